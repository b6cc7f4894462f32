"""Language modeling: every token but the first is predicted once, and the split is by position."""

from pathlib import Path

import numpy as np
import pytest
from experiments.tasks.text import byte_text, cut, token_text, train_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st


@given(st.integers(2, 40), st.integers(0, 60))
@settings(max_examples=20, deadline=None)
def test_windows_predict_every_token_but_the_first_once(length: int, more: int) -> None:
    ids = np.arange(length + more)
    predicted = [int(token) for item in cut(ids, length, "numbers") for token in item["labels"][1:]]
    assert predicted == list(range(1, len(predicted) + 1))
    assert len(ids) - 1 - len(predicted) < length - 1


def test_the_split_is_by_characters_and_the_bytes_come_back(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    text = "naïve café — " * 30
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    task = byte_text(tmp_path / "a.txt", length=32)
    boundary = int(len(text) * 0.9)
    decode = ByT5Tokenizer().decode
    assert decode(task.train.arrays["ids"]) == text[:boundary]
    assert decode(task.test.arrays["ids"]) == text[boundary:]
    assert task.train[0]["input_ids"].tolist() == task.train[0]["labels"].tolist()
    assert (task.vocab_size, task.chance, task.record["source"]) == (259, None, "a.txt")


def test_random_windows_are_drawn_by_the_seed_from_the_training_part(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(chr(97 + i % 26) for i in range(500)))
    drawn = [byte_text(tmp_path / "a.txt", length=8, windows=300, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0].record == drawn[1].record
    assert drawn[0].record["sha256"] != drawn[2].record["sha256"]
    starts = drawn[0].train.arrays["starts"]
    assert 0 <= starts.min() <= starts.max() <= 450 - 8
    assert len(starts) == 300
    assert len(np.unique(starts)) > 150


@pytest.mark.parametrize("vocab_size", [257, 300])
def test_a_tokenizer_restores_every_text(vocab_size: int) -> None:
    tokenizer = train_tokenizer("to be or not to be, that is the question " * 9, vocab_size)
    text = "be ü 🦉\n\x00 <b>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= vocab_size


def test_the_training_part_decides_the_tokens_and_end_marks_count(tmp_path: Path) -> None:
    text = "to be or not to be, that is the question " * 60
    (tmp_path / "a.txt").write_text(text)
    task = token_text(tmp_path / "a.txt", length=8, vocab_size=300)
    boundary = int(len(text) * 0.9)
    tokenizer = train_tokenizer(text[:boundary], 300)
    ids = task.test.arrays["ids"].tolist()
    assert tokenizer.decode(ids) == text[boundary:] + tokenizer.eos_token
    assert ids.count(tokenizer.eos_token_id) == 1
    assert task.bytes_per_token == pytest.approx(len(text[boundary:]) / len(ids))
    assert task.vocab_size == len(tokenizer)
