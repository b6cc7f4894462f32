"""Gated delta rules of transformers: the operator is the rule that each layer runs, token by token."""

import importlib

import pytest
import torch
import transformers
from experiments.state_space_models import ATTENTION, EXPERTS, GATED_DELTA, KIMI, SIZES, widen

import rankwise as rw
from rankwise.tracing.adapters import adapter_of
from rankwise.tracing.module_calls import ModuleCall

GLM = {
    "num_attention_heads": 4,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 0,
    "head_dim": 0,
    "n_shared_experts": 1,
}
QWEN4 = {"hc_lowrank": 4, "ngram_vocab_size_base": 50, "heads_per_ngram": 2, "head_dim": 8}
QWEN4 |= {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
QWEN4 |= {"indexer_budget": 8, "indexer_compress_ratio": 2}
MODELS = {
    "Qwen3Next": GATED_DELTA | EXPERTS,
    "Qwen3_5Text": GATED_DELTA,
    "Qwen3_5MoeText": GATED_DELTA | EXPERTS,
    "Qwen4ExpText": GATED_DELTA | EXPERTS | QWEN4,
    "OlmoHybrid": GATED_DELTA | {"linear_allow_neg_eigval": True},
    "KimiLinear": KIMI | EXPERTS,
    "BailingHybrid": KIMI | EXPERTS,
    "Glm5NextText": KIMI | EXPERTS | GLM,
}
RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")


def tiny(name):
    settings = SIZES | ATTENTION | {"head_dim": 8} | MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**settings))
    with torch.no_grad():
        widen(model)
    return model.eval()


def batch():
    torch.manual_seed(1)
    mask = torch.ones(2, 70, dtype=torch.long)  # more than one chunk
    mask[0, :4] = 0
    return {"input_ids": torch.randint(5, 60, (2, 70)), "attention_mask": mask}


def by_hand(query, key, value, g, beta, divides):
    """The rule token by token, in float64 from float32 inputs: (B, H, T, V)."""
    query, key, value, g, beta = (
        x.transpose(1, 2).contiguous().float() for x in (query, key, value, g, beta)
    )
    groups = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(groups, 1) for x in (query, key))
    squared = [(x * x).sum(-1, keepdim=True) + 1e-6 for x in (query, key)]
    if divides:
        query, key = (x / y.sqrt() for x, y in zip((query, key), squared, strict=True))
    else:
        query, key = (x * y.rsqrt() for x, y in zip((query, key), squared, strict=True))
    query = (query * query.shape[-1] ** -0.5).double()
    key, value, beta, g = (x.double() for x in (key, value, beta, g if g.dim() == 4 else g[..., None]))
    state, read = 0, []
    for t in range(query.shape[2]):
        k = key[:, :, t, :, None]
        state = g[:, :, t, :, None].exp() * state
        held = k.mT @ state if t else 0
        state = state + k * beta[:, :, t, None, None] * (value[:, :, t, None] - held)
        read.append((query[:, :, t, None] @ state)[:, :, 0])
    return torch.stack(read, 2)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_operator_is_the_rule_the_layer_runs(name, monkeypatch):
    model, seen, gave = tiny(name), [], []
    module = importlib.import_module(type(model).__module__)
    (rule,) = (rule for rule in RULES if hasattr(module, rule))
    run = getattr(module, rule)

    def listening(*tensors, g, beta, **settings):
        seen.append(by_hand(*tensors, g, beta, divides=rule == RULES[1]))
        gave.append(run(*tensors, g=g, beta=beta, **settings))
        return gave[-1]

    alone = model(**batch())[0]
    monkeypatch.setattr(module, rule, listening)
    with rw.capture(model, values=True) as trace:
        watched = model(**batch())[0]
    assert torch.equal(alone, watched)
    (site,) = (site for site in trace.mixers if site.kind == "gated delta")
    assert trace.uncaptured == []
    values = site.values.double()
    for product in (site.operator @ values, site.operator.dense(torch.float64) @ values):
        # 70 steps of (K + 4) roundings of states of norm ≤ 70 · ‖v‖, 1e-16 each: 1e-12
        assert (product - seen[0]).abs().max() <= 1e-12
    # the layer sums in float32: 70 steps of 12 roundings of 6e-8
    assert (gave[0][0].transpose(1, 2) - seen[0]).abs().max() <= 5e-5 * float(seen[0].abs().max())
    assert torch.equal(site.valid_tokens, batch()["attention_mask"].bool())


def test_packed_rows_are_not_read():
    """transformers refuses them itself without a kernel, so the adapter is asked alone."""
    layer, x = tiny("Qwen3Next").layers[0].linear_attn, torch.randn(1, 12, 32)
    ends = torch.tensor([0, 5, 12])
    reason = adapter_of(layer).why_not(ModuleCall("layer", layer, (x,), {"cu_seq_lens_q": ends}))
    assert "a row holds several sequences" in reason
    assert adapter_of(layer).why_not(ModuleCall("layer", layer, (x,), {})) is None
