"""Texts become batches: every token once, padding on the right, special tokens around each sequence."""

from collections.abc import Callable
from itertools import chain, pairwise

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    BertForMaskedLM,
    ByT5Tokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5ForConditionalGeneration,
)

from rankwise.auditing.batches import evenly, model_batches, text_batches
from rankwise.errors import InputError

LETTERS = "abcdefgh"


def letter_tokenizer(template: str = "$A", **special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters with special tokens around a text by ``template``; [UNK] is token 0."""
    vocabulary = {token: i for i, token in enumerate(("[UNK]", "[CLS]", "[SEP]", "[END]", *LETTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split("", "isolated")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=4, **special)


BARE = letter_tokenizer(eos_token="[END]")
FRAMED = letter_tokenizer("[CLS] $A [SEP]", pad_token="[UNK]")
BYTES = ByT5Tokenizer(extra_ids=0)
FRAMES = [(BARE, [], []), (FRAMED, [1], [2]), (BYTES, [], [1])]
KINDS = pytest.mark.parametrize(("tokenizer", "before", "after"), FRAMES, ids=["bare", "framed", "bytes"])

texts = st.text(LETTERS, min_size=1, max_size=60)
sizes = st.integers(1, 12)


def rows_of(batches) -> list[list[int]]:
    """Return the ids of every sequence without its padding."""
    return [
        ids[mask.bool()].tolist()
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def bare(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


@KINDS
@given(text=texts, room=sizes, batch_size=sizes)
def test_windows_are_disjoint_in_order_and_cover_the_text(
    tokenizer, before, after, text: str, room: int, batch_size: int
) -> None:
    tokens = room + len(before) + len(after)
    ids = bare(tokenizer, text)
    if len(ids) < room:
        return
    rows = rows_of(text_batches(text, tokenizer, tokens=tokens, sequences=10**6, batch_size=batch_size))
    for row in rows:
        assert len(row) == tokens
        assert row[: len(before)] == before
        assert row[tokens - len(after) :] == after
    joined = list(chain.from_iterable(row[len(before) : tokens - len(after)] for row in rows))
    assert joined == ids[: len(joined)]
    assert len(ids) - len(joined) < room  # the rest does not fill a window


@given(text=texts, tokens=st.integers(2, 12), sequences=sizes)
def test_fewer_windows_are_some_of_all_windows_in_order(text: str, tokens: int, sequences: int) -> None:
    if len(text) < tokens - 1:
        return
    every = rows_of(text_batches(text, BYTES, tokens=tokens, sequences=10**6))
    some = rows_of(text_batches(text, BYTES, tokens=tokens, sequences=sequences))
    assert len(some) == min(sequences, len(every))
    remaining = iter(every)
    assert all(row in remaining for row in some)


def test_windows_are_spread_over_the_text() -> None:
    rows = rows_of(text_batches("aabbccddeeff", BARE, tokens=2, sequences=3))
    assert [BARE.decode(row).replace(" ", "") for row in rows] == ["aa", "cc", "ee"]


@given(
    source=st.one_of(texts, st.lists(st.text(LETTERS, max_size=9), min_size=1, max_size=12)),
    tokens=sizes,
    sequences=sizes,
    batch_size=sizes,
)
def test_batching_does_not_change_the_sequences(source, tokens: int, sequences: int, batch_size: int) -> None:
    def cut(size: int) -> list[dict[str, Tensor]] | None:
        try:
            return list(text_batches(source, FRAMED, tokens=tokens, sequences=sequences, batch_size=size))
        except InputError:
            return None

    one_by_one, batches = cut(1), cut(batch_size)
    if one_by_one is None or batches is None:
        assert one_by_one is batches
        return
    assert rows_of(batches) == rows_of(one_by_one)
    assert [len(batch["input_ids"]) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert 1 <= len(batches[-1]["input_ids"]) <= batch_size


@KINDS
@given(rows=st.lists(st.text(LETTERS, max_size=9), min_size=1, max_size=8), tokens=st.integers(3, 12))
def test_each_text_is_one_sequence_cut_and_padded_on_the_right(
    tokenizer, before, after, rows: list[str], tokens: int
) -> None:
    written = [row for row in rows if row]
    if not written:
        return
    [batch] = text_batches(rows, tokenizer, tokens=tokens, sequences=8, batch_size=8)
    room = tokens - len(before) - len(after)
    assert rows_of([batch]) == [[*before, *bare(tokenizer, row)[:room], *after] for row in written]
    mask = batch["attention_mask"]
    assert mask.shape[1] == mask.sum(1).max()  # no wider than the longest
    assert (mask.diff(dim=1) <= 0).all()  # ones, then zeros


def test_blank_texts_are_skipped() -> None:
    rows = rows_of(text_batches([" ", "a", "\n", "b"], BYTES, sequences=2))
    assert rows == [[100, 1], [101, 1]]


@KINDS
@pytest.mark.parametrize("source", ["abcdef", ["abc", "d"]], ids=["text", "texts"])
def test_a_sequence_of_one_token_has_no_special_token(tokenizer, before, after, source) -> None:
    rows = rows_of(text_batches(source, tokenizer, tokens=1, sequences=2))
    first = [bare(tokenizer, letter) for letter in ("ad" if isinstance(source, str) else ["a", "d"])]
    assert rows == first


@pytest.mark.parametrize(
    ("special", "pad"),
    [({"pad_token": "[SEP]", "eos_token": "[END]"}, 2), ({"eos_token": "[END]"}, 3), ({}, 0)],
    ids=["its own", "end of text", "none"],
)
def test_padding_uses_the_token_of_the_tokenizer_or_its_end(special: dict[str, str], pad: int) -> None:
    tokenizer = letter_tokenizer(**special)
    [batch] = text_batches(["abc", "d"], tokenizer, tokens=8)
    assert batch["input_ids"][1].tolist() == [*bare(tokenizer, "d"), pad, pad]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_padding_side_and_truncation_of_the_tokenizer_are_ignored() -> None:
    tokenizer = letter_tokenizer(pad_token="[UNK]", padding_side="left")
    tokenizer("abc", truncation=True, max_length=2, padding="max_length")
    [batch] = text_batches(["abc", "d"], tokenizer, tokens=8)
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert len(rows_of(text_batches("abcdefgh", tokenizer, tokens=4, sequences=9))) == 2


def test_a_text_like_a_special_token_does_not_hide_special_tokens() -> None:
    rows = rows_of(text_batches("</s>" * 9, BYTES, tokens=4, sequences=1))
    assert rows == [[1, 1, 1, 1]]
    assert rows_of(text_batches("ab</s>", BYTES, tokens=4, sequences=1)) == [[100, 101, 1, 1]]


@pytest.mark.parametrize("source", ["abcdefgh" * 4, ["abcdefgh" * 4]], ids=["text", "texts"])
@pytest.mark.parametrize("make", [letter_tokenizer, lambda: ByT5Tokenizer(model_max_length=4)])
def test_long_texts_cause_no_warning(source, make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    logger = transformers.tokenization_utils_base.logger
    monkeypatch.setattr(logger, "warning", lambda message, *rest: warnings.append(message))
    list(text_batches(source, make(), tokens=3))
    assert warnings == []
    make()("abcdefgh")  # the tokenizer alone warns
    assert any("longer than the specified maximum" in message for message in warnings)


@KINDS
def test_a_text_shorter_than_a_window_is_refused_with_its_length(tokenizer, before, after) -> None:
    total = 5 + len(before) + len(after)
    message = rf"expected 9 tokens for one window, got {total} tokens\. Use --tokens {total} "
    with pytest.raises(InputError, match=message):
        text_batches("abcde", tokenizer, tokens=9)
    assert len(rows_of(text_batches("abcde", tokenizer, tokens=total))) == 1


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        *(
            ("abc", {name: 0}, f"`{name}`.*at least 1, got 0")
            for name in ("tokens", "sequences", "batch_size")
        ),
        (" ", {"tokens": 2}, r"got 0 tokens\. Use another text or tokenizer"),
        ([], {}, "at least one with a token, got 0 without a token"),
        (["", " \n"], {}, "at least one with a token, got 2 without a token"),
    ],
)
def test_numbers_below_one_and_texts_without_a_token_are_refused(source, options, message: str) -> None:
    with pytest.raises(InputError, match=message):
        text_batches(source, BARE, **{"tokens": 1} | options)


@given(st.integers(0, 500), st.integers(1, 500))
def test_sequences_are_chosen_at_even_spacing(count: int, wanted: int) -> None:
    taken = evenly(count, wanted)
    assert len(taken) == min(count, wanted)
    assert taken == sorted(set(taken) & set(range(count)))
    gaps = [b - a for a, b in pairwise([*taken, count])]
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


MODELS = {
    "causal": (LlamaForCausalLM, {}),
    "masked": (BertForMaskedLM, {}),
    "encoder-decoder": (
        T5ForConditionalGeneration,
        {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 1},
    ),
}


@KINDS
@pytest.mark.parametrize("kind", MODELS)
def test_only_a_model_of_next_tokens_reads_windows_without_an_end(
    tokenizer, before, after, kind: str
) -> None:
    make, sizes = MODELS[kind]
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = make(make.config_class(vocab_size=300, pad_token_id=0, **(sizes or small)))
    batches, _ = model_batches(model, LETTERS * 4, tokenizer, tokens=6, sequences=3)
    ends = [] if kind == "causal" else after
    text = bare(tokenizer, LETTERS * 4)
    room = 6 - len(before) - len(ends)
    starts = [room * i for i in evenly(len(text) // room, 3)]
    assert rows_of(batches) == [[*before, *text[start : start + room], *ends] for start in starts]


def test_batches_fit_in_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForMaskedLM(BertForMaskedLM.config_class(vocab_size=300, **small))

    def rows(free: int, tokens: int = 6, batch_size: int = 4) -> tuple[list[int], list[str]]:
        monkeypatch.setattr("rankwise.auditing.batches.free_memory", lambda device: free)
        batches, notes = model_batches(model, LETTERS * 4, BYTES, tokens=tokens, batch_size=batch_size)
        return [len(batch["input_ids"]) for batch in batches], notes

    sequence = 2 * 4 * 6 * 300  # copies, bytes of a float32, tokens, words
    assert rows(4 * sequence) == ([4, 2], [])
    sizes, [note] = rows(3 * sequence - 1)
    assert sizes == [2, 2, 2]
    assert note.startswith("batches of 2 sequences instead of 4")
    with pytest.raises(InputError, match=r"Use --tokens 4, or free memory") as refused:
        rows(5 * sequence // 6 - 1)
    assert "300 words" in str(refused.value)
    assert rows(5 * sequence // 6 - 1, tokens=4, batch_size=1) == ([1] * 8, [])


@KINDS
def test_only_texts_that_are_not_cut_have_an_end_without_end_tokens(tokenizer, before, after) -> None:
    rows = rows_of(text_batches(["abcdefgh", "ab"], tokenizer, tokens=6, end_token=False))
    assert rows[0] == [*before, *bare(tokenizer, "abcdefgh")][:6]
    assert rows[1] == [*before, *bare(tokenizer, "ab"), *after]


def test_models_without_logits_need_no_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.auditing.batches.free_memory", lambda device: 0)
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    decoder = LlamaForCausalLM(LlamaForCausalLM.config_class(vocab_size=300, **small))  # of one token
    for model in (torch.nn.Identity(), decoder):
        batches, _ = model_batches(model, LETTERS * 4, BYTES, tokens=6)
        assert len(list(batches)) > 0
