"""IMDB reviews as bytes (Maas et al. 2011): the task Text of Long Range Arena."""

import gzip
import json
from pathlib import Path

import numpy as np

from experiments.tasks.task import Examples, Task, choose, make_task
from experiments.tasks.text import BYTE_VOCABULARY, byte_ids

FILES = ("train.jsonl.gz", "test.jsonl.gz")


def imdb_bytes(
    folder: Path,
    *,
    length: int,
    train_examples: int | None = None,
    test_examples: int | None = None,
    seed: int = 0,
) -> Task:
    """Return the first `length` bytes of reviews, in two classes (Tay et al. 2021, section 2.1.2).

    The files hold lines with `text` and `label` (1: positive). Examples are drawn at random; None: all.
    """
    wanted = {"train_examples": train_examples, "test_examples": test_examples}
    splits = []
    for part, (name, count) in enumerate(zip(FILES, wanted.values(), strict=True)):
        with gzip.open(folder / name, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        chosen = [rows[place] for place in choose(len(rows), count, seed, part)]
        contents = [byte_ids(row["text"])[:length] for row in chosen]
        ids = np.zeros((len(contents), length), dtype=np.uint8)
        for row, content in zip(ids, contents, strict=True):
            row[: len(content)] = content
        lengths = np.array([len(content) for content in contents])
        labels = np.array([row["label"] for row in chosen])
        splits.append(Examples({"input_ids": ids, "labels": labels}, lengths))
    return make_task(
        "imdb_bytes",
        "sequence",
        *splits,
        length=length,
        source=" and ".join(FILES),
        seed=seed if any(wanted.values()) else None,
        options={"length": length, **wanted},
        vocab_size=BYTE_VOCABULARY,
        num_labels=2,
        pad_token_id=0,
    )
