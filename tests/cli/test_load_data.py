"""Texts from files and data sets, and errors that name the file, the line and the fix."""

import gzip
import json
import os
import sys
import threading
from pathlib import Path

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankwise.cli import load_model
from rankwise.cli.load_data import (
    DatasetSpec,
    check_data,
    dataset_texts,
    load_data,
    load_text,
    parse_dataset,
)
from rankwise.errors import InputError

ROWS = b'{"text": "one", "id": 1}\n\n{"text": "two \\u00e9"}\n'


def write(folder: Path, content: bytes, name: str = "text.txt") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@given(text=st.text(min_size=1).filter(lambda text: text.strip() and not text.startswith("\ufeff")))
def test_a_text_comes_back_as_written(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write(tmp_path_factory.mktemp("texts"), text.encode("utf-8"))
    assert load_text(path) == text


def test_a_byte_order_mark_is_dropped_and_line_endings_are_kept(tmp_path: Path) -> None:
    assert load_text(write(tmp_path, b"\xef\xbb\xbfa\r\nb\n")) == "a\r\nb\n"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "expected some text, got an empty file"),
        ("a.txt", b"\xef\xbb\xbf \n\t\n", "expected some text, got an empty file"),
        ("a.txt", b"caf\xe9", r"byte 0xe9 in position 3.* iconv -f LATIN1 -t UTF-8 .*/a\.txt"),
        ("a.txt", None, r"a\.txt: expected a text file, got no such file\. Check the path"),
        (".", None, "expected a text file, got a folder"),
        ("a.jsonl", None, r"a\.jsonl: expected a data file or folder, got no such file\. Check the path"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": ', r"a\.jsonl: expected a data set that can be read"),
        ("a.jsonl", b'{"txt": "a"}', r"a\.jsonl: expected a column 'text', got the columns 'txt'"),
        ("a.jsonl", b"\n\n", r"a\.jsonl: expected "),
        ("a.jsonl.gz", gzip.compress(ROWS, mtime=0)[:-9], "expected a data set that can be read"),
    ],
)
def test_texts_that_cannot_be_read(name: str, content: bytes | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        write(tmp_path, content, name)
    with pytest.raises(InputError, match=says):
        load_text(tmp_path / name)


def test_a_text_of_one_token_is_refused_without_advice_to_cut_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"got 1 token\. Use a longer text\.$"):
        load_data(load_model.LoadedModel(torch.nn.Identity(), "m"), text=write(tmp_path, b"x"), tokens=4)


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("r.jsonl", ROWS, ["one", "two é"]),
        ("R.JSONL.GZ", gzip.compress(ROWS, mtime=0), ["one", "two é"]),
        ("r.jsonl", '{"text": "a\u2028b\x85c"}\n'.encode(), ["a\u2028b\x85c"]),  # no end of a line in JSON
    ],
)
def test_rows_come_in_order_without_blank_lines(name, content, texts, tmp_path) -> None:
    assert load_text(write(tmp_path, content, name)) == texts


# --- data sets ----------------------------------------------------------------------------------------------

TEXTS = [f"text {i}" for i in range(10)]
names = st.text("abc/-_.0", min_size=1, max_size=8).map(lambda name: f"n{name}")
parts = st.text("abc%-", max_size=4)


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@given(name=names, config=parts, split=parts, column=parts)
def test_a_specification_is_parsed_into_its_parts(name: str, config: str, split: str, column: str) -> None:
    spec = f"{name}@{config}:{split}:{column}"
    assert parse_dataset(spec) == DatasetSpec(name, config, split, column or "text")


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("imdb", DatasetSpec("imdb")),
        ("imdb:test", DatasetSpec("imdb", split="test")),
        ("org/wiki@v1:test[:5%]", DatasetSpec("org/wiki", "v1", "test[:5%]")),
        ("a@b:c.txt", DatasetSpec("a@b:c.txt")),  # there is such a file
        ("a@b.txt:train", DatasetSpec("a@b.txt", split="train")),
    ],
)
def test_spec(spec: str, wanted: DatasetSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a@b:c.txt", "a@b.txt"):
        Path(name).write_text("x")
    assert parse_dataset(spec) == wanted


@pytest.mark.parametrize(("spec", "got"), [("a:b:c:d", "4 parts"), ("", "no name"), (":test", "no name")])
def test_spec_that_cannot_be_parsed(spec: str, got: str) -> None:
    with pytest.raises(InputError, match=rf"expected NAME\[@CONFIG\]\[:SPLIT\[:COLUMN\]\], got {got}"):
        parse_dataset(spec)


def rows() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": TEXTS, "label": list(range(10))})


def write_rows(path: Path) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows()).encode()
    name = path.name.lower()
    if name.endswith(".csv"):
        rows().to_csv(path)
    elif name.endswith(".parquet"):
        rows().to_parquet(path)
    elif name.endswith(".txt"):
        path.write_text("\n".join(TEXTS))
    else:
        path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    return path


FILES = ["a.json", "a.jsonl", "a.jsonl.gz", "A.JSONL", "a.csv", "a.parquet", "a.txt"]


@pytest.mark.parametrize("name", FILES)
def test_files_are_read_without_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("this asks the Hub"))
    assert dataset_texts(str(write_rows(tmp_path / name))) == TEXTS


def test_folders_of_files_and_folders_that_datasets_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_rows(folder / "test.jsonl")
    write_rows(folder / "train.jsonl")
    assert dataset_texts(f"{folder}:test:text", rows=2) == [TEXTS[0], TEXTS[5]]
    with pytest.raises(InputError, match=r"expected a split 'tst', got train, test\. Did you mean test\?"):
        dataset_texts(f"{folder}:tst")
    rows().save_to_disk(tmp_path / "one")
    splits = {"train": rows().select([1]), "validation": rows().select([2]), "test": rows().select([3])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "many")
    assert dataset_texts(str(tmp_path / "one")) == TEXTS
    assert dataset_texts(str(tmp_path / "many")) == ["text 2"]  # validation, then test, then train
    assert dataset_texts(f"{tmp_path / 'many'}:train") == ["text 1"]


def test_missing_texts_are_empty(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"text": "a"}\n{"text": null}\n', "a.jsonl")
    assert dataset_texts(str(path)) == ["a", ""]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl::txt", b'{"text": "", "label": 1}', r"a column 'txt', got .*'label'\. Did you mean text"),
        ("a.jsonl::label", b'{"text": "", "label": 1}', "column 'label' of .*got values of type int"),
        ("a.xlsx", b"x", r"expected a data file \(\.json, .*\), got \.xlsx ending\. Convert it"),
        ("a.parquet", b"no parquet", r"a\.parquet: expected a data set that can be read, got "),
        ("empty", None, "empty: expected a data set that can be read, got .*or pass a file: --text"),
    ],
)
def test_data_that_cannot_be_read(name: str, content: bytes | None, says: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    if content is not None:
        write(tmp_path, content, name.partition(":")[0])
    with pytest.raises(InputError, match=says):
        dataset_texts(f"{tmp_path}/{name}")


@pytest.mark.parametrize("name", ["/no/such/folder", "./no", "rows.jsonl.gz"])
def test_a_missing_file_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_: pytest.fail("asked the Hub"))
    with pytest.raises(InputError, match="expected a data file or folder, got no such file"):
        dataset_texts(name)


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple] = []

    def load(name: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((name, config, split))
        return rows().select([] if split == "empty" else range(10))

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: ["train", "test"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert dataset_texts("org/name@v1", rows=1) == TEXTS[:1]
    assert dataset_texts("org/name:train[:5]") == TEXTS
    assert asked == [("org/name", "v1", "test"), ("org/name", None, "train[:5]")]
    with pytest.raises(InputError, match=r"column 'text' of org/name: expected texts, got no rows"):
        dataset_texts("org/name:empty")


@pytest.mark.parametrize(
    "error",
    [
        datasets.exceptions.DatasetNotFoundError("Dataset 'x/y' doesn't exist on the Hub."),
        ValueError("Config name is missing.\nPick one of: a, b"),
        ConnectionError("Couldn't reach 'x/y' on the Hub"),
        IndexError(""),
    ],
)
def test_errors_of_the_hub_are_reported(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "get_dataset_split_names", refuse)
    with pytest.raises(InputError, match="expected a data set that can be read, got ") as caught:
        dataset_texts("x/y")
    assert (str(error).split("\n")[0].rstrip(".") or "IndexError") in str(caught.value)


def test_without_the_package_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"the package datasets.*pip install 'rankwise\[data\]'"):
        dataset_texts("a.txt")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with a name")
def test_a_pipe_is_read_once_for_all_who_ask(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("some text"))
    writer.start()
    check_data(["model"], text=pipe)
    assert [load_text(pipe) for _ in range(2)] == ["some text"] * 2
    writer.join(timeout=20)
