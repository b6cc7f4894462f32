import gzip
import json
import sys
from pathlib import Path

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.data import DatasetSpec, dataset_texts, hub, parse_dataset
from rankwise.errors import InputError

TEXTS = [f"text {i}" for i in range(10)]
names = st.text("abc/-_.0", min_size=1, max_size=8).map(lambda name: f"n{name}")
parts = st.text("abc%-", max_size=4)


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@given(name=names, config=parts, split=parts, column=parts)
def test_what_is_put_together_is_taken_apart(name: str, config: str, split: str, column: str) -> None:
    spec = f"{name}@{config}:{split}:{column}"
    assert parse_dataset(spec) == DatasetSpec(name, config, split, column or "text")


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("imdb", DatasetSpec("imdb")),
        ("imdb:test", DatasetSpec("imdb", split="test")),
        ("org/wiki@v1:test[:5%]", DatasetSpec("org/wiki", "v1", "test[:5%]")),
        (r"C:\data\rows.csv:train:body", DatasetSpec(r"C:\data\rows.csv", "", "train", "body")),
    ],
)
def test_spec(spec: str, wanted: DatasetSpec) -> None:
    assert parse_dataset(spec) == wanted


@pytest.mark.parametrize(("spec", "got"), [("a:b:c:d", "4 parts"), ("", "no name"), (":test", "no name")])
def test_spec_that_cannot_be_understood(spec: str, got: str) -> None:
    with pytest.raises(InputError, match=rf"expected NAME\[@CONFIG\]\[:SPLIT\[:COLUMN\]\], got {got}"):
        parse_dataset(spec)


def test_file_with_colon_and_at_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a@b:c.txt").write_text("x")
    assert parse_dataset("a@b:c.txt") == DatasetSpec("a@b:c.txt")
    Path("a@b.txt").write_text("x")
    assert parse_dataset("a@b.txt:train") == DatasetSpec("a@b.txt", split="train")


def rows() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": TEXTS, "label": list(range(10))})


def write(folder: Path, name: str) -> Path:
    path, name = folder / name, name.lower()
    lines = "".join(json.dumps(row) + "\n" for row in rows())
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif name.endswith((".json", ".jsonl")):
        path.write_text(lines)
    elif name.endswith(".csv"):
        rows().to_csv(path)
    elif name.endswith(".parquet"):
        rows().to_parquet(path)
    else:
        path.write_text("\n".join(TEXTS))
    return path


FILES = ["a.json", "a.jsonl", "a.jsonl.gz", "A.JSONL", "a.csv", "a.parquet", "a.txt"]


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    assert dataset_texts(str(write(tmp_path, name))) == TEXTS


def test_folder_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder, "test.jsonl")
    write(folder, "train.jsonl")
    assert dataset_texts(f"{folder}:test:text", rows=2) == [TEXTS[0], TEXTS[5]]
    with pytest.raises(InputError, match=r"expected a split 'tst', got train, test\. Did you mean test\?"):
        dataset_texts(f"{folder}:tst")


def test_folders_that_datasets_wrote(tmp_path: Path) -> None:
    rows().save_to_disk(tmp_path / "one")
    splits = {"train": rows().select([1]), "validation": rows().select([2]), "test": rows().select([3])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "many")
    assert dataset_texts(str(tmp_path / "one")) == TEXTS
    assert dataset_texts(str(tmp_path / "many")) == ["text 2"]  # validation, then test, then train
    assert dataset_texts(f"{tmp_path / 'many'}:train") == ["text 1"]


def test_missing_texts_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": null}\n')
    assert dataset_texts(str(path)) == ["a", ""]


def test_unknown_column(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl")
    with pytest.raises(
        InputError, match=r"expected a column 'txt', got the columns 'text', 'label'\. Did you mean text"
    ):
        dataset_texts(f"{path}::txt")


def test_column_that_holds_no_text(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl")
    with pytest.raises(InputError, match=r"column 'label' of .*: expected texts, got values of type int"):
        dataset_texts(f"{path}::label")


def test_split_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows().select([]))
    with pytest.raises(InputError, match=r"column 'text' of org/name: expected texts, got no rows"):
        dataset_texts("org/name:train")


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_bytes(b"x")
    with pytest.raises(
        InputError, match=r"expected a data file \(\.json, .*\), got \.xlsx ending\. Convert it"
    ):
        dataset_texts(str(tmp_path / "a.xlsx"))


def test_broken_file(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(InputError, match=r"a\.parquet: expected a data set that can be read, got "):
        dataset_texts(str(tmp_path / "a.parquet"))


def test_folder_without_data(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        InputError, match=r"empty: expected a data set that can be read, got .*or give a file: --text"
    ):
        dataset_texts(str(tmp_path / "empty"))


@pytest.mark.parametrize("name", ["/no/such/folder", "./no", "rows.jsonl.gz", r"C:\no"])
def test_missing_file_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_reachable", lambda: pytest.fail("asked the Hub"))
    with pytest.raises(
        InputError, match=r"expected a data file or folder, got no such file\. Check the path"
    ):
        dataset_texts(name)


def test_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("tried to load it"))
    message = r"stanfordnlp/imdb: .*no answer from https://.*Use --text FILE.*HF_HUB_OFFLINE=1"
    with pytest.raises(InputError, match=message):
        dataset_texts("stanfordnlp/imdb:test:text")


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple] = []

    def load(name: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((name, config, split))
        return rows()

    monkeypatch.setattr(hub, "hub_reachable", lambda: True)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: ["train", "test"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert dataset_texts("org/name@v1", rows=1) == TEXTS[:1]
    assert dataset_texts("org/name:train[:5]") == TEXTS
    assert asked == [("org/name", "v1", "test"), ("org/name", None, "train[:5]")]


@pytest.mark.parametrize(
    "error",
    [
        datasets.exceptions.DatasetNotFoundError("Dataset 'x/y' doesn't exist on the Hub."),
        ValueError("Config name is missing.\nPick one of: a, b"),
        ConnectionError("Couldn't reach 'x/y' on the Hub"),
        RuntimeError("Dataset scripts are no longer supported"),
        IndexError("list index out of range"),
    ],
)
def test_what_the_hub_refuses(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(hub, "hub_reachable", lambda: True)
    monkeypatch.setattr(datasets, "get_dataset_split_names", refuse)
    said = str(error).split("\n")[0].rstrip(".")
    with pytest.raises(InputError, match="expected a data set that can be read, got ") as caught:
        dataset_texts("x/y")
    assert said in str(caught.value)


def test_without_the_package_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = r"expected the package datasets.*pip install 'rankwise\[train\]'; or give a file: --text FILE"
    with pytest.raises(InputError, match=message):
        dataset_texts(str(write_plain(tmp_path)))


def write_plain(folder: Path) -> Path:
    path = folder / "a.txt"
    path.write_text("x")
    return path
