"""The part `rotary`: pairs are found from values and removed in greedy order."""

from typing import Any

import pytest
import torch
from tests.compression.compression_cases import ROTARY, ids, output

from rankwise.compression import compress, rotary_find
from rankwise.compression.qk_modules import narrow_layers
from rankwise.compression.qk_statistics import collect_statistics, layer_divergence, usable_layers
from rankwise.compression.rotary_solve import Order, greedy, kept_factors, rows_of, units_of, whole_factors
from rankwise.errors import CompressionError

QUICK: dict[str, Any] = {"parts": ("rotary",)}
EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("family", ROTARY)
def test_at_full_width_nothing_changes(family: str) -> None:
    model, batch = ROTARY[family](), ids(2, 12)
    before = output(model, batch)
    found, _ = rotary_find.find_layers(model, batch, rotary_find.read_rotations)
    assert len(found) == 2
    layers = collect_statistics(model, found, [batch])
    swap = narrow_layers(model, [(layer.projections, whole_factors(layer)) for layer in layers])
    swap.apply()
    # unrotated channels are in another basis, scaled by roots of moments down to a ridge of 1e-9
    assert torch.allclose(output(model, batch), before, atol=1e5 * EPS * float(before.abs().max()))
    swap.undo()
    assert torch.equal(output(model, batch), before)


def test_pairs_are_found_from_values() -> None:
    batch = ids(2, 12)
    for family, pairs in {
        "llama": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "neox": [[0, 1]],
        "glm": [[0, 1], [2, 3]],
    }.items():
        found, reasons = rotary_find.find_layers(ROTARY[family](), batch, rotary_find.read_rotations)
        assert not reasons
        assert all(one.pairs.tolist() == pairs for one in found)


def test_greedy_is_the_best_first_step_and_its_curve_is_measured() -> None:
    model, batch = ROTARY["llama"](), ids(2, 12)
    found, _ = rotary_find.find_layers(model, batch, rotary_find.read_rotations)
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
    model, turned, batch = ROTARY["llama"](), ROTARY["llama"](), ids(6, 30)
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


def test_layers_with_nan_in_later_batches_are_left_out_or_named() -> None:
    model = ROTARY["llama"]()
    found, _ = rotary_find.find_layers(model, ids(2, 12), rotary_find.read_rotations)
    layers = collect_statistics(model, found, [ids(4, 24)])
    layers[0].broken = {1, 3}
    fine, left_out = usable_layers(layers, {"other": "it runs more than once"})
    assert [layer.projections.name for layer in fine] == [layer.projections.name for layer in layers[1:]]
    assert left_out == {"other": "it runs more than once", found[0].name: "NaN or infinity in head 1"}
    with pytest.raises(CompressionError, match=rf"'{found[0].name}': expected finite .* in head 1"):
        usable_layers(layers[:1], {"other": "it runs more than once"})
