"""Packed documents: every token and end mark is predicted once, and the last ones are for testing."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unchecked import unchecked
from transformers import ByT5Tokenizer

from rankwise.data import tasks
from rankwise.errors import InputError

DOCUMENTS = ["first one", "", "the second", "ü", "the last of them"]


def stream(documents: list[str]) -> list[int]:
    return [i for text in documents if text for i in (*(b + 3 for b in text.encode()), 1)]


def test_documents_are_joined_by_end_marks_and_split_by_position() -> None:
    task = tasks.token_language_model(DOCUMENTS, ByT5Tokenizer(), length=6, validation_share=0.2)
    for split, documents in ((task.train, DOCUMENTS[:4]), (task.test, DOCUMENTS[4:])):
        ids = [int(i) for item in split for i in item["input_ids"][1:]]
        expected = stream(documents)
        assert ids == expected[1 : len(ids) + 1]
        assert len(expected) - 1 - len(ids) < 5
    assert (task.vocab_size, task.pad_token_id, task.num_labels) == (len(ByT5Tokenizer()), 0, None)


def test_files_give_the_same_as_documents(tmp_path: Path) -> None:
    written = [text for text in DOCUMENTS if text]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in written))
    options = {"length": 6, "validation_share": 0.2}
    from_file = tasks.token_language_model(tmp_path / "a.jsonl", ByT5Tokenizer(), **options)
    given = tasks.token_language_model(written, ByT5Tokenizer(), **options)
    assert from_file.provenance.sha256 == given.provenance.sha256
    assert from_file.provenance.source == "a.jsonl"
    (tmp_path / "a.txt").write_text("abcdefghijklmnopqrst")
    one = tasks.token_language_model(tmp_path / "a.txt", ByT5Tokenizer(), length=5, validation_share=0.25)
    assert one.train.arrays["ids"].tolist() == stream(["abcdefghijklmno"])
    assert one.test.arrays["ids"].tolist() == stream(["pqrst"])


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        (["only one document"], {}, "documents: expected two or more, .* got 1"),
        (["a", "b"], {}, "the training part: expected 256 tokens for one window, got 2 tokens"),
        (["a", ""], {"length": 2}, "the validation part: expected 2 tokens for one window, got 0 tokens"),
        (["a", "b"], {"validation_share": 0.0}, r"validation_share: .* got 0\.0"),
        (["", ""], {"length": 2}, r"got 0 tokens\. Give a longer text\.$"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    documents: list[str], options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        tasks.token_language_model(documents, ByT5Tokenizer(), **options)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (3, "expected a text file, .* got int"),
        (None, "expected a text file, .* got NoneType"),
        (b"text", "expected a text file, .* got bytes"),
        ([None, "b"], "the document None: expected text, got NoneType"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(documents: Any, message: str) -> None:
    with unchecked(), pytest.raises(InputError, match=message):
        tasks.token_language_model(documents, ByT5Tokenizer())


def test_a_tokenizer_without_an_end_mark_is_refused() -> None:
    with pytest.raises(InputError, match=r"the tokenizer: expected an end mark \(eos_token_id\), got none"):
        tasks.token_language_model(DOCUMENTS, SimpleNamespace(eos_token_id=None))
