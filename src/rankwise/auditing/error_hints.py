"""Errors of a model on a batch, with advice on how to fix the batch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.batches import argument_names, tensors_of
from rankwise._internals.forward import config_value, out_of_memory
from rankwise._internals.torch_private import original_of
from rankwise.errors import InputError, RankwiseError, did_you_mean, first_line

TRACEBACK = "Run the model on this batch alone to see the whole traceback."


@contextmanager
def batch_errors(model: nn.Module, batch: Any, subject: str = "`batch`") -> Iterator[None]:
    """Context manager that raises `InputError`, with advice, if a model fails on a batch."""
    try:
        yield
    except RankwiseError:
        raise
    except Exception as error:
        raise InputError(
            subject,
            expected=f"a batch that {type(model).__name__} runs on",
            got=f"{type(error).__name__}: {first_line(error)}",
            fix=_advice(original_of(model), batch, error),
        ) from error


def _advice(model: nn.Module, batch: Any, error: Exception) -> str:
    if isinstance(batch, Mapping):
        towers = {"input_ids": "text_model", "pixel_values": "vision_model"}
        given = [tower for name, tower in towers.items() if name in batch]
        if len(given) == 1 and all(hasattr(model, tower) for tower in towers.values()):
            return (
                f"It reads texts and images together: add the other input, or pass `model.{given[0]}`, which "
                "reads this data alone, to a command as module.py:function."
            )
        names = argument_names(model)
        unknown = [str(key) for key in batch if key not in names]
        if unknown:
            guess = did_you_mean(unknown[0], names)
            return f"`forward` has no {', '.join(unknown)}: leave them out or rename them. {guess}"
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() == 1:
            collate = "`DataLoader(rows, batch_size=4, collate_fn=DataCollatorWithPadding(tokenizer))`"
            return f"It is one row without a batch axis. Put rows together: {collate}."
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        return (
            f"The model was called with all {len(batch)} items of it: if the last are labels, pass "
            f"`[(x,) for x, *labels in batches]`. {TRACEBACK}"
        )
    return TRACEBACK + _advice_from_numbers(model, batch, error)


def _advice_from_numbers(model: nn.Module, batch: Any, error: Exception) -> str:
    """Return advice that sizes, ids or dtypes of the batch prove, or an empty string.

    The message of the error is not read, because other errors can have the same words.
    """
    tensors = tensors_of(batch).values()
    ids = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.numel()]
    longest = max((tensor.shape[-1] for tensor in ids if tensor.dim() > 1), default=0)
    words, positions = config_value(model, "vocab_size"), positions_of(getattr(model, "config", None))
    weight = next(model.parameters(), None)
    if out_of_memory(error):
        return " Use smaller batches or shorter sequences."
    if isinstance(error, torch.AcceleratorError):
        return " The device failed: check it, and start a new process."
    if isinstance(words, int) and words and any(int(tensor.max()) >= words for tensor in ids):
        return f" A token id is not below the {words} that the model knows: is it the model's own tokenizer?"
    if positions is not None and positions < longest:
        return f" Its {longest} tokens are more than the {positions} positions of the model: cut them."
    if weight is not None and any(x.is_floating_point() and x.dtype != weight.dtype for x in tensors):
        return f" Cast the batch to {weight.dtype}, the dtype of the weights."
    return ""


def positions_of(config: Any) -> int | None:
    """Return the number of positions in a configuration, or the smallest in its inner configurations.

    Return None if the number is unknown or unlimited.
    """
    positions = config_value(config, "max_position_embeddings", "n_positions")
    if isinstance(positions, int):
        return positions if positions > 0 else None
    inner = [value for value in getattr(config, "__dict__", {}).values() if hasattr(value, "vocab_size")]
    return min(filter(None, map(positions_of, inner)), default=None)
