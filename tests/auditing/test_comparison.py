"""Laws of comparing two audits."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import records
from tests.support.documents import comparison_document
from tests.support.records import HeadImportance, changed

from rankwise.auditing import Audit, Comparison, compare
from rankwise.tracing import Address

SHARES = ("first_token_mass", "max_token_mass", "row_spread", "identity_distance", "nearest_head_distance")
RANGES = {
    "numerical_rank": 128.0,
    "effective_rank": 128.0,
    "stable_rank": 128.0,
    "row_entropy": math.log(128),
}
RANGES |= dict.fromkeys(SHARES, 1.0)
"""Ranges of measures of a head of 128 tokens."""
ENCODER = records.encoder()


def pair(*updates: dict[str, object]) -> list[Audit]:
    """Return the encoder with other fields of its first head, per update."""
    return [changed(ENCODER, {0: update}) for update in updates]


values = st.floats(0.0, 1.0).map(lambda value: round(value, 3)) | st.just(math.nan)
edits = st.dictionaries(
    st.integers(0, 71), st.dictionaries(st.sampled_from(sorted(RANGES)), values, max_size=3), max_size=6
)


@pytest.mark.parametrize("name", records.ALL)
def test_an_audit_does_not_differ_from_itself(name: str) -> None:
    audit = records.ALL[name]()
    comparison = compare(audit, audit)
    assert comparison.is_empty
    assert comparison.structure == []
    assert (comparison.heads, comparison.states) == (len(audit.heads), len(audit.states))


@given(edits)
@settings(max_examples=25, deadline=None)
def test_the_reverse_comparison_has_opposite_changes(edit: dict[int, dict[str, object]]) -> None:
    after = changed(ENCODER, edit)
    there, back = compare(ENCODER, after), compare(after, ENCODER)
    assert [(c.where, c.measure, repr(c.before), repr(c.after), c.size) for c in there.changes] == [
        (c.where, c.measure, repr(c.after), repr(c.before), c.size) for c in back.changes
    ]
    for one, other in zip(there.changes, back.changes, strict=True):
        assert one.change == -other.change or (math.isnan(one.change) and math.isnan(other.change))


@given(edits)
@settings(max_examples=25, deadline=None)
def test_every_changed_number_is_listed_and_the_largest_change_is_first(
    edit: dict[int, dict[str, object]],
) -> None:
    comparison = compare(ENCODER, changed(ENCODER, edit))
    made = {
        (ENCODER.heads[index].layer, ENCODER.heads[index].head, measure)
        for index, fields in edit.items()
        for measure, value in fields.items()
        if repr(getattr(ENCODER.heads[index], measure)) != repr(value)
    }
    assert {(c.where.layer, c.where.head, c.measure) for c in comparison.changes} == made
    sizes = [change.size for change in comparison.changes]
    assert sizes == sorted(sizes, reverse=True)
    assert all(0 < size <= 1 for size in sizes)


@pytest.mark.parametrize("measure", RANGES)
def test_the_size_of_a_change_is_a_share_of_the_range(measure: str) -> None:
    (change,) = compare(*pair({measure: 0.25}, {measure: 0.75})).changes
    assert (change.change, change.size) == (0.5, pytest.approx(0.5 / RANGES[measure]))


@pytest.mark.parametrize(
    ("measure", "before", "after", "size"),
    [
        ("numerical_rank", {}, {"tokens": 64.0, "sources": 64.0}, 32 / 128),  # the wider range
        ("sigma_max", {}, {}, 32 / 42),  # no range: a share of the larger value
    ],
)
def test_sizes_do_not_depend_on_the_order(measure: str, before: Any, after: Any, size: float) -> None:
    audits = pair(before | {measure: 10.0}, after | {measure: 42.0})
    for first, second in (audits, audits[::-1]):
        changes = compare(first, second).changes
        assert next(change.size for change in changes if change.measure == measure) == size


@pytest.mark.parametrize(
    ("measure", "scale"),
    [
        ("spread", 1.0),
        ("mean_cosine", 2.0),
        ("effective_rank", 128.0),
        ("norm", 0.75),
        ("absolute_spread", 0.75),
    ],
)
def test_measures_of_states_have_their_own_ranges(measure: str, scale: float) -> None:
    before, after = records.encoder(), records.encoder()
    for audit, value in ((before, 0.25), (after, 0.75)):
        audit.states[2] = audit.states[2].model_copy(update={measure: value})
    (change,) = compare(before, after).changes
    where = Address(stack="encoder.layer", layer=1, site="encoder.layer.0")
    assert (change.where, change.size) == (where, pytest.approx(0.5 / scale))


def scaled(factor: float, heads: int, dtype: str) -> list[Audit]:
    """Return the encoder, and the encoder with other numbers in its first heads."""
    numbers = [{name: getattr(head, name) * factor for name in RANGES} for head in ENCODER.heads[:heads]]
    audits = [ENCODER, changed(ENCODER, dict(enumerate(numbers)))]
    origin = ENCODER.provenance.model_copy(update={"model_dtype": dtype})
    return [audit.model_copy(update={"provenance": origin}) for audit in audits]


@pytest.mark.parametrize(("dtype", "small"), [("float32", 1e-8), ("bfloat16", 1e-8), ("float64", 3e-16)])
def test_differences_below_rounding_are_counted_and_not_listed(dtype: str, small: float) -> None:
    every = len(compare(*scaled(1.001, 72, dtype)).changes)
    assert every > 400
    comparison = compare(*scaled(1 + small, 72, dtype))
    assert comparison.changes == []
    assert 0 < comparison.below_rounding <= every
    assert comparison.is_empty
    document = comparison_document(comparison)
    said = f"No difference. {comparison.below_rounding} differences below rounding are left out."
    assert document.verdict.sentence == said
    assert not any(section.name in ("layers", "changes", "maps") for section in document.sections)
    assert len(compare(*scaled(1 + 1e5 * small, 72, dtype)).changes) == every


def test_a_layer_with_a_head_less_changes_its_means() -> None:
    comparison = compare(ENCODER, ENCODER.model_copy(update={"heads": ENCODER.heads[1:]}))
    assert comparison.changes == []
    assert "layers" in {section.name for section in comparison_document(comparison).sections}


def test_a_number_known_in_one_audit_is_a_change_of_the_whole_range() -> None:
    (change,) = compare(ENCODER, changed(ENCODER, {5: {"first_token_mass": math.nan}})).changes
    assert change.size == 1.0
    assert math.isnan(change.change)


def test_the_order_of_records_does_not_matter() -> None:
    audit = records.encoder_decoder()
    reverse = changed(audit, states=audit.states[::-1]).model_copy(update={"heads": audit.heads[::-1]})
    assert compare(audit, reverse).is_empty


def test_cross_attention_is_not_matched_with_self_attention() -> None:
    comparison = compare(ENCODER, changed(ENCODER, every={"cross": True}))
    assert (comparison.heads, len(comparison.only_before), len(comparison.only_after)) == (0, 72, 72)
    assert any("No head of one audit is in the other" in warning for warning in comparison.warnings)


def test_calls_of_a_module_are_matched_in_order() -> None:
    heads = records.grid(1, 2)
    twice = [*heads, *(head.model_copy(update={"first_token_mass": 0.5}) for head in heads)]
    audit = ENCODER.model_copy(update={"heads": twice})
    assert compare(audit, audit).is_empty
    assert compare(audit, audit).heads == 4


def test_heads_and_states_in_one_audit_are_listed() -> None:
    small, large = records.sized(2, 2), records.sized(3, 2)
    comparison = compare(small, large)
    places = [(place.layer, place.head) for place in comparison.only_after]
    assert places == [(2, 0), (2, 1), (2, None)]
    assert comparison.only_before == []
    assert compare(large, small).only_before == comparison.only_after


def test_findings_are_matched_by_code_and_place() -> None:
    first, sink = ENCODER.findings[0], ENCODER.findings[2]
    worse = [first, sink.model_copy(update={"severity": "error", "evidence": {}})]
    comparison = compare(ENCODER, changed(ENCODER, findings=worse))
    outcomes = [(one.outcome, one.finding.code) for one in comparison.findings[:2]]
    assert outcomes == [("changed", "SINK"), ("unchanged", "COLLAPSE")]
    assert (comparison.new, len(comparison.resolved)) == ([], len(ENCODER.findings) - 2)
    reworded = [finding.model_copy(update={"meaning": "other words"}) for finding in ENCODER.findings]
    assert compare(ENCODER, changed(ENCODER, findings=reworded)).is_empty


WARNINGS = [
    ({"origin": {"delta": 0.1}}, "δ differs: 0.01 before, 0.1 after"),
    ({"origin": {"data": "other.txt"}}, "The data differ: sentences.txt before, other.txt after"),
    ({"origin": {"data": ""}}, "The data differ: sentences.txt before, unknown after"),
    ({"origin": {"rank_method": "estimate"}}, "The method differs: exact before"),
    ({"origin": {"sequences": 8}}, "The sequences differ: 64 before, 8 after"),
    (
        {"every": {"tokens": 256.0}},
        "The sequences are not equally long: 128 tokens on average before, 244.7 after",
    ),
    (
        {"heads": {3: {"mask": "causal"}, 4: {"kind": "linear"}}},
        "2 of 72 heads have another kind or mask: their references differ.",
    ),
    ({"complete": False}, "The audit after is incomplete: some measurements are missing."),
]


@pytest.mark.parametrize(("fields", "said"), WARNINGS)
def test_audits_that_are_not_comparable_cause_a_warning(fields: dict[str, Any], said: str) -> None:
    (warning,) = compare(ENCODER, changed(ENCODER, **fields)).warnings
    assert warning.startswith(said)


def test_another_model_or_revision_causes_no_warning() -> None:
    assert compare(ENCODER, changed(ENCODER, origin={"model": "x", "revision": "y"})).warnings == []


def with_importance(costs: list[float], *, exact: bool = False, **fields: object) -> Audit:
    """Return the encoder with costs of its first heads."""
    field = "exact" if exact else "estimate"
    heads = {
        at: {"importance": HeadImportance(**{field: cost}), "removal_cost": cost}
        for at, cost in enumerate(costs)
    }
    return changed(ENCODER, heads, importance=records.importance(**{"value": 4.0} | fields))


@pytest.mark.parametrize(("value", "share"), [(4.0, 0.005), (0.0, 0.02)])
def test_a_change_of_cost_is_a_share_of_the_loss(value: float, share: float) -> None:
    before, after = with_importance([1e-4, 0.01], value=value), with_importance([0.0201, 0.01], value=value)
    for change in (compare(before, after).changes[0], compare(after, before).changes[0]):
        assert (change.measure, change.size) == ("removal_cost", pytest.approx(share))
    assert compare(before, after).warnings == []
    assert any(one.measure == "removal_cost" and one.change for one in compare(before, after).by_layer)


def test_a_comparison_says_how_the_loss_changed() -> None:
    before, after = (changed(ENCODER, importance=records.importance(value=value)) for value in (2.0, 1.5))
    found = compare(before, after)
    [loss] = [total for total in found.totals if total.name == "loss, nats per token"]
    assert (loss.before, loss.after, found.warnings, found.is_empty) == (2.0, 1.5, [], False)
    assert comparison_document(found).verdict.sentence.startswith("Loss 2 → 1.5 nats per token. Findings: ")
    none = records.importance(value=0.0, unit="of its squared norm")
    for other in (changed(ENCODER, importance=none), ENCODER):
        assert not any(total.name.startswith("loss") for total in compare(before, other).totals)
    assert compare(before, ENCODER).warnings == []  # without costs there are no removable heads to name


@pytest.mark.parametrize(
    "fields",
    [
        {"loss": "how far the output moves", "unit": "of its squared norm"},
        {"exact": True},
    ],
)
def test_costs_that_measure_different_quantities_are_left_out(fields: dict[str, Any]) -> None:
    known = with_importance([0.1, 0.2])
    for other in (with_importance([0.3, 0.2], **fields), ENCODER):
        for comparison in (compare(known, other), compare(other, known)):
            (warning,) = comparison.warnings
            assert warning.startswith("Costs of removal are left out")
            changes = [*comparison.changes, *comparison.by_layer]
            assert not [change for change in changes if change.measure == "removal_cost"]


@pytest.mark.parametrize("name", ["encoder", "encoder_decoder", "nasty", "only_nan", "no_layers"])
def test_a_comparison_survives_json(name: str) -> None:
    comparison = compare(ENCODER, records.ALL[name]())
    text = comparison.model_dump_json()
    assert Comparison.model_validate_json(text).model_dump_json() == text
