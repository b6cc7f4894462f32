"""Needle in a haystack: a sentence somewhere in a long text, and at the end the question for what it said."""

from pathlib import Path
from typing import Any

import numpy as np

from rankwise.cli.load_data import read_text
from rankwise.data.tasks.checks import need_number, need_share, need_whole
from rankwise.data.tasks.examples import IGNORED, Examples
from rankwise.data.tasks.language import BYTE_VOCABULARY, byte_ids
from rankwise.data.tasks.task import Task, make_task
from rankwise.errors import InputError

STATEMENT, QUESTION = "\nThe code of {key} is", "\nWhat is the code of {key}? The code of {key} is"
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))
DIGITS = 5


def needle(
    source: str | Path,
    train: int = 10_000,
    test: int = 1_000,
    *,
    length: int = 1024,
    depth: float | int | None = None,
    tokenizer: Any = None,
    validation_share: float | int = 0.1,
    seed: int = 0,
) -> Task:
    """Hide a sentence in a text and ask for it at the end (Kamradt 2023; Mohtashami and Jaggi 2023).

    A sequence is a passage from a random place of the text with ``The code of KEY is VALUE.`` inside it, four
    letters and five digits drawn for each sequence, and then the question with its answer. Only the tokens of
    the answer have labels. Passages for training and for testing come from different parts of the file. The
    sentence stands between two tokens, at the given share of the passage.

    Chance: 1/10 of the digits, one byte each.

    Args:
        source: a UTF-8 text file, the haystack.
        train: sequences to train on.
        test: sequences to be tested on.
        length: tokens of a sequence.
        depth: 0 = the sentence comes first, 1 = right before the question; None = drawn for each sequence.
        tokenizer: of transformers; None = bytes, as ids of ByT5Tokenizer.
        validation_share: of the characters, for testing.
        seed: of all draws; the test split does not depend on ``train``.

    Raises:
        InputError: if the file cannot be read, a part of it is shorter than a sequence, or the sentence
            has no room.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a.txt").write_text("to be or not to be " * 99)
        ...     task = needle(Path(folder) / "a.txt", 1, 1, length=100, depth=0.5)
        >>> item = task.test[0]
        >>> bytes((item["labels"][item["labels"] != -100] - 3).tolist()).decode()
        ' 38298'
    """
    need_whole("train", train)
    need_whole("test", test)
    need_share("validation_share", validation_share)
    if depth is not None:
        need_number("depth", depth, 0, 1, example=0.5)
    need_whole("length", length)
    need_whole("seed", seed, 0)
    text = read_text(source)
    boundary = int(len(text) * (1 - validation_share))
    splits = [
        _sequences(np.random.default_rng([seed, part]), rows, passage, length, depth, tokenizer)
        for part, (rows, passage) in enumerate(((train, text[:boundary]), (test, text[boundary:])))
    ]
    return make_task(
        "needle",
        "language",
        splits[0],
        splits[1],
        length=length,
        source=Path(source).name,
        seed=seed,
        options={"length": length, "depth": depth, "validation_share": validation_share},
        vocab_size=BYTE_VOCABULARY if tokenizer is None else len(tokenizer),
        pad_token_id=0 if tokenizer is None else tokenizer.pad_token_id,
    )


def _encode(texts: list[str], tokenizer: Any) -> list[np.ndarray]:
    if tokenizer is None:
        return [byte_ids(text).astype(np.int32) for text in texts]
    rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [np.array(row, dtype=np.int32) for row in rows]


def _sequences(
    draw: np.random.Generator, rows: int, text: str, length: int, depth: float | int | None, tokenizer: Any
) -> Examples:
    [hay] = _encode([text], tokenizer)
    [stop] = _encode(["."], tokenizer)
    keys = ["".join(row) for row in LETTERS[draw.integers(0, 26, (rows, 4))]]
    values = [" " + "".join(map(str, row)) for row in draw.integers(0, 10, (rows, DIGITS))]
    depths = draw.random(rows) if depth is None else np.full(rows, depth)
    statements = _encode([STATEMENT.format(key=key) for key in keys], tokenizer)
    questions = _encode([QUESTION.format(key=key) for key in keys], tokenizer)
    answers = _encode(values, tokenizer)
    ids = np.empty((rows, length), dtype=np.int32)
    labels = np.full((rows, length), IGNORED, dtype=np.int32)
    parts = zip(statements, questions, answers, depths, draw.random(rows), strict=True)
    for row, (statement, question, answer, share, place) in enumerate(parts):
        sentence = np.concatenate([statement, answer, stop])
        room = length - len(sentence) - len(question) - len(answer)
        if room < 1:
            fix = f"Give length={length - room + 1} or more."
            raise InputError(
                "length", expected="room for sentence, question and answer", got=str(length), fix=fix
            )
        if len(hay) < room:
            fix = "Give a longer text, or a smaller length."
            raise InputError(
                "the text", expected=f"{room} tokens in each part", got=f"{len(hay)} tokens", fix=fix
            )
        start = int(place * (len(hay) - room + 1))
        at = round(share * room)
        before, after = hay[start : start + at], hay[start + at : start + room]
        ids[row] = np.concatenate([before, sentence, after, question, answer])
        labels[row, -len(answer) :] = answer
    return Examples({"input_ids": ids, "labels": labels})
