"""Each finding appears where its condition holds, and not a step before."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.records import band, head, heads, layer, layers

from rankwise.auditing import RULES, HeadRecord, LayerRecord, Unseen, check_codes, findings
from rankwise.auditing.findings import diagnose
from rankwise.auditing.records import Finding
from rankwise.errors import InputError

Fields = dict[str, Any]

CASES: list[tuple[str, Fields, Fields]] = [
    ("SINK", {"max_token_mass": 0.91}, {"max_token_mass": 0.89}),
    ("CONSTANT", {"stable_rank": 1.05, "row_distance": 0.2}, {"stable_rank": 1.05, "row_distance": 0.4}),
    ("CONSTANT", {"stable_rank": 1.05, "row_distance": 0.2}, {"stable_rank": 1.2, "row_distance": 0.2}),
    ("IDENTITY", {"identity_distance": 0.09}, {"identity_distance": 0.11}),
    ("HIGH_RANK", {"numerical_rank": 26}, {"numerical_rank": 25}),
    ("LOW_RANK", {"numerical_rank": 10}, {"numerical_rank": 11}),
    ("OVERSIZED_HEADS", {"width": 10, "required_head_dim": 4}, {"width": 10, "required_head_dim": 5}),
    ("OVERSIZED_HEADS", {"width": 8, "required_head_dim": 1}, {"width": 8, "required_head_dim": 0}),
    # 2 sequences of 32 tokens less their means: 62 tokens, 4 per channel
    ("OVERSIZED_HEADS", {"width": 15, "required_head_dim": 2}, {"width": 16, "required_head_dim": 2}),
    ("NONFINITE", {"nonfinite": 1}, {"nonfinite": 0}),
]
"""A rule of heads, a head that just has its finding, and a head that does not."""
LAYER_CASES: list[tuple[str, list[LayerRecord], list[LayerRecord]]] = [
    ("COLLAPSE", layers(0.9, 0.8, 0.29), layers(0.9, 0.8, 0.31)),
    ("COLLAPSE", layers(0.4, 0.19), layers(0.4, 0.21)),
    ("COLLAPSE", layers(0.9, 0.05, tokens=8), layers(0.9, 0.05, tokens=7)),
    ("COLLAPSE", layers(0.9, 0.2), layers(math.nan, 0.2)),
    ("INACTIVE_BLOCK", [layer(1, 0.9, relative_update=0.009)], [layer(1, 0.9, relative_update=0.011)]),
    ("NONFINITE", [layer(1, math.nan, nonfinite=2)], [layer(1, math.nan)]),
]
"""The same for rules of token states."""


def codes(*heads: HeadRecord, layers: tuple[LayerRecord, ...] = ()) -> list[str]:
    return [finding.code for finding in diagnose(heads, layers, ())]


def only(*heads: HeadRecord) -> Finding:
    [finding] = diagnose(heads, (), ())
    return finding


@pytest.mark.parametrize(("code", "just", "not_quite"), CASES)
def test_thresholds_of_heads(code: str, just: Fields, not_quite: Fields) -> None:
    assert codes(head(**just)) == [code]
    assert codes(head(**not_quite)) == []


@pytest.mark.parametrize(("code", "just", "not_quite"), LAYER_CASES)
def test_thresholds_of_layers(code: str, just: list[LayerRecord], not_quite: list[LayerRecord]) -> None:
    [finding] = diagnose((), just, ())
    assert (finding.code, finding.where.layer) == (code, just[-1].layer)
    assert diagnose((), not_quite, ()) == []


def test_every_rule_has_a_case() -> None:
    """The rules that are about several records have tests of their own, below."""
    assert {code for code, *_ in (*CASES, *LAYER_CASES)} | {
        "DUPLICATE_HEADS", "NOT_CAPTURED", "REMOVABLE",
    } == set(RULES)  # fmt: skip


def test_the_walk_through_adds_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "RULES", {**RULES})
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    [example] = re.findall(r"```python\n(@rule\(.*?)```", page, re.DOTALL)
    exec(example, {**vars(findings)})
    assert codes(head(sigma_max=1001)) == ["STRETCH"]
    assert codes(head(sigma_max=999)) == []


def test_every_code_is_known() -> None:
    assert check_codes(["collapse", "high-rank"]) == ["COLLAPSE", "HIGH_RANK"]
    with pytest.raises(InputError, match="Did you mean COLLAPSE"):
        check_codes(["COLAPSE"])


def test_the_number_that_decides_is_in_the_evidence() -> None:
    found = [
        *(finding for _, just, _ in CASES for finding in diagnose([head(**just)], (), ())),
        *(finding for _, just, _ in LAYER_CASES for finding in diagnose((), just, ())),
        *diagnose(heads(*[{"nearest_distance": 0.05, "nearest_head": 1 - at} for at in range(2)]), (), ()),
        *diagnose((), (), [Unseen(name="mamba", type="Mamba", reason="called, but nothing was seen")]),
    ]
    about_states = [
        finding for finding in found if finding.code == "NONFINITE" and finding.where.head is None
    ]
    for finding in found:
        assert RULES[finding.code].decided_by in finding.evidence or finding in about_states


@pytest.mark.parametrize("fewer", ["tokens", "sources"])
def test_head_dimensions_need_as_many_queries_as_keys(fewer: str) -> None:
    narrow = {"width": 15, "required_head_dim": 2}
    assert codes(head(**narrow, **{fewer: 31})) == ["OVERSIZED_HEADS"]
    assert codes(head(**narrow, **{fewer: 30})) == []


def test_a_sink_is_not_also_called_constant() -> None:
    assert codes(head(max_token_mass=0.95, stable_rank=1.01, row_distance=0.1)) == ["SINK"]


def test_short_sequences_say_nothing() -> None:
    odd = {"max_token_mass": 0.99, "identity_distance": 0.0, "stable_rank": 1.0, "row_distance": 0.0}
    assert codes(head(tokens=7, sources=7, numerical_rank=1, hardmax_rank=4.6, **odd)) == []


@pytest.mark.parametrize("trouble", [{"max_token_mass": 0.95}, {"stable_rank": 1.0, "row_distance": 0.1}])
def test_structure_of_few_tokens_is_a_note_that_names_their_number(trouble: dict[str, float]) -> None:
    short, long = only(head(tokens=63, sources=200, **trouble)), only(head(tokens=64, sources=64, **trouble))
    assert (short.severity, long.severity) == ("info", "warning")
    assert short.meaning.endswith("Of 63 tokens; longer sequences may show another head.")
    assert "Of 6" not in long.meaning


@pytest.mark.parametrize(
    ("nearest", "groups"),
    [
        ({0: 1, 1: 0}, [[0, 1]]),
        ({0: 1, 1: 2, 2: 1}, [[0, 1, 2]]),
        ({0: 2, 1: 2, 2: 0}, [[0, 1, 2]]),
        ({0: 3, 1: 2, 2: 1, 3: 0}, [[0, 3], [1, 2]]),
        ({1: 0, 2: 1, 3: 2}, [[0, 1, 2, 3]]),
        ({2: 1}, [[1, 2]]),
    ],
)
def test_similar_heads_have_a_finding_per_group(nearest: dict[int, int], groups: list[list[int]]) -> None:
    """Joined through nearest heads, whichever of them is nearest to which."""
    near = [
        {"nearest_head": nearest[at], "nearest_distance": 0.02 * (at + 1)} if at in nearest else {}
        for at in range(4)
    ]
    found = diagnose(heads(*near), (), ())
    assert [finding.heads for finding in found] == groups
    for finding in found:
        assert (finding.code, finding.where.head) == ("DUPLICATE_HEADS", finding.heads[0])
        largest = max(0.02 * (at + 1) for at in finding.heads if at in nearest)
        assert finding.evidence == {"heads": len(finding.heads), "nearest_distance": largest}
    assert found[0].meaning.endswith("1 mix the same way.") == (groups == [[0, 1]])
    assert ("give both" in found[0].remedy) == (len(groups[0]) == 2)


@pytest.mark.parametrize(
    "changes",
    [{"nearest_distance": 0.11}, {"nearest_distance": math.nan}, {"tokens": 7}, {"kind": "selective"}],
)
def test_heads_that_are_not_near_or_not_judged_are_not_duplicates(changes: Fields) -> None:
    pair = [{"nearest_head": 1 - at, "nearest_distance": 0.05} for at in range(2)]
    assert codes(*heads(*pair)) == ["DUPLICATE_HEADS"]
    assert codes(*heads(*(one | changes for one in pair))) == []


def test_duplicates_need_a_head_without_a_finding_of_its_own() -> None:
    pair = [{"nearest_head": 1 - at, "nearest_distance": 0.05} for at in range(2)]
    sink = {"max_token_mass": 0.95}
    assert codes(*heads(pair[0] | sink, pair[1] | sink)) == ["SINK", "SINK"]
    for both in ((pair[0] | sink, pair[1]), (pair[0], pair[1] | sink)):
        assert sorted(codes(*heads(*both))) == ["DUPLICATE_HEADS", "SINK"]


def test_heads_beyond_the_references_are_counted_by_mixer() -> None:
    finding = only(*heads(*({"numerical_rank": 2 + at} for at in range(4))))
    assert (finding.code, finding.evidence["heads"]) == ("LOW_RANK", 4)
    assert finding.where.head == 0  # the most extreme


def test_oversized_heads_have_a_finding_per_mixer_with_the_least_required_width() -> None:
    finding = only(*heads(*({"width": 12, "required_head_dim": needed} for needed in (12, 4, 3, 5))))
    assert (finding.code, finding.where.head, finding.heads) == ("OVERSIZED_HEADS", 2, [1, 2])
    assert finding.evidence == {"heads": 2, "of": 4, "width": 12, "required_head_dim": 3, "tolerance": 0.01}


def test_a_collapse_is_an_error_if_nearly_nothing_is_left_and_is_found_per_stack() -> None:
    for lowest, severity in ((0.29, "warning"), (0.09, "error")):
        [finding] = diagnose((), layers(0.9, 0.8, lowest), ())
        assert (finding.severity, finding.where.layer) == (severity, 2)
    stacks = [layer(at, value, stack=name) for at, value in enumerate((0.9, 0.05)) for name in "ab"]
    assert [finding.where.stack for finding in diagnose((), stacks, ())] == ["a", "b"]


@pytest.mark.parametrize(("site", "named"), [("h.0.attn", "h.0.attn"), ("", "the model itself")])
def test_nonfinite_attention_names_its_module(site: str, named: str) -> None:
    """A mixer that is itself the model has no name in it."""
    assert only(head(site=site, nonfinite=2)).meaning.startswith(f"Attention of {named}: ")


def test_modules_that_were_not_captured_are_counted_by_class() -> None:
    modules = [
        Unseen(name=f"h.{at}.mamba", type="Mamba", reason="called, but nothing was seen") for at in range(3)
    ]
    [finding] = diagnose((), (), modules)
    assert finding.evidence == {"modules": 3}
    assert finding.remedy == "rw.audit(model, batches, sites={'h.0.mamba': adapter})"


def test_the_most_severe_come_first_then_heads_in_order() -> None:
    found = diagnose(
        heads(
            {"identity_distance": 0.0},
            {"max_token_mass": 0.95, "tokens": 64, "sources": 64},
            {"nonfinite": 1},
            {"max_token_mass": 0.95},
        ),
        (),
        (),
    )
    assert [finding.severity for finding in found] == ["error", "warning", "info", "info"]
    assert [finding.code for finding in found[2:]] == ["IDENTITY", "SINK"]


NULLS = {"hardmax_rank": 20.0, "random_rank": 20.0, "uniform_rank": 20.0}


@pytest.mark.parametrize("null", NULLS)
def test_rank_that_one_reference_has_too_is_not_a_finding(null: str) -> None:
    assert codes(head(numerical_rank=26, **NULLS)) == ["HIGH_RANK"]
    assert codes(head(numerical_rank=26, **NULLS | {null: 21.0})) == []
    assert codes(head(numerical_rank=26, **NULLS | {null: math.nan})) == ["HIGH_RANK"]
    assert codes(head(numerical_rank=9, **NULLS)) == ["LOW_RANK"]
    assert codes(head(numerical_rank=9, **NULLS | {null: 17.0})) == []
    assert codes(head(numerical_rank=9, **NULLS | {null: math.nan})) == ["LOW_RANK"]


@pytest.mark.parametrize("step", range(5))
def test_rank_beyond_the_references_must_be_so_at_every_threshold(step: int) -> None:
    above, below = ({"numerical_rank": rank, **NULLS} for rank in (26, 9))
    for name in NULLS:
        assert codes(head(**above, band=band(head(**above).model_dump(), **{name: {step: 21.0}}))) == []
        assert codes(head(**below, band=band(head(**below).model_dump(), **{name: {step: 17.0}}))) == []
    assert codes(head(**above, band=band(head(**above).model_dump(), rank_low={step: 25.0}))) == []
    assert codes(head(**below, band=band(head(**below).model_dump(), rank_high={step: 10.0}))) == []
    unknown = {name: {step: math.nan} for name in NULLS}
    assert codes(head(**above, band=band(head(**above).model_dump(), **unknown))) == []


def test_a_rank_beyond_the_references_names_its_band_and_the_references() -> None:
    finding = only(head(numerical_rank=26, hardmax_rank=16.0, uniform_rank=1.0))
    assert finding.evidence == {
        "heads": 1, "of": 1, "numerical_rank": 26, "hardmax_rank": 16, "uniform_rank": 1,
        "delta_low": pytest.approx(0.01 / math.sqrt(10)), "delta_high": pytest.approx(0.01 * math.sqrt(10)),
    }  # fmt: skip
    assert finding.meaning == (
        "1 of 1 heads have over 1.25 times the rank of each reference (of 32: random winners 16, "
        "equal weights 1), whatever δ from 0.0032 to 0.032."
    )


def test_the_head_farthest_beyond_the_nearest_reference_is_named() -> None:
    near, far = {"numerical_rank": 31, "random_rank": 24.0}, {"numerical_rank": 29, "random_rank": 10.0}
    finding = only(*heads(near, far, near))
    assert (finding.where.head, finding.evidence["heads"]) == (1, 3)


def test_a_record_without_a_band_is_not_judged() -> None:
    assert codes(head(numerical_rank=32, band=[])) == []
