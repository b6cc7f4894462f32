"""Convert attention calls to operators (mixing matrices) of shape (B, H, T, S), and to `CapturedMixer`s."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant

from rankwise._internals.torch_private import without_torch_function
from rankwise.operators import (
    DenseMixing,
    MixingOperator,
    SoftmaxMixing,
)
from rankwise.tracing.axes import (
    HeadAxes,
    areas_of,
    given_shape,
    is_window,
    layout_of,
    lengths_of,
    plain_tensors,
    sequences_behind,
    unpacked_groups,
)
from rankwise.tracing.explicit_softmax import SoftmaxProduct
from rankwise.tracing.module_calls import ABSENT, CallId, ModuleCall, parameter_names, same, snapshot
from rankwise.tracing.trace import CapturedMixer

ROUTER = "a softmax weighs several values within each token, as a router does"
STREAMS = "a softmax mixes several vectors within each token, as hyper-connections do"
WITHIN_TOKENS = (ROUTER, STREAMS)
"""Reasons why a product mixes nothing across tokens; such products are not reported to the user."""
CROSS_ARGUMENTS = (
    *("encoder_hidden_states", "key_value_states", "memory", "context"),
    *("cross_attention_states", "encoder_output"),
)
"""Names of arguments that pass another sequence, the source of keys, to an attention module."""
CACHE_ARGUMENTS = (
    *("past_key_values", "past_key_value", "layer_past", "past"),
    *("cache_params", "kv_cache", "cache"),
)
NOT_TOKENS = "are vectors of the layer (learned, padded or pooled), not the tokens of an input"
OWN_MASK, OTHER_MASK, DECODER_MASK = "attention_mask", "encoder_attention_mask", "decoder_attention_mask"
FUSED_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
"""Names of the arguments of `scaled_dot_product_attention`, in order."""


@dataclass(frozen=True)
class MixingCall:
    """Operator of an attention call, with its input and output."""

    operator: MixingOperator
    values: Tensor | None = None
    output: Tensor | None = None
    cross: bool | None = None
    """True if keys come from another sequence than queries (cross-attention). None if not yet decided."""
    lengths: Tensor | None = None
    """Mask (B, T) that the self-attention module received, True for real tokens. None if it received none."""
    whole: bool = False
    """True if the batch axis is known to hold whole sequences instead of windows."""
    apply_output: Callable[[Tensor], Tensor] | None = None
    """Function from M V to the output of the module (gate, norm, output projection). None if unknown."""
    axes: HeadAxes | None = None
    """Conversion between the model's attention output and heads (B, H, T, V). None if it is not visible."""
    projection: Tensor | None = None
    """Tokens projected to the subspace of each head (B, H, T, K). None if heads have no subspaces."""
    kind: str = ""
    """Kind of mixer. If it is "", the kind of the operator is used."""
    logits: Tensor | None = None
    """Inputs (B, H, T, S) of the softmax, if the model formed M. None if unknown."""


def fused_mixing(given: dict[str, Any], output: Tensor, call: ModuleCall) -> MixingCall:
    """Return the operator that `scaled_dot_product_attention` applied."""
    query, key, value = (given[name].detach() for name in FUSED_ARGUMENTS[:3])
    query, key = query.clone(), key.clone()  # the model may change the originals, such as a key cache
    mask = given.get("attn_mask")
    if isinstance(mask, CausalBias):  # variant and lengths define this mask, not its values
        later = mask.seq_len_kv - mask.seq_len_q if mask.variant is CausalVariant.LOWER_RIGHT else 0
        mask = query.new_ones(mask.seq_len_q, mask.seq_len_kv, dtype=torch.bool).tril(later)
    if mask is not None and mask.dim() > 2 and (mask.dim() != 4 or query.dim() != 4):
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    unpack, shape = partial(unpacked_groups, call=call), output.shape
    layout = layout_of(unpack(query).shape, call)
    if mask is not None and mask.dim() > 2:
        mask = mask.detach()
        mask = layout(mask if mask.shape[1] == 1 else unpack(mask))
    causal, scale = bool(given.get("is_causal", False)), given.get("scale")
    operator = SoftmaxMixing(layout(unpack(query)), layout(key), mask, causal, scale)
    axes = HeadAxes(lambda out: layout(unpack(out)), lambda heads: heads.reshape(shape))
    return MixingCall(operator, layout(value), axes.to_heads(output.detach()), axes=axes)


def flex_mixing(args: tuple[Any, ...], output: Tensor, call: ModuleCall) -> MixingCall:
    """Return the operator of `flex_attention` from its queries, keys, score function and block mask."""
    query, key, value = (tensor.detach() for tensor in args[:3])
    score_mod, (*_, mask_mod), scale, _, score_buffers, mask_buffers = args[3:9]
    groups = query.shape[1] // key.shape[1]
    scores = (query @ key.repeat_interleave(groups, 1).mT).mul(scale)
    indices = [torch.arange(size, device=query.device) for size in scores.shape]
    scores = _each_entry(lambda *entry: score_mod(*entry, *score_buffers))(scores, *indices)
    allowed = _each_entry(lambda _, *entry: mask_mod(*entry, *mask_buffers))(scores, *indices)
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    axes = HeadAxes(lambda out: out, lambda heads: heads)
    operator = _dense(weights, allowed)
    return MixingCall(operator, value, output.detach(), axes=axes, kind="softmax", logits=scores)


def _each_entry(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Convert a function of one entry (score, b, h, i, j) to a function of the tensors of all entries."""
    for axis in (4, 3, 2, 1):
        mapped = (0, *(0 if axis == other else None for other in (1, 2, 3, 4)))
        function = torch.vmap(function, in_dims=mapped)
    return function


def _dense(weights: Tensor, allowed: Tensor | None) -> DenseMixing:
    if allowed is not None and bool(allowed.all()):
        # A single True means "nothing is masked": zeros in this matrix are underflow, not masked entries.
        allowed = allowed.new_ones((1, 1, 1, 1))
    return DenseMixing(weights, allowed)


def explicit_mixing(mixed: SoftmaxProduct, call: ModuleCall) -> MixingCall:
    """Return the operator of attention that the model computes as a product of a softmax with values."""
    matrix, axes, shape = mixed.matrix.detach(), mixed.axes, mixed.output.shape
    layout = layout_of(matrix.shape, call)
    allowed = None if mixed.allowed is None else layout(mixed.allowed.of(matrix.shape))
    home = sorted(range(len(axes)), key=axes.__getitem__)
    head_axes = HeadAxes(
        lambda out: layout(out.permute(*axes)), lambda heads: heads.reshape(shape).permute(*home)
    )
    logits = None if mixed.logits is None else layout(mixed.logits.of(matrix.shape))
    values, output = layout(mixed.values.detach()), layout(mixed.output.detach())
    operator = _dense(layout(matrix), allowed)
    return MixingCall(operator, values, output, axes=head_axes, kind="softmax", logits=logits)


def why_no_tokens(mixed: SoftmaxProduct, calls: Sequence[ModuleCall]) -> str | None:
    """Return why a product of a softmax with values does not mix tokens. Return None if it mixes tokens.

    Routers, linear attention, channel attention and code books also multiply a softmax by values. A product
    mixes tokens if its scores compare queries and keys of tokens (not channels). A product also mixes tokens
    if its number of columns is the number of tokens in the input of an enclosing module.
    """
    matrix, call = mixed.matrix, calls[-1]
    tokens, sources = matrix.shape[-2:]
    given = given_shape(call, tokens)
    count = given[1] if given is not None and matrix.dim() > 3 else 0
    if tokens == 1 and count == matrix.shape[1] and (count > 1 or not mixed.compared):
        return ROUTER
    if not mixed.compared and _streams_of_each_token(matrix, calls):
        return STREAMS
    if mixed.values_learned:
        return f"a softmax weighs {sources} vectors that are weights of the model or made of them, not tokens"
    if not mixed.compared and mixed.values_compared:
        return "a softmax of queries alone multiplies a product of keys and values, as in linear attention"
    if tokens == sources and _are_channels(mixed, calls):
        return f"a softmax mixes {sources} channels, not tokens"
    if not mixed.compared and sources not in lengths_of(calls):
        return f"a softmax weighs {sources} items that are not tokens of an input"
    return None


def _streams_of_each_token(matrix: Tensor, calls: Sequence[ModuleCall]) -> bool:
    """Return True if each token has its own matrix, which mixes several vectors (streams) of that token."""
    leading, columns = matrix.shape[:-2], matrix.shape[-1]
    given = plain_tensors(calls)
    each_token = any(
        tensor.shape[:2] == leading and tensor.dim() == (3 if tensor.is_floating_point() else 2)
        for tensor in given
    )
    return each_token and any(tensor.shape[:-1] == (*leading, columns) for tensor in given)


def _are_channels(mixed: SoftmaxProduct, calls: Sequence[ModuleCall]) -> bool:
    """Return True if the columns of a matrix are channels: columns times heads equal the width of an input.

    The columns are tokens if the width of the values times heads also equals an input's width. They are also
    tokens if the matrix has one row per token of the innermost module's input (B, T, D).
    """
    given = next((call.tokens for call in reversed(calls) if call.tokens is not None), None)
    if given is not None and not given.is_nested and mixed.matrix.shape[-2] == given.shape[1]:
        return False
    layout = layout_of(mixed.matrix.shape, calls[-1])
    heads = {1, prod(mixed.matrix.shape[:-2]) // max(layout.batch, 1)}
    widths = {call.tokens.size(-1) for call in calls if call.tokens is not None}
    columns, of_values = ({t.shape[-1] * n for n in heads} for t in (mixed.matrix, mixed.values))
    return bool(columns & widths) and not of_values & widths


def captured_mixer(
    mixing: MixingCall,
    calls: Sequence[ModuleCall],
    forward_pass: int,
    values: bool | Literal["attention"],
    call_id: CallId,
) -> CapturedMixer:
    """Return the `CapturedMixer` of a call, without stack and layer.

    ``values`` adds copies of V and M V, or of V alone if it is "attention".
    """
    operator = mixing.operator
    with without_torch_function(), torch.no_grad():
        cross = is_cross(calls, operator) if mixing.cross is None else mixing.cross
        if mixing.lengths is None:
            tokens, sources = valid_positions(calls, operator, cross)
        else:
            added = operator.shape[-1] - operator.shape[-2]
            tokens, sources = mixing.lengths, F.pad(mixing.lengths, (0, added), value=True)
        if mixing.logits is not None and isinstance(operator, DenseMixing):
            hidden = ~(operator.support() & sources[:, None, None])
            largest = mixing.logits.masked_fill(hidden, -torch.inf).amax(-1, keepdim=True)
            operator = DenseMixing(operator.matrix, operator.allowed, largest)
        window = not cross and not mixing.whole and is_window(operator, calls[-1])
        return CapturedMixer(
            name=calls[-1].name,
            layer=-1,
            kind=mixing.kind or operator.kind,
            operator=operator,
            valid_tokens=tokens,
            valid_sources=sources,
            cross=cross,
            sequences=operator.shape[0] if mixing.whole else sequences_behind(calls, operator),
            forward_pass=forward_pass,
            window_of=calls[-1].serial if window else None,
            call_id=call_id,
            values=snapshot(mixing.values) if values and mixing.values is not None else None,
            output=snapshot(mixing.output) if values is True and mixing.output is not None else None,
            apply_output=mixing.apply_output if values is True else None,
            projection=mixing.projection,
        )


def axis_notes(mixing: MixingCall, calls: Sequence[ModuleCall]) -> Iterator[str]:
    """Yield notes if the rows or columns of an operator are not tokens, or may be channels."""
    operator, values = mixing.operator, None if mixing.whole else mixing.values  # whole: columns are tokens
    batch, heads, rows, columns = operator.shape
    name = re.sub(r"\b\d+\b", "*", calls[-1].name) or type(calls[-1].module).__name__
    widths = {call.tokens.size(-1) for call in calls if call.tokens is not None}
    channels_first = values is not None and values.stride(-2) < values.stride(-1)
    if rows == columns and channels_first and {columns, columns * heads} & widths:
        yield (
            f"{name}: its matrices may mix {columns} channels instead of {columns} tokens, as in "
            "cross-covariance attention; a sequence of another length decides which"
        )
    # Below the outermost call, inputs with four axes do not count: they may be queries (B, H, T, K), whose
    # vectors need not be tokens.
    lengths = lengths_of(calls[:1]) | lengths_of(calls, most_axes=3) | areas_of(calls)
    # Fewer rows and columns than tokens are a window, or one of several packed sequences.
    windows = batch > sequences_behind(calls, operator) or rows == columns <= max(lengths, default=rows)
    if not has_cache(calls) and not windows:
        axes = [("rows", rows), ("columns", columns)]
        for axis, count in axes if rows != columns else [("rows and columns", rows)]:
            if _learned(count, calls):
                yield f"{name}: the {count} {axis} of its matrices are learned vectors (weights of the model)"
            elif count != 1 and count not in lengths:
                yield f"{name}: the {count} {axis} of its matrices {NOT_TOKENS}"


def _learned(count: int, calls: Sequence[ModuleCall]) -> bool:
    """Return True if a module received ``count`` vectors that are a weight of the model, as latents are."""
    given = [tensor for tensor in plain_tensors(calls) if tensor.dim() == 3 and tensor.shape[1] == count]
    return any(
        type(weight) is nn.Parameter
        and not weight.is_meta
        and weight.device == tensor.device
        and weight.squeeze(0).shape == tensor.shape[1:]
        and bool((tensor == weight).all())
        for tensor in given
        for weight in calls[0].module.parameters()
    )


def is_cross(calls: Sequence[ModuleCall], operator: MixingOperator) -> bool:
    """Return True if the keys of a mixer come from another sequence than its queries."""
    innermost = calls[-1]
    given = [innermost.argument(name) for name in CROSS_ARGUMENTS]
    if any(isinstance(other, Tensor) and other is not innermost.tokens for other in given):
        return True
    return operator.shape[-1] != operator.shape[-2] and not has_cache(calls)


def has_cache(calls: Sequence[ModuleCall]) -> bool:
    """Return True if keys of earlier tokens may come from a cache."""
    return any(call.argument(name) not in (None, ABSENT) for call in calls for name in CACHE_ARGUMENTS)


def valid_positions(
    calls: Sequence[ModuleCall], operator: MixingOperator, cross: bool
) -> tuple[Bool[Tensor, "B T"], Bool[Tensor, "B S"]]:
    """Return masks of the real (not padding) rows and columns of an operator (B, H, T, S).

    A two-axis ``attention_mask`` of an enclosing module decides. Without a mask, a column that no row of any
    head may see is padding. In self-attention, the row of a padding column is padding too. An exception is a
    module that received a second tensor of states, because its keys may come from this tensor.
    """
    batch, _, tokens, sources = operator.shape
    columns = find_token_mask(calls, OTHER_MASK if cross else OWN_MASK, batch, sources)
    given = columns is not None
    if not given and operator.may_hide_columns:
        columns = operator.support().any(-2).any(-2)
    if cross:
        rows = find_token_mask(calls, OWN_MASK, batch, tokens, past_none=True)
    elif tokens == sources:
        # Keys of a second stream do not show which rows are padding.
        rows = columns if given or not _has_second_stream(calls[-1]) else None
    else:
        # With a cache, the rows are the last tokens of the mask.
        rows = find_token_mask(calls, OWN_MASK, batch, tokens, longer=True)
    return _or_all(rows, batch, tokens, operator), _or_all(columns, batch, sources, operator)


def find_token_mask(
    calls: Sequence[ModuleCall],
    name: str,
    batch: int,
    length: int,
    *,
    longer: bool = False,
    past_none: bool = False,
) -> Bool[Tensor, "B T"] | None:
    """Return the two-axis mask of a given name and shape from the innermost module that received such a mask.

    If ``longer``, a mask with more tokens fits too, and its last entries are returned. If ``past_none``, the
    search continues after a module that received None. Return None if no mask is found.
    """
    for depth in reversed(range(len(calls))):
        decodes = name == OWN_MASK and _runs_decoder(calls, depth)
        value = calls[depth].argument(DECODER_MASK if decodes else name)
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == batch:
            fits = value.shape[1] >= length if longer else value.shape[1] == length
            if fits and _is_token_mask(value):
                return value[:, -length:].bool()
        if decodes or (value is None and not past_none):
            return None
    return None


def _runs_decoder(calls: Sequence[ModuleCall], depth: int) -> bool:
    """Return True if an encoder-decoder runs its decoder, so that ``attention_mask`` is for the encoder."""
    if depth + 1 == len(calls) or DECODER_MASK not in parameter_names(calls[depth].module):
        return False
    return "decoder" in calls[depth + 1].name.rpartition(".")[2]


def _is_token_mask(mask: Tensor) -> bool:
    """Return True for a 0/1 mask with at least one 1 per sequence. Return False for an additive bias."""
    return not mask.is_meta and bool(((mask == 0) | (mask == 1)).all() and (mask == 1).any(1).all())


def _or_all(mask: Tensor | None, batch: int, length: int, operator: MixingOperator) -> Tensor:
    if mask is None:
        return torch.ones(batch, length, dtype=torch.bool, device=operator.device)
    return mask.to(operator.device)


def _has_second_stream(call: ModuleCall) -> bool:
    """Return True if a module received two different (B, T, D) tensors."""
    streams = [tensor for tensor in call.tensors if tensor.is_floating_point() and tensor.dim() == 3]
    return any(not same(streams[0], other) for other in streams[1:])
