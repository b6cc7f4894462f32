"""Texts in the form a model at hand reads: with its mask, its longest sequence, its decoder."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.data.batches import Tokenizer, text_batches
from rankwise.data.evenly import WHOLE, Shard
from rankwise.errors import InputError


def model_batches(
    model: nn.Module,
    texts: str | Sequence[str],
    tokenizer: Tokenizer,
    *,
    tokens: int = 256,
    sequences: int = 8,
    batch_size: int = 4,
    shard: Shard = WHOLE,
) -> tuple[Iterator[Any], list[str]]:
    """Make batches of texts as `text_batches` does, in the form that a model reads.

    Sequences are cut at what the model can take. A model without ``attention_mask`` reads one sequence at a
    time, so that nothing is padded; the decoder of an encoder-decoder model reads the encoder's text, shifted
    by one token.

    Args:
        model: the model.
        texts: one text, cut in windows, or several, one sequence each.
        tokenizer: one of transformers, or anything alike.
        tokens: length of a window, or the most of a sequence.
        sequences: how many to take at most.
        batch_size: sequences in a batch.
        shard: which of the sequences to take, where several processes share them.

    Returns:
        The batches, and in words what was done to them.

    Raises:
        InputError: as `text_batches`.

    Examples:
        >>> from transformers import ByT5Tokenizer
        >>> embedding = torch.nn.Embedding(400, 8)
        >>> batches, notes = model_batches(embedding, ["one", "two"], ByT5Tokenizer())
        >>> [batch.shape for batch in batches]
        [torch.Size([1, 4]), torch.Size([1, 4])]
    """
    notes: list[str] = []
    limit = longest_sequence(model)
    if limit is not None and tokens > limit:
        notes.append(f"sequences cut from {tokens} to {limit} tokens, the longest the model takes")
        tokens = limit
    alone = not takes_mask(model)
    size = 1 if alone else batch_size
    made: Iterator[Any] = text_batches(
        texts, tokenizer, tokens=tokens, sequences=sequences, batch_size=size, shard=shard
    )
    if alone:
        notes.append(
            "one sequence in a batch: the model takes no attention_mask, so padding could not be told"
        )
        return (batch["input_ids"] for batch in made), notes
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        notes.append("the decoder reads the encoder's text, shifted by one token")
        made = (_with_decoder(model, batch) for batch in made)
    return made, notes


def check_texts(texts: object, tokenizer: Tokenizer | None) -> tuple[list[str], Tokenizer]:
    """A list of texts and their tokenizer; one text alone becomes a list of one.

    Args:
        texts: what the user gave.
        tokenizer: what is to make ids of them.

    Returns:
        The texts and the tokenizer.

    Raises:
        InputError: if they are no texts, there is none, or the tokenizer cannot be called.

    Examples:
        >>> check_texts("one", len)[0]
        ['one']
        >>> check_texts(["one", 2], len)
        Traceback (most recent call last):
        ...
        rankwise.errors.InputError: `texts`, number 2: expected a str, got int. Give a list of strings.
    """
    several = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else None
    if several is None or isinstance(texts, dict):
        raise InputError(
            "`texts`",
            expected="a list of strings",
            got=type(texts).__name__,
            fix="Put the texts into a list.",
        )
    for number, text in enumerate(several, start=1):
        if not isinstance(text, str):
            got = type(text).__name__
            raise InputError(
                f"`texts`, number {number}", expected="a str", got=got, fix="Give a list of strings."
            )
    if not several:
        raise InputError("`texts`", expected="at least one text", got="none", fix="Give a list of strings.")
    if not callable(tokenizer):
        raise InputError(
            "`tokenizer`",
            expected="the tokenizer of the model, beside `texts`",
            got="none" if tokenizer is None else type(tokenizer).__name__,
            fix="tokenizer = transformers.AutoTokenizer.from_pretrained(name of the model)",
        )
    return several, tokenizer


def takes_mask(model: nn.Module) -> bool:
    """Whether ``forward`` has an ``attention_mask``, and ``input_ids`` to go with it; or takes anything, as
    wrappers around a model do.
    """
    parameters = inspect.signature(model.forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    named = {"input_ids", "attention_mask"} <= set(parameters)
    return named or {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} == kinds


def longest_sequence(model: nn.Module) -> int | None:
    """Positions the model has, less those that a padding index takes (RoBERTa and its kin)."""
    config = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    offset = any(
        getattr(module, "padding_idx", None) is not None and "position_embeddings" in name
        for name, module in model.named_modules()
    )
    return positions - (getattr(config, "pad_token_id", 0) or 0) - 1 if offset else positions


def _with_decoder(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    ids = batch["input_ids"]
    start = getattr(model.config, "decoder_start_token_id", None)
    first = torch.full_like(ids[:, :1], 0 if start is None else start)
    return {
        **batch,
        "decoder_input_ids": torch.cat([first, ids[:, :-1]], dim=1),
        "decoder_attention_mask": batch["attention_mask"],
    }
