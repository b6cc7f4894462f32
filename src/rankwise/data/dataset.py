"""A data set by name: from the Hugging Face Hub, a local file or a local folder."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rankwise.auditing.text_inputs import evenly
from rankwise.data.hub import need_hub
from rankwise.errors import InputError, did_you_mean

_READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
_PREFERRED = ("validation", "test", "train")
_COLON = re.compile(r":(?![^\[]*\])")  # the colon of a slice such as test[:100] is no separator
_DRIVE = re.compile(r"^[A-Za-z]:[\\/]")


class DatasetSpec(NamedTuple):
    """Which texts of which data set.

    ``split`` empty stands for the first of validation, test and train that there is.
    """

    name: str
    config: str = ""
    split: str = ""
    column: str = "text"


def parse_dataset(spec: str) -> DatasetSpec:
    """Understand ``NAME[@CONFIG][:SPLIT[:COLUMN]]``.

    NAME may be a file or folder; one that exists is taken by its full name, whatever colons and @ are in it.

    Args:
        spec: what the user wrote.

    Raises:
        InputError: if there is no name or there are too many parts.

    Examples:
        >>> parse_dataset("imdb:test:text")
        DatasetSpec(name='imdb', config='', split='test', column='text')
        >>> parse_dataset("Salesforce/wikitext@wikitext-2-raw-v1:test").config
        'wikitext-2-raw-v1'
    """
    if spec and Path(spec).exists():
        return DatasetSpec(spec)
    drive = _DRIVE.match(spec)
    head = drive.group() if drive else ""
    name, *rest = _COLON.split(spec[len(head) :])
    if len(rest) > 2 or not head + name:
        raise InputError(
            f"--dataset {spec!r}",
            expected="NAME[@CONFIG][:SPLIT[:COLUMN]]",
            got=f"{len(rest) + 1} parts" if name else "no name",
            fix="For instance: --dataset stanfordnlp/imdb:test:text",
        )
    split, column = (*rest, "", "")[:2]
    name, config = (head + name, "") if Path(head + name).exists() else _split_config(head + name)
    return DatasetSpec(name, config, split, column or "text")


def _split_config(name: str) -> tuple[str, str]:
    name, _, config = name.partition("@")
    return name, config


def dataset_texts(spec: str | DatasetSpec, *, rows: int = 4096) -> list[str]:
    """Read texts of a data set, evenly spread over its rows.

    Args:
        spec: ``NAME[@CONFIG][:SPLIT[:COLUMN]]``, or what :func:`parse_dataset` made of it. NAME is a data
            set of the Hugging Face Hub, a .json, .jsonl, .csv, .parquet or .txt file (the first three
            gzipped or not), or a folder that ``datasets`` understands or has written.
        rows: how many rows to read at most.

    Returns:
        A list for :func:`rankwise.auditing.text_batches`: one text for each sequence.

    Raises:
        InputError: if ``datasets`` is not installed, there is no such file and the Hub does not answer
            (found out within 5 seconds), or data set, split or column do not exist, or the column holds no
            text.
    """
    spec = parse_dataset(spec) if isinstance(spec, str) else spec
    need_datasets()
    data = _load(spec)
    if spec.column not in data.column_names:
        raise InputError(
            spec.name,
            expected=f"a column {spec.column!r}",
            got=f"the columns {', '.join(map(repr, data.column_names))}",
            fix=did_you_mean(spec.column, data.column_names),
        )
    texts = data.select(evenly(len(data), rows)).with_format(None)[spec.column]
    return _strings(list(texts), spec)


def _strings(texts: list[Any], spec: DatasetSpec) -> list[str]:
    wrong = next((type(text).__name__ for text in texts if not isinstance(text, str | None)), None)
    if wrong or not texts:
        raise InputError(
            f"column {spec.column!r} of {spec.name}",
            expected="texts",
            got=f"values of type {wrong}" if wrong else "no rows",
            fix="Name the column that holds the text: --dataset NAME:SPLIT:COLUMN",
        )
    return [text or "" for text in texts]


def need_datasets(subject: str = "--dataset") -> None:
    """Refuse to go on without the package ``datasets``.

    Args:
        subject: what an error calls the data.

    Raises:
        InputError: naming the extra that brings it.
    """
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise InputError(
            subject,
            expected="the package datasets to read it",
            got="no such package installed",
            fix="Install it: pip install 'rankwise[train]'; or give a file: --text FILE (text or .jsonl).",
        ) from error


def _load(spec: DatasetSpec) -> Any:
    path = Path(spec.name)
    try:
        if path.is_file():
            return _choose(_from_file(path), spec)
        if path.is_dir():
            return _choose(open_folder(path, spec.config), spec)
        _need_name(spec.name)
        need_hub(
            spec.name,
            expected="a data set: a file, a folder or a name on the Hugging Face Hub",
            fix="Use --text FILE, or --dataset with a local file or folder.",
        )
        return _from_hub(spec)
    except InputError:
        raise
    except Exception as error:  # of datasets, which raises whatever its readers and file systems raise
        first = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        fix = "Check name, configuration and split: NAME@CONFIG:SPLIT:COLUMN; or give a file: --text FILE."
        raise InputError(spec.name, expected="a data set that can be read", got=first, fix=fix) from error


def _need_name(name: str) -> None:
    """Refuse what is plainly meant as a path: the Hub would be asked for nothing."""
    if name.startswith(("/", ".", "~")) or _DRIVE.match(name) or _suffix(Path(name)) in _READERS:
        raise InputError(name, expected="a data file or folder", got="no such file", fix="Check the path.")


def _suffix(path: Path) -> str:
    return next((s.lower() for s in reversed(path.suffixes) if s.lower() != ".gz"), "")


def _from_file(path: Path) -> dict[str, Any]:
    from datasets import Dataset

    suffix = _suffix(path)
    if suffix not in _READERS:
        known = ", ".join(_READERS)
        raise InputError(
            str(path), expected=f"a data file ({known})", got=f"{suffix or 'no'} ending", fix="Convert it."
        )
    # not load_dataset("json", …): that counts the use on the Hub, and waits for it where there is no network
    return {"train": getattr(Dataset, f"from_{_READERS[suffix]}")(str(path))}


def open_folder(path: Path, config: str = "") -> Mapping[str, Any]:
    """Open the splits of a folder that ``datasets`` understands or has written.

    Args:
        path: the folder.
        config: which of its configurations, where it has some.
    """
    from datasets import Dataset, load_dataset, load_from_disk

    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        saved = load_from_disk(str(path))
        return {"train": saved} if isinstance(saved, Dataset) else saved
    return load_dataset(str(path), config or None)


def _from_hub(spec: DatasetSpec) -> Any:
    from datasets import get_dataset_split_names, load_dataset

    config = spec.config or None
    split = spec.split or _preferred(get_dataset_split_names(spec.name, config))
    return load_dataset(spec.name, config, split=split)


def _choose(splits: Mapping[str, Any], spec: DatasetSpec) -> Any:
    split = spec.split or _preferred(list(splits))
    if split not in splits:
        fix = did_you_mean(split, splits)
        raise InputError(spec.name, expected=f"a split {split!r}", got=f"{', '.join(splits)}", fix=fix)
    return splits[split]


def _preferred(names: list[str]) -> str:
    return next((name for name in _PREFERRED if name in names), names[0])
