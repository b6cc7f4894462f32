"""Audits are written whole, read back the same, and refused clearly when they are not what they should be."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.zoo.transformers import nano_gpt
from tests.unchecked import unchecked

import rankwise as rw
from rankwise.auditing.records import SCHEMA_VERSION
from rankwise.errors import InputError, RecordError


@pytest.fixture(scope="module")
def audit() -> rw.Audit:
    return rw.audit(nano_gpt(), [{"input_ids": torch.randint(0, 60, (2, 10))}])


def test_round_trip(audit: rw.Audit, tmp_path: Path) -> None:
    path = audit.save(tmp_path / "deep" / "audit.json")
    again = rw.Audit.load(path)
    assert again.model_dump_json() == audit.model_dump_json()
    assert isinstance(again, rw.Audit)
    assert rw.Audit.load(path.parent).heads[0].head == 0  # a folder will do


def test_nan_survives(audit: rw.Audit, tmp_path: Path) -> None:
    broken = audit.model_copy(
        update={"heads": [audit.heads[0].model_copy(update={"stable_rank": float("nan")})]}
    )
    path = broken.save(tmp_path / "audit.json")
    assert "NaN" not in path.read_text()  # JSON has no NaN
    assert rw.Audit.load(path).heads[0].stable_rank != rw.Audit.load(path).heads[0].stable_rank


def edited(audit: rw.Audit, path: Path, change: Any) -> Path:
    content = json.loads(audit.model_dump_json())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected JSON"),
        ('{"format": "rankwise-au', "cut short"),
        ("[1, 2]", "other JSON"),
        ('{"model": "bert"}', "other JSON"),
        ('{"format": "rankwise-plan"}', "got .format.: 'rankwise-plan'"),
        ('{"format": "rankwise-audit"}', "schema version"),
    ],
)
def test_foreign_files(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=says):
        rw.Audit.load(path)


def test_newer_versions_and_damaged_fields(audit: rw.Audit, tmp_path: Path) -> None:
    newer = edited(audit, tmp_path / "a.json", lambda c: c.update(schema_version=SCHEMA_VERSION + 1))
    with pytest.raises(RecordError, match="Upgrade rankwise"):
        rw.Audit.load(newer)
    damaged = edited(audit, tmp_path / "b.json", lambda c: c["heads"][0].update(layer="seven"))
    with pytest.raises(RecordError, match=r"heads\.0\.layer"):
        rw.Audit.load(damaged)


def as_version_1(content: dict[str, Any]) -> None:
    content["schema_version"] = 1
    for record in (*content["heads"], *content["layers"]):
        record["spread"] = record.pop("std")
    for head in content["heads"]:
        del head["band"], head["uniform_rank"]
        head["z_score"] = 1.5


@pytest.mark.parametrize(("varied", "kept"), [(0.0, True), (None, True), (0.4, False)])
def test_version_1_is_read_without_its_z_score(
    audit: rw.Audit, tmp_path: Path, varied: float | None, kept: bool
) -> None:
    """And without a random rank that was taken at the mean of different lengths."""

    def change(content: dict[str, Any]) -> None:
        as_version_1(content)
        content["heads"][0]["spread"]["null_rank"] = varied

    old = rw.Audit.load(edited(audit, tmp_path / "a.json", change))
    assert old.heads[0].numerical_rank == audit.heads[0].numerical_rank
    assert (old.heads[0].random_rank == audit.heads[0].random_rank) == kept
    assert math.isnan(old.heads[0].random_rank) == (not kept)
    assert old.heads[1].random_rank == audit.heads[1].random_rank
    assert old.heads[0].band == []
    assert rw.compare(old, audit).changes == []


@pytest.mark.parametrize("damage", [{"heads": 3}, {"heads": [3]}, {"heads": [{"spread": 3}]}])
def test_a_damaged_version_1_is_refused_as_any_other(
    audit: rw.Audit, tmp_path: Path, damage: dict[str, Any]
) -> None:
    path = edited(audit, tmp_path / "a.json", lambda content: content.update(schema_version=1, **damage))
    with pytest.raises(RecordError, match=r"heads"):
        rw.Audit.load(path)


def test_a_z_score_in_a_file_of_today_is_damage(audit: rw.Audit, tmp_path: Path) -> None:
    path = edited(audit, tmp_path / "a.json", lambda content: content["heads"][0].update(z_score=1.0))
    with pytest.raises(RecordError, match="z_score"):
        rw.Audit.load(path)


def test_missing_and_unreadable(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        rw.Audit.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="expected JSON"):
        rw.Audit.load(tmp_path / "binary.json")


def test_a_place_that_cannot_be_written(audit: rw.Audit, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can be written"):
        audit.save(tmp_path / "file" / "audit.json")


def test_a_full_disk_leaves_the_old_file(
    audit: rw.Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = audit.save(tmp_path / "audit.json")
    before = path.read_text()

    def full(self: Path, *_: Any, **__: Any) -> int:
        self.touch()
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError, match="No space left"):
        audit.save(path)
    monkeypatch.undo()
    assert path.read_text() == before
    assert [other.name for other in tmp_path.iterdir()] == ["audit.json"]


def test_frames(audit: rw.Audit) -> None:
    pytest.importorskip("pandas")
    heads = audit.to_frame()
    assert len(heads) == 12
    assert set(heads.columns) >= {"layer", "head", "numerical_rank", "hardmax_rank"}
    assert list(audit.to_frame("layers")["layer"]) == [0, 1, 2, 3]
    empty = audit.model_copy(update={"findings": []}).to_frame("findings")
    assert len(empty) == 0


def test_repr_is_one_line(audit: rw.Audit) -> None:
    assert str(audit).startswith("Audit(NanoGPT: 12 heads, 4 layers")


def test_links_are_followed_and_devices_refused(audit: rw.Audit, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "real" / "audit.json")
    audit.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert rw.Audit.load(tmp_path / "real").heads
    with pytest.raises(InputError, match="a folder or a device"):
        audit.save("/dev/null")


def test_ctrl_c_in_the_middle_leaves_the_old_file_and_nothing_else(
    audit: rw.Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = audit.save(tmp_path / "audit.json")
    before = path.read_text()

    def interrupted(self: Path, *_: Any) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        audit.model_copy(update={"heads": []}).save(path)
    assert path.read_text() == before
    assert [other.name for other in tmp_path.iterdir()] == ["audit.json"]


@pytest.mark.parametrize(
    "text", ['{"format": ' + "9" * 5000 + "}", '{"format": "rankwise-audit", "a": "\\ud800"}']
)
def test_json_that_python_cannot_hold(text: str, tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text(text)
    with pytest.raises(RecordError, match="expected JSON"):
        rw.Audit.load(tmp_path)


def test_names_that_are_no_text_are_written_readably(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    batches = [{"input_ids": torch.randint(0, 60, (1, 9))}]
    audit = rw.audit(nano_gpt(), batches, provenance={"data": name, "notes": [name]})
    assert rw.Audit.load(audit.save(tmp_path / "a.json")).provenance.data == "caf\\udce9.txt"
    audit.to_html(tmp_path / "a.html")


@pytest.mark.parametrize(
    ("audits", "names", "words"),
    [
        (lambda one: [one, one], ["x"], "expected 2 names, got 1"),
        (lambda one: ["audit.json", one], [], "audit 1 of .* expected an audit, got str"),
        (lambda one: iter([one, one]), [], "the same in audit 1 and audit 2"),
    ],
)
def test_merge_says_what_it_was_given(audit: rw.Audit, audits: Any, names: list[str], words: str) -> None:
    with pytest.raises((InputError, RecordError), match=words):
        rw.Audit.merge(audits(audit), names)


def test_compare_says_what_it_was_given(audit: rw.Audit) -> None:
    says = r"audit 2 of `compare`: expected an audit, got 'a/audit\.json'"
    with unchecked(), pytest.raises(InputError, match=says):
        rw.compare(audit, "a/audit.json")  # type: ignore[arg-type]
