"""Interventions replace outputs of heads and blocks; a replacement by equal outputs changes no bit."""

from functools import partial

import pytest
import torch
import transformers
from capture_zoo import kind, torch_encoder
from experiments.zoo.state_space import STATE_SPACE, tiny
from tests.support.torch_names import hooks_of
from torch import nn

from rankwise.tracing import CallId, Intervention, capture


class Same(Intervention):
    """Multiplies the output of every head by 1, and keeps all outputs."""

    def __init__(self, blocks=()):
        self.blocks = frozenset(blocks)
        self.seen, self.added = {}, {}

    def on_heads(self, heads):
        self.seen[heads.call_id] = heads
        return heads.values * torch.ones(heads.values.shape[:2])[..., None, None]

    def on_block(self, block):
        self.added[block.call_id] = block.output - block.input
        return block.output * 1


class Silent(Intervention):
    """Replaces the output of every head by zero."""

    def on_heads(self, heads):
        return torch.zeros_like(heads.values)


def run(model, given, intervention=None):
    """Return the first output of a model, and the sites of a run with an intervention."""
    sites = []
    call = partial(model, **given) if isinstance(given, dict) else partial(model, given)
    with torch.enable_grad():  # with gradients, PyTorch's own layers do not take their inference fast path
        if intervention is None:
            output = call()
        else:
            with capture(model, intervention=intervention, on_mixer=sites.append, values=True):
                output = call()
    return (output if isinstance(output, torch.Tensor) else output[0]), sites


def text_model(name, implementation):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2} if name == "GPT2" else {"intermediate_size": 48}
    config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation=implementation)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}Model")(config).eval()


IDS = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(3))
PADDED = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS).index_fill(1, torch.tensor([7, 8]), 0)}
STATES = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(4))
encoder = partial(torch_encoder, width=8, heads=2)


def einsum_attention(self, x):
    """Tokens before heads: (B, T, H, K)."""
    q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
    weights = torch.einsum("bthd,bshd->bhts", q, k).softmax(-1)
    return self.out(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))


def attention(forward):
    return kind(forward, qkv=lambda: nn.Linear(8, 24), out=lambda: nn.Linear(8, 8))


CASES = {
    "GPT-2, fused": (partial(text_model, "GPT2", "sdpa"), PADDED, "transformer.h.1"),
    "GPT-2, written": (partial(text_model, "GPT2", "eager"), PADDED, "transformer.h.1"),
    "BERT, fused": (partial(text_model, "Bert", "sdpa"), PADDED, "encoder.layer.0"),
    "BERT, written": (partial(text_model, "Bert", "eager"), PADDED, "encoder.layer.0"),
    "torch encoder": (encoder, STATES, "layers.1"),
    "torch encoder, norm first": (partial(encoder, norm_first=True), STATES, "layers.1"),
    "torch encoder, tokens first": (partial(encoder, batch_first=False), STATES, "layers.1"),
    "torch decoder": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval(),
        {"src": STATES, "tgt": STATES[:, :4]},
        "decoder.layers.0",
    ),
    "einsum": (attention(einsum_attention), STATES, ""),
    **{name: (partial(tiny, name), {"input_ids": IDS}, "") for name in STATE_SPACE},
}
every_case = pytest.mark.parametrize("name", list(CASES))


@every_case
def test_equal_outputs_in_place_of_the_models_outputs_change_no_bit(name):
    make, given, block = CASES[name]
    model, same = make(), Same([block] if block else [])
    alone, _ = run(model, given)
    changed, sites = run(model, given, same)
    assert torch.equal(alone, changed)
    assert {site.call_id for site in sites} == set(same.seen)
    assert all(same.seen[site.call_id].values.shape[:3] == site.operator.shape[:3] for site in sites)
    assert set(same.added) == ({CallId(block, 0)} if block else set())
    assert not hooks_of(model)
    assert not torch.equal(alone, run(model, given, Silent())[0])  # other outputs reach the model's output


@pytest.mark.parametrize("name", [name for name in CASES if name not in STATE_SPACE])
def test_interventions_receive_m_v_of_the_site_of_the_same_call(name):
    make, given, _ = CASES[name]
    same = Same()
    _, sites = run(make(), given, same)
    for site in sites:
        outputs = same.seen[site.call_id]
        expected = site.operator.dense(torch.float64) @ site.values.double()
        rows = site.valid_tokens[:, None, :, None]
        # sums of at most 9 products of weights below 1 with values of size max|V|, in float32
        limit = 40 * torch.finfo(torch.float32).eps * float(site.values.abs().max())
        assert outputs.call_id == site.call_id
        assert ((outputs.values - expected).abs() * rows).max() <= limit


def test_a_block_can_be_left_out():
    class Out(Intervention):
        blocks = frozenset({"transformer.h.0", "transformer.h.1"})

        def on_block(self, block):
            return block.input

    model = text_model("GPT2", "sdpa")
    out, _ = run(model, {"input_ids": IDS}, Out())
    tokens = model.transformer.wte(IDS) + model.transformer.wpe(torch.arange(9))
    assert torch.allclose(out, model.lm_head(model.transformer.ln_f(tokens)), atol=1e-6)
