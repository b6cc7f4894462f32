"""Every model family, fused and written out: all mixers and states are exact, and no output changes."""

import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from experiments.coverage.families import STUDY, difference, prepared, tensors
from experiments.coverage.families import check as check_anew
from experiments.zoo.state_space import STATE_SPACE
from experiments.zoo.transformers import FAMILIES

EPS32 = torch.finfo(torch.float32).eps
CASES = [(family, implementation) for family in FAMILIES for implementation in family.implementations]
every_case = pytest.mark.parametrize(
    ("family", "implementation"), CASES, ids=[f"{family.name}-{how}" for family, how in CASES]
)
both_ways = pytest.mark.parametrize("how", ["sdpa", "eager"])
check = lru_cache(maxsize=None)(check_anew)
by_name = {family.name: family for family in FAMILIES}


@every_case
def test_a_family_is_captured_completely_and_exactly(family, implementation):
    """Layers and states are numbered by their blocks."""
    row = check(family, implementation)
    assert len(row.trace.mixers) == family.mixers
    assert len(row.trace.states) == family.states
    assert row.trace.uncaptured == row.trace.notes == []
    assert row.identical
    # Sums of at most 64 float64 products of size ≤ 100: 64 · 100 · 2⁻⁵² = 1.4e-12.
    assert row.product_error < 2e-12
    if not math.isnan(row.attention_error):
        # Scores of size ≤ 100 rounded to float32 move a softmax by at most twice their rounding.
        assert row.attention_error < 2 * 100 * EPS32
    if not math.isnan(row.state_error):
        # The eager twin's float32 softmax, through three blocks of gain ≤ 10 each.
        assert row.state_error < 2 * 100 * EPS32 * 10
    for stack in {state.stack for state in row.trace.states}:
        states = [state for state in row.trace.states if state.stack == stack]
        assert [state.layer for state in states] == list(range(len(states)))
        layers = [site.layer for site in row.trace.mixers if site.stack == stack]
        assert sorted(set(layers)) == list(range(len(states) - 1))
        assert layers == sorted(layers)
    assert {site.stack for site in row.trace.mixers} == {state.stack for state in row.trace.states}
    assert all(site.name for site in row.trace.mixers)
    assert {(site.kind, site.forward_pass) for site in row.trace.mixers} == {("softmax", 0)}


def test_the_check_fails_for_an_error():
    assert check(replace(by_name["GPT-2"], final_norm=""), "sdpa").state_error > 1
    assert not check(replace(by_name["BERT"], mixers=4), "sdpa").complete
    assert difference(torch.zeros(2), torch.ones(2)) == 1
    assert difference(torch.zeros(2), torch.zeros(3)) == math.inf


def test_eager_twins_have_the_same_weights():
    for family in FAMILIES:
        if len(family.implementations) == 2:
            one, other = (prepared(family, how)[0].state_dict() for how in family.implementations)
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one), family.name


@pytest.mark.parametrize("name", ["T5", "torch Transformer"])
def test_encoder_decoder_and_cross_attention_are_distinguished(name):
    family = by_name[name]
    mixers = check(family, family.implementations[0]).trace.mixers
    encoder = [site for site in mixers if "encoder" in site.stack]
    decoder = [site for site in mixers if "decoder" in site.stack]
    assert not any(site.cross for site in encoder)
    assert [site.cross for site in decoder] == [False, True] * (len(decoder) // 2)
    assert {tuple(site.operator.shape[-2:]) for site in decoder if site.cross} == {(7, 12)}


@both_ways
def test_windows_of_swin_know_their_sequences(how):
    mixers = check(by_name["Swin"], how).trace.mixers
    assert [site.operator.shape[0] for site in mixers] == [32, 32, 8, 8]
    assert {site.sequences for site in mixers} == {2}


DISTANCE = torch.arange(12)[:, None] - torch.arange(12)
SUPPORTS = {
    "BERT": [DISTANCE < 12] * 3,
    "Llama": [DISTANCE >= 0] * 3,
    "Mistral": [(DISTANCE >= 0) & (DISTANCE < 5)] * 3,
    "ModernBERT": [DISTANCE < 12, DISTANCE.abs() <= 3],
}


@pytest.mark.parametrize("name", SUPPORTS)
@both_ways
def test_support_is_the_mask_of_the_family(name, how):
    mixers = check(by_name[name], how).trace.mixers
    assert len(mixers) == 3
    for site, mask in zip(mixers, SUPPORTS[name], strict=False):
        assert torch.equal(site.operator.support(), mask.expand(site.operator.shape))


def test_experts_are_not_mixers():
    trace = check(by_name["Mixtral"], "eager").trace
    assert {site.name.rpartition(".")[2] for site in trace.mixers} == {"self_attn"}


# --- the page -----------------------------------------------------------------------------------------------


def test_the_kept_rows_show_every_family_as_claimed():
    kept = STUDY.kept()
    assert [row[0] for row in kept["attention"]] == [family.name for family, _ in CASES]
    assert [row[0] for row in kept["state_space"]] == list(STATE_SPACE)
    for row in [*kept["attention"], *kept["state_space"]]:
        counts = [cell.split(" of ") for cell in row if " of " in cell]
        assert all(found == wanted for found, wanted in counts)
        assert "yes" in row
    assert check(by_name["GPT-2"], "eager").cells in kept["attention"]


def test_tensors_of_nested_outputs_are_compared():
    x = torch.zeros(1)
    assert len(tensors({"a": x, "b": (x, [x, None]), "c": "text"})) == 3
