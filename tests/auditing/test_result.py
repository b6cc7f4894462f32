"""Audits are saved whole and loaded equal; other files are refused."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from experiments.zoo.transformers import nano_gpt
from tests.support.modules import token_ids
from tests.support.records import changed
from tests.unchecked import unchecked

import rankwise as rw
from rankwise.errors import InputError, RecordError

Content = dict[str, Any]


@pytest.fixture(scope="module")
def audit() -> rw.Audit:
    return rw.audit(nano_gpt(), [token_ids()])


def edited(audit: rw.Audit, folder: Path, change: Callable[[Content], None]) -> Path:
    content = json.loads(audit.model_dump_json())
    change(content)
    (folder / "a.json").write_text(json.dumps(content))
    return folder / "a.json"


def test_a_saved_audit_is_loaded_equal(audit: rw.Audit, tmp_path: Path) -> None:
    unknown = changed(audit, {0: {"stable_rank": math.nan}})
    path = unknown.save(tmp_path / "deep" / "audit.json")
    assert "NaN" not in path.read_text()  # JSON has no NaN
    for place in (path, path.parent):
        assert rw.Audit.load(place).model_dump_json() == unknown.model_dump_json()
    assert math.isnan(rw.Audit.load(path).heads[0].stable_rank)


def test_names_that_are_not_text_are_escaped(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    audit = rw.audit(nano_gpt(), [token_ids()], provenance={"data": name, "notes": [name]})
    assert rw.Audit.load(audit.save(tmp_path / "a.json")).provenance.data == "caf\\udce9.txt"
    audit.to_html(tmp_path / "a.html")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got Invalid JSON: EOF"),
        ("\xff\xfe\x00", "got Invalid JSON"),
        ('{"format": "rankwise-au', "got Invalid JSON: EOF"),
        ("[1, 2]", "a saved audit .* got Input should be an object"),
        ('{"model": "bert"}', "got provenance: Field required"),
        ('{"format": "rankwise-plan"}', "got format: Input should be 'rankwise-audit'"),
        ('{"format": "rankwise-audit", "a": "\\ud800"}', "got Invalid JSON"),
    ],
    ids=str,
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RecordError, match=message):
        rw.Audit.load(tmp_path)
    with pytest.raises(InputError, match="no such file"):
        rw.Audit.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"schema_version": version}, "got schema_version: Input should be 5") for version in (4, 6, True)),
        *(({"heads": heads}, "heads") for heads in (3, [3], [{"spread": 3}])),
    ],
)
def test_other_versions_and_damaged_files_are_refused(
    audit: rw.Audit, tmp_path: Path, change: Content, message: str
) -> None:
    with pytest.raises(RecordError, match=message):
        rw.Audit.load(edited(audit, tmp_path, lambda content: content.update(change)))


@pytest.mark.parametrize("field", [{"layer": "seven"}, {"z_score": 1.0}])
def test_a_damaged_head_is_refused(audit: rw.Audit, tmp_path: Path, field: Content) -> None:
    with pytest.raises(RecordError, match=rf"heads\.0\.{next(iter(field))}"):
        rw.Audit.load(edited(audit, tmp_path, lambda content: content["heads"][0].update(field)))


def test_links_are_followed_and_other_places_are_refused(audit: rw.Audit, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "real" / "audit.json")
    audit.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert rw.Audit.load(tmp_path / "real").heads
    for path, message in (
        ("/dev/null", "a folder or a device"),
        (tmp_path / "link.json" / "a.json", "can be written"),
    ):
        with pytest.raises(InputError, match=message):
            audit.save(path)


@pytest.mark.parametrize(
    ("method", "error", "raised", "message"),
    [
        ("write_text", OSError(28, os.strerror(28)), InputError, "No space left"),
        ("replace", KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
    ids=["full disk", "Ctrl-C"],
)
def test_a_failed_write_keeps_the_earlier_file(audit, tmp_path, monkeypatch, method, error, raised, message):
    path = audit.save(tmp_path / "audit.json")
    before = path.read_text()

    def fail(self: Path, *_: Any, **__: Any) -> int:
        self.touch()
        raise error

    monkeypatch.setattr(Path, method, fail)
    with pytest.raises(raised, match=message):
        changed(audit, complete=False).save(path)
    monkeypatch.undo()
    assert path.read_text() == before
    assert [other.name for other in tmp_path.iterdir()] == ["audit.json"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda one: rw.Audit.merge([]), "at least one audit, got none"),
        (lambda one: rw.Audit.merge(["audit.json", one]), "audit 1 of .* expected an audit, got str"),
        (lambda one: rw.Audit.merge(iter([one, one])), "the same data in audits 1 and 2"),
        (lambda one: rw.compare(one, "a/audit.json"), "audit 2 of `compare`: .* got 'a/audit.json'"),
    ],
)
def test_merge_and_compare_refuse_objects_other_than_audits(audit: rw.Audit, call: Any, message: str) -> None:
    with unchecked(), pytest.raises((InputError, RecordError), match=message):
        call(audit)
