"""Text into batches of token ids: windows of one long text, or one sequence for each of many."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.data.evenly import WHOLE, Shard, check_positive, evenly
from rankwise.errors import InputError

Tokenizer = Callable[..., Any]
"""A tokenizer of transformers, or what can be called as one: a list of texts in, ``input_ids`` out."""


class SpecialTokens(NamedTuple):
    """The special tokens a tokenizer puts before and after a text."""

    before: list[int]
    after: list[int]

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.before) + len(self.after)

    def around(self, ids: list[int]) -> list[int]:
        """Put them around ids."""
        return [*self.before, *ids, *self.after]


def text_batches(
    text: str | Sequence[str],
    tokenizer: Tokenizer,
    *,
    tokens: int = 256,
    sequences: int = 8,
    batch_size: int = 4,
    shard: Shard = WHOLE,
) -> Iterator[dict[str, Tensor]]:
    """Turn one long text, or many texts, into batches for a model.

    *One text* is cut into windows of exactly ``tokens`` tokens, one after the other, without overlap; what
    is left over at its end is not used. ``sequences`` of them are taken, spread evenly over the text, or
    all where there are no more. *Many texts* give one sequence each, spread evenly over the list, cut at
    ``tokens`` tokens and padded on the right to the longest of its batch; texts without a token are left
    out.

    The special tokens that the tokenizer adds to a text ([CLS] and [SEP] of BERT, the beginning token of
    Llama) are part of every sequence and count as tokens of it. Where ``tokens`` leaves no room for text
    beside them they are left out, so ``tokens=1`` is one token of text.

    A tokenizer without a padding token pads with its end-of-text token, or with id 0 where it has none: a
    pad id only has to be a valid one, for ``attention_mask`` is 0 there. Padding is on the right whatever
    the tokenizer's ``padding_side``, which is made for generating: left padding moves the positions of the
    real tokens in models that count them from 0.

    Cost: the text is tokenized whole, O(its length), at the call; a batch is made when it is asked for.

    Args:
        text: a text, or texts.
        tokenizer: one of transformers, or anything alike.
        tokens: length of a window, or the most of a sequence.
        sequences: how many to take at most.
        batch_size: sequences in a batch; the last batch may hold fewer.
        shard: which of the sequences to take, where several processes share them.

    Returns:
        An iterator over ``{"input_ids": Int[Tensor, "B T"], "attention_mask": Int[Tensor, "B T"]}``.

    Raises:
        InputError: at the call, if a number is below 1, the text is shorter than a window or no text has a
            token.

    Examples:
        >>> from transformers import ByT5Tokenizer
        >>> [batch] = text_batches("To be, or not to be", ByT5Tokenizer(), tokens=8, sequences=2)
        >>> batch["input_ids"].shape  # each window: 7 bytes and </s>
        torch.Size([2, 8])
    """
    check_positive(tokens=tokens, sequences=sequences, batch_size=batch_size)
    rows = (
        windows(text, tokenizer, tokens=tokens, sequences=sequences)
        if isinstance(text, str)
        else separate(text, tokenizer, tokens=tokens, sequences=sequences)
    )
    mine, pad = shard.of(rows), _pad_id(tokenizer)
    return (_batch(mine[i : i + batch_size], pad) for i in range(0, len(mine), batch_size))


def windows(text: str, tokenizer: Tokenizer, *, tokens: int, sequences: int) -> list[list[int]]:
    """Cut one text into consecutive windows; see :func:`text_batches`.

    Args:
        text: the text.
        tokenizer: what makes ids of it.
        tokens: length of a window, special tokens included.
        sequences: how many windows to take at most.

    Returns:
        Ids of each window, in the order of the text.

    Raises:
        InputError: if there is not one full window.

    Examples:
        >>> from transformers import ByT5Tokenizer
        >>> windows("abcd", ByT5Tokenizer(), tokens=3, sequences=2)  # a is byte 97, after three special ids
        [[100, 101, 1], [102, 103, 1]]
    """
    [ids] = _encode([text], tokenizer)
    special = _special_tokens(text, tokenizer, tokens)
    room = tokens - special.size
    if len(ids) < room:
        total = len(ids) + special.size
        fix = f"Use --tokens {total} or less, or a longer text." if ids else "Use another text or tokenizer."
        raise InputError(
            "the text", expected=f"{tokens} tokens for one window", got=f"{total} tokens", fix=fix
        )
    starts = (room * i for i in evenly(len(ids) // room, sequences))
    return [special.around(ids[start : start + room]) for start in starts]


def separate(texts: Sequence[str], tokenizer: Tokenizer, *, tokens: int, sequences: int) -> list[list[int]]:
    """Make one sequence of each of many texts; see :func:`text_batches`.

    Args:
        texts: the texts.
        tokenizer: what makes ids of them.
        tokens: the most tokens of a sequence, special tokens included.
        sequences: how many texts to take at most.

    Returns:
        Ids of each sequence, in the order of the texts.

    Raises:
        InputError: if no text has a token.

    Examples:
        >>> from transformers import ByT5Tokenizer
        >>> separate(["a", "", "abc"], ByT5Tokenizer(), tokens=3, sequences=8)
        [[100, 1], [100, 101, 1]]
    """
    written = [text for text in texts if text.strip()]
    chosen = [written[i] for i in evenly(len(written), sequences)]
    encoded = [(text, ids) for text, ids in zip(chosen, _encode(chosen, tokenizer), strict=True) if ids]
    if not encoded:
        got = f"{len(texts)} without a token"
        raise InputError(
            "the texts", expected="at least one with a token", got=got, fix="Check the text column."
        )
    special = _special_tokens(encoded[0][0], tokenizer, tokens)
    return [special.around(ids[: tokens - special.size]) for _, ids in encoded]


def _encode(texts: list[str], tokenizer: Tokenizer, special: bool = False) -> list[list[int]]:
    """Make ids, whatever their number: ``verbose=False`` because a sequence too long is cut by us."""
    if not texts:
        return []
    return tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]


def _pad_id(tokenizer: Tokenizer) -> int:
    candidates = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return next((i for i in candidates if i is not None), 0)


def _special_tokens(text: str, tokenizer: Tokenizer, tokens: int) -> SpecialTokens:
    """See what the tokenizer puts around a text: no other way is the same for all tokenizers."""
    for sample in ("a", text):
        [bare], [full] = _encode([sample], tokenizer), _encode([sample], tokenizer, special=True)
        if bare:
            break
    extra = len(full) - len(bare)
    before = next((i for i in range(extra + 1) if full[i : i + len(bare)] == bare), None)
    if extra >= tokens or before is None:
        return SpecialTokens([], [])
    return SpecialTokens(full[:before], full[before + len(bare) :])


def _batch(rows: Sequence[list[int]], pad: int) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}
