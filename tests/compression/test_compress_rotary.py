"""Rotary pairs that go, in several families."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.compression.compression_cases import VOCABULARY, gpt2, ids, sharpened
from torch import nn

import rankwise as rw
from rankwise.compression import compress, save_compressed
from rankwise.compression.qk_modules import narrow_layers
from rankwise.compression.qk_statistics import collect_statistics, layer_divergence, usable_layers
from rankwise.compression.rotary_find import find_rotations
from rankwise.compression.rotary_solve import Order, greedy, kept_factors, rows_of, units_of, whole_factors
from rankwise.errors import CompressionError

QUICK: dict[str, Any] = {"parts": ("rotary",)}
EPS = torch.finfo(torch.float32).eps
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def made(name: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    return sharpened(getattr(transformers, f"{name}ForCausalLM")(config))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama, grouped": lambda: made("Llama", num_key_value_heads=2),
    "phi3, fused": lambda: made("Phi3", num_key_value_heads=4),
    "neox, a quarter rotated": lambda: made("GPTNeoX"),
    "glm, neighbours": lambda: made("Glm", num_key_value_heads=2, head_dim=8),
}


def output(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_at_full_width_nothing_changes(family: str) -> None:
    model, batch = FAMILIES[family](), ids(2, 12)
    before = output(model, batch)
    found, _ = find_rotations(model, batch)
    assert len(found) == 2
    layers = collect_statistics(model, found, [batch])
    swap = narrow_layers(model, [(layer.found, whole_factors(layer)) for layer in layers])
    swap.apply()
    # unrotated channels are in another basis, scaled by roots of moments down to a ridge of 1e-9
    assert torch.allclose(output(model, batch), before, atol=1e5 * EPS * float(before.abs().max()))
    swap.undo()
    assert torch.equal(output(model, batch), before)


def test_pairs_are_told_from_values() -> None:
    batch = ids(2, 12)
    for family, pairs in {
        "llama, grouped": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "neox, a quarter rotated": [[0, 1]],
        "glm, neighbours": [[0, 1], [2, 3]],
    }.items():
        found, reasons = find_rotations(FAMILIES[family](), batch)
        assert not reasons
        assert all(one.pairs.tolist() == pairs for one in found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("calibrate", [0, 10])
def test_attention_of_the_first_layer_is_what_the_record_says(family: str, calibrate: int) -> None:
    model, batch = FAMILIES[family](), ids(6, 30)
    matrices = []
    for compressing in (True, False):
        with rw.capture(model) as trace, torch.no_grad():
            model(**batch)
        matrices.append(trace.mixers[0].operator.dense())
        if compressing:
            done = compress(model, [batch], keep=0.5, calibrate=calibrate, **QUICK)
    before, after = matrices
    terms = torch.where(before > 0, before * (before.log() - after.log()), 0).sum(-1)
    assert terms.mean().item() == pytest.approx(done.layers[0].kl, rel=1e-2, abs=1e-5)
    assert done.layers[0].kl > 1e-4
    assert 3 <= done.mean_width <= 4
    assert done.parameters_after == sum(one.numel() for one in model.parameters()) < done.parameters_before


@pytest.mark.parametrize("family", FAMILIES)
def test_it_generates_with_narrow_keys_and_is_saved_twice(family: str, tmp_path: Path) -> None:
    model, batch = FAMILIES[family](), ids(2, 12)
    done = compress(model, [ids(6, 30)], keep=0.5, **QUICK)
    whole = output(model, batch)
    with torch.no_grad():
        start = model(batch["input_ids"][:, :7], use_cache=True)
        rest = model(batch["input_ids"][:, 7:], past_key_values=start.past_key_values, use_cache=True)
    logits = torch.cat([start.logits, rest.logits], 1)
    assert torch.allclose(logits, whole, atol=1e4 * EPS * float(whole.abs().max()))
    kept = sum(layer.keys.numel() for layer in rest.past_key_values.layers)
    assert kept == 2 * 12 * sum(head.width for head in done.heads)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    greedily = model.generate(batch["input_ids"], **options)
    assert torch.equal(greedily, model.generate(batch["input_ids"], use_cache=False, **options))
    save_compressed(model, tmp_path / "one", done)
    rw.load_compressed(tmp_path / "one").save_pretrained(tmp_path / "two")
    assert torch.equal(output(rw.load_compressed(tmp_path / "two"), batch), whole)
    half = rw.load_compressed(tmp_path / "two", dtype=torch.bfloat16)
    assert bool(output(half, batch).isfinite().all())


def test_greedy_is_the_best_first_step_and_its_curve_is_measured() -> None:
    model, batch = FAMILIES["llama, grouped"](), ids(2, 12)
    found, _ = find_rotations(model, batch)
    layer = collect_statistics(model, found[:1], [batch])[0]
    whole, units = whole_factors(layer), units_of(layer)
    rows = rows_of(layer.samples, 1, whole, units, seed=0)
    order = greedy(rows, units)
    assert order.widths == [2, 4, 6, 8]
    assert order.losses[-1] == 0
    other = greedy(rows_of(layer.samples, 0, whole, units, 0), units)

    def measured(units: list[int], width: int) -> float:
        # all rows were drawn: there are 12 of each sequence, and 48 at most
        orders = [other, Order(units, order.widths, order.losses)]
        each = layer_divergence(layer.samples, kept_factors(layer, whole, orders, [8, width]))
        assert each[:2].abs().max() < 1e-6
        return float(each[2:].mean())

    for width, loss in zip(order.widths, order.losses, strict=True):
        assert measured(order.units, width) == pytest.approx(loss, rel=1e-4, abs=1e-6)
    for first in range(4):
        rest = [unit for unit in range(4) if unit != first]
        assert measured([first, *rest], 6) >= order.losses[-2] - 1e-6


def test_the_order_of_key_heads_does_not_matter() -> None:
    model, turned, batch = FAMILIES["llama, grouped"](), FAMILIES["llama, grouped"](), ids(6, 30)
    with torch.no_grad():
        for layer in turned.model.layers:
            own = layer.self_attn
            for one, width in ((own.q_proj, 16), (own.k_proj, 8), (own.v_proj, 8)):
                one.weight.copy_(one.weight.roll(width, 0))
            own.o_proj.weight.copy_(own.o_proj.weight.roll(16, 1))
    done, again = (compress(one, [batch], keep=0.5, **QUICK) for one in (model, turned))
    widths = [[head.width for head in one.heads if head.layer == 0] for one in (done, again)]
    assert widths[0] == widths[1][::-1]
    assert torch.allclose(output(model, batch), output(turned, batch), atol=1e-4)


def test_padding_counts_for_nothing() -> None:
    made, plain = FAMILIES["llama, grouped"], ids(6, 30)
    batch = {"input_ids": plain["input_ids"], "attention_mask": torch.ones(6, 30, dtype=torch.long)}
    done = compress(made(), [plain], keep=0.5, **QUICK)
    again = compress(made(), [batch], keep=0.5, **QUICK)
    assert [head.width for head in again.heads] == [head.width for head in done.heads]
    assert again.kl == pytest.approx(done.kl, rel=1e-4)
    batch["attention_mask"][0, 20:] = 0
    before = compress(made(), [batch], keep=0.5, **QUICK)
    batch["input_ids"] = batch["input_ids"].clone()
    batch["input_ids"][0, 20:] = 7
    after = compress(made(), [batch], keep=0.5, **QUICK)
    assert before.tokens == 6 * 30 - 10
    assert [head.width for head in after.heads] == [head.width for head in before.heads]
    assert after.kl == pytest.approx(before.kl, rel=1e-4)


def test_calibration_lowers_attention_kl_on_other_tokens() -> None:
    batches, held_out = [ids(8, 30, seed) for seed in range(3)], [ids(8, 30, 9)]
    made = FAMILIES["llama, grouped"]
    plain = compress(made(), batches, keep=0.5, held_out=held_out, **QUICK)
    done = compress(made(), batches, keep=0.5, calibrate=60, held_out=held_out, **QUICK)
    assert done.kl < plain.kl
    assert [head.width for head in done.heads] == [head.width for head in plain.heads]


def test_a_tolerance_is_kept_and_the_curve_falls() -> None:
    done = compress(FAMILIES["llama, grouped"](), [ids(6, 30)], tolerance=0.05, **QUICK)
    assert sum(head.kl for head in done.heads) / len(done.heads) <= 0.05 * 1.001
    (curve,) = done.curves
    assert [point.width for point in curve.points] == sorted(point.width for point in curve.points)
    assert [point.kl for point in curve.points] == sorted((point.kl for point in curve.points), reverse=True)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (gpt2, "positions are not rotated in"),
        (lambda: made("Qwen3", num_key_value_heads=2, head_dim=16), "a norm comes between"),
    ],
    ids=["gpt2", "qwen3"],
)
def test_families_that_cannot_are_refused_and_stay(model: Callable[[], nn.Module], said: str) -> None:
    one, batch = model(), ids()
    before = output(one, batch)
    with pytest.raises(CompressionError, match=said):
        compress(one, [batch], keep=0.5, **QUICK)
    assert torch.equal(output(one, batch), before)


@pytest.mark.parametrize("part", ["rotary", "heads"])
def test_nan_is_refused_by_name(part: str) -> None:
    model = FAMILIES["llama, grouped"]()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0] = float("nan")
    with pytest.raises(CompressionError, match=r"layers\.1\.self_attn.*NaN"):
        compress(model, [ids()], keep=0.5, parts=(part,))


def test_layers_with_nan_in_later_batches_are_left_out_or_named() -> None:
    model = FAMILIES["llama, grouped"]()
    found, _ = find_rotations(model, ids(2, 12))
    layers = collect_statistics(model, found, [ids(4, 24)])
    layers[0].broken = {1, 3}
    fine, left_out = usable_layers(layers, {"other": "it runs more than once"})
    assert [layer.found.name for layer in fine] == [layer.found.name for layer in layers[1:]]
    assert left_out == {"other": "it runs more than once", found[0].name: "NaN or infinity in head 1"}
    with pytest.raises(CompressionError, match=rf"'{found[0].name}': expected finite .* in head 1"):
        usable_layers(layers[:1], {"other": "it runs more than once"})


def test_requests_that_fit_nothing() -> None:
    made = FAMILIES["llama, grouped"]
    with pytest.raises(CompressionError, match="Give more text"):
        compress(made(), [ids(1, 3)], keep=0.5, **QUICK)
    model = made()
    compress(model, [ids()], keep=0.5, **QUICK)
    with pytest.raises(CompressionError, match="not compressed yet"):
        compress(model, [ids()], keep=0.5, **QUICK)
