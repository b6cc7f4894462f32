"""Which tokens are real: what the model was told, and what its masks show."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from rankwise.capture.frames import ABSENT, Frame
from rankwise.operators import MixingOperator

CROSS_ARGUMENTS = ("encoder_hidden_states", "key_value_states", "memory", "cross_attention_states")
"""Arguments of an attention module that give it keys from another sequence."""


def is_cross(frames: Sequence[Frame], operator: MixingOperator, cached: bool) -> bool:
    """Whether a mixer's keys come from another sequence than its queries."""
    if operator.shape[-1] != operator.shape[-2] and not cached:
        return True
    innermost = frames[-1]
    return any(isinstance(innermost.argument(name), Tensor) for name in CROSS_ARGUMENTS)


def valid_positions(
    frames: Sequence[Frame], operator: MixingOperator, cross: bool
) -> tuple[Bool[Tensor, "B T"], Bool[Tensor, "B S"]]:
    """Real rows and columns of an operator of shape (B, H, T, S).

    A two-axis ``attention_mask`` given to a module around the mixer says it outright; without one, a column
    that no row of any head may see is padding, and in self-attention so is its row.
    """
    batch, _, tokens, sources = operator.shape
    device = operator.device
    columns = told_mask(frames, "encoder_attention_mask" if cross else "attention_mask", batch, sources)
    if columns is None:
        support = operator.support()
        columns = support.any(-2).any(-2) if _could_hide(operator) else None
    columns = torch.ones(batch, sources, dtype=torch.bool, device=device) if columns is None else columns
    if not cross:
        return columns[:, sources - tokens :].to(device), columns.to(device)
    rows = told_mask(frames, "attention_mask", batch, tokens)
    rows = torch.ones(batch, tokens, dtype=torch.bool, device=device) if rows is None else rows
    return rows.to(device), columns.to(device)


def told_mask(frames: Sequence[Frame], name: str, batch: int, length: int) -> Bool[Tensor, "B T"] | None:
    """The nearest two-axis mask of that name and shape; stops where a module was given None."""
    for frame in reversed(frames):
        value = frame.argument(name)
        if value is None:
            return None
        if value is ABSENT or not isinstance(value, Tensor) or value.dim() != 2:
            continue
        if tuple(value.shape) == (batch, length) and bool(((value == 0) | (value == 1)).all()):
            return value.bool()
    return None


def _could_hide(operator: MixingOperator) -> bool:
    """An operator without a mask hides no column, so its support need not be formed."""
    return getattr(operator, "mask", True) is not None
