"""Turn texts into batches that a model accepts."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rankwise._internals.batches import can_leave_out_logits
from rankwise._internals.forward import config_value, device_of, free_memory, vocabulary
from rankwise.auditing.error_hints import positions_of
from rankwise.errors import InputError, whole_number
from rankwise.importance.loss_choice import continues_texts

LOGIT_BYTES = 8
"""Bytes of memory that a logit takes during a pass: two copies in float32."""
T = TypeVar("T")
Tokenizer = Callable[..., Any]
"""A transformers tokenizer, or a callable that maps a list of texts to a dict with ``input_ids``."""


class Shard(NamedTuple):
    """Consecutive part ``number`` (from 0) of ``total`` parts of the data; sizes differ by at most one item.

    Examples:
        >>> [Shard(number, 3).of("abcd") for number in range(3)]
        ['ab', 'c', 'd']
    """

    number: int = 0
    total: int = 1

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """Return the items of this part."""
        start, stop = (-(-len(items) * n // self.total) for n in (self.number, self.number + 1))
        return items[start:stop]


ALL = Shard()
"""Shard of all items."""


def evenly(count: int, most: int) -> list[int]:
    """Return at most ``most`` indices, evenly spaced from 0 to ``count - 1``: ``⌊i·count/most⌋``.

    Data are often sorted by class, so the first items could all belong to one class.

    Examples:
        >>> evenly(10, 4), evenly(2, 4)
        ([0, 2, 5, 7], [0, 1])
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
    end_token: bool = True,
    shard: Shard = ALL,
) -> Iterator[dict[str, Int[Tensor, "B T"]]]:
    """Return batches of token ids from windows of one text, or from many texts (one sequence per text).

    *One text* is cut into consecutive windows of exactly ``tokens`` tokens; a shorter rest is not used.
    *Many texts* become one sequence each, cut at ``tokens`` tokens and padded on the right to the longest
    sequence of the batch; texts without a token are skipped. If more than ``sequences`` windows or texts
    exist, evenly spaced windows or texts are used.

    The tokenizer's special tokens ([CLS] and [SEP] of BERT, the first token of Llama) are part of every
    sequence and count in ``tokens``. Special tokens are omitted if they would leave no room for text. With
    ``end_token=False``, no token follows a window or a text that was cut, because the text continues.

    Padding is on the right even if the tokenizer pads on the left (for generation), because left padding
    shifts positions in models that count positions from 0. The pad id is the tokenizer's pad id, else its
    end-of-text id, else 0; ``attention_mask`` is 0 at padding. The whole text is tokenized at the call; each
    batch ``{"input_ids": …, "attention_mask": …}`` is built when the iterator reaches it.

    Args:
        text: one text or many.
        tokenizer: a transformers tokenizer, or a callable that maps a list of texts to ``input_ids``.
        tokens: length of a window, or the maximum length of a sequence.
        batch_size: sequences per batch; the last batch may have fewer.
        end_token: close windows and cut texts with the special tokens that the tokenizer puts after a text.
        shard: part of the sequences to return.

    Raises:
        InputError: at the call, if a number is below 1, the text is shorter than one window, or no text has
            a token.

    Examples:
        >>> from transformers import ByT5Tokenizer
        >>> [batch] = text_batches("To be, or not to be", ByT5Tokenizer(), tokens=8, sequences=2)
        >>> batch["input_ids"].shape  # each window: 7 bytes and </s>
        torch.Size([2, 8])
    """
    for name, number in (("tokens", tokens), ("sequences", sequences), ("batch_size", batch_size)):
        whole_number(f"`{name}`", number)
    if isinstance(text, str):
        rows = shard.of(_windows(text, tokenizer, tokens, sequences, end_token))
    else:
        rows = shard.of(_rows(text, tokenizer, tokens, sequences, end_token))
    candidates = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    pad = next((number for number in candidates if number is not None), 0)
    return (_padded(rows[i : i + batch_size], pad) for i in range(0, len(rows), batch_size))


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
    """Return batches of `text_batches` adapted to a model, and notes on the adaptations.

    If a model always computes the logits of all tokens, batches are made smaller until these fit in the free
    memory. `InputError` is raised if those of one sequence do not fit. If the model takes no
    ``attention_mask``, each batch has one sequence, so that nothing is padded. Windows of one text have no
    end token if the model predicts next tokens, because the text goes on.
    """
    notes: list[str] = []
    limit = longest_sequence(model)
    if limit is not None and tokens > limit:
        notes.append(f"sequences cut from {tokens} to {limit} tokens, the longest the model takes")
        tokens = limit
    parameters = inspect.signature(model.forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    is_wrapper = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} == kinds
    alone = not (is_wrapper or {"input_ids", "attention_mask"} <= set(parameters))
    size = 1 if alone else batch_size
    words = 0 if can_leave_out_logits(model) else vocabulary(model)
    free, needed = free_memory(device_of(model)), LOGIT_BYTES * tokens * words
    if needed > free:
        expected = f"{needed / 1e9:.1f} GB for the logits of one sequence ({tokens} tokens, {words:,} words)"
        fitting = tokens * free // needed
        fix = f"Use --tokens {fitting}, or free memory." if fitting > 1 else "Free memory."
        raise InputError("memory", expected=expected, got=f"{free / 1e9:.1f} GB that are free", fix=fix)
    if needed and (most := free // needed) < size:
        kept = f"the free memory holds the logits of {words:,} words for no more"
        notes.append(f"batches of {most} sequences instead of {size}: {kept}")
        size = most
    decodes = config_value(model, "is_encoder_decoder")
    end_token = bool(decodes) or not continues_texts(model)
    batches: Iterator[Any] = text_batches(
        texts,
        tokenizer,
        tokens=tokens,
        sequences=sequences,
        batch_size=size,
        end_token=end_token,
        shard=shard,
    )
    if alone:
        notes.append("one sequence in a batch: the model takes no attention_mask that would mark padding")
        return (batch["input_ids"] for batch in batches), notes
    if decodes:
        notes.append("the decoder reads the encoder's text, shifted by one token")
        batches = (_with_decoder(model, batch) for batch in batches)
    return batches, notes


def longest_sequence(model: nn.Module) -> int | None:
    """Return the maximum sequence length without positions for padding (RoBERTa), or None if unknown."""
    positions = positions_of(getattr(model, "config", None))
    if positions is None:
        return None
    offset = any(
        getattr(module, "padding_idx", None) is not None and "position_embeddings" in name
        for name, module in model.named_modules()
    )
    return positions - config_value(model, "pad_token_id", default=0) - 1 if offset else positions


def _with_decoder(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    ids, mask = batch["input_ids"], batch["attention_mask"]
    start = config_value(model, "decoder_start_token_id", default=0)
    shifted = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)
    return {**batch, "decoder_input_ids": shifted, "decoder_attention_mask": mask}


def _windows(
    text: str, tokenizer: Tokenizer, tokens: int, sequences: int, end_token: bool
) -> list[list[int]]:
    """Return token ids of evenly spaced windows of one text. Raise `InputError` if the text is too short."""
    [ids] = _encode([text], tokenizer)
    before, after = _special_tokens(text, tokenizer, tokens)
    after = after if end_token else []
    room = tokens - len(before) - len(after)
    if len(ids) < room:
        total = len(ids) + tokens - room
        expected, got = f"{tokens} tokens for one window", "1 token" if total == 1 else f"{total} tokens"
        shorter = f"--tokens {total} or less, or " if total > 1 else ""
        fix = f"Use {shorter}a longer text." if ids else "Use another text or tokenizer."
        raise InputError("the text", expected=expected, got=got, fix=fix)
    starts = (room * i for i in evenly(len(ids) // room, sequences))
    return [[*before, *ids[start : start + room], *after] for start in starts]


def _rows(
    texts: Sequence[str], tokenizer: Tokenizer, tokens: int, sequences: int, end_token: bool
) -> list[list[int]]:
    """Return the first ``tokens`` token ids of up to ``sequences`` evenly spaced texts.

    Raise `InputError` if no text has a token.
    """
    nonempty = [text for text in texts if text.strip()]
    chosen = [nonempty[i] for i in evenly(len(nonempty), sequences)]
    encoded = [(text, ids) for text, ids in zip(chosen, _encode(chosen, tokenizer), strict=True) if ids]
    if not encoded:
        got, fix = f"{len(texts)} without a token", "Check the text column."
        raise InputError("the texts", expected="at least one with a token", got=got, fix=fix)
    before, after = _special_tokens(encoded[0][0], tokenizer, tokens)
    room = tokens - len(before) - len(after)
    return [
        [*before, *ids[:room], *after]
        if end_token or len(ids) <= room
        else [*before, *ids[: room + len(after)]]
        for _, ids in encoded
    ]


def _encode(texts: list[str], tokenizer: Tokenizer, special: bool = False) -> list[list[int]]:
    """Return token ids of texts. Warnings about long texts are off, because sequences are cut later."""
    return tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"] if texts else []


def _special_tokens(text: str, tokenizer: Tokenizer, tokens: int) -> tuple[list[int], list[int]]:
    """Return special tokens before and after a text, or empty lists if they leave no room for text."""
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
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad)
    mask = pad_sequence([torch.ones(len(row), dtype=torch.int64) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}
