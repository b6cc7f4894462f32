"""The part `key-heads`: fewer key heads, merged in aligned bases, as a plain checkpoint."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.compression_cases import (
    SIZES,
    Make,
    bert,
    glm,
    gpt2,
    ids,
    in_steps,
    llama,
    made,
    output,
    phi3,
    qwen3,
    sharpened,
    smollm3,
)
from tests.support.documents import compression_document
from tests.support.untouched import untouched
from torch import Tensor, nn

import rankwise as rw
from rankwise.compression import compress, save_compressed
from rankwise.compression.key_heads_find import find, merging
from rankwise.compression.key_heads_solve import HeadMoments
from rankwise.errors import CompressionError

EPS = torch.finfo(torch.float32).eps
BATCH = ids(2, 12)


def own(**more: Any) -> nn.Module:
    """Own keys for each of 4 heads, with biases."""
    return made("Llama", **SIZES | {"attention_bias": True} | more)


FAMILIES: dict[str, Make] = {
    "llama": own,
    "qwen2": partial(made, "Qwen2", **SIZES, num_key_value_heads=2),  # biases, 2 query heads per key head
    "phi3": partial(phi3, 4),  # queries, keys and values in one projection
    "glm": glm,  # half of the channels rotated, neighbors
    "smollm3": smollm3,  # one layer without rotation
    "cohere": partial(made, "Cohere", **SIZES, num_key_value_heads=4),
}


def repeated(model: nn.Module, parts: int, seed: int = 0) -> nn.Module:
    """Keys and values of `parts` adjacent heads that differ only by bases, which the outputs do not show.

    Keys of each head are the first head's, with each rotary pair turned and scaled. Values are the first
    head's times a matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    count, width = config.num_key_value_heads, config.head_dim
    with torch.no_grad():
        for layer in model.model.layers:  # type: ignore[union-attr]
            attention: Any = layer.self_attn
            for side in (attention.k_proj, attention.v_proj):
                heads = [x.view(count, width, -1) for x in (side.weight, side.bias) if x is not None]
                for head in range(count):
                    if side is attention.v_proj:
                        factor = torch.randn(width, width, generator=generator)
                    else:
                        scale, angle = torch.rand(2, width // 2, generator=generator)
                        cos, sin = ((0.5 + scale) * f(6 * angle) for f in (torch.cos, torch.sin))
                        factor = torch.cat(
                            [torch.cat([x.diag() for x in row], 1) for row in ((cos, -sin), (sin, cos))]
                        )
                    for values in heads:
                        values[head] = factor @ values[head - head % parts]
    return model


@pytest.mark.parametrize(("keep", "parts"), [(0.5, 2), (0.25, 4)])
def test_heads_that_differ_by_a_basis_are_merged_without_loss(keep: float, parts: int) -> None:
    """float32 weights are rounded once: errors are near 1e-6; the test demands a thousandth."""
    model = repeated(own(), parts)
    before = output(model, BATCH)
    done = compress(model, [ids(8, 24)], keep=keep, parts="key-heads")
    after = output(model, BATCH)
    assert float((after - before).norm() / before.norm()) < 1e-3
    for layer in done.merged:
        expected = [[*range(first, first + parts)] for first in range(0, 4, parts)]
        assert layer.groups == expected
        assert max(layer.key_error, layer.value_error) < 1e-3
    assert done.kept_cache.after == keep * done.kept_cache.before


def test_equal_heads_are_found_wherever_they_are() -> None:
    """Heads 0 and 2 have equal keys and values, and 1 and 3: query heads are sorted for them."""
    model = repeated(own(), 1)
    with torch.no_grad():
        for layer in model.model.layers:  # type: ignore[union-attr]
            for side in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                for values in (side.weight.view(4, 8, -1), side.bias.view(4, 8, -1)):
                    values[2:] = values[:2]
    before = output(model, BATCH)
    done = compress(model, [ids(8, 24)], keep=0.5, parts="key-heads")
    assert all(layer.groups == [[0, 2], [1, 3]] for layer in done.merged)
    assert float((output(model, BATCH) - before).norm() / before.norm()) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_class_reads_merged_heads_with_a_cache(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    config: Any = model.config
    heads, before = config.num_key_value_heads, output(model, BATCH)
    done = compress(model, [ids(8, 24)], keep=0.5, parts="key-heads")
    whole = output(model, BATCH)
    assert (model.config.num_key_value_heads, model.config.num_attention_heads) == (heads // 2, 4)  # type: ignore[union-attr]
    assert float((whole - before).abs().max()) > 1e-3  # it was a real change
    assert done.kept_cache.after == done.kept_cache.before // 2
    assert torch.allclose(in_steps(model, BATCH)[0], whole, atol=EPS**0.5 * float(whole.abs().max()))
    save_compressed(model, tmp_path / "folder", done)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert torch.equal(output(again, BATCH), whole)


# --- errors by hand --------------------------------------------------------------------------------------


def filled(model: nn.Module, batch: dict[str, Tensor]) -> HeadMoments:
    """Moments of the first layer of a model."""
    layers, _ = find(model, batch)
    layer, outputs = layers[0], {}
    names = {side.module for side in (layer.query_key.query, layer.query_key.key, layer.value)}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda module, args, value, name=name: outputs.__setitem__(name, value.detach())
        )
        for name in names
    ]
    output(model, batch)
    for handle in handles:
        handle.remove()
    weight: Any = model.get_submodule(layer.output.module).weight
    moments = HeadMoments(layer, weight.detach().double())
    moments.add(outputs, torch.ones(batch["input_ids"].shape, dtype=torch.bool))
    return moments


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000))
def test_no_other_factors_have_a_smaller_error(seed: int) -> None:
    """Eckart and Young: other factors of the same form cost at least as much."""
    moments = filled(llama4(), ids(4, 16, seed))
    merge = moments.merge([0, 2])
    best = [moments.error(what, [merge]) for what in ("key", "value")]
    generator = torch.Generator().manual_seed(seed)
    x, y = moments.layer.query_key.pairs.mT
    for name in ("key", "query", "value", "output"):
        old = getattr(merge, name)
        change = torch.randn(old.shape, generator=generator, dtype=torch.float64)
        if name in ("key", "query"):  # complex numbers, one for each rotary pair
            real, imaginary = change[:, x, x], change[:, x, y]
            change = torch.zeros_like(old)
            change[:, x, x] = change[:, y, y] = real
            change[:, x, y], change[:, y, x] = imaginary, -imaginary
        setattr(merge, name, old + 0.05 * float(old.norm()) * change / change.norm())
        assert moments.error("key" if name in ("key", "query") else "value", [merge]) >= best[
            name in ("value", "output")
        ] * (1 - 1e-9)
        setattr(merge, name, old)


def test_the_error_of_logits_is_their_mean_over_relative_positions() -> None:
    """Dense oracle: logits of both models for all pairs of tokens and evenly spaced angles of each pair."""
    model, batch = llama4(), ids(2, 8)
    layers, _ = find(model, batch)
    moments = filled(model, batch)
    merge = moments.merge([1, 3])
    attention: Any = model.model.layers[0].self_attn  # type: ignore[union-attr]
    states: list[Tensor] = []
    handle = attention.register_forward_pre_hook(
        lambda module, args, kwargs: states.append(kwargs["hidden_states"]), with_kwargs=True
    )
    output(model, batch)
    handle.remove()
    tokens = states[0].detach().flatten(0, 1).double()
    lost = whole = 0.0
    x, y = layers[0].query_key.pairs.mT
    keys = {head: tokens @ attention.k_proj.weight.double()[8 * head :][:8].mT for head in merge.heads}
    new = sum(keys[head] @ factor for head, factor in zip(merge.heads, merge.key, strict=True))
    angles = torch.arange(16) / 16 * 2 * torch.pi
    for place, head in enumerate(merge.heads):
        query = tokens @ attention.q_proj.weight.double()[8 * head :][:8].mT
        for pair in zip(x.tolist(), y.tolist(), strict=True):  # at different speeds: no cross terms
            change = (query @ merge.query[place])[:, pair], new[:, pair]  # type: ignore[index]
            for angle in angles:
                turn = torch.tensor([[angle.cos(), angle.sin()], [-angle.sin(), angle.cos()]]).double()
                old = query[:, pair] @ turn @ keys[head][:, pair].mT
                lost += float((change[0] @ turn @ change[1].mT - old).square().sum())
                whole += float(old.square().sum())
    assert moments.error("key", [merge]) == pytest.approx((lost / whole) ** 0.5, rel=1e-4)  # float32 inputs


def llama4() -> nn.Module:
    return made("Llama", **SIZES | {"num_hidden_layers": 1})


def test_least_squares_bring_the_outputs_closer() -> None:
    """On the calibration data, the fitted output layer is at least as close as the merged one."""
    model, original, batch = llama4(), llama4(), ids(8, 24)
    before = output(original, batch)
    layers, _ = find(original, batch)
    plan = {layers[0]: filled(original, batch).merges(2)}
    with merging(original, plan):
        merged = output(original, batch)
    compress(model, [batch], keep=0.5, parts="key-heads")
    assert float((output(model, batch) - before).norm()) < float((merged - before).norm())


# --- requests --------------------------------------------------------------------------------------------


def test_half_precision_and_other_parts_combine(tmp_path: Path) -> None:
    half = own().bfloat16()
    compress(half, [ids(8, 24)], keep=0.5, parts="key-heads")
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    model = own()
    done = compress(model, [ids(8, 24)], keep={"heads": 0.5, "key-heads": 0.5, "kv": 0.5}, uniform=True)
    config: Any = model.config
    assert (config.num_attention_heads, config.num_key_value_heads) == (2, 1)
    assert done.parts == ["heads", "key-heads", "kv"]
    folder = save_compressed(model, tmp_path / "all", done)
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 1
    assert torch.equal(output(rw.load_compressed(folder), BATCH), output(model, BATCH))


def test_a_tolerance_takes_the_fewest_heads_within_it() -> None:
    labels = {"labels": ids(8, 24, 7)["input_ids"]}
    model = repeated(own(), 4)
    done = compress(model, [ids(8, 24) | labels], tolerance=1e-3, parts="key-heads")
    assert [len(layer.groups) for layer in done.merged] == [1, 1]
    model = own()
    done = compress(model, [ids(8, 24) | labels], tolerance=1e-9, parts="key-heads")
    assert done.parameters_after <= done.parameters_before
    assert done.worst.loss_added / done.worst.loss_before <= 1e-6


def test_the_report_lists_the_groups() -> None:
    done = compress(own(), [ids(8, 24)], keep=0.5, parts="key-heads")
    text = repr(compression_document(done))
    assert "4 key heads per layer merged to 2" in text
    assert "Merged key heads" in text


@pytest.mark.parametrize(
    ("make", "keep", "said"),
    [
        (partial(made, "Gemma", **SIZES, num_key_value_heads=1), 0.5, "it has one key head, which all query"),
        (qwen3, 0.5, "q_norm', which is of class Qwen3RMSNorm"),
        (bert, 0.5, r"its class builds 'encoder.*key.weight' with \(32, 32\) instead of \(16, 32\)"),
        (gpt2, 0.5, "its projections are no nn.Linear"),
        (
            own,
            0.75,
            r"at most 0.5: a number of key heads must divide 4, got 0.75. `keep` can be 0.5 or 0.25",
        ),
        (llama, 0.4, None),
    ],
)
def test_models_and_shares_that_do_not_fit_are_refused(make: Make, keep: float, said: str | None) -> None:
    model = make()
    if said is None:  # 2 key heads: a share of 0.4 is rounded up, and the note says so
        done = compress(model, [ids(8, 24)], keep=keep, parts="key-heads")
        assert done.notes[0] == "Key heads: 1 of 2 remain in every layer, a share of 0.5."
        return
    with untouched(model, but="config"), pytest.raises(CompressionError, match=said):
        compress(model, [ids(8, 24)], keep=keep, parts="key-heads")


def test_layers_with_different_numbers_are_refused() -> None:
    model = sharpened(own())
    with pytest.raises(CompressionError, match=r"numbers of key heads that differ: \d, 4"):
        compress(model, [ids(8, 24)], keep={"heads": 0.8, "key-heads": 0.5})
