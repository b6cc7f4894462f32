"""A trained BPE sees the training part alone, loses nothing, and is the same each time; others are loaded."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, ByT5Tokenizer

from rankwise.data import tasks
from rankwise.data.tasks.tokenizers import load_tokenizer, tokenizer_sha256, train_tokenizer
from rankwise.errors import InputError

TRAIN = ["to be, or not to be: that is the question"] * 9
TOKENIZER = train_tokenizer(TRAIN, 280)


@settings(deadline=None, max_examples=30)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_gives_every_text_back(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.decode(ids) == text
    assert len(ids) <= len(text.encode())


def test_the_test_part_has_no_say() -> None:
    one, other = (
        tasks.token_language_model([*TRAIN, last * 30], vocab_size=290, length=8) for last in ("zyx", "whale")
    )
    assert one.tokenizer.get_vocab() == other.tokenizer.get_vocab()
    digests = [task.provenance.options["tokenizer_sha256"] for task in (one, other)]
    assert digests[0] == digests[1] == tokenizer_sha256(train_tokenizer(TRAIN, 290))
    assert digests[0] != tokenizer_sha256(train_tokenizer([*TRAIN, "zyx" * 30], 290)), "it could have one"


def test_two_builds_give_the_same_ids() -> None:
    documents = [*TRAIN, "nobler in the mind"]
    one, other = (
        tasks.token_language_model(documents, vocab_size=270, length=8, windows=5, seed=3) for _ in range(2)
    )
    assert one.provenance == other.provenance
    assert (one.vocab_size, len(one.train), one.provenance.seed) == (270, 5, 3)


def test_bytes_per_token_are_those_of_the_test_part() -> None:
    documents = [*TRAIN, "nobler in the mind", "ü"]
    for tokenizer in (ByT5Tokenizer(), None):
        task = tasks.token_language_model(documents, tokenizer, length=2, validation_share=0.15)
        tokens = sum(
            len(task.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in documents[-2:]
        )
        assert task.bytes_per_token == pytest.approx(20 / (tokens + 2))  # two end marks


def test_a_saved_tokenizer_is_loaded_without_a_network(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "bpe")
    assert tokenizer_sha256(load_tokenizer(tmp_path / "bpe")) == tokenizer_sha256(TOKENIZER)
    assert AutoTokenizer.from_pretrained(tmp_path / "bpe").eos_token == "<|endoftext|>"
    task = tasks.token_language_model([*TRAIN, "the end"], str(tmp_path / "bpe"), length=2)
    assert (task.vocab_size, task.provenance.options["tokenizer"]) == (280, "bpe")


def test_what_is_no_tokenizer_is_refused_in_words(tmp_path: Path) -> None:
    for place, got in (
        (tmp_path / "none", "got no such folder"),
        (tmp_path, "got a folder with nothing in it"),
        (Path(__file__), "got a file"),
    ):
        with pytest.raises(InputError, match=rf"expected a folder with tokenizer\.json.*, {got}"):
            load_tokenizer(place)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"got a folder with tokenizer\.json \("):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match=r"vocab_size: expected a whole number, 257 or more, got 256"):
        tasks.token_language_model(TRAIN, vocab_size=256)
    with pytest.raises(InputError, match=r"vocab_size: expected none beside a tokenizer, got 300"):
        tasks.token_language_model(TRAIN, TOKENIZER, vocab_size=300)
    with pytest.raises(InputError, match=r"the document 'a.*half of a surrogate pair at character 1"):
        tasks.token_language_model([*TRAIN, "a\ud800"])
