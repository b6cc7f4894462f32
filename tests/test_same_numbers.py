"""The comparison of two revisions finds changed numbers, lost records and lost fields, renamed or not."""

import copy
import json
import math

import pytest
from benchmarks import measured_numbers
from benchmarks.same_numbers import FLOOR, TOLERANCE, Expected, differences, relative_difference, report

AUDIT = {
    "schema_version": 1,
    "provenance": {"created": "2026"},
    "heads": [
        {"layer": 0, "site": "a", "head": 0, "rank": 3.0, "spread": {"rank": 0.5}, "spectrum": [1.0, 0.5]},
        {"layer": 0, "site": "a", "head": 1, "rank": None, "spread": {"rank": 1e-17}, "spectrum": []},
    ],
    "findings": [
        {
            "code": "SINK",
            "severity": "warning",
            "where": {"layer": 0, "head": 1},
            "evidence": {"mass": 0.9},
            "meaning": "x",
        }
    ],
}


def changed(change):
    after = copy.deepcopy(AUDIT)
    change(after)
    return differences(AUDIT, after)


def test_a_file_is_the_same_as_itself_in_another_order_and_from_another_day():
    def change(after):
        after["heads"].reverse()
        after["provenance"]["created"] = "2027"
        after["heads"][0]["spread"]["rank"] = 3e-17  # rounding of 0

    found = changed(change)
    assert found.compared == 13
    assert not found.above(TOLERANCE)
    assert [found.records, found.lost, found.new, found.texts] == [[], set(), set(), set()]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda after: after["heads"][0].update(rank=3.00001), "heads.rank"),
        (lambda after: after["heads"][0].update(rank=None), "heads.rank"),
        (lambda after: after["heads"][1].update(rank=1.0), "heads.rank"),
        (lambda after: after["heads"][0]["spectrum"].__setitem__(1, 0.51), "heads.spectrum"),
        (lambda after: after["findings"][0]["evidence"].update(mass=0.91), "findings.evidence.mass"),
        (lambda after: after["heads"][0].update(spectrum=None), "heads.spectrum"),
        (lambda after: after["heads"][0]["spectrum"].__setitem__(1, math.nan), "heads.spectrum"),
        (lambda after: after["findings"][0].update(severity="info"), "findings.severity"),
    ],
)
def test_a_changed_number_is_seen_where_it_is(change, field):
    assert list(changed(change).above(TOLERANCE)) == [field]


def test_a_record_of_one_side_is_named():
    assert changed(lambda after: after["heads"].pop()).records == ["heads layer 0 site a head 1, only before"]
    longer = changed(lambda after: after["heads"][0]["spectrum"].append(0.1))
    assert longer.records == ["heads.spectrum layer 0 site a head 0 [2], only after"]


def test_lost_fields_new_fields_and_words_are_listed_apart():
    found = changed(lambda after: after["heads"][0].update(extra=1.0))
    assert (found.lost, found.new, found.above(0)) == (set(), {"heads.extra"}, {})
    found = changed(lambda after: after["heads"][0].update(other=after["heads"][0].pop("rank")))
    assert (found.lost, found.new, found.above(0)) == ({"heads.rank"}, {"heads.other"}, {})
    found = changed(lambda after: after["findings"][0].update(meaning="y"))
    assert (found.texts, found.above(0)) == ({"findings.meaning"}, {})


def test_a_measure_of_one_side_is_a_field_and_a_missing_change_a_record():
    rank, turn = ({"measure": name, "where": {"layer": 1}, "change": 0.5} for name in ("rank", "turn"))
    found = differences({"changes": [rank]}, {"changes": [rank, turn]})
    assert (found.lost, found.new, found.records, found.compared) == (set(), {"changes of turn"}, [], 2)
    assert differences({"changes": [rank, turn]}, {"changes": [rank]}).lost == {"changes of turn"}
    vanished = differences({"changes": [rank]}, {"changes": []})
    assert vanished.records == ["changes layer 1 measure rank, only before"]
    other = {**rank, "where": {"layer": 2}}
    assert differences({"changes": [rank]}, {"changes": [rank, other]}).records == [
        "changes layer 2 measure rank, only after"
    ]


def test_renames_apply_at_once_and_only_if_the_new_name_is_there():
    expected = Expected(
        renamed={"std": "seed_std", "spread": "std", "SINK": "FIRST_TOKEN", "rank": "full_rank"}
    )
    before = {"std": 1.0, "spread": 2.0, "findings": AUDIT["findings"]}
    renamed = {"seed_std": 1.0, "std": 2.0, "findings": [AUDIT["findings"][0] | {"code": "FIRST_TOKEN"}]}
    for after in (before, renamed):
        found = differences(before, after, expected)
        assert [found.compared, found.above(0), found.records] == [5, {}, []]
        assert (found.lost, found.new) == (set(), set())
    renamed["std"] = 1.0
    assert list(differences(before, renamed, expected).above(TOLERANCE)) == ["std"]
    half = {"rank": 1.0}
    assert differences(half, {"other": 1.0}, expected).lost == {"rank"}


@pytest.mark.parametrize("uncompared", ["SINK", "FIRST_TOKEN"])
def test_findings_of_an_uncompared_code_are_left_out_under_both_names(uncompared):
    sink = AUDIT["findings"][0]
    change = {"outcome": "gone", "before": sink, "after": None}
    before = {"findings": [sink, change], "totals": [{"name": "findings", "before": 1.0}], "layers": 2}
    after = {"findings": [], "totals": [{"name": "findings", "before": 0.0}], "layers": 2}
    expected = Expected(renamed={"SINK": "FIRST_TOKEN"}, uncompared={uncompared: "one finding per group"})
    found = differences(before, after, expected)
    assert [found.compared, found.above(0), found.records] == [1, {}, []]
    seen = differences(before, after)
    assert len(seen.records) == 2
    assert list(seen.above(0)) == ["totals.before"]


def test_a_place_with_a_new_field_is_the_same_place():
    heads = [{"layer": 0, "head": head, "rank": float(head)} for head in range(2)]
    found = differences({"heads": heads}, {"heads": [head | {"call": 0} for head in reversed(heads)]})
    assert [found.records, found.above(0), found.new] == [[], {}, {"heads.call"}]


def test_standard_deviations_may_have_a_tolerance_of_their_own():
    found = changed(lambda after: after["heads"][0]["spread"].update(rank=0.5 + 1e-8))
    assert list(found.above(TOLERANCE)) == ["heads.spread.rank"]
    assert found.above(TOLERANCE, 1e-7) == {}


def test_a_missing_file_differs(tmp_path, capsys):
    for folder, files in (("before", ("one", "two")), ("after", ("one",))):
        (tmp_path / folder).mkdir()
        for name in files:
            (tmp_path / folder / f"demo, {name}.json").write_text(json.dumps(AUDIT))
    assert not report(tmp_path / "before", tmp_path / "after", ["demo"], TOLERANCE, {})
    assert "demo, two: only before" in capsys.readouterr().out


def test_expected_losses_may_not_have_happened_yet(tmp_path, capsys):
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "demo, one.json").write_text(json.dumps(AUDIT))
    expected = Expected(gone={"heads.rank": "nobody read it"})
    folders = tmp_path / "before", tmp_path / "after"
    assert report(*folders, ["demo"], TOLERANCE, {}, expected=expected)
    assert not report(*folders, ["demo"], TOLERANCE, expected.gone)


def test_a_subject_measured_twice_is_the_same(tmp_path):
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        measured_numbers.measure("t5", None, tmp_path / folder)
    assert len(list((tmp_path / "before").iterdir())) == 8
    assert report(tmp_path / "before", tmp_path / "after", ["t5"], TOLERANCE, {})


@pytest.mark.parametrize(
    ("gone", "same", "said"),
    [
        ({}, False, "heads.rank (LOST, and no --gone names it)"),
        ({"heads.rank": "nobody read it"}, True, "heads.rank (nobody read it)"),
        ({"heads.rank": "x", "heads.head": "y"}, False, "heads.head (named by --gone, but NOT lost)"),
    ],
)
def test_a_lost_field_fails_unless_it_is_named(gone, same, said, tmp_path, capsys):
    after = copy.deepcopy(AUDIT)
    for head in after["heads"]:
        head["effective"] = head.pop("rank")
    for folder, audit in (("before", AUDIT), ("after", after)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "demo, one batch.json").write_text(json.dumps(audit))
    assert report(tmp_path / "before", tmp_path / "after", ["demo"], TOLERANCE, gone) is same
    told = capsys.readouterr().out
    assert f"only before: {said}" in told
    assert "only after: heads.effective" in told


def test_relative_differences():
    assert relative_difference(2.0, 1.0) == relative_difference(1.0, 2.0) == 0.5
    assert relative_difference(None, None) == 0
    assert relative_difference(None, 1.0) == relative_difference(0.0, None) == math.inf
    assert relative_difference(0.0, FLOOR / 2) == 0.5
