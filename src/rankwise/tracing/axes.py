"""Which axes hold sequences, heads, tokens and channels: in attention calls, token states and einsums."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from rankwise.operators import MixingOperator
from rankwise.tracing.module_calls import ModuleCall, first_tokens
from rankwise.tracing.trace import MixerSite

HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_head")
"""What modules call their number of heads."""


@dataclass(frozen=True)
class Layout:
    """How one attention call lays out sequences and heads on its leading axes.

    Args:
        axes: how many leading axes there are.
        batch: how many sequences (or windows) they hold; the rest are heads.
        split: with three leading axes or more, how many of them are the batch.
    """

    axes: int
    batch: int
    split: int = 1

    def __call__(self, tensor: Tensor) -> Tensor:
        """(…, T, ·) → (B, H, T, ·); a tensor with fewer heads keeps its own number of them."""
        if self.axes == 0:
            return tensor[None, None]
        if self.axes == 1:
            heads = max(tensor.shape[0] // self.batch, 1)
            return tensor.reshape(-1, heads, *tensor.shape[1:])
        leading, rest = tensor.shape[: self.axes], tensor.shape[self.axes :]
        return tensor.reshape(prod(leading[: self.split]), prod(leading[self.split :]), *rest)


@dataclass(frozen=True)
class HeadAxes:
    """Where the heads lie in what a mixer gave: how to turn it to (B, H, T, V), and back."""

    to_heads: Callable[[Tensor], Tensor]
    from_heads: Callable[[Tensor], Tensor]


def permuted(axes: Sequence[int], layout: Layout) -> HeadAxes:
    """Of an output whose axes come in another order than (…, T, V).

    Args:
        axes: where (…, T, V) are found in it.
        layout: of its leading axes, once they are in order.
    """
    home = sorted(range(len(axes)), key=lambda at: axes[at])
    shape: list[int] = []

    def turned(output: Tensor) -> Tensor:
        ordered = output.permute(*axes)
        shape[:] = ordered.shape
        return layout(ordered)

    return HeadAxes(turned, lambda heads: heads.reshape(shape).permute(*home))


def layout_of(shape: Sequence[int], call: ModuleCall) -> Layout:
    """The layout of an attention call from the shape of its queries (or weights), (…, T, ·).

    One leading axis holds B·H with the heads inside, as far as the batch and the head count that the module
    states tell. Three or more hold sequences and heads in groups (B, Hkv, groups), or sequences in windows
    (B, windows, H): they are groups where the module was given as many tokens as the call has rows.
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
    """(B, T) of the tokens a module was called with; a module that keeps tokens first is read as such."""
    given = call.tokens
    if given is None:
        flat = first_tokens(call.tensors, axes=2)
        return (1, tokens) if flat is not None and flat.shape[0] == tokens else None
    if given.is_nested:
        return None
    first, second = given.shape[:2]
    return (second, first) if second != tokens == first else (first, second)


def _folded_heads(leading: int, tokens: int, call: ModuleCall) -> int:
    """Heads among B·H, or in an unbatched call H, matrices."""
    given = given_shape(call, tokens)
    batch = given[0] if given else None
    stated = next(
        (value for name in HEAD_COUNTS if isinstance(value := getattr(call.module, name, None), int)), None
    )
    if batch is not None and leading % batch == 0 and leading // batch in (1, stated):
        return leading // batch
    if stated and leading % stated == 0:
        return stated
    return leading // batch if batch and leading % batch == 0 else 1


def unpacked_groups(query: Tensor, call: ModuleCall) -> Tensor:
    """Undo transformers' packing of one query token: (B, Hkv, groups, K) → (B, Hkv·groups, 1, K).

    For a single token it lays the query heads that share a key head where tokens belong.
    """
    groups = getattr(call.module, "num_key_value_groups", 1)
    tokens = call.tokens
    packed = (
        query.dim() == 4 and query.shape[-2] == groups > 1 and tokens is not None and tokens.shape[1] == 1
    )
    return query.flatten(1, 2).unsqueeze(2) if packed else query


def sequences_behind(calls: Sequence[ModuleCall], operator: MixingOperator) -> int:
    """Sequences in the batch axis: an outer module that saw fewer of them cut them into windows."""
    batch, tokens = operator.shape[0], operator.shape[-2]
    # Two axes are (B, F) as often as (T, D), and one sequence has one window unless three axes say otherwise.
    deep = [call for call in calls if call.tokens is not None]
    given = [shape for call in deep if (shape := given_shape(call, tokens)) is not None]
    return min((size for size, _ in given if size and batch % size == 0), default=batch)


def find_batch_first(
    tokens: Tensor, module: nn.Module, mixers: Sequence[MixerSite]
) -> Callable[[Tensor], Tensor] | None:
    """How to turn the states that a block reads into (B, T, D), by the shapes of the mixers inside it.

    Models may keep tokens on the first axis, have no batch axis, or nest sequences of different lengths. None
    where two axes are no token states.
    """
    shapes = {(site.operator.shape[0], site.operator.shape[2]) for site in mixers if not site.cross}
    if tokens.is_nested:
        return _as_it_is
    if tokens.dim() == 2:
        return _as_batch if (1, tokens.shape[0]) in shapes else None
    first, second = tokens.shape[:2]
    if _keeps_tokens_first(module) or ((second, first) in shapes and (first, second) not in shapes):
        return _as_batch_first
    return _as_it_is


def padded(tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """A nested tensor as a padded one with its mask; anything else as it is."""
    if not tokens.is_nested:
        return tokens, None
    lengths = torch.tensor([item.shape[0] for item in tokens.unbind()], device=tokens.device)
    dense = tokens.to_padded_tensor(0.0)
    return dense, torch.arange(dense.shape[1], device=tokens.device) < lengths[:, None]


def _keeps_tokens_first(module: nn.Module) -> bool:
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return not module.self_attn.batch_first
    return False


def _as_it_is(tokens: Tensor) -> Tensor:
    return padded(tokens)[0]


def _as_batch(tokens: Tensor) -> Tensor:
    return tokens.unsqueeze(0)


def _as_batch_first(tokens: Tensor) -> Tensor:
    return tokens.transpose(0, 1)
