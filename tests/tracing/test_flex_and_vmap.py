"""`flex_attention`, compiled functions inside a model, and attention inside `torch.vmap`."""

import pytest
import torch
import transformers
from capture_zoo import (
    HEADS,
    TOKENS,
    fused,
    hidden,
    plain,
    scores,
    seen,
    stack_of,
)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import rankwise as rw
from rankwise.errors import CaptureError

EPS = torch.finfo(torch.float32).eps
SLOPES = torch.rand(HEADS)


def window(b, h, i, j):
    return (i >= j) & (i - j < 3)


def sloped(score, b, h, i, j):
    return torch.tanh(score) + SLOPES[h] * (i - j)


def block_mask():
    return create_block_mask(window, None, None, TOKENS, TOKENS, device="cpu")


def by_hand(q, k):
    i = torch.arange(TOKENS)
    distance = i[:, None] - i
    changed = scores(q, k).tanh() + SLOPES[:, None, None] * distance
    return changed.masked_fill((distance < 0) | (distance >= 3), -torch.inf).softmax(-1)


@pytest.mark.parametrize("key_heads", [1, HEADS])
def test_flex_attention_is_captured_from_its_arguments(key_heads):
    given = []

    def mix(q, k, v):
        k, v = k[:, :key_heads], v[:, :key_heads]
        given.append((q, k))
        grouped = key_heads != HEADS
        return flex_attention(q, k, v, score_mod=sloped, block_mask=block_mask(), enable_gqa=grouped)

    (site,) = seen(stack_of(mix, 1), hidden()).mixers
    assert site.kind == "softmax"
    # Weights of at most 1, of scores of size at most 10 in another order of operations.
    assert (site.operator.dense() - by_hand(*given[-1])).abs().max() < 32 * EPS
    assert torch.equal(
        site.operator.support()[0, 0], window(0, 0, *torch.meshgrid(*[torch.arange(TOKENS)] * 2))
    )
    assert site.values.shape[1] == key_heads
    assert (site.operator @ site.values - site.output).abs().max() < 64 * EPS


def flex_llama():
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="flex_attention")
    return transformers.LlamaForCausalLM(config).eval()


def test_compiled_attention_is_audited_uncompiled():
    model, ids = flex_llama(), torch.arange(24).reshape(2, 12)
    flex = rw.audit(model, [ids])
    with torch.compiler.set_stance("force_eager"):
        assert len(seen(model, ids).mixers) == 2
    model.set_attn_implementation("sdpa")
    for one, other in zip(flex.heads, rw.audit(model, [ids]).heads, strict=True):
        assert one.effective_rank == pytest.approx(other.effective_rank, rel=1e-4)


def test_the_reason_for_a_mixer_that_is_not_seen_names_compiled_functions():
    with pytest.raises(CaptureError, match=r'torch\.compile.*set_stance\("force_eager"\)'):
        seen(stack_of(lambda q, k, v: (q + k + v).flip(2)), hidden())


@pytest.mark.parametrize("mix", [plain, fused])
def test_attention_inside_vmap_is_refused_and_changes_nothing(mix):
    model, x = stack_of(torch.vmap(mix), 1), hidden()
    expected = model(x)
    with pytest.raises(CaptureError, match=r"inside `torch\.vmap`"), rw.capture(model):
        assert torch.equal(model(x), expected)
