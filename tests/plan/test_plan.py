"""Saturation, prices, records and errors of plans."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unchecked import unchecked
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import rankwise as rw
from rankwise.plan import HeadDimPlan, fit_log_law, plan_head_dim, trained_widths, with_prices
from rankwise.plan import planner as planner_module
from rankwise.plan.prices import Shape, _Layer
from rankwise.plan.saturation import gains, layer_curve, saturation

WIDTHS = tuple(range(1, 33))


def test_the_rule_on_a_curve_with_a_known_gain() -> None:
    """r = 1 − 1/K gains 1/(2K²) a unit from K to 2K: below 0.01 from K = 8 on (1/128; at 7: 1/98)."""
    curve = 1 - 1 / np.array(WIDTHS)
    assert gains(WIDTHS, curve) == pytest.approx([1 / (2 * k**2) for k in range(1, 17)])
    assert WIDTHS[saturation(WIDTHS, curve, 0.01)] == 8
    assert WIDTHS[saturation(WIDTHS[::2], curve[::2], 0.5)] == 1


def test_a_flat_start_is_no_saturation_and_a_steep_end_is_none() -> None:
    late = np.clip((np.array(WIDTHS) - 10) * 0.05, 0, 0.2)
    assert saturation(WIDTHS, late, 0.01) > 8
    assert saturation(WIDTHS, np.array(WIDTHS) * 0.02, 0.01) == -1


def test_interval_and_fall() -> None:
    noise = np.random.default_rng(0).normal(0, 0.002, (10, 32))
    rising = layer_curve(1, WIDTHS, 1 - 1 / np.array(WIDTHS) + noise, 0.01)
    assert rising.interval[0] <= rising.head_dim <= rising.interval[1]
    assert rising.fall is None
    dip = np.abs(np.array(WIDTHS) - 6) / 30
    falling = layer_curve(1, WIDTHS, dip + noise, 0.01).fall
    assert falling is not None
    assert falling[0] == 1
    assert abs(falling[1] - 6) <= 1


def test_a_curve_that_falls_is_said_to() -> None:
    """Causal softmax is triangular: at δ = 1e-9 width 1 is nearly full, and wider heads have less."""
    plan = plan_head_dim(64, "causal", temperature=0.3, delta=1e-9, head_dims=[1, 2, 4, 8, 16, 32])
    assert plan.deciding.fall is not None
    assert plan.deciding.fall[0] == 1
    assert plan.curve[0][1] > 0.95
    assert plan.curve[0][1] - plan.curve[-1][1] > 0.02
    assert any("not monotone" in note for note in plan.notes)


def test_the_barrier_holds_and_the_width_grows_like_a_logarithm() -> None:
    plan = rw.plan_head_dim(256, trials=10)
    assert plan.barrier == rw.theory.rank_barrier(256)
    # 5 standard errors of the mean, for the expectation is what the barrier bounds
    assert all(m <= plan.barrier / 256 + 5 * s / 10**0.5 for _, m, s in plan.curve)
    assert abs({k: m for k, m, _ in plan.curve}[16] - 0.43) < 0.04  # .45 at T = 200, .33 at 800
    law = fit_log_law(lengths=(64, 256, 1024), trials=4)
    assert law.slope > 0.5
    assert max(map(abs, law.residuals)) < 2
    assert [point[0] for point in law.points] == [64, 256, 1024]


def test_equal_tokens_are_one_column() -> None:
    ids = torch.arange(100) % 10
    plan = plan_head_dim(rw.plan.embedded(ids, 32), trials=2, head_dims=[1, 2, 4, 8])
    assert max(m for _, m, _ in plan.curve) <= 0.1
    assert plan.inputs == "given"


def test_prices_count_what_torch_counts() -> None:
    plan = with_prices(plan_head_dim(128, trials=2), 96, heads=4, kv_heads=2, head_dim=24)
    now = plan.options[0]
    layer = _Layer(Shape("now", 4, 2, 24, 24), 96, 8, False, False, "cpu")
    assert now.parameters == sum(weight.numel() for weight in layer.weights) + layer.out.numel()
    assert now.cache_bytes == 2 * sum(part[0, :, 0].numel() for part in layer.cache)
    assert all(one.prefill_ms > 0 and one.decode_ms > 0 for one in plan.options)
    long = _Layer(Shape("now", 4, 2, 24, 24), 96, plan.tokens, False, False, "cpu")
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        long.prefill()
    assert now.flops == counted.get_total_flops()
    shape = Shape("narrow", 4, 2, 8, 24)
    ways = [_Layer(shape, 96, 16, True, padded, "cpu").prefill() for padded in (False, True)]
    torch.testing.assert_close(*ways)  # zeros that fill up change nothing


def test_the_recommended_values_make_a_model() -> None:
    plan = with_prices(plan_head_dim(128, trials=3), 128, heads=2, measure=False)
    assert plan.recommended["num_attention_heads"] * plan.recommended["head_dim"] == 128
    config = LlamaConfig(**plan.recommended, intermediate_size=32, num_hidden_layers=1, vocab_size=50)
    model = LlamaForCausalLM(config).eval()
    with rw.capture(model) as trace:
        model(torch.arange(12)[None])
    assert trace.mixers[0].operator.shape[1] == plan.recommended["num_attention_heads"]
    assert str(plan.head_dim) in plan.reason


class Head(torch.nn.Module):
    """One attention head with given projections."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor) -> None:
        super().__init__()
        self.query, self.key = torch.nn.Parameter(query), torch.nn.Parameter(key)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        q, k = ((states @ weight)[:, None] for weight in (self.query, self.key))
        return torch.nn.functional.scaled_dot_product_attention(q, k, states[:, None])


def test_a_trained_head_needs_as_much_width_as_its_logits_have() -> None:
    torch.manual_seed(0)
    down = torch.randn(16, 3)
    model = Head(down @ torch.randn(3, 8), torch.randn(16, 8) * 2)
    [head] = trained_widths(model, [torch.randn(2, 30, 16)], tolerance=1e-6)
    assert (head.needed, head.width) == (3, 8)
    [loose] = trained_widths(model, [torch.randn(2, 30, 16)], tolerance=10.0)
    assert loose.needed == 1


def test_save_load_and_page(tmp_path: Path) -> None:
    plan = plan_head_dim(64, trials=2)
    plan = plan.model_copy(
        update={"notes": ["<script>"], "law": fit_log_law(lengths=(64, 128, 256), trials=2)}
    )
    assert HeadDimPlan.load(plan.save(tmp_path)) == plan
    page = plan.to_html(tmp_path).read_text()
    assert f"K* = {plan.head_dim}" in page
    assert "random weights" in page
    (tmp_path / "plan.json").write_text('{"format": "other"}')
    with pytest.raises(rw.RankwiseError, match="rankwise plan"):
        HeadDimPlan.load(tmp_path)


@pytest.mark.parametrize("damage", [{"layers": []}, {"schema_version": 2}, {"tokens": "many"}])
def test_a_damaged_plan_is_refused(damage: dict[str, object], tmp_path: Path) -> None:
    saved = json.loads(plan_head_dim(8, trials=2, head_dims=[1, 2]).save(tmp_path).read_text())
    (tmp_path / "plan.json").write_text(json.dumps(saved | damage))
    with pytest.raises(rw.RankwiseError, match="schema version 1"):
        HeadDimPlan.load(tmp_path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": 1}, "two tokens"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"tolerance": math.nan}, "tolerance"),
        ({"width": 0}, "width"),
        ({"mask": "casual"}, "Did you mean causal"),
        ({"positions": "rotary"}, "'rope'"),
        ({"trials": 1}, "trials"),
        ({"seed": -1}, "seed"),
        ({"tokens": 5000, "temperature": 1.0}, "temperature 0"),
        ({"kv_heads": 2}, "kv_heads"),
        ({"heads": 3, "kv_heads": 2}, "kv_heads"),
        ({"layers": 0}, "layers"),
        ({"head_dims": [8, 12]}, "double"),
        ({"head_dims": [3, 6], "positions": "rope"}, "even"),
        ({"inputs": "orthonormal", "layers": 2, "width": 16}, "orthonormal"),
        ({"tokens": torch.full((4, 4), math.nan)}, "NaN"),
        ({"tokens": torch.zeros(4, 4)}, "zeros"),
        ({"tokens": torch.arange(4)}, "token ids"),
    ],
)
def test_bad_input_is_named(given: dict[str, object], said: str) -> None:
    with unchecked(), pytest.raises(rw.RankwiseError, match=said):
        plan_head_dim(**{"tokens": 32, **given})


def test_interrupted_it_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planner_module.trial_ranks

    def stopping(setting: object, widths: object, trial: int) -> np.ndarray:
        if trial == 3:
            raise KeyboardInterrupt
        return whole(setting, widths, trial)

    monkeypatch.setattr(planner_module, "trial_ranks", stopping)
    plan = plan_head_dim(32, trials=10)
    assert (plan.complete, plan.trials) == (False, 3)


def test_what_does_not_saturate_is_not_advised() -> None:
    plan = with_prices(plan_head_dim(256, trials=2, head_dims=[1, 2, 4]), 64, heads=2, measure=False)
    assert not plan.saturated
    assert plan.head_dim == 4
    assert [one.name for one in plan.options] == ["now"]
    assert "no narrower width" in plan.reason


def test_equal_parameters_where_channels_are_no_model_width() -> None:
    plan = with_prices(plan_head_dim(64, trials=2), 96, heads=8, kv_heads=2, head_dim=32, measure=False)
    now, more = plan.options[:2]
    assert more.parameters == now.parameters
    assert more.heads // more.kv_heads == 4
    assert more.head_dim < now.head_dim
