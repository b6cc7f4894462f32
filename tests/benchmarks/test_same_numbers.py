"""The comparison of two revisions finds changed numbers, lost records and lost fields, renamed or not."""

import copy
import json
import math

import pytest
from benchmarks import measured_numbers
from benchmarks.same_numbers import FLOOR, TOLERANCE, differences, relative_difference, report

FINDING = {
    "code": "SINK",
    "severity": "warning",
    "where": {"layer": 0},
    "evidence": {"mass": 0.9},
    "text": "x",
}
AUDIT = {
    "schema_version": 1,
    "provenance": {"created": "2026"},
    "heads": [
        {"layer": 0, "site": "a", "head": 0, "rank": 3.0, "spread": {"rank": 0.5}, "spectrum": [1.0, 0.5]},
        {"layer": 0, "site": "a", "head": 1, "rank": None, "spread": {"rank": 1e-17}, "spectrum": []},
    ],
    "findings": [FINDING],
}


def changed(change):
    after = copy.deepcopy(AUDIT)
    change(after)
    return differences(AUDIT, after, {})


@pytest.fixture
def folders(tmp_path):
    """Return a function that writes two folders of files and returns them."""

    def write(before, after):
        for side, files in (("before", before), ("after", after)):
            (tmp_path / side).mkdir()
            for name, audit in files.items():
                (tmp_path / side / f"demo, {name}.json").write_text(json.dumps(audit))
        return tmp_path / "before", tmp_path / "after"

    return write


def test_order_day_and_rounding_of_zero_do_not_count():
    def change(after):
        after["heads"].reverse()
        after["provenance"]["created"] = "2027"
        after["heads"][0]["spread"]["rank"] = 3e-17  # rounding of 0

    found = changed(change)
    assert found.compared == 12
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
def test_a_changed_number_is_found_with_its_place(change, field):
    assert list(changed(change).above(TOLERANCE)) == [field]


RANK, TURN = ({"measure": name, "where": {"layer": 1}, "change": 0.5} for name in ("rank", "turn"))
PLACES = [{"layer": 0, "head": head, "rank": float(head)} for head in range(2)]


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ({"findings": [FINDING]}, {"findings": [FINDING | {"text": "y"}]}, {"texts": {"findings.text"}}),
        ({"rank": 1.0}, {"other": 1.0}, {"lost": {"rank"}, "new": {"other"}}),
        ({"changes": [RANK]}, {"changes": [RANK, TURN]}, {"new": {"changes of turn"}}),
        ({"changes": [RANK, TURN]}, {"changes": [RANK]}, {"lost": {"changes of turn"}}),
        ({"changes": [RANK]}, {"changes": []}, {"records": ["changes layer 1 measure rank, only before"]}),
        (
            {"changes": [RANK]},
            {"changes": [RANK, {**RANK, "where": {"layer": 2}}]},
            {"records": ["changes layer 2 measure rank, only after"]},
        ),
        ({"heads": PLACES}, {"heads": PLACES[:1]}, {"records": ["heads layer 0 head 1, only before"]}),
        ({"spectrum": [1.0]}, {"spectrum": [1.0, 0.1]}, {"records": ["spectrum [1], only after"]}),
        ({"heads": PLACES}, {"heads": [p | {"call": 0} for p in reversed(PLACES)]}, {"new": {"heads.call"}}),
    ],
)
def test_records_fields_and_texts_of_one_side_are_listed(before, after, wanted):
    found, nothing = (
        differences(before, after, {}),
        {"lost": set(), "new": set(), "records": [], "texts": set()},
    )
    assert {name: getattr(found, name) for name in nothing} == nothing | wanted
    assert found.above(0) == {}


def test_renames_apply_at_once_and_only_if_the_new_name_exists():
    renames = {"std": "seed_std", "spread": "std", "SINK": "FIRST_TOKEN", "rank": "full_rank"}
    before = {"std": 1.0, "spread": 2.0, "findings": [FINDING]}
    renamed = {"seed_std": 1.0, "std": 2.0, "findings": [FINDING | {"code": "FIRST_TOKEN"}]}
    for after in (before, renamed):
        found = differences(before, after, renames)
        assert [found.compared, found.above(0), found.records, found.lost, found.new] == [
            4,
            {},
            [],
            set(),
            set(),
        ]
    assert list(differences(before, renamed | {"std": 1.0}, renames).above(TOLERANCE)) == ["std"]
    assert differences({"rank": 1.0}, {"other": 1.0}, renames).lost == {"rank"}


@pytest.mark.parametrize(
    ("gone", "same", "line"),
    [
        ({}, False, "heads.rank (LOST, and no --gone names it)"),
        ({"heads.rank": "nobody read it"}, True, "heads.rank (nobody read it)"),
        ({"heads.rank": "x", "heads.head": "y"}, False, "heads.head (named by --gone, but NOT lost)"),
    ],
)
def test_a_lost_field_fails_unless_it_is_named(gone, same, line, folders, capsys):
    after = copy.deepcopy(AUDIT)
    for head in after["heads"]:
        head["effective"] = head.pop("rank")
    assert report(*folders({"one": AUDIT}, {"one": after}), ["demo"], TOLERANCE, gone, {}) is same
    printed = capsys.readouterr().out
    assert f"only before: {line}" in printed
    assert "only after: heads.effective" in printed


def test_a_missing_file_differs(folders, capsys):
    pair = folders({"one": AUDIT, "two": AUDIT}, {"one": AUDIT})
    assert not report(*pair, ["demo"], TOLERANCE, {}, {})
    assert "demo, two: only before" in capsys.readouterr().out
    (pair[0] / "demo, two.json").unlink()
    assert report(*pair, ["demo"], TOLERANCE, {}, {"rank": "full_rank"})


def test_a_subject_measured_twice_is_the_same(tmp_path):
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        measured_numbers.measure("llama", None, tmp_path / folder)
    assert len(list((tmp_path / "before").iterdir())) == 5
    assert report(tmp_path / "before", tmp_path / "after", ["llama"], TOLERANCE, {}, {})


def test_relative_differences():
    assert relative_difference(2.0, 1.0) == relative_difference(1.0, 2.0) == 0.5
    assert relative_difference(None, None) == 0
    assert relative_difference(None, 1.0) == relative_difference(0.0, None) == math.inf
    assert relative_difference(0.0, FLOOR / 2) == 0.5
