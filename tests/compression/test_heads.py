"""The part `heads`, in several families."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from tests.compression.compression_cases import (
    BART,
    GPT,
    ONE,
    SIZES,
    VOCABULARY,
    WITH_HEADS,
    Make,
    bert,
    bloom,
    gpt2,
    ids,
    in_steps,
    llama,
    made,
    mpnet,
    output,
    phi3,
    sharpened,
    t5,
)
from tests.support.untouched import untouched
from torch import nn

from rankwise.compression import compress
from rankwise.compression.heads_find import find, removal, zeroed
from rankwise.compression.heads_modules import CutLinear, LayerConfig, RemovedHeads, build
from rankwise.errors import CompressionError

EPS = torch.finfo(torch.float32).eps
BATCH = ids(2, 12)


def decided() -> nn.Module:
    """A GPT-2 whose outputs are far from even, so that its heads matter."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**GPT, n_positions=64, initializer_range=0.4)
    return transformers.GPT2LMHeadModel(config).eval()


def own_words(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Labels that the model itself finds likeliest, so that it has something to lose."""
    labels = batch["input_ids"].clone()
    labels[:, 1:] = output(model, batch).argmax(-1)[:, :-1]
    return {**batch, "labels": labels}


def removed(model: nn.Module, batch: dict[str, torch.Tensor], plan: list[set[int]]) -> torch.Tensor:
    """Remove units by hand, and return the output with these units set to zero."""
    sites, _ = find(model, batch)
    named = {site.name: units for site, units in zip(sites, plan, strict=False)}
    with zeroed(model, sites, named):
        expected = output(model, batch)
    removal(model, sites, named).apply()
    return expected


DISTIL: dict[str, Any] = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("ForCausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 16}),
    "Gemma2": ("ForCausalLM", {**SIZES, "num_key_value_heads": 2, "head_dim": 16}),
    "Falcon": ("ForCausalLM", {**SIZES, "alibi": False, "multi_query": True}),
    "GPTJ": ("ForCausalLM", {**GPT, "rotary_dim": 4}),
    "DistilBert": ("Model", DISTIL),
    "Albert": ("Model", {**SIZES, "embedding_size": 16}),
    "Bart": ("Model", BART),
}
ALL: dict[str, Make] = WITH_HEADS | {
    name: partial(made, name, ending, **sizes) for name, (ending, sizes) in OTHERS.items()
}
EACH: list[set[int]] = [{0}] * 3
WHOLE: list[set[int]] = [set(), {0, 1, 2, 3}]
"""All heads of a layer; of decoders with a cache, a test below removes them."""


@pytest.mark.parametrize(
    ("family", "plan"),
    [*((name, EACH) for name in ALL), *((name, WHOLE) for name in ("bert", "DistilBert", "Bart", "Gemma2"))],
)
def test_removed_heads_are_heads_at_zero(family: str, plan: list[set[int]]) -> None:
    model, batch = ALL[family](), BATCH
    if family == "Bart":
        batch = {**batch, "decoder_input_ids": ids(2, 9, seed=3)["input_ids"]}
    layers, skipped = find(model, batch)
    assert not skipped
    assert len(layers) == {"Albert": 1, "llama": 1, "Bart": 3}.get(family, 2)
    units = [own & set(range(layer.units)) for own, layer in zip(plan, layers, strict=False)]
    before = sum(weight.numel() for weight in model.parameters())
    expected = removed(model, batch, units)
    got = output(model, batch)
    assert torch.allclose(got, expected, atol=1e3 * EPS * float(expected.abs().max()))
    assert sum(weight.numel() for weight in model.parameters()) < before


def test_a_model_without_removable_heads_is_unchanged() -> None:
    model = decided()
    batch = own_words(model, ids())
    with untouched(model, but="config"):
        done = compress(model, [batch], tolerance=1e-9, parts="heads")
    assert done.parameters_after == done.parameters_before
    assert all(head.width == head.before for head in done.heads)
    assert "0 of 8 removed" in done.notes[0]


def test_the_order_of_heads_does_not_matter() -> None:
    model, batch = bert(), ids()
    turned = copy.deepcopy(model)
    order = [2, 0, 3, 1]
    places = torch.cat([torch.arange(8) + 8 * head for head in order])
    with torch.no_grad():
        for layer in turned.encoder.layer:
            for one in (layer.attention.self.query, layer.attention.self.key, layer.attention.self.value):
                one.weight.copy_(one.weight[places])
                one.bias.copy_(one.bias[places])
            dense = layer.attention.output.dense
            dense.weight.copy_(dense.weight[:, places])
    done, again = (compress(one, [batch], tolerance=0.3, parts="heads") for one in (model, turned))
    removed = {(head.layer, head.head) for head in done.heads if not head.width}
    assert removed
    assert {(head.layer, order[head.head]) for head in again.heads if not head.width} == removed
    assert torch.allclose(output(model, batch), output(turned, batch), atol=1e-4)


def test_the_loss_stays_in_the_tolerance_and_a_head_without_output_is_removed() -> None:
    model = decided()
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.weight[8:16] = 0
    batch = own_words(model, ids())
    done = compress(model, [batch], tolerance=1e-6, parts="heads")
    assert {(h.layer, h.head) for h in done.heads if not h.width} == {(1, 1)}
    assert done.worst.loss_after == pytest.approx(done.worst.loss_before, rel=1e-6)
    model = decided()
    done = compress(model, [own_words(model, ids())], tolerance=2.0, parts="heads")
    assert done.worst.loss_after <= done.worst.loss_before * 3 + 1e-5
    assert 1 <= sum(not head.width for head in done.heads) < 8


@pytest.mark.parametrize(("keep", "left"), [(0.5, 4), (0.3, 3)])
def test_a_share_is_kept(keep: float, left: int) -> None:
    model, batch = gpt2(), ids()
    done = compress(model, [batch], keep=keep, parts="heads")
    assert sum(head.width > 0 for head in done.heads) == left
    # a layer without heads keeps one, whose output weights are zero
    zero = sum(not bool(layer.attn.c_proj.weight.any()) for layer in model.transformer.h)
    assert done.kept_cache.after == done.kept_cache.before * (left + zero) // 8


def test_a_shared_layer_counts_its_heads_once() -> None:
    sizes = {**SIZES, "num_hidden_layers": 6, "embedding_size": 16}
    batch = {**ids(), "attention_mask": torch.ones(4, 24, dtype=torch.long)}
    batch["attention_mask"][:, 20:] = 0
    done = compress(made("Albert", "Model", **sizes), [batch], keep=0.5, parts="heads")
    assert sum(not head.width for head in done.heads) == 2
    assert done.tokens == 4 * 20


def test_grouped_queries_are_removed_with_their_keys() -> None:
    model, batch = llama(), ids()
    done = compress(model, [batch], keep=0.5, parts="heads")
    assert [head.head for head in done.heads if not head.width] in ([0, 1], [2, 3])
    attention = model.model.layers[0].self_attn
    assert [getattr(attention, f"{name}_proj").weight.shape[0] for name in "qkv"] == [16, 8, 8]
    assert done.kept_cache.after * 2 == done.kept_cache.before


@pytest.mark.parametrize(
    "family", [*(family for family in WITH_HEADS if family != "bert"), "one key head", "Falcon"]
)
def test_a_layer_that_loses_all_heads_works_with_each_cache(family: str) -> None:
    one_key_head = partial(made, "Llama", **{**ONE, "num_key_value_heads": 1})
    model: Any = {**ALL, "one key head": one_key_head}[family]()
    expected = removed(model, BATCH, [set(range(find(model, BATCH)[0][0].units)), {0}])
    whole = output(model, BATCH)
    assert torch.allclose(whole, expected, atol=1e3 * EPS * float(expected.abs().max()))
    assert float((in_steps(model, BATCH)[0] - whole).abs().max()) < 1e4 * EPS * float(whole.abs().max())
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with_cache = model.generate(BATCH["input_ids"], **options)
    assert torch.equal(with_cache, model.generate(BATCH["input_ids"], use_cache=False, **options))
    if family != "bigcode":
        static = model.generate(BATCH["input_ids"], cache_implementation="static", **options)
        assert torch.equal(with_cache, static)


REFUSED: dict[str, Make] = {
    "bloom": bloom,
    "t5": t5,
    "mpnet": mpnet,
    "olmo2": lambda: made("Olmo2", **SIZES),
    "torch": lambda: sharpened(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_families_whose_code_needs_all_heads_are_refused(name: str) -> None:
    model = REFUSED[name]()
    batch: Any = torch.randn(2, 6, 32) if name == "torch" else ids()
    with untouched(model), pytest.raises(CompressionError, match=r"own code does not compute|not seen"):
        compress(model, [batch], keep=0.5, parts="heads")


def test_it_compiles() -> None:
    model, batch = phi3(), ids(2, 12)
    removed(model, batch, [{0}, {1}])
    expected = output(model, batch)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(output(compiled, batch), expected, atol=1e3 * EPS * float(expected.abs().max()))


def test_a_layer_cut_on_both_sides_keeps_its_mode_and_requires_grad() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).eval()
    model[0].requires_grad_(False)
    cuts = [
        CutLinear(module="0", side="out", size=6, runs=[(1, 2), (5, 1)]),
        CutLinear(module="0", side="in", size=4, runs=[(0, 2)]),
    ]
    small = build(model, RemovedHeads(module="", cuts=cuts, sizes={}, config={})).modules["0"]
    assert torch.equal(small.weight, model[0].weight[[1, 2, 5], :2])
    assert torch.equal(small.bias, model[0].bias[[1, 2, 5]])
    assert not small.training
    assert not any(parameter.requires_grad for parameter in small.parameters())


def test_the_configuration_of_a_layer_is_copied_and_pickled() -> None:
    own = LayerConfig(transformers.BertConfig(**SIZES), {"num_attention_heads": 3})
    for twin in (own, copy.deepcopy(own), copy.copy(own), pickle.loads(pickle.dumps(own))):
        assert (twin.num_attention_heads, twin.hidden_size) == (3, 32)
        assert not hasattr(twin, "__len__")
        assert not hasattr(twin, "no_such_field")


@pytest.mark.parametrize(
    ("function", "result", "said"),
    [
        ("heads_find.relative_error", float("nan"), "the output of the model is off by nan"),
        ("heads_solve.difference", "off by 0.1", "outputs with these heads set to zero, got off by 0.1"),
    ],
)
def test_outputs_that_differ_from_zeroed_heads_are_refused(
    function: str, result: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"rankwise.compression.{function}", lambda *_: result)
    model = gpt2()
    with untouched(model), pytest.raises(CompressionError, match=said):
        compress(model, [ids()], keep=0.5, parts="heads")
