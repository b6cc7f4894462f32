"""Each finding appears where its condition holds, and not a step before."""

import math
from typing import Any

import pytest
from tests.auditing.bands import band

from rankwise.auditing import CODES, HeadRecord, LayerRecord, Unseen, check_codes
from rankwise.auditing.findings import find
from rankwise.errors import InputError


def head(**changes: Any) -> HeadRecord:
    """A head that nothing is to be said about."""
    usual: dict[str, Any] = {
        "stack": "h", "site": "h.0.attn", "layer": 0, "head": 0, "kind": "softmax", "mask": "full",
        "sequences": 2, "tokens": 32, "sources": 32, "numerical_rank": 20, "effective_rank": 12,
        "stable_rank": 3, "sigma_max": 1.4, "row_entropy": 2, "first_token_mass": 0.1, "max_token_mass": 0.2,
        "row_distance": 0.7, "identity_distance": 0.8, "hardmax_rank": 20.4, "nearest_head": 1,
        "nearest_distance": 0.7,
    }  # fmt: skip
    fields = usual | changes
    return HeadRecord(**({"band": band(fields)} | fields))


def layer(number: int, relative: float, **changes: Any) -> LayerRecord:
    usual: dict[str, Any] = {
        "stack": "h", "site": f"h.{number}", "layer": number, "sequences": 2, "tokens": 32, "width": 16,
        "norm": 10, "collapse": 10 * relative, "relative_spread": relative, "mean_cosine": 1 - relative**2,
        "effective_rank": 8,
    }  # fmt: skip
    return LayerRecord(**(usual | changes))


def codes(
    *heads: HeadRecord, layers: tuple[LayerRecord, ...] = (), uncaptured: tuple[Unseen, ...] = ()
) -> list[str]:
    return [finding.code for finding in find(heads, layers, uncaptured)]


def test_a_usual_head_gives_none() -> None:
    assert codes(head()) == []


@pytest.mark.parametrize(
    ("code", "just", "not_quite"),
    [
        ("SINK", {"max_token_mass": 0.91}, {"max_token_mass": 0.89}),
        ("CONSTANT", {"stable_rank": 1.05, "row_distance": 0.2}, {"stable_rank": 1.05, "row_distance": 0.4}),
        ("CONSTANT", {"stable_rank": 1.05, "row_distance": 0.2}, {"stable_rank": 1.2, "row_distance": 0.2}),
        ("IDENTITY", {"identity_distance": 0.09}, {"identity_distance": 0.11}),
        ("HIGH_RANK", {"numerical_rank": 26}, {"numerical_rank": 25}),
        ("LOW_RANK", {"numerical_rank": 10}, {"numerical_rank": 11}),
        ("OVERSIZED_HEADS", {"width": 10, "required_head_dim": 4}, {"width": 10, "required_head_dim": 5}),
        ("OVERSIZED_HEADS", {"width": 8, "required_head_dim": 1}, {"width": 8, "required_head_dim": 0}),
        (
            "OVERSIZED_HEADS",
            {"width": 15, "required_head_dim": 2},
            {"width": 16, "required_head_dim": 2},
        ),  # of 62 tokens
        ("NONFINITE", {"nonfinite": 1}, {"nonfinite": 0}),
    ],
)
def test_thresholds(code: str, just: dict[str, float], not_quite: dict[str, float]) -> None:
    assert codes(head(**just)) == [code]
    assert codes(head(**not_quite)) == []


@pytest.mark.parametrize("fewer", ["tokens", "sources"])
def test_width_needs_as_many_queries_as_keys(fewer: str) -> None:
    """Of 15 channels, 4 tokens each: 2 sequences of 31 are enough, each less its mean; 2 of 30 are not."""
    narrow = {"width": 15, "required_head_dim": 2}
    assert codes(head(**narrow, **{fewer: 31})) == ["OVERSIZED_HEADS"]
    assert codes(head(**narrow, **{fewer: 30})) == []


def test_a_sink_is_not_also_called_constant() -> None:
    assert codes(head(max_token_mass=0.95, stable_rank=1.01, row_distance=0.1)) == ["SINK"]


def test_twins_are_one_finding_and_need_both_heads() -> None:
    pair = head(nearest_distance=0.05), head(head=1, nearest_head=0, nearest_distance=0.05)
    [finding] = find(pair, (), ())
    assert finding.code == "DUPLICATE_HEADS"
    assert finding.evidence["nearest_head"] == 1


def test_two_sinks_are_not_twins() -> None:
    pair = (
        head(nearest_distance=0.05, max_token_mass=0.95),
        head(head=1, nearest_head=0, nearest_distance=0.05, max_token_mass=0.95),
    )
    assert codes(*pair) == ["SINK", "SINK"]


def test_short_sequences_say_nothing() -> None:
    odd = {"max_token_mass": 0.99, "identity_distance": 0.0, "stable_rank": 1.0, "row_distance": 0.0}
    assert codes(head(tokens=7, sources=7, numerical_rank=1, hardmax_rank=4.6, **odd)) == []


def test_heads_beyond_the_null_are_counted_by_layer() -> None:
    heads = [head(head=at, numerical_rank=2 + at) for at in range(4)]
    [finding] = find(heads, (), ())
    assert finding.code == "LOW_RANK"
    assert finding.evidence["heads"] == 4
    assert finding.where.head == 0  # the most extreme


def test_heads_that_are_over_wide_are_one_finding_a_layer_with_what_they_need() -> None:
    heads = [head(head=at, width=12, required_head_dim=needed) for at, needed in enumerate((12, 4, 3, 5))]
    [finding] = find(heads, (), ())
    assert (finding.code, finding.where.head, finding.heads) == ("OVERSIZED_HEADS", 2, [1, 2])
    assert finding.evidence == {"heads": 2, "of": 4, "width": 12, "required_head_dim": 3, "tolerance": 0.01}


@pytest.mark.parametrize(
    ("relative", "severity"),
    [((0.9, 0.8, 0.29), "warning"), ((0.9, 0.8, 0.09), "error"), ((0.9, 0.8, 0.5), None)],
)
def test_collapse(relative: tuple[float, ...], severity: str | None) -> None:
    found = find((), [layer(at, value) for at, value in enumerate(relative)], ())
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    if found:
        assert found[0].where.layer == 2


def test_states_that_start_alike_have_not_collapsed() -> None:
    assert codes(layers=(layer(0, 0.2), layer(1, 0.15))) == []


def test_collapse_is_told_stack_by_stack() -> None:
    stacks = [layer(at, value, stack=name) for name in "ab" for at, value in enumerate((0.9, 0.05))]
    assert [finding.where.stack for finding in find((), stacks, ())] == ["a", "b"]


def test_nonfinite_states() -> None:
    [finding] = find((), [layer(0, 0.9), layer(1, math.nan, nonfinite=2)], ())
    assert (finding.code, finding.severity, finding.where.layer) == ("NONFINITE", "error", 1)


@pytest.mark.parametrize(("site", "named"), [("h.0.attn", "h.0.attn"), ("", "the model itself")])
def test_nonfinite_attention_names_its_module(site: str, named: str) -> None:
    """A mixer that is itself the model has no name in it."""
    [finding] = find([head(site=site, nonfinite=2)], (), ())
    assert finding.code == "NONFINITE"
    assert finding.meaning.startswith(f"Attention of {named}: ")


def test_unseen_modules_are_counted_by_class() -> None:
    modules = [
        Unseen(name=f"h.{at}.mamba", type="Mamba", reason="called, but nothing was seen") for at in range(3)
    ]
    [finding] = find((), (), modules)
    assert finding.evidence == {"modules": 3}
    assert "h.0.mamba" in finding.remedy


def test_the_gravest_come_first() -> None:
    found = find(
        [
            head(identity_distance=0.0),
            head(head=1, max_token_mass=0.95, tokens=64, sources=64),
            head(head=2, nonfinite=1),
        ],
        (),
        (),
    )
    assert [finding.severity for finding in found] == ["error", "warning", "info"]


@pytest.mark.parametrize("trouble", [{"max_token_mass": 0.95}, {"stable_rank": 1.0, "row_distance": 0.1}])
def test_structure_of_few_tokens_is_a_note_that_says_so(trouble: dict[str, float]) -> None:
    (short,) = find([head(tokens=63, sources=200, **trouble)], (), ())
    (long,) = find([head(tokens=64, sources=64, **trouble)], (), ())
    assert (short.severity, long.severity) == ("info", "warning")
    assert short.meaning.endswith("Of 63 tokens; longer sequences may show another head.")
    assert "Of 6" not in long.meaning


def test_every_code_is_known() -> None:
    assert check_codes(["collapse", "high-rank"]) == ["COLLAPSE", "HIGH_RANK"]
    assert set(check_codes(CODES)) == set(CODES)
    with pytest.raises(InputError, match="Did you mean COLLAPSE"):
        check_codes(["COLAPSE"])


def test_a_trivial_head_and_a_usual_one_are_twins() -> None:
    for first, second in (({"max_token_mass": 0.95}, {}), ({}, {"max_token_mass": 0.95})):
        pair = (
            head(nearest_distance=0.05, **first),
            head(head=1, nearest_head=0, nearest_distance=0.05, **second),
        )
        assert sorted(codes(*pair)) == ["DUPLICATE_HEADS", "SINK"]


def test_a_twin_is_placed_at_the_lower_head() -> None:
    far = head(head=0, nearest_head=2, nearest_distance=0.5)
    pair = (
        head(head=1, nearest_head=0, nearest_distance=0.6),
        head(head=2, nearest_head=1, nearest_distance=0.05),
    )
    [finding] = find([far, *pair], (), ())
    assert (finding.where.head, finding.evidence["nearest_head"]) == (1, 2)


def test_short_states_have_not_collapsed() -> None:
    assert codes(layers=(layer(0, 0.9, tokens=7), layer(1, 0.01, tokens=7))) == []


def test_unknown_first_states_say_nothing() -> None:
    assert codes(layers=(layer(0, math.nan), layer(1, 0.2))) == []


NULLS = {"hardmax_rank": 20.0, "random_rank": 20.0, "uniform_rank": 20.0}


@pytest.mark.parametrize("null", NULLS)
def test_rank_that_one_null_has_too_is_no_finding(null: str) -> None:
    assert codes(head(numerical_rank=26, **NULLS)) == ["HIGH_RANK"]
    assert codes(head(numerical_rank=26, **NULLS | {null: 21.0})) == []
    assert codes(head(numerical_rank=26, **NULLS | {null: math.nan})) == ["HIGH_RANK"]
    assert codes(head(numerical_rank=9, **NULLS)) == ["LOW_RANK"]
    assert codes(head(numerical_rank=9, **NULLS | {null: 17.0})) == []
    assert codes(head(numerical_rank=9, **NULLS | {null: math.nan})) == ["LOW_RANK"]


@pytest.mark.parametrize("step", range(5))
def test_rank_beyond_the_null_at_all_thresholds_but_one_is_no_finding(step: int) -> None:
    above, below = ({"numerical_rank": rank, **NULLS} for rank in (26, 9))
    for name in NULLS:
        assert codes(head(**above, band=band(head(**above).model_dump(), **{name: {step: 21.0}}))) == []
        assert codes(head(**below, band=band(head(**below).model_dump(), **{name: {step: 17.0}}))) == []
    assert codes(head(**above, band=band(head(**above).model_dump(), rank_low={step: 25.0}))) == []
    assert codes(head(**below, band=band(head(**below).model_dump(), rank_high={step: 10.0}))) == []
    unknown = {name: {step: math.nan} for name in NULLS}
    assert codes(head(**above, band=band(head(**above).model_dump(), **unknown))) == []


def test_a_rank_beyond_the_null_names_its_band_and_the_nulls_it_knows() -> None:
    [finding] = find([head(numerical_rank=26, hardmax_rank=16.0, uniform_rank=1.0)], (), ())
    assert finding.evidence == {
        "heads": 1, "of": 1, "numerical_rank": 26, "hardmax_rank": 16, "uniform_rank": 1,
        "delta_low": pytest.approx(0.01 / math.sqrt(10)), "delta_high": pytest.approx(0.01 * math.sqrt(10)),
    }  # fmt: skip
    assert finding.meaning == (
        "1 of 1 heads have over 1.25 times the rank of each reference (of 32: random winners 16, "
        "equal weights 1), whatever δ from 0.0032 to 0.032."
    )


def test_the_head_farthest_beyond_the_nearest_null_is_named() -> None:
    near = {"numerical_rank": 31, "random_rank": 24.0}
    far = {"numerical_rank": 29, "random_rank": 10.0}
    [finding] = find([head(**near), head(head=1, **far), head(head=2, **near)], (), ())
    assert (finding.where.head, finding.evidence["heads"]) == (1, 3)


def test_a_record_without_a_band_is_not_judged() -> None:
    assert codes(head(numerical_rank=32, band=[])) == []
