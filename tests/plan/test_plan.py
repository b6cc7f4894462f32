"""The rule for K*, its interval, costs, trained heads, records and refusals of plans."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.documents import plan_document
from tests.unchecked import unchecked
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertModel,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    PreTrainedModel,
    ViTConfig,
    ViTModel,
)

import rankwise as rw
from rankwise.models import SoftmaxAttention
from rankwise.plan import HeadDimPlan, plan_head_dim, trained_widths
from rankwise.plan.planner import gains, largest_fall, saturation, saturation_index
from rankwise.plan.ranks import RandomHead

WIDTHS = tuple(range(1, 33))


def test_k_star_of_a_curve_with_a_known_gain() -> None:
    """r = 1 − 1/K gains 1/(2K²) per unit from K to 2K: below 0.01 from K = 8 on (1/128; at 7: 1/98)."""
    curve = 1 - 1 / np.array(WIDTHS)
    assert gains(WIDTHS, curve) == pytest.approx([1 / (2 * k**2) for k in range(1, 17)])
    assert WIDTHS[saturation_index(WIDTHS, curve, 0.01)] == 8
    assert saturation_index(WIDTHS, curve, 0.5) == 1  # 1/2 at K = 1, 1/8 at K = 2


@pytest.mark.parametrize(
    ("head_dims", "tried"), [([4, 64], [4, 8, 16, 32, 64]), ([3, 4, 9], [3, 4, 6, 8, 9])]
)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}])
def test_k_star_of_a_grid_with_gaps_is_k_star_of_its_doublings(
    head_dims: list[int], tried: list[int], options: dict[str, float]
) -> None:
    """Interpolated from 4 to 64, the gain of the hardmax rank of 64 tokens is 0.007 everywhere: K* = 4."""
    few = plan_head_dim(64, head_dims=head_dims, trials=3, **options)
    assert [width for width, _, _ in few.curve] == tried
    whole = plan_head_dim(64, head_dims=tried, trials=3, **options)
    assert (few.curve, few.head_dim, few.interval) == (whole.curve, whole.head_dim, whole.interval)


def test_a_gain_is_never_interpolated() -> None:
    with pytest.raises(KeyError):
        gains((4, 64), np.array([0.1, 0.5]))


def test_a_flat_start_does_not_saturate_and_neither_does_a_steep_end() -> None:
    late = np.clip((np.array(WIDTHS) - 10) * 0.05, 0, 0.2)
    assert saturation_index(WIDTHS, late, 0.01) > 8
    assert saturation_index(WIDTHS, np.array(WIDTHS) * 0.02, 0.01) == -1


def test_interval_and_fall() -> None:
    noise = np.random.default_rng(0).normal(0, 0.002, (10, 32))
    rising = 1 - 1 / np.array(WIDTHS) + noise
    found, (low, high) = saturation(WIDTHS, rising, 0.01, seed=0)
    assert low <= WIDTHS[found] <= high
    assert largest_fall(WIDTHS, rising, 0.01) is None
    falling = largest_fall(WIDTHS, np.abs(np.array(WIDTHS) - 6) / 30 + noise, 0.01)
    assert falling is not None
    assert falling[0] == 1
    assert abs(falling[1] - 6) <= 1


def test_resamples_that_do_not_saturate_count_as_the_widest_width() -> None:
    """One trial saturates at 1, the other never: resamples of the other reach the widest width."""
    trials = np.stack([np.full(32, 0.5), np.array(WIDTHS) * 0.02])
    assert saturation(WIDTHS, trials, 0.015, seed=0) == (0, (1, 32))


def test_a_falling_curve_is_noted() -> None:
    """Causal softmax is triangular: at δ = 1e-9 width 1 is nearly full, and wider heads have less."""
    plan = plan_head_dim(64, "causal", temperature=0.3, delta=1e-9, head_dims=[1, 2, 4, 8, 16, 32])
    assert plan.fall is not None
    assert plan.fall[0] == 1
    assert plan.curve[0][1] > 0.95
    assert plan.curve[0][1] - plan.curve[-1][1] > 0.02
    assert any("not monotone" in note for note in plan.notes)


def test_the_barrier_holds() -> None:
    plan = rw.plan_head_dim(256, trials=10)
    assert plan.barrier == rw.theory.rank_barrier(256)
    # 5 standard errors of the mean: the barrier bounds the expectation
    assert all(m <= plan.barrier / 256 + 5 * s / 10**0.5 for _, m, s in plan.curve)
    assert abs({k: m for k, m, _ in plan.curve}[16] - 0.43) < 0.04  # .45 at T = 200, .33 at 800


def test_equal_tokens_have_a_common_winner() -> None:
    states = torch.randn(10, 32)[torch.arange(100) % 10]
    plan = plan_head_dim(states, trials=2, head_dims=[1, 2, 4, 8])
    assert max(m for _, m, _ in plan.curve) <= 0.1
    assert plan.inputs == "given"


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_costs_are_what_torch_counts(mask: str) -> None:
    plan = plan_head_dim(64, mask, heads=4, kv_heads=2, head_dim=24, width=96, trials=2)
    present = plan.costs[0]
    weights = torch.randn(96, 4 * 24), torch.randn(96, 2 * 24)
    states = torch.randn(64, 96)
    with FlopCounterMode(display=False) as counted:
        query, key = (states @ weight for weight in weights)
        if mask == "full":
            query.view(64, 4, 24).transpose(0, 1) @ key.view(64, 2, 24).permute(1, 2, 0).repeat(2, 1, 1)
        else:  # row by row: token t scores t + 1 keys
            for row in range(64):
                query[row].view(4, 1, 24) @ key[: row + 1].view(-1, 2, 24).permute(1, 2, 0).repeat(2, 1, 1)
    assert present.head_dim == 24
    assert present.flops == counted.get_total_flops()
    assert present.parameters == sum(weight.numel() for weight in weights)
    assert present.cache_bytes == key[0].half().nbytes
    assert [cost.head_dim for cost in plan.costs[1:]] == list(
        dict.fromkeys([plan.head_dim, plan.interval[1]])
    )


def count(module: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def grouped_model(head_dim: int) -> PreTrainedModel:
    """A model with 4 heads, 2 key heads, and values of width 24 whatever the width of queries and keys."""
    config = MiMoV2FlashConfig(
        vocab_size=16, hidden_size=96, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, v_head_dim=24, layer_types=["full_attention"],
        mlp_layer_types=["dense"], pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return MiMoV2FlashForCausalLM(config).half().eval()


def test_savings_are_those_of_a_model_with_key_heads() -> None:
    plan = plan_head_dim(64, "causal", heads=4, kv_heads=2, head_dim=24, width=96, positions="rope", trials=2)
    present, star = plan.costs[:2]
    models = [grouped_model(cost.head_dim) for cost in (present, star)]
    assert count(models[0]) - count(models[1]) == present.parameters - star.parameters > 0
    keys, values = [], []
    for model in models:
        [layer] = model(torch.arange(10)[None]).past_key_values.layers
        keys.append(layer.keys.nbytes / 10)
        values.append(layer.values.nbytes)
    assert keys == [present.cache_bytes, star.cache_bytes]
    assert values[0] == values[1]


def test_parameters_are_those_of_encoders() -> None:
    sizes = {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8}
    plan = plan_head_dim(64, heads=4, width=96, trials=2)
    present, star = plan.costs[:2]
    for model in (BertModel(BertConfig(vocab_size=8, **sizes)), ViTModel(ViTConfig(image_size=32, **sizes))):
        weights = [
            weight
            for name, weight in model.named_parameters()
            if name.endswith(("query.weight", "key.weight", "q_proj.weight", "k_proj.weight"))
        ]
        assert len(weights) == 2
        assert sum(weight.numel() for weight in weights) == present.parameters
    mixers = [SoftmaxAttention(96, 4, query_dim=cost.head_dim, bias=False) for cost in (present, star)]
    assert count(mixers[0]) - count(mixers[1]) == present.parameters - star.parameters > 0


def test_fused_attention_on_a_cpu_requires_values_of_the_same_width() -> None:
    query = torch.randn(1, 2, 8, 14)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        scaled_dot_product_attention(query, query, query)
        with pytest.raises(RuntimeError, match="kernel"), warnings.catch_warnings(action="ignore"):
            scaled_dot_product_attention(query, query, torch.randn(1, 2, 8, 64))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heads": 4, "width": 128}, "At 4 heads, rank at random weights saturates at K* = {star} (95 %"),
        ({"heads": 4, "width": 128}, "Queries and keys of width {star} in place of 32, with the same values"),
        ({"heads": 4, "width": 128}, "save {parameters:,} parameters in each layer and"),
        ({"heads": 4, "width": 128}, "Rank/T is {rank:.2f} at K*, {now:.2f} at 32."),
        ({"heads": 4, "width": 128, "kv_heads": 2}, "if keys are cached, {cache:,} bytes per token."),
        ({"heads": 64, "width": 128}, "Queries and keys are 2 wide, so there is nothing to save."),
        (
            {"heads": 1, "width": 300},
            "Rank/T is {rank:.2f} at K*, – at 300.",
        ),  # it is outside of the widths tried
        ({}, "Rank at random weights saturates at K* = {star} (95 %"),
        ({}, "With heads and a model width, a plan counts what a width of K* saves."),
        ({"head_dims": [1, 2], "heads": 4, "width": 128}, "so no width follows."),
    ],
)
def test_the_first_sentence_says_what_k_star_saves(options: dict[str, object], said: str) -> None:
    plan = plan_head_dim(64, trials=3, **options)
    present, star = (plan.costs * 2)[:2] if plan.costs else (None, None)
    numbers = {"star": plan.head_dim, "rank": {k: mean for k, mean, _ in plan.curve}[plan.head_dim]}
    if present and star:
        numbers |= {"now": present.rank_share, "parameters": present.parameters - star.parameters}
        numbers |= {"cache": present.cache_bytes - star.cache_bytes}
    assert said.format(**numbers) in plan_document(plan).verdict.sentence


@pytest.mark.parametrize(
    "options",
    [
        {"tokens": 64, "heads": 4, "width": 128},
        {"tokens": 400, "mask": "causal", "heads": 4, "width": 128},
        {"tokens": 512, "mask": "causal", "tolerance": 0.02},
        {"tokens": 64, "positions": "rope"},
        {"tokens": 64, "head_dims": [1, 2, 3]},
    ],
)
def test_what_the_first_sentence_says_of_doubled_widths_holds_for_the_curve(options: dict[str, Any]) -> None:
    plan = plan_head_dim(**{"trials": 4, **options})
    shares = {k: mean for k, mean, _ in plan.curve}
    gains = {k: (shares[2 * k] - shares[k]) / k for k in shares if 2 * k in shares}
    said = plan_document(plan).verdict.sentence
    if plan.saturated:
        assert all(gain < plan.tolerance for k, gain in gains.items() if k >= plan.head_dim)
        assert gains[max(k for k in gains if k < plan.head_dim)] >= plan.tolerance
        words = "if a width of K* or more is doubled, rank/T grows by less than"
    else:
        assert gains[max(gains)] >= plan.tolerance
        words = f"if K = {max(gains)} is doubled, rank/T at random weights still grows by"
    assert f"{words} {plan.tolerance:g} " in said


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, True),
        ({"heads": 4, "width": 128}, True),
        ({"heads": 64, "width": 64}, False),
        ({"head_dims": [1, 2], "heads": 4, "width": 128}, False),
    ],
)
def test_training_at_k_star_is_asked_for_only_if_it_can_save(options: dict[str, Any], asked: bool) -> None:
    said = plan_document(plan_head_dim(64, trials=3, **options)).verdict.no_action
    assert ("without training" in said) == ("recorded training runs" in said) == asked
    assert "Trained heads require 15 to 30" in said


def test_no_rank_is_stated_outside_the_widths_tried() -> None:
    plan = plan_head_dim(64, head_dims=[2, 4, 8, 16], heads=1, head_dim=3, width=3, trials=2)
    shares = {k: m for k, m, _ in plan.curve}
    assert plan.costs[0].rank_share == pytest.approx((shares[2] + shares[4]) / 2)
    wide = plan_head_dim(64, head_dims=[2, 4, 8, 16], heads=1, width=17, trials=2)
    assert math.isnan(wide.costs[0].rank_share)


def test_rotary_heads_have_even_widths() -> None:
    plan = plan_head_dim(32, positions="rope", heads=3, width=64, trials=2)
    assert plan.costs[0].head_dim == 20  # 64 // 3 = 21
    assert any("present K is taken as 20" in note for note in plan.notes)
    assert all(width % 2 == 0 for width, _, _ in plan.curve)


def test_a_plan_without_saturation_is_marked() -> None:
    plan = plan_head_dim(256, trials=2, head_dims=[1, 2, 4], heads=2, width=64)
    assert (plan.saturated, plan.head_dim, plan.interval) == (False, 4, (4, 4))
    assert [cost.head_dim for cost in plan.costs] == [32]
    assert plan_document(plan).verdict.sentence.startswith("Not saturated: if K = 2 is doubled")


class Head(torch.nn.Module):
    """One attention head with given projections."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor) -> None:
        super().__init__()
        self.query, self.key = torch.nn.Parameter(query), torch.nn.Parameter(key)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        q, k = ((states @ weight)[:, None] for weight in (self.query, self.key))
        return torch.nn.functional.scaled_dot_product_attention(q, k, states[:, None])


def test_a_trained_head_requires_as_much_width_as_its_logits_have() -> None:
    torch.manual_seed(0)
    down = torch.randn(16, 3)
    model = Head(down @ torch.randn(3, 8), torch.randn(16, 8) * 2)
    [head] = trained_widths(model, [torch.randn(2, 30, 16)], tolerance=1e-6)
    assert (head.required, head.width) == (3, 8)
    [loose] = trained_widths(model, [torch.randn(2, 30, 16)], tolerance=1e6)
    assert loose.required == 0


def test_trained_heads_require_the_width_of_an_audit() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        model.layers[0].self_attn.in_proj_weight *= 0.5
        model.layers[1].self_attn.in_proj_weight *= 2
    batches = [torch.randn(2, 40, 16), torch.randn(3, 24, 16)]
    audit = rw.audit(model, batches)
    found = trained_widths(model, batches)
    assert {one.head: one.required for one in found} == {
        head.id: head.required_head_dim for head in audit.heads
    }
    assert len({one.required for one in found}) > 1


@pytest.mark.parametrize("batches", [None, 3, "text", torch.randn(2, 5, 8), {"src": torch.randn(2, 5, 8)}])
def test_a_single_batch_is_refused(batches: object) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with (
        unchecked(),
        pytest.raises(rw.RankwiseError, match="`batches`: expected an iterable of at least one batch"),
    ):
        trained_widths(layer, batches)  # type: ignore[arg-type]


def test_a_batch_on_which_the_model_fails_is_named() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    batches = [torch.randn(2, 5, 8), torch.randn(2, 5, 9)]
    with pytest.raises(
        rw.RankwiseError, match=r"`batches`, batch 2: expected a batch that Transformer.* runs"
    ):
        trained_widths(layer, batches)


def test_save_load_and_page(tmp_path: Path) -> None:
    plan = plan_head_dim(64, heads=2, width=64, trials=2).model_copy(update={"notes": ["<script>"]})
    assert HeadDimPlan.load(plan.save(tmp_path)) == plan
    page = plan.to_html(tmp_path).read_text()
    assert f"saturates at K* = {plan.head_dim}" in page
    assert "random weights" in page
    assert "Recommended" not in page
    assert "&lt;script&gt;" in page
    (tmp_path / "plan.json").write_text('{"format": "other"}')
    with pytest.raises(rw.RankwiseError, match="saved plan"):
        HeadDimPlan.load(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        {"curve": []},
        {"schema_version": 3},
        {"schema_version": 1},
        {"schema_version": 1, "layers": "many"},
        {"schema_version": 1, "layers": [{"head_dim": 3}]},
        {"tokens": "many"},
    ],
)
def test_a_damaged_plan_is_refused(damage: dict[str, object], tmp_path: Path) -> None:
    saved = json.loads(plan_head_dim(8, trials=2, head_dims=[1, 2]).save(tmp_path).read_text())
    (tmp_path / "plan.json").write_text(json.dumps(saved | damage))
    with pytest.raises(rw.RankwiseError, match="schema version"):
        HeadDimPlan.load(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 1}, "from 2 to"),
        ({"tokens": 10**8}, "131072"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"tolerance": math.nan}, "tolerance"),
        ({"temperature": math.inf}, "temperature"),
        ({"delta": 0.0}, "delta"),
        ({"width": 0}, "width"),
        ({"width": 64}, "Add `heads`"),
        ({"heads": 4}, "Add `width`"),
        ({"mask": "casual"}, "Did you mean causal"),
        ({"positions": "learned"}, "rope"),
        ({"trials": 1}, "trials"),
        ({"seed": -1}, "seed"),
        ({"tokens": 5000, "temperature": 1.0}, "temperature 0"),
        ({"kv_heads": 2}, "kv_heads"),
        ({"heads": 3, "kv_heads": 2, "width": 12}, "divisor of 3 heads"),
        ({"heads": 128, "width": 64}, "128 heads at D = 64"),
        ({"heads": 2, "width": 64, "head_dim": 7, "positions": "rope"}, "head_dim=7"),
        ({"tokens": torch.randn(8, 4), "heads": 2, "width": 8}, "4, as the token states"),
        ({"head_dims": [8, 12]}, "double"),
        ({"head_dims": [3, 6], "positions": "rope"}, "even"),
        ({"tokens": torch.full((4, 4), math.nan)}, "NaN"),
        ({"tokens": torch.stack([torch.ones(4, 4), torch.zeros(4, 4)])}, "zeros"),
        ({"tokens": torch.arange(4)}, "token ids"),
        ({"tokens": torch.empty(0, 5, 4)}, "not empty, .* shape \\(0, 5, 4\\)"),
        ({"tokens": torch.empty(1, 0, 4)}, "not empty"),
        ({"tokens": torch.empty(2, 5, 0)}, "not empty"),
        ({"tokens": "64"}, "`tokens`: expected an int, .* got str"),
        ({"tokens": 2.5}, "got float"),
        ({"tokens": np.int64(64)}, "got int64"),
        ({"tokens": np.ones((8, 4))}, "got ndarray"),
        ({"tokens": True}, "got True"),
        ({"tokens": None}, "got NoneType"),
        ({"head_dims": 8}, "`head_dims`: expected a list of widths, got int"),
        ({"head_dims": "64"}, "got '6'"),
        ({"head_dims": []}, "double"),
        ({"head_dims": [4.0, 8.0]}, "got 4.0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with unchecked(), pytest.raises(rw.RankwiseError, match=message):
        plan_head_dim(**{"tokens": 32, **arguments})


@pytest.mark.parametrize("done", [1, 3])
def test_ctrl_c_keeps_two_trials_or_more(done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RandomHead.trial

    def stopping(self: RandomHead, widths: object, trial: int) -> np.ndarray:
        if trial == done:
            raise KeyboardInterrupt
        return whole(self, widths, trial)

    monkeypatch.setattr(RandomHead, "trial", stopping)
    if done < 2:
        with pytest.raises(KeyboardInterrupt):
            plan_head_dim(32, trials=10)
    else:
        plan = plan_head_dim(32, trials=10)
        assert (plan.complete, plan.trials) == (False, done)
