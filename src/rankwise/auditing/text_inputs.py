"""Turn texts into batches of token ids, in the form that a model reads."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn

from rankwise.errors import InputError, whole_number

T = TypeVar("T")
Tokenizer = Callable[..., Any]
"""A tokenizer of transformers, or a callable like it: a list of texts in, ``input_ids`` out."""


class Shard(NamedTuple):
    """The share of one process: neighboring items, the first process has the first ones.

    Shares differ by at most one item; if there are fewer items than processes, some shares are empty.

    Examples:
        >>> [Shard(rank, 3).of("abcd") for rank in range(3)]
        ['ab', 'c', 'd']
    """

    rank: int = 0
    world: int = 1

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """Return the items of this share."""
        start, stop = (-(-len(items) * rank // self.world) for rank in (self.rank, self.rank + 1))
        return items[start:stop]


ALL = Shard()
"""All items."""


def evenly(count: int, most: int) -> list[int]:
    """Choose at most ``most`` of ``count`` indices, evenly from first to last: ``⌊i·count/most⌋``.

    Files and rows are often sorted by class, so the first few would be of one class only.

    Examples:
        >>> evenly(10, 4)
        [0, 2, 5, 7]
        >>> evenly(2, 4)
        [0, 1]
    """
    chosen = min(count, most)
    return [i * count // chosen for i in range(chosen)]


def text_batches(
    text: str | Sequence[str],
    tokenizer: Tokenizer,
    *,
    tokens: int = 256,
    sequences: int = 8,
    batch_size: int = 4,
    shard: Shard = ALL,
) -> Iterator[dict[str, Int[Tensor, "B T"]]]:
    """Cut one text into windows, or make one sequence of each of many.

    *One text* is cut into consecutive windows of exactly ``tokens`` tokens; the rest at its end is not used.
    *Many texts* become one sequence each, cut at ``tokens`` tokens and padded on the right to the longest of
    the batch; texts without a token are skipped. If there are more than ``sequences``, they are spread evenly
    over the data.

    The tokenizer's special tokens ([CLS] and [SEP] of BERT, the first token of Llama) are part of every
    sequence and count in ``tokens``. They are left out if there is no room for text beside them.

    Padding is on the right even if the tokenizer pads on the left, as it does for generation: left padding
    would shift positions in models that count them from 0. The pad id is the tokenizer's, else its
    end-of-text id, else 0; ``attention_mask`` is 0 there.

    Cost: the whole text is tokenized at the call; a batch is made when it is needed.

    Args:
        text: one text or many.
        tokenizer: a tokenizer of transformers, or a callable like it.
        tokens: length of a window, or the maximum length of a sequence.
        sequences: maximum number of sequences.
        batch_size: sequences per batch; the last batch may have fewer.
        shard: the share of this process.

    Returns:
        An iterator over ``{"input_ids": …, "attention_mask": …}``.

    Raises:
        InputError: at the call, if a number is below 1, the text is shorter than a window or no text has a
            token.

    Examples:
        >>> from transformers import ByT5Tokenizer
        >>> [batch] = text_batches("To be, or not to be", ByT5Tokenizer(), tokens=8, sequences=2)
        >>> batch["input_ids"].shape  # each window: 7 bytes and </s>
        torch.Size([2, 8])
    """
    for name, number in (("tokens", tokens), ("sequences", sequences), ("batch_size", batch_size)):
        whole_number(f"`{name}`", number)
    make_rows = _windows if isinstance(text, str) else _rows
    own_rows = shard.of(make_rows(text, tokenizer, tokens, sequences))  # type: ignore[arg-type]
    candidates = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    pad = next((number for number in candidates if number is not None), 0)
    return (_padded(own_rows[i : i + batch_size], pad) for i in range(0, len(own_rows), batch_size))


def model_batches(
    model: nn.Module,
    texts: str | Sequence[str],
    tokenizer: Tokenizer,
    *,
    tokens: int = 256,
    sequences: int = 8,
    batch_size: int = 4,
    shard: Shard = ALL,
) -> tuple[Iterator[Any], list[str]]:
    """Make batches as `text_batches` does, adapted to a model; also return notes on the changes.

    Sequences are cut at the model's maximum length. A model without ``attention_mask`` reads one sequence
    per batch, so that nothing is padded. The decoder of an encoder-decoder model reads the encoder's text,
    shifted by one token.
    """
    notes: list[str] = []
    limit = longest_sequence(model)
    if limit is not None and tokens > limit:
        notes.append(f"sequences cut from {tokens} to {limit} tokens, the longest the model takes")
        tokens = limit
    alone = not _takes_mask(model)
    batches: Iterator[Any] = text_batches(
        texts,
        tokenizer,
        tokens=tokens,
        sequences=sequences,
        batch_size=1 if alone else batch_size,
        shard=shard,
    )
    if alone:
        notes.append(
            "one sequence in a batch: the model takes no attention_mask, so padding could not be told"
        )
        return (batch["input_ids"] for batch in batches), notes
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        notes.append("the decoder reads the encoder's text, shifted by one token")
        batches = (_with_decoder(model, batch) for batch in batches)
    return batches, notes


def checked_texts(texts: object, tokenizer: Tokenizer | None) -> tuple[list[str], Tokenizer]:
    """Return a list of texts and their tokenizer; one text becomes a list of one.

    Examples:
        >>> checked_texts("one", len)[0]
        ['one']
        >>> checked_texts(["one", 2], len)
        Traceback (most recent call last):
        ...
        rankwise.errors.InputError: `texts`, number 2: expected a str, got int. Give a list of strings.
    """
    fix = "Give a list of strings."
    several = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else None
    if several is None or isinstance(texts, dict):
        raise InputError("`texts`", expected="a list of strings", got=type(texts).__name__, fix=fix)
    for number, text in enumerate(several, start=1):
        if not isinstance(text, str):
            got = type(text).__name__
            raise InputError(f"`texts`, number {number}", expected="a str", got=got, fix=fix)
    if not several:
        raise InputError("`texts`", expected="at least one text", got="none", fix=fix)
    if not callable(tokenizer):
        raise InputError(
            "`tokenizer`",
            expected="the tokenizer of the model, to go with `texts`",
            got="none" if tokenizer is None else type(tokenizer).__name__,
            fix="tokenizer = transformers.AutoTokenizer.from_pretrained(name of the model)",
        )
    return several, tokenizer


def longest_sequence(model: nn.Module) -> int | None:
    """Return the number of positions, less those that a padding index occupies (RoBERTa); None if unknown."""
    config = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    offset = any(
        getattr(module, "padding_idx", None) is not None and "position_embeddings" in name
        for name, module in model.named_modules()
    )
    return positions - (getattr(config, "pad_token_id", 0) or 0) - 1 if offset else positions


def _takes_mask(model: nn.Module) -> bool:
    """True if ``forward`` has `input_ids` and `attention_mask`, or `*args, **kwargs` as wrappers have."""
    parameters = inspect.signature(model.forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    named = {"input_ids", "attention_mask"} <= set(parameters)
    return named or {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} == kinds


def _with_decoder(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    ids = batch["input_ids"]
    start = getattr(model.config, "decoder_start_token_id", None)
    first = torch.full_like(ids[:, :1], 0 if start is None else start)
    return {
        **batch,
        "decoder_input_ids": torch.cat([first, ids[:, :-1]], dim=1),
        "decoder_attention_mask": batch["attention_mask"],
    }


def _windows(text: str, tokenizer: Tokenizer, tokens: int, sequences: int) -> list[list[int]]:
    """Cut one text into consecutive windows."""
    [ids] = _encode([text], tokenizer)
    before, after = _special_tokens(text, tokenizer, tokens)
    room = tokens - len(before) - len(after)
    if len(ids) < room:
        total = len(ids) + tokens - room
        fix = f"Use --tokens {total} or less, or a longer text." if ids else "Use another text or tokenizer."
        raise InputError(
            "the text", expected=f"{tokens} tokens for one window", got=f"{total} tokens", fix=fix
        )
    starts = (room * i for i in evenly(len(ids) // room, sequences))
    return [[*before, *ids[start : start + room], *after] for start in starts]


def _rows(texts: Sequence[str], tokenizer: Tokenizer, tokens: int, sequences: int) -> list[list[int]]:
    """Make one sequence of each text."""
    nonempty = [text for text in texts if text.strip()]
    chosen = [nonempty[i] for i in evenly(len(nonempty), sequences)]
    encoded = [(text, ids) for text, ids in zip(chosen, _encode(chosen, tokenizer), strict=True) if ids]
    if not encoded:
        got = f"{len(texts)} without a token"
        raise InputError(
            "the texts", expected="at least one with a token", got=got, fix="Check the text column."
        )
    before, after = _special_tokens(encoded[0][0], tokenizer, tokens)
    return [[*before, *ids[: tokens - len(before) - len(after)], *after] for _, ids in encoded]


def _encode(texts: list[str], tokenizer: Tokenizer, special: bool = False) -> list[list[int]]:
    """Tokenize without a warning about long texts, which are cut afterwards."""
    return tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"] if texts else []


def _special_tokens(text: str, tokenizer: Tokenizer, tokens: int) -> tuple[list[int], list[int]]:
    """Return the special tokens before and after a text: compare encodings, which works for any tokenizer."""
    for sample in ("a", text):
        [bare], [full] = _encode([sample], tokenizer), _encode([sample], tokenizer, special=True)
        if bare:
            break
    extra = len(full) - len(bare)
    before = next((i for i in range(extra + 1) if full[i : i + len(bare)] == bare), None)
    if extra >= tokens or before is None:
        return [], []
    return full[:before], full[before + len(bare) :]


def _padded(rows: Sequence[list[int]], pad: int) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}
