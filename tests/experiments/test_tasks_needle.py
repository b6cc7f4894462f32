"""Needle in a haystack: the sentence occurs once, at its depth, and only the answer has labels."""

import re
from pathlib import Path

import numpy as np
import pytest
from experiments.tasks.needle import needle

SHA256 = "2428e369be156154bcb7430e580939301998cd2dc7ef93ee65973b7ed6424bcf"
TEXT = "".join(chr(97 + i * i % 26) + " " * (i % 7 == 0) for i in range(4000))
SENTENCE = re.compile(r"\nThe code of ([a-z]{4}) is (\d{5})\.")
QUESTION = re.compile(r"\nWhat is the code of ([a-z]{4})\? The code of \1 is (\d{5})$")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "hay.txt").write_text(TEXT)
    return tmp_path / "hay.txt"


def parts(item: dict) -> tuple[str, re.Match, re.Match]:
    """Return the written passage, its sentence and its question."""
    written = bytes((item["input_ids"] - 3).tolist()).decode()
    [sentence], [question] = SENTENCE.finditer(written), QUESTION.finditer(written)
    return written, sentence, question


def test_the_sentence_answers_the_question_and_only_the_answer_has_labels(file: Path) -> None:
    task = needle(file, train=20, test=20, length=200)
    boundary = int(len(TEXT) * 0.9)
    for split, part in ((task.train, TEXT[:boundary]), (task.test, TEXT[boundary:])):
        for item in split:
            written, sentence, question = parts(item)
            assert sentence.groups() == question.groups()
            assert written[: sentence.start()] + written[sentence.end() : question.start()] in part
            labelled = item["labels"] != -100
            assert labelled.nonzero().flatten().tolist() == list(range(194, 200))
            assert item["labels"][labelled].tolist() == item["input_ids"][labelled].tolist()
    assert task.record["sha256"] == SHA256


def test_depths_and_digits_are_uniform(file: Path) -> None:
    found = [parts(item) for item in needle(file, train=1, test=400, length=120).test]
    room = found[0][2].start() - len(found[0][1].group())
    depths = np.array([sentence.start() / room for _, sentence, _ in found])
    assert abs(depths.mean() - 0.5) < 5 * (1 / 12 / 400) ** 0.5
    assert depths.min() < 0.05 < 0.95 < depths.max()
    digits = np.bincount([int(digit) for _, sentence, _ in found for digit in sentence[2]], minlength=10)
    assert np.abs(digits - 200).max() < 5 * (2000 * 0.1 * 0.9) ** 0.5
