"""Find which axes of attention tensors and token states hold sequences, heads, tokens and channels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from rankwise._internals.torch_private import base_of
from rankwise.errors import ShapeError
from rankwise.operators import MixingOperator
from rankwise.tracing.module_calls import ModuleCall, first_tokens
from rankwise.tracing.trace import CapturedMixer

HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_head")
"""Attribute names under which attention modules store their number of heads."""


@dataclass(frozen=True)
class Layout:
    """Leading axes of attention tensors (…, T, K): which of them hold sequences, and which hold heads."""

    axes: int
    """Number of leading axes."""
    batch: int
    """Number B of sequences (or windows); the sizes of the leading axes multiply to B·H for H heads."""
    split: int = 1
    """Number of leading axes that hold sequences; the leading axes after them hold heads."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Reshape a tensor (…, T, K) to (B, H, T, K); grouped keys and values keep their smaller H."""
        if self.axes == 1:
            heads = max(tensor.shape[0] // self.batch, 1)
            return tensor.reshape(-1, heads, *tensor.shape[1:])
        leading, rest = tensor.shape[: self.axes], tensor.shape[self.axes :]
        return tensor.reshape(prod(leading[: self.split]), prod(leading[self.split :]), *rest)


@dataclass(frozen=True)
class HeadAxes:
    """Pair of functions that convert the output of a mixer to heads (B, H, T, V), and heads to the output."""

    to_heads: Callable[[Tensor], Tensor]
    from_heads: Callable[[Tensor], Tensor]


def layout_of(shape: Sequence[int], call: ModuleCall) -> Layout:
    """Return the layout of an attention call from the shape of its queries or weights, (…, T, ·).

    A single leading axis holds B·H matrices with the heads innermost. The batch size that the module received
    and its number of heads separate B from H. Three or more leading axes hold grouped heads (B, Hkv, groups)
    if the module received B sequences of T tokens. Otherwise they hold windows (B, windows, H).
    """
    *leading, tokens, _ = shape
    if len(leading) == 1:
        return Layout(1, max(leading[0] // _folded_heads(leading[0], tokens, call), 1))
    if len(leading) > 2:
        given = given_shape(call, tokens)
        grouped = given is not None and given == (leading[0], tokens)
        split = 1 if grouped else len(leading) - 1
        return Layout(len(leading), prod(leading[:split]), split)
    return Layout(len(leading), leading[0] if leading else 1)


def given_shape(call: ModuleCall, tokens: int) -> tuple[int, int] | None:
    """Return (B, T) of a module's input states (B, T, D), (T, B, D) or (T, D), or None for other inputs."""
    given = call.tokens
    if given is None:
        flat = first_tokens(call.tensors, axes=2)
        return (1, tokens) if flat is not None and flat.shape[0] == tokens else None
    if given.is_nested:
        return None
    first, second = given.shape[:2]
    return (second, first) if second != tokens == first else (first, second)


def _folded_heads(leading: int, tokens: int, call: ModuleCall) -> int:
    """Return the number of heads H if a single leading axis holds B·H matrices; 1 if H is unknown."""
    given = given_shape(call, tokens)
    batch = given[0] if given else None
    counts = (getattr(call.module, name, None) for name in HEAD_COUNTS)
    stated = next((count for count in counts if isinstance(count, int)), None)
    if batch and stated and leading < batch * stated and leading != batch and leading % stated:
        expected, got = f"matrices of {batch} sequences and {stated} heads", f"a slice of {leading}"
        raise ShapeError("attention", expected=expected, got=got, fix="Turn attention slicing off.")
    if batch is not None and leading % batch == 0 and leading // batch in (1, stated):
        return leading // batch
    if stated and leading % stated == 0:
        return stated
    return leading // batch if batch and leading % batch == 0 else 1


def unpacked_groups(heads: Tensor, call: ModuleCall) -> Tensor:
    """Undo how transformers reshapes one query token: (B, Hkv, groups, K) → (B, Hkv·groups, 1, K).

    For a single token, transformers moves the query heads that share a key head (a group) to the token axis.
    """
    groups = getattr(call.module, "num_key_value_groups", 1)
    tokens = call.tokens
    single = tokens is not None and tokens.shape[1] == 1
    packed = single and heads.dim() == 4 and heads.shape[-2] == groups > 1
    return heads.flatten(1, 2).unsqueeze(2) if packed else heads


def sequences_behind(calls: Sequence[ModuleCall], operator: MixingOperator) -> int:
    """Return the number of sequences in a batch, also if each sequence is cut into several windows."""
    batch, tokens = operator.shape[0], operator.shape[-2]
    # Only inputs with three or four axes count, because an input with two axes may be (B, F) or (T, D).
    given = (given_shape(call, tokens) for call in calls if call.tokens is not None)
    counts = [shape[0] for shape in given if shape]
    counts += [call.stream.shape[0] for call in calls if call.stream is not None and call.stream.dim() == 4]
    return min((count for count in counts if count and batch % count == 0), default=batch)


def is_window(operator: MixingOperator, call: ModuleCall) -> bool:
    """Return True if an operator mixes only some of the tokens (B, T, D) or (T, D) of a module call."""
    states = call.stream
    if states is None or states.is_nested or states.dim() > 3:
        return False
    return operator.shape[0] * operator.shape[-2] < prod(states.shape[:-1])


def same_for_all(factor: Tensor, other: Tensor) -> bool:
    """Return True if ``factor`` is a weight, or is the same for all sequences of the factor ``other``."""
    expanded = factor.layout is torch.strided and len(factor) > 1 and factor.stride(0) == 0
    without_batch = factor.dim() < other.dim() and (factor.dim() == 2 or len(factor) != len(other))
    return isinstance(base_of(factor), nn.Parameter) or expanded or without_batch


def lengths_of(calls: Sequence[ModuleCall], most_axes: int = 8) -> set[int]:
    """Return the possible token counts T of the calls' input tensors that have at most ``most_axes`` axes."""
    lengths = set()
    for tensor in plain_tensors(calls):
        if not tensor.is_floating_point():
            lengths |= {tensor.shape[-1]} if tensor.dim() == 2 else set()
        elif 1 < tensor.dim() <= most_axes:
            lengths |= {tensor.shape[-2], tensor.shape[0 if tensor.dim() == 3 else -2]}
    return lengths


def areas_of(calls: Sequence[ModuleCall]) -> set[int]:
    """Return the numbers of places H·W of feature maps (B, C, H, W) or (B, H, W, C) in the calls' inputs."""
    given = ([tensor.shape for tensor in plain_tensors([call]) if tensor.dim() == 4] for call in calls)
    # A call with three such tensors received queries, keys and values instead of feature maps.
    shapes = (shape for each in given if len(each) < 3 for shape in each)
    return {prod(places) for shape in shapes for places in (shape[1:3], shape[2:])}


def plain_tensors(calls: Sequence[ModuleCall]) -> list[Tensor]:
    """Return the tensor arguments of calls, without nested tensors."""
    return [tensor for call in calls for tensor in call.tensors if not tensor.is_nested]


def learned_tokens(pieces: Sequence[Tensor], tokens: Tensor) -> int:
    """Return how many tokens joined by `torch.cat` are weights. Return 0 if at most one is, or all are."""
    if tokens.dim() != 3 or any(piece.dim() != 3 for piece in pieces):
        return 0
    count = sum(piece.shape[1] for piece in pieces if isinstance(base_of(piece), nn.Parameter))
    return count if 1 < count < tokens.shape[1] == sum(piece.shape[1] for piece in pieces) else 0


def find_batch_first(
    tokens: Tensor, module: nn.Module, mixers: Sequence[CapturedMixer]
) -> Callable[[Tensor], Tensor] | None:
    """Find the order of axes of a block's states; return a function that converts them to (B, T, D).

    The states may be (B, T, D), (T, B, D), (T, D) without a batch, a nested tensor, or feature maps
    (B, H, W, D) or (B, D, H, W). The shapes of the operators decide. Return None if states with two or four
    axes fit no operator.
    """
    shapes = {(mixer.operator.shape[0], mixer.operator.shape[2]) for mixer in mixers if not mixer.cross}
    if tokens.is_nested:
        return lambda states: padded(states)[0]
    if tokens.dim() == 4:
        # Windows may pad the map, so that the operators have more rows than the map has places.
        rows = max((batch * count for batch, count in shapes), default=0)
        channels_last, channels_first = (
            tokens.numel() // max(tokens.shape[axis], 1) <= rows for axis in (-1, 1)
        )
        if channels_last == channels_first:
            return None
        return lambda states: states.flatten(1, 2) if channels_last else states.flatten(2).mT
    if tokens.dim() == 2:
        return (lambda states: states.unsqueeze(0)) if (1, tokens.shape[0]) in shapes else None
    first, second = tokens.shape[:2]
    turned = (second, first) in shapes and (first, second) not in shapes
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        turned |= not module.self_attn.batch_first
    if turned:
        return lambda states: states.transpose(0, 1)
    return lambda states: padded(states)[0]


def padded(tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a nested tensor as (padded tensor, mask of real tokens), any other tensor as (tensor, None)."""
    if not tokens.is_nested:
        return tokens, None
    lengths = torch.tensor([item.shape[0] for item in tokens.unbind()], device=tokens.device)
    dense = tokens.to_padded_tensor(0.0)
    return dense, torch.arange(dense.shape[1], device=tokens.device) < lengths[:, None]
