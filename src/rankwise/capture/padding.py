"""Which tokens are real: what the model was told, and what its masks show."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from rankwise.capture.block_stacks import same
from rankwise.capture.module_calls import ABSENT, ModuleCall, parameter_names
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


def is_cross(calls: Sequence[ModuleCall], operator: MixingOperator) -> bool:
    """Whether a mixer's keys come from another sequence than its queries."""
    innermost = calls[-1]
    given = [innermost.argument(name) for name in CROSS_ARGUMENTS]
    if any(isinstance(other, Tensor) and other is not innermost.tokens for other in given):
        return True
    return operator.shape[-1] != operator.shape[-2] and not has_cache(calls)


def has_cache(calls: Sequence[ModuleCall]) -> bool:
    """Whether keys of earlier tokens may come from a cache."""
    return any(call.argument(name) not in (None, ABSENT) for call in calls for name in CACHE_ARGUMENTS)


def valid_positions(
    calls: Sequence[ModuleCall], operator: MixingOperator, cross: bool
) -> tuple[Bool[Tensor, "B T"], Bool[Tensor, "B S"]]:
    """Real rows and columns of an operator of shape (B, H, T, S).

    A two-axis ``attention_mask`` given to a module around the mixer says it outright; without one, a column
    that no row of any head may see is padding, and in self-attention so is its row, unless the module was
    given a second stream of tokens that its keys may come from.
    """
    batch, _, tokens, sources = operator.shape
    columns = told_mask(calls, OTHER_MASK if cross else OWN_MASK, batch, sources)
    told = columns is not None
    if not told and operator.may_hide:
        columns = operator.support().any(-2).any(-2)
    if cross:
        rows = told_mask(calls, OWN_MASK, batch, tokens, past_none=True)
    elif tokens == sources and (told or not _has_second_stream(calls[-1])):
        rows = columns
    elif tokens == sources:  # keys may come from the second stream: rows stay until someone tells
        rows = None
    else:  # with a cache, rows are the last of the tokens that the mask speaks of
        rows = told_mask(calls, OWN_MASK, batch, at_least=tokens)
    return _or_all(rows, batch, tokens, operator), _or_all(columns, batch, sources, operator)


def told_mask(
    calls: Sequence[ModuleCall],
    name: str,
    batch: int,
    length: int = 0,
    *,
    at_least: int = 0,
    past_none: bool = False,
) -> Bool[Tensor, "B T"] | None:
    """The nearest two-axis mask of that name and shape.

    Args:
        calls: calls under way, outermost first.
        name: what the argument is called.
        batch: sequences.
        length: how long the mask must be.
        at_least: or how long it must be at least; then its last so many entries are meant.
        past_none: whether to go on outwards where a module was given None.
    """
    for at in range(len(calls) - 1, -1, -1):
        decodes = name == OWN_MASK and _runs_decoder(calls, at)
        value = calls[at].argument(DECODER_MASK if decodes else name)
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == batch:
            fits = value.shape[1] >= at_least if at_least else value.shape[1] == length
            if fits and _speaks_of_tokens(value):
                return value[:, -at_least:].bool() if at_least else value.bool()
        if decodes or (value is None and not past_none):
            return None
    return None


def _runs_decoder(calls: Sequence[ModuleCall], at: int) -> bool:
    """Whether an encoder-decoder runs its decoder: what it calls ``attention_mask`` is the encoder's."""
    if at + 1 == len(calls) or DECODER_MASK not in parameter_names(calls[at].module):
        return False
    return "decoder" in calls[at + 1].name.rpartition(".")[2]


def _speaks_of_tokens(mask: Tensor) -> bool:
    """Whether it is 1 for real tokens and 0 for padding, and no bias: every sequence has a real token."""
    return not mask.is_meta and bool(((mask == 0) | (mask == 1)).all() and (mask == 1).any(1).all())


def _or_all(mask: Tensor | None, batch: int, length: int, operator: MixingOperator) -> Tensor:
    if mask is None:
        return torch.ones(batch, length, dtype=torch.bool, device=operator.device)
    return mask.to(operator.device)


def _has_second_stream(call: ModuleCall) -> bool:
    """Whether a module was given two (B, T, D) tensors that are not the same."""
    streams = [tensor for tensor in call.tensors if tensor.is_floating_point() and tensor.dim() == 3]
    return any(not same(streams[0], other) for other in streams[1:])
