"""`flex_attention`, compiled functions inside a model, and attention inside `torch.vmap`."""

import pytest
import torch
import transformers
from capture_zoo import (
    BATCH,
    HEADS,
    TOKENS,
    attention_block,
    fused,
    hidden,
    kind,
    plain,
    scores,
    seen,
    stack_of,
)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import rankwise as rw
from rankwise.errors import CaptureError, SkipError

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


def test_compiled_attention_is_audited_uncompiled_and_its_capture_names_the_remedy():
    model, ids = flex_llama(), torch.arange(24).reshape(2, 12)
    flex = rw.audit(model, [ids])
    with torch.compiler.set_stance("force_eager"):
        assert len(seen(model, ids).mixers) == 2
    with pytest.raises(SkipError, match=r"derivative.*set_attn_implementation\('sdpa'\)"):
        rw.add_lambda_skip(model, example=ids)
    model.set_attn_implementation("sdpa")
    for one, other in zip(flex.heads, rw.audit(model, [ids]).heads, strict=True):
        assert one.effective_rank == pytest.approx(other.effective_rank, rel=1e-4)


def test_the_reason_for_a_mixer_that_is_not_seen_names_compiled_functions():
    with pytest.raises(CaptureError, match=r'torch\.compile.*set_stance\("force_eager"\)'):
        seen(stack_of(lambda q, k, v: (q + k + v).flip(2)), hidden())


MAPPED = {
    "sequences": lambda f: torch.vmap(f),
    "heads": lambda f: torch.vmap(f, in_dims=1, out_dims=1),
    "heads, then sequences": lambda f: torch.vmap(torch.vmap(f)),
}
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
INSIDE = {
    "plain": plain,
    "masked": lambda q, k, v: scores(q, k).masked_fill(~CAUSAL, -torch.inf).softmax(-1) @ v,
    "fused": fused,
    "fused, masked": lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=CAUSAL),
    "linear": lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
}


@pytest.mark.parametrize("mapped", MAPPED)
@pytest.mark.parametrize("inside", INSIDE)
def test_attention_inside_vmap_is_captured_with_its_mapped_axes(mapped, inside):
    mix = INSIDE[inside]
    (expected,) = seen(usual := stack_of(mix, 1), x := hidden()).mixers
    model = stack_of(MAPPED[mapped](mix), 1)
    model.load_state_dict(usual.state_dict())
    (site,) = seen(model, x).mixers
    assert site.operator.shape == (BATCH, HEADS, TOKENS, TOKENS)
    assert (site.operator.dense() - expected.operator.dense()).abs().max() < 32 * EPS
    assert torch.equal(site.operator.support().expand(site.operator.shape), expected.operator.support())
    assert (site.values - expected.values).abs().max() < 32 * EPS
    assert (site.operator @ site.values - site.output).abs().max() < 64 * EPS * TOKENS


@pytest.mark.parametrize("rows", [1, 2])
def test_an_audit_measures_mixers_that_are_called_inside_vmap(rows):
    def forward(self, x):
        return torch.vmap(self.mixer)(x.unflatten(0, (-1, rows))).flatten(0, 1)

    mixer, x = attention_block().attention, hidden()
    found = [rw.audit(model, [x]) for model in (kind(forward, mixer=lambda: mixer)().eval(), mixer.eval())]
    ranks, usual = ([head.effective_rank for head in audit.heads] for audit in found)
    assert ranks == pytest.approx(usual)
