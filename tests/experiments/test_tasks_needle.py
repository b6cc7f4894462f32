"""Needle in a haystack: the answer is in the sequence once, at its depth, and only there is a label."""

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


def test_the_sentence_answers_the_question_and_only_the_answer_has_labels(file: Path) -> None:
    task = needle(file, train=20, test=20, length=200)
    boundary = int(len(TEXT) * 0.9)
    for split, part in ((task.train, TEXT[:boundary]), (task.test, TEXT[boundary:])):
        for item in split:
            written = bytes((item["input_ids"] - 3).tolist()).decode()
            [sentence], [question] = SENTENCE.finditer(written), QUESTION.finditer(written)
            assert sentence.groups() == question.groups()
            assert written[: sentence.start()] + written[sentence.end() : question.start()] in part
            labelled = item["labels"] != -100
            assert labelled.nonzero().flatten().tolist() == list(range(194, 200))
            assert item["labels"][labelled].tolist() == item["input_ids"][labelled].tolist()
    assert task.record["sha256"] == SHA256


@pytest.mark.parametrize("depth", [0, 0.25, 1.0])
def test_the_sentence_is_at_its_depth(file: Path, depth: float) -> None:
    for item in needle(file, train=4, test=4, length=200, depth=depth).test:
        written = bytes((item["input_ids"] - 3).tolist()).decode()
        [sentence], [question] = SENTENCE.finditer(written), QUESTION.finditer(written)
        room = question.start() - len(sentence.group())
        assert sentence.start() == round(depth * room)


def test_depths_are_drawn_over_the_whole_passage_and_answers_by_digit(file: Path) -> None:
    items = list(needle(file, train=1, test=400, length=120).test)
    written = [bytes((item["input_ids"] - 3).tolist()).decode() for item in items]
    found = [SENTENCE.search(text) for text in written]
    room = QUESTION.search(written[0]).start() - len(found[0].group())
    depths = np.array([one.start() / room for one in found])
    assert abs(depths.mean() - 0.5) < 5 * (1 / 12 / 400) ** 0.5
    assert depths.min() < 0.05 < 0.95 < depths.max()
    digits = np.bincount([int(digit) for one in found for digit in one[2]], minlength=10)
    assert np.abs(digits - 200).max() < 5 * (2000 * 0.1 * 0.9) ** 0.5


@pytest.mark.parametrize("length", [79, 600])
def test_lengths_without_room_are_refused(file: Path, length: int) -> None:
    assert needle(file, train=1, test=1, length=80).length == 80
    with pytest.raises(ValueError, match="expected from 1 to"):
        needle(file, train=1, test=1, length=length)
