"""Language modelling of bytes: every byte but the first is predicted once, and the split is by position."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.data import tasks
from rankwise.data.tasks.language import cut
from rankwise.errors import InputError


@given(st.integers(2, 40), st.integers(0, 60))
@settings(max_examples=30, deadline=None)
def test_windows_predict_every_token_but_the_first_once_and_leave_less_than_a_window(
    length: int, more: int
) -> None:
    ids = np.arange(length + more)
    windows = cut(ids, length, "numbers")
    predicted = [int(token) for item in windows for token in item["labels"][1:]]
    assert predicted == list(range(1, len(predicted) + 1))
    assert len(ids) - 1 - len(predicted) < length - 1


def test_the_split_is_by_characters_and_the_bytes_come_back(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    text = "naïve café — " * 30
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    task = tasks.byte_language_model(tmp_path / "a.txt", length=32, validation_share=0.25)
    boundary = int(len(text) * 0.75)
    decode = ByT5Tokenizer().decode
    assert decode(task.train.arrays["ids"]) == text[:boundary]
    assert decode(task.test.arrays["ids"]) == text[boundary:]
    assert task.train[0]["input_ids"].tolist() == task.train[0]["labels"].tolist()
    assert (task.vocab_size, task.chance, task.provenance.source) == (259, None, "a.txt")


def test_random_windows_are_drawn_by_the_seed_from_the_training_part(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(chr(97 + i % 26) for i in range(500)))
    drawn = [
        tasks.byte_language_model(tmp_path / "a.txt", length=8, windows=300, seed=seed) for seed in (0, 0, 1)
    ]
    assert len(drawn[0].train) == 300
    assert drawn[0].provenance == drawn[1].provenance
    assert drawn[0].provenance.sha256 != drawn[2].provenance.sha256
    starts = drawn[0].train.arrays["starts"]
    assert starts.min() >= 0
    assert starts.max() <= 450 - 8
    assert len(np.unique(starts)) > 150


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", {}, "an empty file"),
        (
            b"short",
            {},
            r"a\.txt, training part: expected 256 tokens for one window, got 4 tokens\. .*or 4 tokens or l",
        ),
        (b"\xff\xfe\x00", {}, "UTF-8"),
        (b"long " * 99, {"length": 1}, "length: expected a whole number, 2 or more, got 1"),
        (b"long " * 99, {"validation_share": 1.0}, r"validation_share: .* got 1\.0"),
        (b"long " * 99, {"windows": 0}, "windows: expected a whole number, 1 or more, got 0"),
        (b"long " * 99, {"length": 60}, "validation part: expected 60 tokens for one window, got 50 tokens"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    tmp_path: Path, content: bytes, options: dict[str, object], message: str
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(InputError, match=message):
        tasks.byte_language_model(tmp_path / "a.txt", **options)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.txt: expected a text file, got no such file"):
        tasks.byte_language_model(tmp_path / "none.txt")
