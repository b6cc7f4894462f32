"""Where real examples come from: a file or folder of the user's, or a data set of the Hugging Face Hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rankwise.cli.load_data import open_folder
from rankwise.cli.load_model import need_hub
from rankwise.data.tasks.checks import need_whole
from rankwise.errors import InputError, did_you_mean, need_package


class HubData(NamedTuple):
    """A data set of the Hugging Face Hub, and the files that stand in for it.

    ``files`` are what a local folder has to hold where it is not one of ``datasets``; those that end in
    ``.gz`` may be unpacked.
    """

    repository: str
    inputs: str
    labels: str
    megabytes: int
    files: tuple[str, ...]
    config: str = ""

    @property
    def call(self) -> str:
        """The call of ``datasets`` that downloads it."""
        config = f", {self.config!r}" if self.config else ""
        return f"datasets.load_dataset({self.repository!r}{config})"

    @property
    def expected(self) -> str:
        """What has to be there."""
        files = " and ".join(name.replace(".jsonl.gz", ".jsonl[.gz]") for name in self.files)
        return f"{files}, a folder written by `datasets`, or {self.repository} (about {self.megabytes} MB)"

    @property
    def fix(self) -> str:
        """How to come by it."""
        folder = self.files[0].split(".")[0] if len(self.files) == 1 else self.repository.split("/")[-1]
        command = f'python -c "import datasets; {self.call}.save_to_disk({folder!r})"'
        given = f"source={folder!r} (task.path={folder} of a recipe)"
        return f"Where there is a network, run {command}; then give {given}."


def local_files(source: str | Path, data: HubData) -> list[Path] | None:
    """Find the files of a task at a path.

    Args:
        source: a folder that holds them; where there is only one, also the file itself.
        data: which files.

    Returns:
        The files, or None where the path is a folder of ``datasets``.

    Raises:
        InputError: if there is nothing at the path, or neither of both.
    """
    path = Path(source)
    if path.is_file() and len(data.files) == 1:
        return [path]
    if not path.is_dir():
        got = "a file" if path.exists() else "no such file or folder"
        raise InputError(str(path), expected=data.expected, got=got, fix=data.fix)
    either = {name: [path / name, path / name.removesuffix(".gz")] for name in data.files}
    held_of = {name: next((file for file in files if file.is_file()), None) for name, files in either.items()}
    found = [file for file in held_of.values() if file is not None]
    if len(found) == len(data.files):
        return found
    if not found and _is_of_datasets(path):
        return None
    missing = [name for name, file in held_of.items() if file is None]
    held = sorted(child.name for child in path.iterdir())
    got = f"a folder without {' and '.join(missing)} (it holds {', '.join(held[:8]) or 'nothing'})"
    raise InputError(str(path), expected=data.expected, got=got, fix=data.fix)


def _is_of_datasets(path: Path) -> bool:
    return (path / "dataset_dict.json").exists() or any(path.rglob("*.parquet"))


def open_splits(source: str | Path | None, data: HubData) -> Mapping[str, Any]:
    """Open a data set with `datasets`: from a folder, or from the Hub where no source is given.

    Args:
        source: a folder, or None.
        data: which data set.

    Raises:
        InputError: if ``datasets`` is missing, the Hub does not answer and nothing was downloaded before, or
            splits or columns are missing.
    """
    name = data.repository if source is None else str(source)
    need_package("datasets", name, "train")
    if source is None:
        need_hub(name, expected=data.expected, fix=data.fix)
    try:
        splits = open_folder(Path(source)) if source is not None else _download(data)
    except Exception as error:  # of datasets, which raises whatever its readers and file systems raise
        first = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise InputError(name, expected=data.expected, got=first, fix=data.fix) from error
    for split in ("train", "test"):
        if split not in splits:
            fix = did_you_mean(split, splits)
            raise InputError(name, expected=f"a split {split!r}", got=", ".join(splits) or "none", fix=fix)
        columns = splits[split].column_names
        for column in (data.inputs, data.labels):
            if column not in columns:
                fix = did_you_mean(column, columns)
                raise InputError(name, expected=f"a column {column!r}", got=", ".join(columns), fix=fix)
    return splits


def _download(data: HubData) -> dict[str, Any]:
    from datasets import load_dataset

    config = data.config or None
    return {split: load_dataset(data.repository, config, split=split) for split in ("train", "test")}


def chosen(name: str, total: int, wanted: int | None, seed: int, part: int) -> np.ndarray:
    """Which examples of a split to take: all in their order, or some drawn at random.

    Args:
        name: of the option, for the error.
        total: how many there are.
        wanted: how many to take, or None for all.
        seed: of the draw.
        part: 0 for training, 1 for testing: their draws are independent.

    Raises:
        InputError: if there are fewer than wanted.

    Examples:
        >>> chosen("test_examples", 3, None, 0, 1)
        array([0, 1, 2])
    """
    if wanted is None:
        return np.arange(total)
    need_whole(name, wanted, 1, total)
    return np.random.default_rng([seed, part]).permutation(total)[:wanted]
