"""What of a model's output and of a batch is what."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from rankwise._internals.forward import Batch, tensors_of
from rankwise.errors import InputError

ANOTHER = (
    "Name another loss, or pass a function of (output, batch) that returns the loss of each sequence: "
    "rw.audit(model, batches, importance=ImportanceSettings(loss=…))."
)
"""The cure where a loss does not fit."""


def logits_of(output: Any) -> Tensor:
    """The logits a model gave; its first floating-point tensor where nothing is called so.

    Args:
        output: of the model.
    """
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return named if isinstance(named, Tensor) else first_floating(output)


def first_floating(output: Any) -> Tensor:
    """The first floating-point tensor of an output that has a batch axis.

    Args:
        output: of the model.

    Raises:
        InputError: if there is none.
    """
    values = output.values() if isinstance(output, Mapping) else output
    for value in values if isinstance(values, tuple | list) or values is not output else (values,):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
            return value
    shape = f" {tuple(output.shape)} {output.dtype}" if isinstance(output, Tensor) else ""
    raise InputError(
        "output of the model",
        expected="a floating-point tensor (B, …), or an object or dict with one",
        got=type(output).__name__ + shape,
        fix=ANOTHER,
    )


def of_decoder(output: Any, batch: Batch) -> bool:
    """Whether an output is of the tokens that a decoder reads, beside those of an encoder.

    Args:
        output: of the model.
        batch: the batch.
    """
    named = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    read = isinstance(batch, Mapping) and any(str(name).startswith("decoder_") for name in batch)
    return read or named.get("encoder_last_hidden_state") is not None


def real_tokens(batch: Batch, shape: Sequence[int], decoder: bool = False) -> Bool[Tensor, "B T"]:
    """Where outputs (B, T) stand for real tokens, by the mask of the batch; everywhere where none fits.

    Args:
        batch: the batch.
        shape: (B, T) of the outputs.
        decoder: whether they are of the decoder's tokens, which the encoder's mask says nothing of.
    """
    mask = tensors_of(batch).get("decoder_attention_mask" if decoder else "attention_mask")
    if mask is not None and tuple(mask.shape) == tuple(shape):
        return mask.bool()
    return torch.ones(*shape, dtype=torch.bool)


def token_ids(batch: Batch, name: str = "input_ids") -> Tensor | None:
    """The token ids (B, T) of a batch: those of that name, or its first whole numbers.

    Args:
        batch: the batch.
        name: what they are called in a dict.
    """
    tensors = tensors_of(batch)
    if name in tensors:
        return tensors[name]
    if isinstance(batch, Mapping):
        return None
    whole = (tensor for tensor in tensors.values() if tensor.dim() == 2 and not tensor.is_floating_point())
    return next(whole, None)
