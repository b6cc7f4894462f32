"""Interventions replace outputs of heads and blocks; one that replaces them by themselves changes no bit."""

import pytest
import torch
import transformers
from experiments.state_space_models import STATE_SPACE, tiny
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
    sites = []
    with torch.enable_grad():  # PyTorch's own layers leave their inference fast path by themselves
        if intervention is None:
            output = call(model, given)
        else:
            with capture(model, intervention=intervention, on_mixer=sites.append, values=True):
                output = call(model, given)
    return (output if isinstance(output, torch.Tensor) else output[0]), sites


def call(model, given):
    return model(**given) if isinstance(given, dict) else model(given)


def gpt2(implementation):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(vocab_size=64, **sizes)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()


def bert(implementation):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BertConfig(vocab_size=64, **sizes)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return transformers.BertModel(config).eval()


IDS = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(3))
PADDED = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS).index_fill(1, torch.tensor([7, 8]), 0)}
STATES = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(4))


def torch_encoder(norm_first=False, batch_first=True):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def torch_decoder():
    torch.manual_seed(0)
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()


class EinsumAttention(nn.Module):
    """Tokens first in the product, heads behind: (B, T, H, K)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
        weights = torch.einsum("bthd,bshd->bhts", q, k).softmax(-1)
        return self.out(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))


class ChannelsFirst(nn.Module):
    """Y = V Mᵀ."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.mT).softmax(-1)
        return self.out((v.mT @ weights.mT).mT)


CASES = {
    "GPT-2, fused": (lambda: gpt2("sdpa"), PADDED, "transformer.h.1"),
    "GPT-2, written": (lambda: gpt2("eager"), PADDED, "transformer.h.1"),
    "BERT, fused": (lambda: bert("sdpa"), PADDED, "encoder.layer.0"),
    "BERT, written": (lambda: bert("eager"), PADDED, "encoder.layer.0"),
    "torch encoder": (torch_encoder, STATES, "layers.1"),
    "torch encoder, norm first": (lambda: torch_encoder(norm_first=True), STATES, "layers.1"),
    "torch encoder, tokens first": (lambda: torch_encoder(batch_first=False), STATES, "layers.1"),
    "torch decoder": (torch_decoder, {"src": STATES, "tgt": STATES[:, :4]}, "decoder.layers.0"),
    "einsum": (EinsumAttention, STATES, ""),
    "channels first": (ChannelsFirst, STATES, ""),
}
every_case = pytest.mark.parametrize("name", list(CASES))


@every_case
def test_a_change_by_nothing_changes_no_bit(name):
    make, given, block = CASES[name]
    model = make()
    alone, _ = run(model, given)
    same = Same([block] if block else [])
    changed, sites = run(model, given, same)
    assert torch.equal(alone, changed)
    assert {site.call_id for site in sites} == set(same.seen)
    assert set(same.added) == ({CallId(block, 0)} if block else set())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@every_case
def test_interventions_receive_m_v_of_the_site_of_the_same_call(name):
    make, given, _ = CASES[name]
    same = Same()
    _, sites = run(make(), given, same)
    for site in sites:
        outputs = same.seen[site.call_id]
        wanted = site.operator.dense(torch.float64) @ site.values.double()
        rows = site.valid_tokens[:, None, :, None]
        # sums of at most 9 products of weights below 1 with values of size max|V|, in float32
        limit = 40 * torch.finfo(torch.float32).eps * float(site.values.abs().max())
        assert outputs.call_id == site.call_id
        assert torch.equal(outputs.valid_tokens, site.valid_tokens)
        assert ((outputs.values - wanted).abs() * rows).max() <= limit


@every_case
def test_a_change_arrives_in_the_output(name):
    make, given, _ = CASES[name]
    model = make()
    assert not torch.equal(run(model, given)[0], run(model, given, Silent())[0])


@pytest.mark.parametrize("name", list(STATE_SPACE))
def test_state_space_mixers_can_be_changed(name):
    model, given = tiny(name), {"input_ids": IDS}
    alone, _ = run(model, given)
    same = Same()
    changed, sites = run(model, given, same)
    assert torch.equal(alone, changed)
    assert {site.call_id for site in sites} == set(same.seen)
    for site in sites:
        assert same.seen[site.call_id].values.shape[:3] == site.operator.shape[:3]
    assert not torch.equal(alone, run(model, given, Silent())[0])


def test_a_block_can_be_left_out():
    class Out(Intervention):
        blocks = frozenset({"transformer.h.0", "transformer.h.1"})

        def on_block(self, block):
            return block.input

    model = gpt2("sdpa")
    out, _ = run(model, {"input_ids": IDS}, Out())
    tokens = model.transformer.wte(IDS) + model.transformer.wpe(torch.arange(9))
    assert torch.allclose(out, model.lm_head(model.transformer.ln_f(tokens)), atol=1e-6)
