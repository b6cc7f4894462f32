"""Needle in a haystack: a sentence in a long text, and at the end the question for its content."""

from pathlib import Path

import numpy as np

from experiments.tasks.task import IGNORED, Examples, Task, make_task
from experiments.tasks.text import BYTE_VOCABULARY, TEST_SHARE, byte_ids, read_text, split_text

STATEMENT, QUESTION = "\nThe code of {key} is", "\nWhat is the code of {key}? The code of {key} is"
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))
DIGITS = 5


def needle(path: Path, *, train: int = 10_000, test: int = 1_000, length: int = 1024, seed: int = 0) -> Task:
    """Return passages with a hidden sentence, and a question for it (Kamradt 2023; Mohtashami, Jaggi 2023).

    A passage contains `The code of KEY is VALUE.`, four letters and five digits drawn for each sequence. The
    question with its answer follows the passage. Only the bytes of the answer have labels. Training and test
    use different parts of the file, and the test split does not depend on `train`.
    """
    passages = zip((train, test), split_text(read_text(path)), strict=True)
    splits = [
        _sequences(np.random.default_rng([seed, part]), rows, byte_ids(passage), length)
        for part, (rows, passage) in enumerate(passages)
    ]
    return make_task(
        "needle", "language", *splits, length=length, source=path.name, seed=seed,
        options={"length": length, "depth": None, "validation_share": TEST_SHARE},
        vocab_size=BYTE_VOCABULARY, pad_token_id=0,
    )  # fmt: skip


def _sequences(draw: np.random.Generator, rows: int, hay: np.ndarray, length: int) -> Examples:
    keys = ["".join(row) for row in LETTERS[draw.integers(0, 26, (rows, 4))]]
    values = [" " + "".join(map(str, row)) for row in draw.integers(0, 10, (rows, DIGITS))]
    depths = draw.random(rows)
    ids = np.empty((rows, length), dtype=np.int32)
    labels = np.full((rows, length), IGNORED, dtype=np.int32)
    for row, (key, value, share, place) in enumerate(
        zip(keys, values, depths, draw.random(rows), strict=True)
    ):
        answer, question = byte_ids(value), byte_ids(QUESTION.format(key=key))
        sentence = byte_ids(f"{STATEMENT.format(key=key)}{value}.")
        room = length - len(sentence) - len(question) - len(answer)
        if not 1 <= room <= len(hay):
            raise ValueError(f"expected from 1 to {len(hay)} bytes of the text, got room for {room}")
        start = int(place * (len(hay) - room + 1))
        at = round(share * room)
        before, after = hay[start : start + at], hay[start + at : start + room]
        ids[row] = np.concatenate([before, sentence, after, question, answer])
        labels[row, -len(answer) :] = answer
    return Examples({"input_ids": ids, "labels": labels})
