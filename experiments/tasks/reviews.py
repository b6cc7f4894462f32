"""IMDB reviews as bytes (Maas et al. 2011): the task Text of Long Range Arena."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tasks.task import Examples, Task, chosen, make_task
from experiments.tasks.text import BYTE_VOCABULARY, byte_ids
from rankwise.errors import InputError

FILES = ("train.jsonl.gz", "test.jsonl.gz")


def imdb_bytes(
    folder: Path,
    *,
    length: int,
    train_examples: int | None = None,
    test_examples: int | None = None,
    seed: int = 0,
) -> Task:
    """Return reviews as bytes, in two classes (Tay et al. 2021, section 2.1.2).

    A review longer than `length` keeps its beginning.

    Args:
        folder: holds `train.jsonl.gz` and `test.jsonl.gz`, lines with `text` and `label` (1: positive).
        length: maximum number of bytes.
        train_examples: number of training examples, drawn at random; None: all.
        test_examples: the same for the test split.
        seed: of these draws.
    """
    wanted = {"train_examples": train_examples, "test_examples": test_examples}
    train, test = (
        _bytes(_read(folder / name), count, seed, part, length)
        for part, (name, count) in enumerate(zip(FILES, wanted.values(), strict=True))
    )
    return make_task(
        "imdb_bytes",
        "sequence",
        train,
        test,
        length=length,
        source=" and ".join(FILES),
        seed=seed if any(wanted.values()) else None,
        options={"length": length, **wanted},
        vocab_size=BYTE_VOCABULARY,
        num_labels=2,
        pad_token_id=0,
    )


def _read(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        fix = 'Write the reviews of IMDB as lines {"text": …, "label": 0 or 1}.'
        raise InputError(str(file), expected="a file of reviews", got="no such file", fix=fix)
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _bytes(rows: list[dict[str, Any]], count: int | None, seed: int, part: int, length: int) -> Examples:
    which = [rows[place] for place in chosen(len(rows), count, seed, part)]
    contents = [byte_ids(row["text"])[:length] for row in which]
    ids = np.zeros((len(contents), length), dtype=np.uint8)
    for row, content in zip(ids, contents, strict=True):
        row[: len(content)] = content
    lengths = np.array([len(content) for content in contents])
    return Examples({"input_ids": ids, "labels": np.array([row["label"] for row in which])}, lengths)
