"""Reviews as bytes: they come back as they were, and whatever is wrong with a file is said by its line."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from rankwise.cli import load_model
from rankwise.data import tasks
from rankwise.errors import InputError

TEXTS = ["good", "naïve 🙂 but long enough to be cut", "bad"]


def saved(folder: Path, test: list[object] | None = None) -> Path:
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(TEXTS)]
    for split, content in (("train", rows), ("test", rows if test is None else test)):
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


def test_reviews_come_back_but_for_what_is_cut(tmp_path: Path) -> None:
    task = tasks.imdb_bytes(saved(tmp_path), length=16)
    for text, item in zip(TEXTS, task.train, strict=True):
        mask = item["attention_mask"].bool()
        assert bytes((item["input_ids"][mask] - 3).tolist()) == text.encode()[:16]
        assert (item["input_ids"][~mask] == task.pad_token_id).all()
        assert len(item["input_ids"]) == task.length == 16
    assert [int(item["labels"]) for item in task.test] == [0, 1, 0]
    assert (task.vocab_size, task.num_labels, task.chance) == (259, 2, 2 / 3)


def test_unpacked_files_are_read_as_packed_ones(tmp_path: Path) -> None:
    packed = tasks.imdb_bytes(saved(tmp_path), length=16)
    for split in ("train", "test"):
        file = tmp_path / f"{split}.jsonl.gz"
        (tmp_path / f"{split}.jsonl").write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
        plain = tasks.imdb_bytes(tmp_path, length=16)
        assert plain.provenance.sha256 == packed.provenance.sha256
    assert plain.provenance.source == "train.jsonl and test.jsonl"


def test_every_character_keeps_its_bytes_in_range() -> None:
    from rankwise.data.tasks.language import byte_ids

    text = "".join(map(chr, (0, 127, 128, 0x7FF, 0x800, 0xFFFF, 0x10000, 0x10FFFF)))
    assert (byte_ids(text).astype(int) - 3).tolist() == list(text.encode())


def test_datasets_give_the_same_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_dict({"text": TEXTS, "label": [0, 1, 0]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "imdb")
    kept = tasks.imdb_bytes(tmp_path / "imdb", length=16)
    assert kept.provenance.sha256 == tasks.imdb_bytes(saved(tmp_path), length=16).provenance.sha256
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "half")
    with pytest.raises(InputError, match="half: expected a split 'test', got train"):
        tasks.imdb_bytes(tmp_path / "half")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "", "label": 1}, "line 1: expected .* got an empty text"),
        ({"text": "a"}, "line 1: expected .* got None in 'label'"),
        ({"text": "a", "label": True}, "line 1: expected .* got True in 'label'"),
        ({"text": "a", "label": 2}, r"labels of .*, test: expected 0 and 1, got 2"),
        ({"body": "a", "label": 1}, "line 1: expected a field 'text', got the fields 'body', 'label'"),
        (["a", 1], "line 1: expected a JSON object .* got type list"),
    ],
)
def test_a_row_that_is_no_review_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tasks.imdb_bytes(saved(tmp_path, test=[row]))


def test_broken_and_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(tmp_path) / "test.jsonl.gz"
    content = file.read_bytes()
    file.write_bytes(content[:-12])
    with pytest.raises(InputError, match=r"test\.jsonl\.gz: expected a whole gzip file, got a broken one"):
        tasks.imdb_bytes(tmp_path)
    file.write_bytes(b"")
    with pytest.raises(
        InputError, match=r"test\.jsonl\.gz: expected JSON objects, one per line, got an empty file"
    ):
        tasks.imdb_bytes(tmp_path)
    file.unlink()
    wanted = (
        r"train\.jsonl\[\.gz\] and test\.jsonl\[\.gz\], a folder written by `datasets`, or stanfordnlp/imdb"
    )
    with pytest.raises(
        InputError, match=wanted + r".* got a folder without test\.jsonl\.gz \(it holds train"
    ):
        tasks.imdb_bytes(tmp_path)
    with pytest.raises(InputError, match=wanted + ".* got a file"):
        tasks.imdb_bytes(tmp_path / "train.jsonl.gz")
    monkeypatch.setattr(load_model, "hub_reachable", lambda: False)
    with pytest.raises(InputError, match=r"no answer from .*save_to_disk\('imdb'\)"):
        tasks.imdb_bytes()
    monkeypatch.setattr(load_model, "hub_reachable", lambda: True)  # offline with nothing downloaded before
    with pytest.raises(InputError, match=r"stanfordnlp/imdb: expected .*save_to_disk\('imdb'\)"):
        tasks.imdb_bytes()


def test_the_real_reviews_are_balanced(shared_data: Path) -> None:
    task = tasks.imdb_bytes(shared_data / "imdb", length=4096)
    assert (len(task.train), len(task.test), task.chance) == (6000, 2000, 0.5)
    lengths = task.train.arrays["lengths"]
    assert np.array_equal((task.train.arrays["input_ids"] != 0).sum(1), lengths)
    assert 1000 < lengths.mean() < 1500
