"""Which tokens are real: what the model was told, and what its masks show."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from rankwise.capture.frames import ABSENT, Frame
from rankwise.operators import MixingOperator

CROSS_ARGUMENTS = (
    "encoder_hidden_states",
    "key_value_states",
    "memory",
    "context",
    "cross_attention_states",
    "encoder_output",
)
"""Arguments of an attention module that give it keys from another sequence."""
CACHE_ARGUMENTS = (
    "past_key_values",
    "past_key_value",
    "layer_past",
    "cache_params",
    "kv_cache",
    "cache",
    "past",
)
OWN_MASK, OTHER_MASK, DECODER_MASK = "attention_mask", "encoder_attention_mask", "decoder_attention_mask"


def is_cross(frames: Sequence[Frame], operator: MixingOperator) -> bool:
    """Whether a mixer's keys come from another sequence than its queries."""
    innermost = frames[-1]
    given = [innermost.argument(name) for name in CROSS_ARGUMENTS]
    if any(isinstance(other, Tensor) and other is not innermost.tokens for other in given):
        return True
    return operator.shape[-1] != operator.shape[-2] and not has_cache(frames)


def has_cache(frames: Sequence[Frame]) -> bool:
    """Whether keys of earlier tokens may come from a cache."""
    return any(frame.argument(name) not in (None, ABSENT) for frame in frames for name in CACHE_ARGUMENTS)


def valid_positions(
    frames: Sequence[Frame], operator: MixingOperator, cross: bool
) -> tuple[Bool[Tensor, "B T"], Bool[Tensor, "B S"]]:
    """Real rows and columns of an operator of shape (B, H, T, S).

    A two-axis ``attention_mask`` given to a module around the mixer says it outright; without one, a column
    that no row of any head may see is padding, and in self-attention so is its row.
    """
    batch, _, tokens, sources = operator.shape
    columns = told_mask(frames, OTHER_MASK if cross else OWN_MASK, batch, sources)
    if columns is None and _could_hide(operator):
        columns = operator.support().any(-2).any(-2)
    if cross:
        rows = _told_decoder(frames, batch, tokens)
    elif tokens == sources:
        rows = columns
    else:  # with a cache, rows are the last of the tokens that the mask speaks of
        rows = told_mask(frames, OWN_MASK, batch, at_least=tokens)
    return _or_all(rows, batch, tokens, operator), _or_all(columns, batch, sources, operator)


def told_mask(
    frames: Sequence[Frame], name: str, batch: int, length: int = 0, at_least: int = 0
) -> Bool[Tensor, "B T"] | None:
    """The nearest two-axis mask of that name and shape; stops where a module was given None.

    Args:
        frames: calls under way, outermost first.
        name: what the argument is called.
        batch: sequences.
        length: how long the mask must be.
        at_least: or how long it must be at least; then its last so many entries are meant.
    """
    for frame in reversed(frames):
        value = frame.argument(name)
        if value is None:
            return None
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == batch:
            fits = value.shape[1] >= at_least if at_least else value.shape[1] == length
            if fits and _speaks_of_tokens(value):
                return value[:, -at_least:].bool() if at_least else value.bool()
    return None


def _told_decoder(frames: Sequence[Frame], batch: int, tokens: int) -> Bool[Tensor, "B T"] | None:
    """The mask of the queries of cross-attention: inner modules that were given none do not decide."""
    for frame in reversed(frames):
        told = frame.argument(DECODER_MASK)
        value = frame.argument(OWN_MASK) if told is ABSENT else told
        if isinstance(value, Tensor) and value.dim() == 2 and tuple(value.shape) == (batch, tokens):
            return value.bool() if _speaks_of_tokens(value) else None
        if told is not ABSENT:
            return None
    return None


def _speaks_of_tokens(mask: Tensor) -> bool:
    """Whether it is 1 for real tokens and 0 for padding, and no bias: every sequence has a real token."""
    return not mask.is_meta and bool(((mask == 0) | (mask == 1)).all() and (mask == 1).any(1).all())


def _or_all(mask: Tensor | None, batch: int, length: int, operator: MixingOperator) -> Tensor:
    if mask is None:
        return torch.ones(batch, length, dtype=torch.bool, device=operator.device)
    return mask.to(operator.device)


def _could_hide(operator: MixingOperator) -> bool:
    """An operator without a mask hides no column, so its support need not be formed."""
    return getattr(operator, "mask", True) is not None
