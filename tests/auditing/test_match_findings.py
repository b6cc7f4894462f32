"""`compare` reports each finding as new, worse, better, changed, unchanged or resolved."""

from itertools import pairwise
from typing import Any

import pytest
from tests.auditing.test_findings import CASES
from tests.support.records import audit, head, heads, layers

from rankwise.auditing import RULES, Unseen, compare
from rankwise.auditing.findings import diagnose
from rankwise.auditing.result import Audit
from rankwise.importance.records import HeadId, ImportanceRecord, RemovableSet
from rankwise.report.comparison_report import finding_lists

LOW, SINK = {"numerical_rank": 3}, {"max_token_mass": 0.95}


def resolved_and_new(before: Audit, after: Audit) -> tuple[list[str], list[str]]:
    """``resolved`` and ``new`` of a comparison, as code and place; the reverse mirrors them."""
    there, back = compare(before, after), compare(after, before)
    assert (there.resolved, there.new) == (back.new, back.resolved)
    return tuple([f"{one.code} {one.where}" for one in found] for found in (there.resolved, there.new))


def outcomes(before: Audit, after: Audit) -> list[str]:
    """Outcomes of a comparison; the reverse has the opposite outcomes."""
    opposite = {"new": "resolved", "resolved": "new", "worse": "better", "better": "worse"} | {
        same: same for same in ("changed", "unchanged")
    }
    there, back = compare(before, after).findings, compare(after, before).findings
    found = [one.outcome for one in there]
    assert sorted(opposite[one.outcome] for one in back) == sorted(found)
    return found


@pytest.mark.parametrize(("code", "just", "not_quite"), CASES)
def test_a_finding_is_unchanged_against_itself_and_resolved_without_its_condition(
    code: str, just: dict[str, Any], not_quite: dict[str, Any]
) -> None:
    before, after = audit([head(**just)]), audit([head(**not_quite)])
    assert compare(before, before).is_empty
    assert resolved_and_new(before, after) == ([f"{code} h layer 0 head 0"], [])


@pytest.mark.parametrize(
    ("code", "one", "other"),
    [
        ("LOW_RANK", LOW, {"numerical_rank": 3.5}),
        ("HIGH_RANK", {"numerical_rank": 30}, {"numerical_rank": 30.5}),
        ("NONFINITE", {"nonfinite": 1}, {}),
    ],
)
def test_a_finding_of_a_mixer_is_the_same_whichever_head_it_is_placed_at(
    code: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    before, after = audit(heads(one, other)), audit(heads(other, one))
    assert [finding.code for finding in before.findings] == [code]
    assert before.findings[0].where != after.findings[0].where
    assert resolved_and_new(before, after) == ([], [])


@pytest.mark.parametrize("change", [SINK, {"identity_distance": 0.01}])
def test_a_finding_of_a_head_belongs_to_that_head(change: dict[str, float]) -> None:
    gone, new = resolved_and_new(audit(heads(change, {})), audit(heads({}, change)))
    assert [one.split(" ", 1)[1] for one in (*gone, *new)] == ["h layer 0 head 0", "h layer 0 head 1"]


def test_self_and_cross_attention_of_a_layer_are_distinguished() -> None:
    own, other = heads(LOW, site="h.0.self"), heads(LOW, site="h.0.cross", cross=True)
    usual_own, usual_other = heads({}, site="h.0.self"), heads({}, site="h.0.cross", cross=True)
    gone, new = resolved_and_new(audit(own, usual_other), audit(usual_own, other))
    assert (gone, new) == (["LOW_RANK h layer 0 head 0"],) * 2
    assert resolved_and_new(audit(own, other), audit(own, other)) == ([], [])
    assert len(resolved_and_new(audit(own, other), audit(own, usual_other))[0]) == 1


def test_a_layer_that_moves_from_below_to_above_is_resolved_and_new() -> None:
    gone, new = resolved_and_new(audit(heads(LOW)), audit(heads({"numerical_rank": 30})))
    assert (gone, new) == (["LOW_RANK h layer 0 head 0"], ["HIGH_RANK h layer 0 head 0"])


def test_a_module_that_runs_twice_loses_one_of_two_findings() -> None:
    sink, usual = heads(SINK), heads({})
    assert resolved_and_new(audit(sink, sink), audit(sink, usual)) == (["SINK h layer 0 head 0"], [])


def alike(*nearest: int, **changes: Any) -> Audit:
    """An audit of heads with a near head each, by its number; −1 for none."""
    near = [{"nearest_head": other, "nearest_distance": 0.05} if other >= 0 else {} for other in nearest]
    return audit(heads(*near, **changes))


DUPLICATES = "DUPLICATE_HEADS h layer 0 head 0"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (alike(1, 2, 1), alike(2, 2, 0), ["unchanged"]),  # three heads, whichever is nearest to which
        (alike(1, 0, -1), alike(1, 0, 1), ["worse"]),  # a third head joins
        (alike(1, 2, 1), alike(-1, 2, 1), ["better"]),
        (alike(1, 0, -1), alike(2, -1, 0), ["new", "resolved"]),  # another partner
        (alike(1, 0), alike(1, 0, layer=1, site="h.1.attn"), ["new", "resolved"]),
        (alike(1, 0, 3, 2), alike(-1, -1, 3, 2), ["unchanged", "resolved"]),
    ],
)
def test_groups_of_heads_are_the_same_if_they_share_two(
    before: Audit, after: Audit, expected: list[str]
) -> None:
    assert outcomes(before, after) == expected


def test_a_collapse_that_starts_earlier_or_goes_deeper_is_worse() -> None:
    late, early = audit(layers=layers(0.9, 0.8, 0.2)), audit(layers=layers(0.9, 0.2, 0.2))
    assert outcomes(late, early) == ["worse"]
    assert outcomes(late, audit(layers=layers(0.9, 0.8, 0.05))) == ["worse"]  # an error, no longer a warning
    assert outcomes(late, audit(layers=layers(0.9, 0.8, 0.19))) == ["worse"]
    assert outcomes(late, audit(layers=layers(0.9, 0.8, 0.21))) == ["better"]
    assert outcomes(late, late) == ["unchanged"]


@pytest.mark.parametrize(("sequences", "expected"), [(2, "unchanged"), (400, "worse")])
def test_a_number_that_moves_within_its_error_is_unchanged(sequences: int, expected: str) -> None:
    """0.92 → 0.95 with a standard deviation of 0.1: two errors of the difference are 0.2, then 0.014."""
    before, after = (
        audit(heads({"max_token_mass": mass, "sequences": sequences, "std": {"max_token_mass": 0.1}}))
        for mass in (0.92, 0.95)
    )
    assert outcomes(before, after) == [expected]


@pytest.mark.parametrize(("sequences", "expected"), [(2, "unchanged"), (400, "worse")])
def test_the_lowest_states_say_how_far_a_collapse_may_move(sequences: int, expected: str) -> None:
    before, after = (
        audit(layers=layers(0.9, 0.25, lowest, sequences=sequences, std={"relative_spread": 0.1}))
        for lowest in (0.19, 0.16)
    )
    assert outcomes(before, after) == [expected]


@pytest.mark.parametrize(
    ("code", "mild", "strong"),
    [
        ("SINK", {"max_token_mass": 0.91}, {"max_token_mass": 0.99}),
        ("IDENTITY", {"identity_distance": 0.09}, {"identity_distance": 0.01}),
        ("CONSTANT", {"stable_rank": 1, "row_distance": 0.2}, {"stable_rank": 1, "row_distance": 0.1}),
    ],
)
def test_farther_beyond_the_threshold_is_worse(
    code: str, mild: dict[str, float], strong: dict[str, float]
) -> None:
    before, after = audit(heads(mild)), audit(heads(strong))
    assert [one.code for one in (*before.findings, *after.findings)] == [code] * 2
    assert outcomes(before, after) == ["worse"]


def test_more_heads_of_a_layer_beyond_their_references_are_worse() -> None:
    assert outcomes(audit(heads(LOW, {})), audit(heads(LOW, LOW))) == ["worse"]
    assert outcomes(audit(heads({}, LOW)), audit(heads(LOW, {}))) == ["unchanged"]


def test_outcomes_are_sorted_from_new_to_resolved() -> None:
    sinks = [{"max_token_mass": mass} for mass in (0.92, 0.95, 0.93, 0.94)]
    before, after = audit(heads(*sinks, {})), audit(heads(*sinks[1::-1], sinks[2], {}, sinks[3]))
    assert outcomes(before, after) == ["new", "worse", "better", "unchanged", "resolved"]


def test_an_audit_against_itself_is_unchanged_throughout_and_in_any_order() -> None:
    near = [{"nearest_head": (at + 1) % 3, "nearest_distance": 0.05} for at in range(3)]
    one = audit(
        heads(*near, *({"max_token_mass": 0.95 - at / 100} for at in range(3)), LOW),
        layers=layers(0.9, 0.2, 0.05),
        uncaptured=[Unseen(name="h.0.mixer", type="Mixer", reason="called, but nothing was seen")],
    )
    assert {finding.code for finding in one.findings} >= {
        "COLLAPSE", "DUPLICATE_HEADS", "SINK", "LOW_RANK", "NOT_CAPTURED",
    }  # fmt: skip
    assert outcomes(one, one) == ["unchanged"] * len(one.findings)
    assert compare(one, one).is_empty
    for first, second in pairwise([one, one.model_copy(update={"findings": one.findings[::-1]}), one]):
        assert resolved_and_new(first, second) == ([], [])


def test_a_code_that_no_rule_has_is_matched_by_its_place() -> None:
    one = audit(heads(SINK, SINK))
    other = one.model_copy(
        update={"findings": [found.model_copy(update={"code": "FROM_LATER"}) for found in one.findings]}
    )
    assert "FROM_LATER" not in RULES
    assert outcomes(other, other) == ["unchanged"] * 2
    assert outcomes(one, other) == ["new"] * 2 + ["resolved"] * 2


def test_modules_of_a_class_that_were_not_captured_share_a_finding() -> None:
    def missed(*layers: int, reason: str = "called, but nothing was seen") -> Audit:
        return audit(uncaptured=[Unseen(name=f"h.{at}.mixer", type="Mixer", reason=reason) for at in layers])

    assert resolved_and_new(missed(0, 1, 2), missed(1, 2)) == ([], [])
    gone, new = resolved_and_new(missed(0), missed(0, reason="written in C++"))
    assert (gone, new) == (["NOT_CAPTURED h.0.mixer"],) * 2
    assert resolved_and_new(missed(0), missed()) == (["NOT_CAPTURED h.0.mixer"], [])


def removable(*places: tuple[int, int]) -> Audit:
    """An audit whose heads at these layers and numbers can be removed together, the cheapest first."""
    gone = [HeadId(stack="h", layer=layer, site=f"h.{layer}.attn", head=head) for layer, head in places]
    joint = RemovableSet(
        heads=gone, tolerance=0.01, loss=2.01, cost=0.01, relative=0.005, sorted_by="estimate", runs=3
    )
    importance = ImportanceRecord(
        loss="next tokens", unit="nats per token", value=2, sequences=2, counted=64, ablation="zero",
        probes=8, seed=0, removable=joint,
    )  # fmt: skip
    one = audit(heads({}))
    found = diagnose(one.heads, [], [], importance)
    return one.model_copy(update={"importance": importance, "findings": found})


def test_heads_that_can_be_removed_share_a_finding_whichever_is_the_cheapest() -> None:
    before, after = removable((0, 1)), removable((3, 2))
    assert before.findings[0].where != after.findings[0].where
    assert outcomes(before, after) == ["unchanged"]
    assert outcomes(removable((0, 1), (3, 2)), removable((3, 2), (0, 1))) == ["unchanged"]
    assert resolved_and_new(removable((0, 1)), audit(heads({})))[0] == ["REMOVABLE h layer 0 head 1"]


def test_more_heads_that_can_be_removed_are_neither_worse_nor_better() -> None:
    comparison = compare(removable((0, 1)), removable((3, 2), (0, 1)))
    [change] = comparison.findings
    assert (change.outcome, change.numbers) == ("changed", ("heads", 1, 2))
    [[item]] = [listed.items for listed in finding_lists(comparison)]
    assert (item.code, item.place, item.facts) == ("REMOVABLE", "", ["heads 1 → 2"])
    assert not comparison.is_empty
