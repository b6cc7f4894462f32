"""`compare` says of each finding whether it is unchanged, better, worse, gone or new."""

from itertools import pairwise
from typing import Any

import pytest
from tests.auditing.bands import band

from rankwise.auditing import HeadRecord, LayerRecord, Provenance, Unseen, compare
from rankwise.auditing.findings import find
from rankwise.auditing.importance_records import ImportanceRecord, Removable, RemovableHead
from rankwise.auditing.records import AuditRecord
from rankwise.report.comparison import finding_words

USUAL: dict[str, Any] = {
    "stack": "h", "site": "h.0.attn", "layer": 0, "head": 0, "kind": "softmax", "mask": "full",
    "sequences": 2, "tokens": 32, "sources": 32, "numerical_rank": 20, "effective_rank": 12,
    "stable_rank": 3, "sigma_max": 1.4, "row_entropy": 2, "first_token_mass": 0.1, "max_token_mass": 0.2,
    "row_distance": 0.7, "identity_distance": 0.8, "hardmax_rank": 20.4,
}  # fmt: skip


def heads(*changes: dict[str, Any], **all_of_them: Any) -> list[HeadRecord]:
    """Heads 0, 1, … of a layer that nothing else is to be said about."""
    fields = [USUAL | {"head": at} | all_of_them | one for at, one in enumerate(changes)]
    return [HeadRecord(**({"band": band(one)} | one)) for one in fields]


def audit(
    *groups: list[HeadRecord], layers: list[LayerRecord] | None = None, uncaptured: list[Unseen] | None = None
) -> AuditRecord:
    measured, states, missed = [head for group in groups for head in group], layers or [], uncaptured or []
    return AuditRecord(
        provenance=Provenance(model="m", delta=0.01),
        heads=measured,
        layers=states,
        findings=find(measured, states, missed),
        uncaptured=missed,
    )


def came_and_went(before: AuditRecord, after: AuditRecord) -> tuple[list[str], list[str]]:
    """``gone`` and ``new`` of a comparison, as code and place; the reverse mirrors them."""
    there, back = compare(before, after), compare(after, before)
    assert (there.gone, there.new) == (back.new, back.gone)
    return tuple([f"{one.code} {one.where}" for one in found] for found in (there.gone, there.new))


@pytest.mark.parametrize("rank", [3, 30], ids=["LOW_RANK", "HIGH_RANK"])
def test_a_layer_beyond_its_null_is_the_same_whichever_head_is_farthest(rank: int) -> None:
    before = audit(heads({"numerical_rank": rank}, {"numerical_rank": rank + 0.5}))
    after = audit(heads({"numerical_rank": rank + 0.5}, {"numerical_rank": rank}))
    assert before.findings[0].where != after.findings[0].where
    assert came_and_went(before, after) == ([], [])


def test_a_layer_with_nan_is_the_same_whichever_head_has_it() -> None:
    before, after = audit(heads({"nonfinite": 1}, {})), audit(heads({}, {"nonfinite": 1}))
    assert came_and_went(before, after) == ([], [])


def test_self_and_cross_attention_of_a_layer_are_told_apart() -> None:
    low = {"numerical_rank": 3}
    own, other = heads(low, site="h.0.self"), heads(low, site="h.0.cross", cross=True)
    usual_own, usual_other = heads({}, site="h.0.self"), heads({}, site="h.0.cross", cross=True)
    gone, new = came_and_went(audit(own, usual_other), audit(usual_own, other))
    assert (gone, new) == (["LOW_RANK h layer 0 head 0"],) * 2
    assert came_and_went(audit(own, other), audit(own, other)) == ([], [])
    assert len(came_and_went(audit(own, other), audit(own, usual_other))[0]) == 1


def test_a_layer_that_moves_from_below_to_above_is_gone_and_new() -> None:
    below, above = audit(heads({"numerical_rank": 3})), audit(heads({"numerical_rank": 30}))
    gone, new = came_and_went(below, above)
    assert (gone, new) == (["LOW_RANK h layer 0 head 0"], ["HIGH_RANK h layer 0 head 0"])


@pytest.mark.parametrize("change", [{"max_token_mass": 0.95}, {"identity_distance": 0.01}])
def test_a_finding_of_a_head_belongs_to_that_head(change: dict[str, float]) -> None:
    before, after = audit(heads(change, {})), audit(heads({}, change))
    gone, new = came_and_went(before, after)
    assert [one.split(" ", 1)[1] for one in (*gone, *new)] == ["h layer 0 head 0", "h layer 0 head 1"]


def test_a_module_that_runs_twice_loses_one_of_two_findings() -> None:
    sink, usual = heads({"max_token_mass": 0.95}), heads({})
    assert came_and_went(audit(sink, sink), audit(sink, usual)) == (["SINK h layer 0 head 0"], [])


def twins(*nearest: int) -> AuditRecord:
    """Heads that each have a twin, by its number; −1 for none."""
    near = [{"nearest_head": other, "nearest_distance": 0.05} if other >= 0 else {} for other in nearest]
    return audit(heads(*near))


def test_of_three_heads_alike_it_does_not_matter_which_two_are_nearest() -> None:
    before, after = twins(1, 2, 1), twins(2, 2, 0)
    pairs = [{(f.where.head, f.evidence["nearest_head"]) for f in one.findings} for one in (before, after)]
    assert pairs == [{(0, 1), (1, 2)}, {(0, 2), (1, 2)}]
    assert came_and_went(before, after) == ([], [])


def test_a_head_that_has_another_twin_is_gone_and_new() -> None:
    gone, new = came_and_went(twins(1, 0, -1), twins(2, -1, 0))
    assert (gone, new) == (["DUPLICATE_HEADS h layer 0 head 0"],) * 2


def test_a_third_head_that_joins_two_twins_is_new() -> None:
    assert came_and_went(twins(1, 0, -1), twins(1, 0, 1)) == ([], ["DUPLICATE_HEADS h layer 0 head 1"])


def test_twins_of_another_layer_are_others() -> None:
    pair = [{"nearest_head": 1, "nearest_distance": 0.05}, {"nearest_head": 0, "nearest_distance": 0.05}]
    before, after = audit(heads(*pair)), audit(heads(*pair, layer=1, site="h.1.attn"))
    gone, new = came_and_went(before, after)
    assert (gone, new) == (["DUPLICATE_HEADS h layer 0 head 0"], ["DUPLICATE_HEADS h layer 1 head 0"])


def states(*relative: float) -> list[LayerRecord]:
    return [
        LayerRecord(
            stack="h", site=f"h.{at}", layer=at, sequences=2, tokens=32, width=16, norm=10, collapse=1,
            relative_spread=value, mean_cosine=0, effective_rank=8,
        )
        for at, value in enumerate(relative)
    ]  # fmt: skip


def outcomes(before: AuditRecord, after: AuditRecord) -> list[str]:
    """In words; the reverse has the opposite ones."""
    opposite = {"new": "gone", "gone": "new", "worse": "better", "better": "worse"} | {
        same: same for same in ("changed", "unchanged")
    }
    there, back = compare(before, after).findings, compare(after, before).findings
    said = [one.outcome for one in there]
    assert sorted(opposite[one.outcome] for one in back) == sorted(said)
    return said


def test_a_collapse_that_starts_earlier_or_goes_deeper_is_worse() -> None:
    late, early = audit(layers=states(0.9, 0.8, 0.2)), audit(layers=states(0.9, 0.2, 0.2))
    assert outcomes(late, early) == ["worse"]
    assert outcomes(late, audit(layers=states(0.9, 0.8, 0.05))) == ["worse"]  # an error, no longer a warning
    assert outcomes(late, audit(layers=states(0.9, 0.8, 0.19))) == ["worse"]
    assert outcomes(late, audit(layers=states(0.9, 0.8, 0.21))) == ["better"]
    assert outcomes(late, late) == ["unchanged"]


@pytest.mark.parametrize(("sequences", "said"), [(2, "unchanged"), (400, "worse")])
def test_a_number_that_moves_within_its_error_is_unchanged(sequences: int, said: str) -> None:
    """0.92 → 0.95 with a standard deviation of 0.1: two errors of the difference are 0.2, then 0.014."""
    before, after = (
        audit(heads({"max_token_mass": mass, "sequences": sequences, "spread": {"max_token_mass": 0.1}}))
        for mass in (0.92, 0.95)
    )
    assert outcomes(before, after) == [said]


@pytest.mark.parametrize(
    ("code", "mild", "strong"),
    [
        ("SINK", {"max_token_mass": 0.91}, {"max_token_mass": 0.99}),
        ("IDENTITY", {"identity_distance": 0.09}, {"identity_distance": 0.01}),
        (
            "CONSTANT",
            {"stable_rank": 1.01, "row_distance": 0.2},
            {"stable_rank": 1.01, "row_distance": 0.1},
        ),
    ],
)
def test_farther_beyond_the_threshold_is_worse(
    code: str, mild: dict[str, float], strong: dict[str, float]
) -> None:
    before, after = audit(heads(mild)), audit(heads(strong))
    assert [one.code for one in (*before.findings, *after.findings)] == [code] * 2
    assert outcomes(before, after) == ["worse"]


def test_more_heads_of_a_layer_beyond_their_null_are_worse() -> None:
    low = {"numerical_rank": 3}
    assert outcomes(audit(heads(low, {})), audit(heads(low, low))) == ["worse"]
    assert outcomes(audit(heads({}, low)), audit(heads(low, {}))) == ["unchanged"]


def test_what_is_new_stands_before_what_is_worse_better_unchanged_and_gone() -> None:
    parked = [{"max_token_mass": mass} for mass in (0.92, 0.95, 0.93, 0.94)]
    before, after = audit(heads(*parked, {})), audit(heads(*parked[1::-1], parked[2], {}, parked[3]))
    assert outcomes(before, after) == ["new", "worse", "better", "unchanged", "gone"]


def test_an_audit_against_itself_is_unchanged_throughout() -> None:
    near = [{"nearest_head": (at + 1) % 3, "nearest_distance": 0.05} for at in range(3)]
    one = audit(
        heads(*near, {"max_token_mass": 0.95}, {"numerical_rank": 3}),
        layers=states(0.9, 0.2, 0.05),
        uncaptured=[Unseen(name="h.0.mixer", type="Mixer", reason="called, but nothing was seen")],
    )
    assert {f.code for f in one.findings} >= {
        "COLLAPSE",
        "DUPLICATE_HEADS",
        "SINK",
        "LOW_RANK",
        "NOT_CAPTURED",
    }
    assert set(outcomes(one, one)) == {"unchanged"}
    assert len(compare(one, one).findings) == len(one.findings)
    assert compare(one, one).is_empty


def test_modules_of_a_class_that_were_not_captured_are_one_finding() -> None:
    def missed(*layers: int, reason: str = "called, but nothing was seen") -> AuditRecord:
        return audit(uncaptured=[Unseen(name=f"h.{at}.mixer", type="Mixer", reason=reason) for at in layers])

    assert came_and_went(missed(0, 1, 2), missed(1, 2)) == ([], [])
    gone, new = came_and_went(missed(0), missed(0, reason="written in C++"))
    assert (gone, new) == (["NOT_CAPTURED h.0.mixer"],) * 2
    assert came_and_went(missed(0), missed()) == (["NOT_CAPTURED h.0.mixer"], [])


def test_an_audit_holds_nothing_new_against_itself_in_any_order() -> None:
    one = audit(heads(*[{"numerical_rank": 3 + at, "max_token_mass": 0.95 - at / 100} for at in range(4)]))
    for first, second in pairwise([one, one.model_copy(update={"findings": one.findings[::-1]}), one]):
        assert came_and_went(first, second) == ([], [])


def removable(*places: tuple[int, int]) -> AuditRecord:
    """An audit whose heads at these layers and numbers can go together, the cheapest first."""
    gone = [
        RemovableHead(stack="h", layer=layer, site=f"h.{layer}.attn", head=head) for layer, head in places
    ]
    joint = Removable(
        heads=gone, tolerance=0.01, loss=2.01, cost=0.01, relative=0.005, order="estimate", runs=3
    )
    importance = ImportanceRecord(
        loss="next tokens", unit="nats per token", value=2, sequences=2, counted=64, removal="zero",
        probes=8, seed=0, removable=joint,
    )  # fmt: skip
    one = audit(heads({}))
    return one.model_copy(update={"importance": importance, "findings": find(one.heads, [], [], importance)})


def test_heads_that_can_go_are_one_finding_whichever_is_the_cheapest() -> None:
    before, after = removable((0, 1)), removable((3, 2))
    assert before.findings[0].where != after.findings[0].where
    assert outcomes(before, after) == ["unchanged"]
    assert outcomes(removable((0, 1), (3, 2)), removable((3, 2), (0, 1))) == ["unchanged"]
    assert came_and_went(removable((0, 1)), audit(heads({})))[0] == ["REMOVABLE h layer 0 head 1"]


def test_more_heads_that_can_go_are_neither_worse_nor_better() -> None:
    [change] = compare(removable((0, 1)), removable((3, 2), (0, 1))).findings
    assert (change.outcome, change.numbers) == ("changed", ("heads", 1, 2))
    assert finding_words(change) == "REMOVABLE, heads 1 → 2"
    assert not compare(removable((0, 1)), removable((3, 2), (0, 1))).is_empty
