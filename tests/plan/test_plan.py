"""The rule for K*, its interval, costs, records and refusals of plans."""

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
from rankwise.plan import HeadDimPlan, plan_head_dim
from rankwise.plan.planner import gains, saturation, saturation_index
from rankwise.plan.ranks import RandomHead

WIDTHS = tuple(range(1, 33))


def test_k_star_of_a_curve_with_a_known_gain() -> None:
    """r = 1 − 1/K gains 1/(2K²) per unit from K to 2K: below 0.01 from K = 8 on (1/128; at 7: 1/98)."""
    curve = 1 - 1 / np.array(WIDTHS)
    assert gains(WIDTHS, curve) == pytest.approx([1 / (2 * k**2) for k in range(1, 17)])
    assert WIDTHS[saturation_index(WIDTHS, curve, 0.01)] == 8
    assert saturation_index(WIDTHS, curve, 0.5) == 1  # 1/2 at K = 1, 1/8 at K = 2


def test_a_gain_is_never_interpolated() -> None:
    with pytest.raises(KeyError):
        gains((4, 64), np.array([0.1, 0.5]))


def test_a_flat_start_does_not_saturate_and_neither_does_a_steep_end() -> None:
    late = np.clip((np.array(WIDTHS) - 10) * 0.05, 0, 0.2)
    assert saturation_index(WIDTHS, late, 0.01) > 8
    assert saturation_index(WIDTHS, np.array(WIDTHS) * 0.02, 0.01) == -1


def test_k_star_is_in_its_interval() -> None:
    noise = np.random.default_rng(0).normal(0, 0.002, (10, 32))
    place, (low, high) = saturation(WIDTHS, 1 - 1 / np.array(WIDTHS) + noise, 0.01, seed=0)
    assert low <= WIDTHS[place] <= high


def test_resamples_that_do_not_saturate_count_as_the_widest_width() -> None:
    """One trial saturates at 1, the other never: resamples of the other reach the widest width."""
    trials = np.stack([np.full(32, 0.5), np.array(WIDTHS) * 0.02])
    assert saturation(WIDTHS, trials, 0.015, seed=0) == (0, (1, 32))


def test_the_barrier_holds() -> None:
    plan = rw.plan_head_dim(256, trials=10)
    assert plan.one_hot_rank == rw.theory.rank_barrier(256)
    # 5 standard errors of the mean: the barrier bounds the expectation
    assert all(m <= plan.one_hot_rank / 256 + 5 * s / 10**0.5 for _, m, s in plan.curve)
    assert abs({k: m for k, m, _ in plan.curve}[16] - 0.43) < 0.04  # .45 at T = 200, .33 at 800


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


def test_savings_equal_the_savings_of_a_model_with_key_heads() -> None:
    plan = plan_head_dim(64, "causal", "rope", heads=4, kv_heads=2, head_dim=24, hidden_size=96, trials=2)
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


def test_parameters_equal_the_parameters_of_encoders() -> None:
    sizes = {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8}
    plan = plan_head_dim(64, heads=4, hidden_size=96, trials=2)
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
        ({"heads": 4, "hidden_size": 128}, "Rank at random weights saturates at K* = {star} (95 %"),
        ({"heads": 4, "hidden_size": 128}, "Reducing queries and keys from width 32 to {star} (values unch"),
        ({"heads": 4, "hidden_size": 128}, "saves {parameters:,} parameters per layer and"),
        ({"heads": 4, "hidden_size": 128}, "Rank/T is {rank:.2f} at K*, {now:.2f} at 32."),
        ({"heads": 4, "hidden_size": 128, "kv_heads": 2}, "and {cache:,} bytes of cached keys per token."),
        ({"heads": 64, "hidden_size": 128}, "Queries and keys are 2 wide, so there is nothing to save."),
        ({"heads": 1, "hidden_size": 300}, "Rank/T is {rank:.2f} at K*, – at 300."),  # 300 was not tried
        ({}, "Rank/T is {rank:.2f} at K*."),
        ({"tokens": 256, "least_gain": 1e-9, "heads": 4, "hidden_size": 128}, "so no width follows."),
    ],
)
def test_the_first_sentence_says_what_k_star_saves(options: dict[str, Any], said: str) -> None:
    plan = plan_head_dim(**{"tokens": 64, "trials": 3, **options})
    present, star = (plan.costs * 2)[:2] if plan.costs else (None, None)
    numbers = {"star": plan.head_dim, "rank": {k: mean for k, mean, _ in plan.curve}[plan.head_dim]}
    if present and star:
        numbers |= {"now": present.rank_share, "parameters": present.parameters - star.parameters}
        numbers |= {"cache": present.cache_bytes - star.cache_bytes}
    assert said.format(**numbers) in plan_document(plan).verdict.sentence


@pytest.mark.parametrize(
    "options",
    [
        {"tokens": 64, "heads": 4, "hidden_size": 128},
        {"tokens": 400, "mask": "causal"},
        {"tokens": 512, "mask": "causal", "least_gain": 0.02},
        {"tokens": 64, "positions": "rope"},
        {"tokens": 256, "least_gain": 1e-9},
    ],
)
def test_the_first_sentence_on_doubled_widths_holds_for_the_curve(options: dict[str, Any]) -> None:
    plan = plan_head_dim(**{"trials": 4, **options})
    shares = {k: mean for k, mean, _ in plan.curve}
    gains = {k: (shares[2 * k] - shares[k]) / k for k in shares if 2 * k in shares}
    said = plan_document(plan).verdict.sentence
    if plan.saturated:
        assert all(gain < plan.least_gain for k, gain in gains.items() if k >= plan.head_dim)
        assert gains[max(k for k in gains if k < plan.head_dim)] >= plan.least_gain
        words = "if a width of K* or more is doubled, rank/T grows by less than"
    else:
        assert gains[max(gains)] >= plan.least_gain
        words = f"if K = {max(gains)} is doubled, rank/T at random weights still grows by"
    assert f"{words} {plan.least_gain:g} " in said


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, True),
        ({"heads": 4, "hidden_size": 128}, True),
        ({"heads": 64, "hidden_size": 64}, False),
        ({"tokens": 256, "least_gain": 1e-9, "heads": 4, "hidden_size": 128}, False),
    ],
)
def test_training_at_k_star_is_advised_only_if_it_can_save(options: dict[str, Any], asked: bool) -> None:
    said = plan_document(plan_head_dim(**{"tokens": 64, "trials": 3, **options})).verdict.no_action
    assert ("lower limit and a second candidate" in said) == asked
    assert "Trained heads require 15 to 30" in said


def test_a_rank_between_widths_is_interpolated() -> None:
    plan = plan_head_dim(32, positions="rope", heads=3, hidden_size=30, trials=2)
    shares = {k: mean for k, mean, _ in plan.curve}
    assert (plan.costs[0].head_dim, 10 in shares) == (10, False)
    assert plan.costs[0].rank_share == pytest.approx((shares[8] + shares[12]) / 2)
    assert all(width % 2 == 0 for width in shares)


def test_a_plan_without_saturation_is_marked() -> None:
    plan = plan_head_dim(256, trials=2, least_gain=1e-9, heads=2, hidden_size=64)
    assert (plan.saturated, plan.head_dim, plan.interval) == (False, 256, (256, 256))
    assert [cost.head_dim for cost in plan.costs] == [32]
    assert plan_document(plan).verdict.sentence.startswith("Not saturated: if K = 128 is doubled")


def test_save_load_and_page(tmp_path: Path) -> None:
    plan = plan_head_dim(64, heads=2, hidden_size=64, trials=2).model_copy(update={"notes": ["<script>"]})
    assert HeadDimPlan.load(plan.save(tmp_path)) == plan
    page = plan.to_html(tmp_path).read_text()
    assert f"saturates at K* = {plan.head_dim}" in page
    assert "random weights" in page
    assert "Recommended" not in page
    assert "&lt;script&gt;" in page
    (tmp_path / "plan.json").write_text('{"format": "other"}')
    with pytest.raises(rw.RankwiseError, match="saved plan"):
        HeadDimPlan.load(tmp_path)


@pytest.mark.parametrize("damage", [{"curve": []}, {"schema_version": 4}, {"tokens": "many"}])
def test_a_damaged_plan_is_refused(damage: dict[str, object], tmp_path: Path) -> None:
    saved = json.loads(plan_head_dim(8, trials=2).save(tmp_path).read_text())
    (tmp_path / "plan.json").write_text(json.dumps(saved | damage))
    with pytest.raises(rw.RankwiseError, match=r"schema version 5.*run `rankwise plan` again"):
        HeadDimPlan.load(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 1}, "from 2 to"),
        ({"tokens": 10**8}, "131072"),
        ({"tokens": "64"}, "`tokens`"),
        ({"tokens": 2.5}, "got 2.5"),
        ({"least_gain": 0.0}, "least_gain"),
        ({"least_gain": 1.0}, "least_gain"),
        ({"least_gain": math.nan}, "least_gain"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 64}, "Add `heads`"),
        ({"heads": 4}, "Add `hidden_size`"),
        ({"kv_heads": 2}, "kv_heads"),
        ({"mask": "casual"}, "Did you mean causal"),
        ({"positions": "learned"}, "rope"),
        ({"trials": 1}, "trials"),
        ({"seed": -1}, "seed"),
        ({"heads": 3, "kv_heads": 2, "hidden_size": 12}, "divisor of 3 heads"),
        ({"heads": 128, "hidden_size": 64}, "divisor of the hidden size 64"),
        ({"heads": 2, "hidden_size": 64, "head_dim": 7, "positions": "rope"}, "even .* got 7"),
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
