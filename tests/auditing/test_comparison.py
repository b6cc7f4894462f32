"""Laws of comparing two audits."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import records

from rankwise.auditing import Comparison, compare
from rankwise.auditing.records import HeadId
from rankwise.auditing.result import Audit
from rankwise.importance.records import HeadImportance, ImportanceRecord

RANGES = {
    "numerical_rank": 128.0,
    "effective_rank": 128.0,
    "stable_rank": 128.0,
    "row_entropy": math.log(128),
    "first_token_mass": 1.0,
    "max_token_mass": 1.0,
    "row_distance": 1.0,
    "identity_distance": 1.0,
    "nearest_distance": 1.0,
}
"""Of a head of 128 tokens."""


def with_heads(audit: Audit, changed: dict[int, dict[str, object]]) -> Audit:
    heads = [head.model_copy(update=changed.get(index, {})) for index, head in enumerate(audit.heads)]
    return audit.model_copy(update={"heads": heads})


def with_provenance(audit: Audit, **fields: object) -> Audit:
    return audit.model_copy(update={"provenance": audit.provenance.model_copy(update=fields)})


values = st.floats(0.0, 1.0) | st.just(math.nan)
edits = st.dictionaries(
    st.integers(0, 71), st.dictionaries(st.sampled_from(sorted(RANGES)), values, max_size=3), max_size=6
)


@pytest.mark.parametrize("name", records.ALL)
def test_an_audit_does_not_differ_from_itself(name: str) -> None:
    audit = records.ALL[name]()
    comparison = compare(audit, audit)
    assert comparison.is_empty
    assert (comparison.heads, comparison.layers) == (len(audit.heads), len(audit.layers))


@given(edits)
@settings(max_examples=25, deadline=None)
def test_comparing_the_other_way_round_turns_every_sign(edit: dict[int, dict[str, object]]) -> None:
    before, after = records.encoder(), with_heads(records.encoder(), edit)
    there, back = compare(before, after), compare(after, before)
    turned = [
        change.model_copy(update={"before": change.after, "after": change.before}) for change in back.changes
    ]
    assert [(c.where, c.measure, repr(c.before), repr(c.after), c.size) for c in there.changes] == [
        (c.where, c.measure, repr(c.before), repr(c.after), c.size) for c in turned
    ]
    for one, other in zip(there.changes, back.changes, strict=True):
        assert one.change == -other.change or (math.isnan(one.change) and math.isnan(other.change))


@given(edits)
@settings(max_examples=25, deadline=None)
def test_changes_are_those_made_and_the_largest_comes_first(edit: dict[int, dict[str, object]]) -> None:
    audit = records.encoder()
    comparison = compare(audit, with_heads(audit, edit))
    made = {
        (audit.heads[index].layer, audit.heads[index].head, measure)
        for index, fields in edit.items()
        for measure, value in fields.items()
        if repr(getattr(audit.heads[index], measure)) != repr(value)
    }
    assert {(c.where.layer, c.where.head, c.measure) for c in comparison.changes} == made
    sizes = [change.size for change in comparison.changes]
    assert sizes == sorted(sizes, reverse=True)
    assert all(0 < size <= 1 for size in sizes)


@pytest.mark.parametrize("measure", RANGES)
def test_a_change_is_measured_in_the_range_of_its_measure(measure: str) -> None:
    before, after = (with_heads(records.encoder(), {0: {measure: value}}) for value in (0.25, 0.75))
    (change,) = compare(before, after).changes
    assert (change.change, change.size) == (0.5, pytest.approx(0.5 / RANGES[measure]))


def test_audits_of_other_lengths_are_measured_in_the_wider_range() -> None:
    before = with_heads(records.encoder(), {0: {"numerical_rank": 10.0}})
    after = with_heads(records.encoder(), {0: {"numerical_rank": 42.0, "tokens": 64.0, "sources": 64.0}})
    sizes = [
        next(change.size for change in comparison.changes if change.measure == "numerical_rank")
        for comparison in (compare(before, after), compare(after, before))
    ]
    assert sizes == [32 / 128, 32 / 128]


def test_what_has_no_bound_is_measured_by_its_larger_value() -> None:
    before, after = (with_heads(records.encoder(), {0: {"sigma_max": value}}) for value in (1.0, 4.0))
    assert compare(before, after).changes[0].size == compare(after, before).changes[0].size == 0.75


@pytest.mark.parametrize(
    ("measure", "scale"),
    [
        ("relative_spread", 1.0),
        ("mean_cosine", 2.0),
        ("effective_rank", 128.0),
        ("norm", 0.75),
        ("token_spread", 0.75),
    ],
)
def test_states_have_ranges_of_their_own(measure: str, scale: float) -> None:
    before, after = records.encoder(), records.encoder()
    for audit, value in ((before, 0.25), (after, 0.75)):
        audit.layers[2] = audit.layers[2].model_copy(update={measure: value})
    (change,) = compare(before, after).changes
    assert (change.where, change.size) == (
        HeadId(stack="encoder.layer", layer=2, site="encoder.layer.0"),
        pytest.approx(0.5 / scale),
    )


def test_a_number_that_came_or_went_is_a_change_of_the_whole_range() -> None:
    audit = records.encoder()
    (change,) = compare(audit, with_heads(audit, {5: {"first_token_mass": math.nan}})).changes
    assert change.size == 1.0
    assert math.isnan(change.change)


def test_the_order_of_records_does_not_matter() -> None:
    audit = records.encoder_decoder()
    turned = audit.model_copy(update={"heads": audit.heads[::-1], "layers": audit.layers[::-1]})
    assert compare(audit, turned).is_empty


def test_cross_attention_is_not_taken_for_self_attention() -> None:
    audit = records.encoder()
    cross = with_heads(audit, {index: {"cross": True} for index in range(72)})
    comparison = compare(audit, cross)
    assert (comparison.heads, len(comparison.only_before), len(comparison.only_after)) == (0, 72, 72)
    assert any("No head of one audit is in the other" in warning for warning in comparison.warnings)


def test_a_module_that_ran_twice_is_matched_time_by_time() -> None:
    heads = records.grid(1, 2)
    twice = [*heads, *(head.model_copy(update={"first_token_mass": 0.5}) for head in heads)]
    audit = records.encoder().model_copy(update={"heads": twice})
    assert compare(audit, audit).is_empty
    assert compare(audit, audit).heads == 4


def test_heads_and_states_of_one_audit_alone_are_listed() -> None:
    small, large = records.sized(2, 2), records.sized(3, 2)
    comparison = compare(small, large)
    places = [(place.layer, place.head) for place in comparison.only_after]
    assert places == [(2, 0), (2, 1), (3, None)]
    assert comparison.only_before == []
    assert compare(large, small).only_before == comparison.only_after


def test_findings_come_and_go_by_code_and_place() -> None:
    audit = records.encoder()
    worse = [audit.findings[0], audit.findings[2].model_copy(update={"severity": "error", "evidence": {}})]
    comparison = compare(audit, audit.model_copy(update={"findings": worse}))
    assert [(one.outcome, one.finding.code) for one in comparison.findings[:2]] == [
        ("worse", "SINK"),
        ("unchanged", "COLLAPSE"),
    ]
    assert comparison.new == []
    assert len(comparison.resolved) == len(audit.findings) - 2
    reworded = [finding.model_copy(update={"meaning": "other words"}) for finding in audit.findings]
    assert compare(audit, audit.model_copy(update={"findings": reworded})).is_empty


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"delta": 0.1}, "δ differs: 0.01 before, 0.1 after"),
        ({"data": "other.txt"}, "The data differ: sentences.txt before, other.txt after"),
        ({"data": ""}, "The data differ: sentences.txt before, unknown after"),
        ({"method": "estimate"}, "The method differs: exact before"),
        ({"sequences": 8}, "The sequences differ: 64 before, 8 after"),
        ({"measure_dtype": "float32"}, "The dtype of the measures differs: float64 before"),
    ],
)
def test_another_provenance_is_a_warning(fields: dict[str, object], said: str) -> None:
    audit = records.encoder()
    (warning,) = compare(audit, with_provenance(audit, **fields)).warnings
    assert warning.startswith(said)


def test_another_model_or_revision_is_what_comparing_is_for() -> None:
    audit = records.encoder()
    assert compare(audit, with_provenance(audit, model="other", revision="other")).warnings == []


def test_advice_in_one_audit_alone_is_a_warning_where_it_found_something() -> None:
    audit = records.encoder()
    advised = with_provenance(audit, advised=True)
    assert compare(audit, advised).is_empty
    assert compare(audit, advised).warnings == []
    drowned = records.finding("INACTIVE_BLOCK", evidence={"mixer_share": 0.001})
    found = advised.model_copy(update={"findings": [*audit.findings, drowned]})
    for first, second in ((audit, found), (found, audit)):
        (warning,) = compare(first, second).warnings
        assert warning.startswith("Only one audit was examined")
    assert compare(found, found).warnings == []


def test_other_lengths_masks_and_incomplete_audits_are_warnings() -> None:
    audit = records.encoder()
    longer = with_heads(audit, {index: {"tokens": 256.0} for index in range(72)})
    (warning,) = compare(audit, longer).warnings
    assert warning.startswith("The sequences are not equally long: 128 tokens on average before, 244.7 after")
    causal = with_heads(audit, {3: {"mask": "causal"}, 4: {"kind": "linear"}})
    assert compare(audit, causal).warnings == [
        "2 of 72 heads have another kind or mask: their references differ."
    ]
    cut = audit.model_copy(update={"complete": False})
    assert compare(audit, cut).warnings == ["The audit after is incomplete: it read only part of its data."]


def with_importance(costs: list[float], *, exact: bool = False, **fields: object) -> Audit:
    """The sample with costs of removal of its first heads."""
    audit, field = records.encoder(), "exact" if exact else "estimate"
    given: dict[str, object] = {
        "loss": "next tokens, causal", "unit": "nats per token", "value": 4.0, "sequences": 64,
        "counted": 640, "ablation": "zero", "probes": 8, "seed": 0,
    }  # fmt: skip
    heads = {
        at: {"importance": HeadImportance(**{field: cost}), "removal_cost": cost}
        for at, cost in enumerate(costs)
    }
    return with_heads(audit, heads).model_copy(update={"importance": ImportanceRecord(**(given | fields))})


@pytest.mark.parametrize(("value", "share"), [(4.0, 0.005), (0.0, 0.02)])
def test_a_cost_of_removal_is_measured_by_the_loss(value: float, share: float) -> None:
    before, after = with_importance([1e-4, 0.01], value=value), with_importance([0.0201, 0.01], value=value)
    for change in (compare(before, after).changes[0], compare(after, before).changes[0]):
        assert (change.measure, change.size) == ("removal_cost", pytest.approx(share))
    assert compare(before, after).warnings == []
    assert any(one.measure == "removal_cost" and one.change for one in compare(before, after).by_layer)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"loss": "how far the output moves", "unit": "of its squared norm"},
            "The loss of importance differs",
        ),
        ({"ablation": "mean"}, "The replacement of removed heads differs: zero before, mean after"),
        ({"exact": True}, "Costs of removal are estimated before, exact after"),
    ],
)
def test_costs_of_two_quantities_are_left_out_by_name(fields: dict[str, Any], said: str) -> None:
    comparison = compare(with_importance([0.1, 0.2]), with_importance([0.3, 0.2], **fields))
    (warning,) = comparison.warnings
    assert warning.startswith(said)
    assert "leave out costs of removal" in warning
    assert not [one for one in (*comparison.changes, *comparison.by_layer) if one.measure == "removal_cost"]


def test_importance_in_one_audit_alone_is_a_warning_and_no_change() -> None:
    for first, second in (
        (records.encoder(), with_importance([0.1])),
        (with_importance([0.1]), records.encoder()),
    ):
        (warning,) = compare(first, second).warnings
        assert warning.startswith("Only the audit")
        assert compare(first, second).changes == []


@pytest.mark.parametrize("name", ["encoder", "encoder_decoder", "nasty", "only_nan", "no_layers"])
def test_a_comparison_survives_json(name: str) -> None:
    comparison = compare(records.encoder(), records.ALL[name]())
    text = comparison.model_dump_json()
    assert Comparison.model_validate_json(text).model_dump_json() == text
