"""Prices and advice hold to what was counted: no width that was not tried, no heads that are not added."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModel

import rankwise as rw
from rankwise.plan import HeadDimPlan, plan_head_dim, with_prices
from rankwise.plan.advice import _than
from rankwise.plan.records import LayerCurve
from rankwise.plan.saturation import falls
from rankwise.report.plan_report import plan_document


def saturating(widths: range = range(1, 65), positions: str = "none", **changed: object) -> HeadDimPlan:
    """A plan whose curve is 1 − 1/K: K* = 8 at a tolerance of 0.01, with the interval 7 to 9."""
    curve = LayerCurve(
        layer=1, points=[(k, 1 - 1 / k, 0.01) for k in widths], head_dim=8, interval=(7, 9), saturated=True
    )
    return HeadDimPlan(
        tokens=64, mask="full", tolerance=0.01, barrier=40.0, inputs="orthonormal", trials=2,
        positions=positions, layers=[curve], **changed,
    )  # fmt: skip


def test_no_rank_outside_the_widths_tried() -> None:
    curve = saturating(range(2, 33, 2)).deciding
    assert math.isnan(curve.share_at(1))
    assert math.isnan(curve.share_at(33))
    assert curve.share_at(2) == 0.5
    assert curve.share_at(3) == pytest.approx((0.5 + 0.75) / 2)
    assert (curve.tried(2), curve.tried(3)) == (True, False)


def test_rotary_heads_have_even_widths_alone() -> None:
    plan = plan_head_dim(32, positions="rope", trials=2, head_dims=[2, 4, 8, 16, 32])
    plan = with_prices(plan, 64, heads=3, measure=False)
    assert plan.options[0].head_dim == 20  # 64 // 3 = 21
    assert plan.options[0].interpolated
    assert any("K of now is taken as 20" in note for note in plan.notes)
    (table,) = (
        t for part in plan_document(plan).sections for t in part.tables if t.title.startswith("Settings")
    )
    assert "≈" in " ".join(row[4] for row in table.rows)
    assert [one.head_dim for one in plan.fixed_width] == [2, 4, 8, 16, 32]
    odd = with_prices(plan, 64, heads=3, head_dim=21, measure=False).options[0]
    assert math.isnan(odd.rank_share)


def test_heads_that_are_not_more_are_not_advised() -> None:
    plan = with_prices(saturating(), 64, heads=3, measure=False)
    assert plan.recommended["num_attention_heads"] == 3
    assert plan.recommended["head_dim"] == 21
    assert "more heads" not in [one.name for one in plan.options]
    assert "no more than 3 heads" in plan.reason


def test_heads_narrower_than_the_interval_become_fewer() -> None:
    plan = with_prices(saturating(), 64, heads=32, measure=False)
    assert (plan.recommended["num_attention_heads"], plan.recommended["head_dim"]) == (4, 16)
    assert "4 heads in place of 32" in plan.reason
    assert "each single head has more" in plan.reason
    with pytest.raises(rw.RankwiseError, match="128 heads at D = 64"):
        with_prices(saturating(), 64, heads=128, measure=False)


def test_the_reason_says_what_was_measured() -> None:
    plan = with_prices(saturating(), 128, heads=2)
    now, more = plan.options[:2]
    assert f"({more.prefill_ms / now.prefill_ms:.2f} times)" in plan.reason
    assert f"({more.decode_ms / now.decode_ms:.2f} times)" in plan.reason
    assert "Values are 16 wide a head in place of 64: still 128 in all heads together" in plan.reason
    assert "not timed" in with_prices(saturating(), 128, heads=2, measure=False).reason


def test_values_of_their_own_width_keep_their_channels() -> None:
    plan = with_prices(saturating(value_dim=32), 128, heads=2, measure=False)
    now, more = plan.options[:2]
    assert (now.head_dim, now.value_dim) == (64, 32)
    assert more.heads * more.value_dim == 64
    assert now.parameters == 128 * 2 * 2 * (64 + 32)
    assert plan.recommended["v_head_dim"] == more.value_dim
    assert "Most classes do not read it" in plan.notes[-1]


def test_classes_that_do_not_make_the_shapes_are_named() -> None:
    shapes = {"heads": 4, "kv_heads": 2, "head_dim": 64}
    plan = with_prices(saturating(), 128, **shapes, measure=False)
    wanted = tuple(
        plan.recommended[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    assert wanted == (16, 8, 16)
    small = {"num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 12}
    found = {}
    for kind in ("llama", "bert"):
        model = AutoModel.from_config(AutoConfig.for_model(kind, **plan.recommended, **small)).eval()
        with torch.no_grad(), rw.capture(model) as trace:
            model(torch.arange(12)[None])
        op = trace.mixers[0].operator
        found[kind] = (op.query.shape[1], op.key.shape[1], op.query.shape[-1])
    assert found == {"llama": wanted, "bert": (16, 16, 8)}
    assert "H·K = 256 is not D = 128" in plan.notes[-2]
    assert "BERT, GPT-2 and OPT make heads of D/H." in plan.notes[-2]
    assert "num_key_value_heads" in plan.notes[-1]
    assert with_prices(saturating(), 128, heads=2, measure=False).notes == []
    [odd, _] = with_prices(saturating(), 128, heads=3, measure=False).notes[::-1]
    assert "refuse 7 heads, which do not divide 128" in odd


def test_no_difference_is_called_one() -> None:
    assert _than(0.424, 0.421) == "as much (0.42)"
    assert _than(0.45, 0.42) == "more (0.45 against 0.42)"


def test_drawn_inputs_beside_given_states_are_refused() -> None:
    with pytest.raises(rw.RankwiseError, match="`inputs`"):
        plan_head_dim(torch.randn(8, 4), inputs="orthonormal", trials=2)


def test_where_the_width_falls_with_length_it_is_said() -> None:
    points = [(1024, 12, 11, 13), (2048, 14, 12, 15), (4096, 12, 11, 13), (8192, 9, 9, 10)]
    overlapping, apart = falls(points)
    assert "14 (12 to 15) at T = 2,048, 12 (11 to 13) at 4,096" in overlapping
    assert "intervals overlap" in overlapping
    assert "do not overlap" in apart
