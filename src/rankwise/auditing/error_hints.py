"""Hints on how to fix a batch on which a model raised an exception."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.batches import argument_names, map_tensors, tensors_in, tensors_of
from rankwise._internals.forward import TRACEBACK, config_value, out_of_memory, run_model, tower_hint
from rankwise._internals.torch_private import original_of
from rankwise.errors import did_you_mean

PASS_TEXTS = "Pass strings with their tokenizer: `rw.audit(model, texts=[…], tokenizer=tokenizer)`."
_COLLATE = "`DataLoader(rows, batch_size=4, collate_fn=DataCollatorWithPadding(tokenizer))`"


def fix_hint(model: nn.Module, batch: Any, error: Exception) -> str:
    """Return the last sentences of an error message: how to fix a batch on which a model raised ``error``."""
    names = argument_names(model)
    model = original_of(model)
    if isinstance(batch, Mapping):
        if hint := tower_hint(model, batch, error):
            return hint
        unknown = [str(key) for key in batch if key not in names]
        if unknown:
            guess = did_you_mean(unknown[0], names)
            return f"`forward` has no {', '.join(unknown)}: leave them out or rename them. {guess}"
        if batch and not tensors_in(batch):
            tensors = '`tokenizer(texts, return_tensors="pt", padding=True)`'
            return f"Its values are not tensors. Use {tensors}, or {_COLLATE} for rows of a data set."
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 1:
            return f"It is one row without a batch axis. Put rows together: {_COLLATE}."
    elif not tensors_in(batch):
        if isinstance(batch, str) or (_is_list(batch) and any(isinstance(item, str) for item in batch)):
            return PASS_TEXTS
        if _is_list(batch):
            return (
                "It is a row of plain Python numbers or lists: a batch is a tensor (B, T), "
                "`[torch.tensor([row]) for row in rows]`, or padded rows with their attention_mask."
            )
        return f"A batch is a dict of tensors, a tuple of tensors or a tensor. {TRACEBACK}"
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        return (
            f"The model was called with all {len(batch)} items of it: if the last are labels, pass "
            f"`[(x,) for x, *labels in batches]`. {TRACEBACK}"
        )
    return TRACEBACK + _hint_from_numbers(model, batch, error)


def _hint_from_numbers(model: nn.Module, batch: Any, error: Exception) -> str:
    """Return a hint that sizes, ids or dtypes of the batch prove, or an empty string.

    The message of the error is not read, because other errors can have the same words.
    """
    tensors = tensors_of(batch).values()
    ids = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.numel()]
    longest = max((tensor.shape[-1] for tensor in ids if tensor.dim() > 1), default=0)
    words, positions = config_value(model, "vocab_size"), positions_of(getattr(model, "config", None))
    weight = next(model.parameters(), None)
    if out_of_memory(error):
        return " Use smaller batches or shorter sequences."
    if isinstance(words, int) and words and any(int(tensor.max()) >= words for tensor in ids):
        return f" A token id is not below the {words} that the model knows: is it the model's own tokenizer?"
    if positions is not None and positions < longest:
        return f" Its {longest} tokens are more than the {positions} positions of the model: cut them."
    if weight is not None and any(x.is_floating_point() and x.dtype != weight.dtype for x in tensors):
        return f" Cast the batch to {weight.dtype}, the dtype of the weights."
    if longest < 2:
        return ""
    half = map_tensors(batch, lambda x: x[:, : longest // 2] if x.dim() == 2 and x.shape[1] == longest else x)
    with suppress(Exception), torch.no_grad():
        run_model(model, half)
        return f" It runs on the first {longest // 2} of {longest} tokens: cut them (`--tokens`)."
    return ""


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def positions_of(config: Any) -> int | None:
    """Return the number of positions in a configuration, or the smallest in its inner configurations.

    Return None if the number is unknown or unlimited.
    """
    positions = config_value(config, "max_position_embeddings", "n_positions")
    if isinstance(positions, int):
        return positions if positions > 0 else None
    inner = [value for value in getattr(config, "__dict__", {}).values() if hasattr(value, "vocab_size")]
    return min(filter(None, map(positions_of, inner)), default=None)
