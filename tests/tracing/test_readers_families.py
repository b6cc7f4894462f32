"""Gated delta rules, RWKV, lightning attention, Longformer, BigBird: operators compared with layers."""

import importlib

import pytest
import torch
import transformers
from capture_zoo import seen_with_outputs
from experiments.zoo.state_space import SIZES, STATE_SPACE, widen
from experiments.zoo.transformers import BERT

import rankwise as rw
from rankwise.tracing.module_calls import ModuleCall
from rankwise.tracing.readers import reader_of
from rankwise.tracing.readers.base import CONTINUED
from rankwise.tracing.readers.recurrent import weighted_means

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
DELTA, KIMI = (STATE_SPACE[name].settings for name in ("Qwen3-Next", "Kimi-Linear"))
KIMI = KIMI | {"q_lora_rank": None}
EXPERTS = {name: value for name, value in DELTA.items() if "expert" in name or "moe" in name}
MODELS = {
    "Qwen3Next": DELTA,
    "Qwen3_5Text": DELTA,
    "Qwen3_5MoeText": DELTA,
    "Qwen4ExpText": DELTA | QWEN4,
    "OlmoHybrid": DELTA | {"linear_allow_neg_eigval": True},
    "KimiLinear": KIMI,
    "BailingHybrid": KIMI,
    "Glm5NextText": KIMI | GLM,
}
RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")


EPS32 = torch.finfo(torch.float32).eps


def built(name, dtype=torch.float64, **settings):
    torch.manual_seed(0)
    if dtype == torch.float64:
        settings["experts_implementation"] = "eager"  # the grouped kernel takes no float64
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}Model")(config)
    with torch.no_grad():
        widen(model)
    return model.to(dtype).eval()


def delta_model(name):
    return built(name, torch.float32, **SIZES | MODELS[name])


def tokens(count, padded=0):
    torch.manual_seed(1)
    mask = torch.ones(2, count, dtype=torch.long)
    mask[0, count - padded :] = 0
    return {"input_ids": torch.randint(5, 60, (2, count)), "attention_mask": mask}


def left_padded():
    given = tokens(70)  # more than one chunk
    given["attention_mask"][0, :4] = 0
    return given


def traced(model, given):
    """Return trace and outputs of a model that is captured completely."""
    trace, outputs = seen_with_outputs(model, **given)
    assert trace.uncaptured == []
    return trace, outputs


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
    model, expected, gave = delta_model(name), [], []
    module = importlib.import_module(type(model).__module__)
    (rule,) = (rule for rule in RULES if hasattr(module, rule))
    run = getattr(module, rule)

    def listening(*tensors, g, beta, **settings):
        expected.append(by_hand(*tensors, g, beta, divides=rule == RULES[1]))
        gave.append(run(*tensors, g=g, beta=beta, **settings))
        return gave[-1]

    monkeypatch.setattr(module, rule, listening)
    trace, _ = traced(model, left_padded())
    (site,) = (site for site in trace.mixers if site.kind == "gated delta")
    values = site.values.double()
    for product in (site.operator @ values, site.operator.dense(torch.float64) @ values):
        # 70 steps of (K + 4) roundings of states of norm ≤ 70 · ‖v‖, 1e-16 each: 1e-12
        assert (product - expected[0]).abs().max() <= 1e-12
    # the layer sums in float32: 70 steps of 12 roundings of 6e-8
    assert (gave[0][0].transpose(1, 2) - expected[0]).abs().max() <= 5e-5 * float(expected[0].abs().max())
    assert torch.equal(site.valid_tokens, left_padded()["attention_mask"].bool())


def test_packed_rows_are_not_captured():
    """transformers refuses packed rows without a kernel, so the reader is called directly."""
    layer, x = delta_model("Qwen3Next").layers[0].linear_attn, torch.randn(1, 12, 32)
    ends = torch.tensor([0, 5, 12])
    reason = reader_of(layer).why_not(ModuleCall("layer", layer, (x,), {"cu_seq_lens_q": ends}))
    assert "a row holds several sequences" in reason
    assert reader_of(layer).why_not(ModuleCall("layer", layer, (x,), {})) is None


def rwkv_by_hand(key, log_decay, bonus):
    """Entry by entry, in float64."""
    key, log_decay, bonus = key.double(), log_decay.double()[:, None], bonus.double()
    tokens = torch.arange(key.shape[-1])
    lag = (tokens[:, None] - tokens - 1).double()
    scores = key[..., None, :] + lag.clamp(min=0) * log_decay[..., None]
    own = torch.diag_embed(key + bonus[:, None])
    scores = torch.where(lag == -1, own, scores).masked_fill(lag < -1, -torch.inf)
    return scores.softmax(-1)


@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("tokens", [1, 2, 70])
def test_its_matrix_is_a_softmax_of_decaying_scores(tokens, size):
    """Keys of size 30 and decays down to e^−50 would overflow or cancel if sums were not kept relative."""
    torch.manual_seed(tokens)
    key, bonus = size * torch.randn(2, 5, tokens), torch.randn(5)
    log_decay = -torch.tensor([0.0, 1e-3, 0.5, 5.0, 50.0])
    op, exact = weighted_means(key, log_decay, bonus), rwkv_by_hand(key, log_decay, bonus)
    # exponents of size ≤ 2·size + 70·50 in float32, summed over the tokens: off by their own rounding
    slack = 4 * EPS32 * (4 * size + tokens)
    values = torch.randn(2, 5, tokens, 3)
    assert (op.dense() - exact).abs().max() <= slack
    assert (op @ values - exact.float() @ values).abs().max() <= slack * tokens**0.5 * 4
    assert (op.mT @ values - exact.float().mT @ values).abs().max() <= slack * tokens * 4
    assert (op.dense().sum(-1) - 1).abs().max() <= slack


def rwkv():
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 32}
    return built("Rwkv", torch.float32, **sizes)


def test_the_operator_reproduces_rwkv():
    trace, outputs = seen_with_outputs(rwkv(), input_ids=torch.randint(5, 60, (2, 12)))
    assert [site.name for site in trace.mixers] == ["blocks.0.attention", "blocks.1.attention"]
    assert not trace.uncaptured
    for site in trace.mixers:
        got, expected = site.apply_output(site.operator @ site.values), outputs[site.name][0]
        # means of ≤ 12 values, then sums of 16 terms
        assert (got - expected).abs().max() <= 200 * EPS32 * float(expected.abs().max())


@torch.no_grad()
def test_a_step_of_rwkv_from_a_state_is_not_captured():
    made, given = rwkv(), {"input_ids": torch.randint(5, 60, (2, 12))}
    state = made(**given, use_cache=True).state
    refused = pytest.raises(rw.RankwiseError, match="it continued from a cache that holds earlier tokens")
    with refused, rw.capture(made):
        made(input_ids=given["input_ids"][:, :1], state=state, use_cache=True)


MINIMAX = SIZES | EXPERTS | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
MINIMAX |= {"layer_types": ["linear_attention", "full_attention"], "block_size": 5, "num_local_experts": 2}


@torch.no_grad()
def test_lightning_attention_is_a_scan_with_a_decay_per_head():
    model = built("MiniMax", **MINIMAX)
    trace, outputs = traced(model, tokens(13))  # blocks of 5: two whole ones and a rest
    assert [site.kind for site in trace.mixers] == ["semiseparable", "softmax"]
    site = trace.mixers[0]
    for product in (site.operator @ site.values, site.operator.dense() @ site.values):
        # the layer's decays are float32 powers of one: the operator's are exact for its float32 slope
        off = (site.apply_output(product) - outputs[site.name][0]).abs().max()
        assert off <= 13 * 8 * EPS32 * float(outputs[site.name][0].abs().max())


@torch.no_grad()
def test_lightning_attention_is_left_out_only_if_it_has_a_state():
    model = built("MiniMax", **MINIMAX)
    trace, _ = traced(model, tokens(13) | {"use_cache": False})
    assert [site.kind for site in trace.mixers] == ["semiseparable", "softmax"]
    cache = model(input_ids=tokens(13)["input_ids"], use_cache=True).past_key_values
    with rw.capture(model) as trace:
        model(input_ids=tokens(1)["input_ids"], past_key_values=cache, use_cache=True)
    assert [site.kind for site in trace.mixers] == ["softmax"]
    assert [one.reason for one in trace.uncaptured] == [CONTINUED]


LONGFORMER = BERT | {"attention_window": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize("padded", [0, 5])
def test_a_window_is_a_softmax_with_a_mask(padded):
    trace, _ = traced(built("Longformer", **LONGFORMER), tokens(14, padded))  # filled up to 16
    for site in trace.mixers:
        assert site.operator.shape == (2, 4, 16, 16)
        # the layer takes its softmax in float32: 5 columns, values of size ≤ 10
        off = (site.operator @ site.values - site.output).abs().max()
        assert off <= 50 * EPS32
        assert site.valid_tokens.sum(1).tolist() == [14 - padded, 14]
    dense = trace.mixers[0].operator.dense()
    assert bool((dense[1, :, 6, 4:9] > 0).all())
    assert bool((dense[1, :, 6, 9:] == 0).all())


@torch.no_grad()
def test_global_tokens_see_and_are_seen_by_all():
    model, given = built("Longformer", **LONGFORMER), tokens(16, 3)
    given["global_attention_mask"] = torch.zeros(2, 16, dtype=torch.long)
    given["global_attention_mask"][0, 0] = 1
    given["global_attention_mask"][1, [2, 9]] = 1
    trace, _ = traced(model, given)
    told = model(**given, output_attentions=True)
    for site, local, everywhere in zip(trace.mixers, told.attentions, told.global_attentions, strict=True):
        dense = site.operator.dense()
        # columns of `attentions`: the global tokens, then the window from t − 2 to t + 2
        torch.testing.assert_close(dense[1, :, 5, [2, 9]], local[1, :, 5, :2].double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(dense[1, :, 5, 3:8], local[1, :, 5, 2:].double(), rtol=0, atol=1e-6)
        rows = everywhere[1].transpose(-1, -2).double()
        torch.testing.assert_close(dense[1, :, [2, 9]], rows, rtol=0, atol=1e-6)
        torch.testing.assert_close(dense[0].sum(-1)[:, :13], torch.ones(4, 13, dtype=torch.float64))
        assert bool((dense[0, :, :, 13:] == 0).all())
        assert bool((dense[0, :, 0, :13] > 0).all())
        assert site.values is None


def test_the_encoder_of_led_is_read_in_the_same_way():
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "vocab_size": 64, "pad_token_id": 0}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "attention_window": 4}
    sizes |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "bos_token_id": 1, "eos_token_id": 2}
    given = tokens(12) | {"decoder_input_ids": torch.randint(5, 60, (2, 6))}
    trace, _ = traced(built("LED", **sizes, decoder_start_token_id=1), given)
    assert [tuple(site.operator.shape[-2:]) for site in trace.mixers] == [(12, 12)] * 2 + [(6, 6), (6, 12)]
    for site in trace.mixers[:2]:
        off = (site.operator @ site.values - site.output).abs().max()
        assert off <= 50 * EPS32


BIG_BIRD = BERT | {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 2}
BIG_BIRD |= {"num_hidden_layers": 2, "max_position_embeddings": 128}


@pytest.mark.parametrize("padded", [0, 9])
def test_blocks_of_big_bird_make_a_softmax(padded):
    trace, _ = traced(built("BigBird", **BIG_BIRD), tokens(62, padded))  # filled up to 64
    assert [site.operator.shape for site in trace.mixers] == [(2, 4, 64, 64)] * 2
    for site in trace.mixers:
        # float64 throughout: ≤ 64 terms of size ≤ 10, and the mask's −10000 gives exact zeros in both
        assert (site.operator @ site.values - site.output).abs().max() <= 1e-12
        assert site.valid_tokens.sum(1).tolist() == [62 - padded, 62]
    dense = trace.mixers[0].operator.dense()
    assert bool((dense[1, :, 20:24, 8:16] == 0).all())
    assert bool((dense[1, :, 20:24, 16:28] > 0).all())


def test_random_blocks_of_big_bird_are_not_guessed():
    model = built("BigBird", **BIG_BIRD).train()
    with pytest.raises(rw.RankwiseError, match="it draws its random blocks inside itself"), rw.capture(model):
        model(**tokens(62))
