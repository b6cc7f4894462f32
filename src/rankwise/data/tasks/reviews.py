"""IMDB reviews as bytes: the task Text of Long Range Arena."""

from pathlib import Path
from typing import Any

import numpy as np

from rankwise.cli.load_data import read_rows, row_text
from rankwise.data.tasks.checks import need_whole
from rankwise.data.tasks.examples import Examples
from rankwise.data.tasks.language import BYTE_VOCABULARY, byte_ids
from rankwise.data.tasks.sources import HubData, chosen, local_files, open_splits
from rankwise.data.tasks.task import Task, make_task
from rankwise.errors import InputError

IMDB = HubData("stanfordnlp/imdb", "text", "label", 83, ("train.jsonl.gz", "test.jsonl.gz"))


def imdb_bytes(
    source: str | Path | None = None,
    *,
    length: int = 4096,
    train_examples: int | None = None,
    test_examples: int | None = None,
    seed: int = 0,
) -> Task:
    """IMDB reviews as bytes, in two classes (Maas et al. 2011; Tay et al. 2021, section 2.1.2).

    From a folder with ``train.jsonl.gz`` and ``test.jsonl.gz``, or the two unpacked, one object a line with
    ``text`` and ``label`` (1 = positive, 0 = negative), a folder written by ``datasets``, or, without a
    source, from the Hugging Face Hub (25,000 and 25,000 reviews). Ids are those of ByT5Tokenizer: byte + 3,
    0 for padding. A review longer than ``length`` keeps its beginning.

    Args:
        source: a folder, or None.
        length: the most bytes of a review.
        train_examples: so many of the training split, drawn at random; None = all.
        test_examples: likewise of the test split.
        seed: of these draws.

    Raises:
        InputError: if source or Hub does not give these reviews.
    """
    need_whole("length", length)
    need_whole("seed", seed, 0)
    files = None if source is None else local_files(source, IMDB)
    if files is not None:
        parts = [_read_labelled_rows(file) for file in files]
        origin = " and ".join(file.name for file in files)
    else:
        splits = open_splits(source, IMDB)
        parts = [(list(splits[split]["text"]), list(splits[split]["label"])) for split in ("train", "test")]
        origin = IMDB.repository if source is None else Path(source).name
    for (_, labels), split in zip(parts, ("train", "test"), strict=True):
        if set(labels) - {0, 1}:
            got = ", ".join(map(str, sorted(set(labels))[:8]))
            raise InputError(
                f"labels of {origin}, {split}", expected="0 and 1", got=got, fix="Give each review its class."
            )
    wanted = {"train_examples": train_examples, "test_examples": test_examples}
    examples = [
        _bytes(texts, labels, chosen(option, len(texts), count, seed, part), length)
        for part, ((texts, labels), (option, count)) in enumerate(zip(parts, wanted.items(), strict=True))
    ]
    return make_task(
        "imdb_bytes",
        "sequence",
        examples[0],
        examples[1],
        length=length,
        source=origin,
        seed=seed if any(wanted.values()) else None,
        options={"length": length, **wanted},
        vocab_size=BYTE_VOCABULARY,
        num_labels=2,
        pad_token_id=0,
    )


def _read_labelled_rows(path: Path) -> tuple[list[str], list[int]]:
    """Return texts and classes, the fields `text` and `label` of each row."""
    texts, labels = [], []
    for where, row in read_rows(path):
        text, label = row_text(row, where), row.get("label")
        if not text or isinstance(label, bool) or not isinstance(label, int):
            got = f"{label!r} in 'label'" if text else "an empty text"
            expected, fix = 'a text in "text" and a whole number in "label"', "Correct the line or omit it."
            raise InputError(where, expected=expected, got=got, fix=fix)
        texts.append(text)
        labels.append(label)
    return texts, labels


def _bytes(texts: list[str], labels: list[int], which: np.ndarray, length: int) -> Examples:
    rows: list[Any] = [byte_ids(texts[i])[:length] for i in which]
    ids = np.zeros((len(rows), length), dtype=np.uint8)
    for row, content in zip(ids, rows, strict=True):
        row[: len(content)] = content
    lengths = np.array([len(content) for content in rows])
    return Examples({"input_ids": ids, "labels": np.array([labels[i] for i in which])}, lengths)
