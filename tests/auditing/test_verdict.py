"""The verdict counts the findings and names at most three actions, each once."""

import pytest
from tests.support.records import audit, heads, layers

import rankwise as rw
from rankwise.auditing.records import Verdict
from rankwise.auditing.result import Audit
from rankwise.auditing.verdict import MOST_ACTIONS, verdict_of

SINK = {"max_token_mass": 0.95}


def test_a_usual_audit_has_no_action() -> None:
    assert verdict_of(audit(heads({}), layers=layers(0.9, 0.8))) == Verdict(sentence="No findings.")


def test_ranks_are_counted_and_cause_no_action() -> None:
    verdict = verdict_of(audit(heads({"numerical_rank": 3}, {"numerical_rank": 30})))
    assert verdict == Verdict(sentence="2 notes.")


def test_a_code_causes_one_action_and_the_most_severe_come_first() -> None:
    found = audit(heads(SINK, SINK, {"identity_distance": 0.01}, {"nonfinite": 1}), layers=layers(0.9, 0.2))
    verdict = verdict_of(found)
    assert verdict.sentence == "1 error, 1 warning, 3 notes."
    nonfinite, collapse, sink = verdict.actions
    assert len(verdict.actions) == MOST_ACTIONS
    assert nonfinite.shell == "rankwise audit MODEL --text TEXT --dtype float32 --out DIR"
    assert nonfinite.python.startswith("[name for name, weight in model.named_parameters()")
    assert (collapse.shell, collapse.python) == ("", "rw.skips.recommend(audit, model, batch)")
    assert (sink.shell, sink.python) == ("", "")
    assert [action.text for action in verdict.actions] == [
        next(finding.remedy for finding in found.findings if finding.code == code)
        for code in ("NONFINITE", "COLLAPSE", "SINK")
    ]


def test_the_verdict_names_an_incomplete_audit() -> None:
    half = audit(heads({})).model_copy(update={"complete": False})
    assert verdict_of(half).sentence == "No findings. The audit stopped before it had read all of its data."


@pytest.mark.parametrize("change", [{"findings": []}, {"complete": False}])
def test_a_copy_has_a_verdict_of_its_own(change: dict[str, object]) -> None:
    """A cached property would be copied along."""
    records: Audit = audit(heads(SINK))
    one = rw.Audit.model_validate(records.model_dump())
    first = one.verdict
    assert one.model_copy(update=change).verdict != first
    assert "verdict" not in one.model_dump()
