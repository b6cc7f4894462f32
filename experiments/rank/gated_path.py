"""The whole path through a gated state-space layer as one operator, next to its scan alone.

A Mamba layer computes, channel by channel,

    x ─► K x + bias ─► u·σ(u) ─► M v ─► + D v ─► · silu(z) ─► (norm) ─► output projection
         short conv     SiLU     scan    D-term     gate

The share σ(u) that SiLU keeps of a token, and the gate, depend on the tokens, as M does. If both are fixed,
everything before the norm is one matrix per channel: diag(silu(z)) (M + diag(D)) diag(σ(u)) K.

    python -m experiments run families  # ranks of both for each tiny family, and the error of the path
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn import functional as F

import rankwise as rw
from rankwise.operators import DenseMixing, MixingOperator, SemiseparableMixing
from rankwise.operators.toeplitz import short_convolution
from rankwise.tracing import CapturedMixer, RecordedCall
from rankwise.tracing.module_calls import ABSENT, ModuleCall
from rankwise.tracing.readers import reader_of
from rankwise.tracing.readers.mamba import Mamba2Reader, MambaReader, ShortConvReader, ZambaReader

SILU = ("silu", "swish")
"""Activations x·σ(x), which keep the share σ(x) of a token."""


@dataclass(frozen=True)
class GatedPath:
    """The path through the channels of a layer as one operator."""

    operator: MixingOperator
    """Shape (B, D, T, T)."""
    values: Float[Tensor, "B D T 1"]
    """Input of the short convolution."""
    offset: Float[Tensor, "B D T 1"]
    """Contribution of the bias of the convolution to ``operator @ values``."""
    apply_output: Callable[[Tensor], Tensor]
    """From ``operator @ values + offset`` to the output of the layer: norm, output projection."""


def gated_paths(
    trace: rw.Trace, calls: Sequence[RecordedCall]
) -> list[tuple[CapturedMixer, RecordedCall, GatedPath | None]]:
    """Return the path of each state-space mixer of a trace, with the call of its module."""
    last = {call.name: call for call in calls}
    found = []
    for site in trace.mixers:
        if site.kind != "softmax":
            projection = last.get(f"{site.name}.in_proj")
            path = None if projection is None else gated_path(site, last[site.name], projection.output)
            found.append((site, last[site.name], path))
    return found


def gated_path(site: CapturedMixer, call: RecordedCall, projected: Tensor) -> GatedPath | None:
    """Return the path of one call; None if the layer has no gate, no SiLU, or a norm before its gate."""
    layer: Any = call.module
    reader = reader_of(layer)
    with torch.no_grad(), torch.autocast(projected.device.type, enabled=False):
        if isinstance(reader, ShortConvReader):
            return _short_conv_path(site, layer, projected)
        if getattr(layer, "activation", None) not in SILU:
            return None
        if isinstance(reader, Mamba2Reader):
            return _mamba2_path(site, call, projected)
        if isinstance(reader, MambaReader):
            given, gate = projected.transpose(1, 2).chunk(2, dim=1)
        elif isinstance(reader, ZambaReader):
            given, gate = projected.transpose(1, 2).unflatten(1, (-1, 2)).unbind(2)
        else:
            return None
        assert site.values is not None
        dtype, skip = site.values.dtype, layer.D.detach().flatten()
        return _path(call, site.operator, given, gate, skip, lambda tokens: layer.out_proj(tokens.to(dtype)))


def _short_conv_path(site: CapturedMixer, layer: Any, projected: Tensor) -> GatedPath:
    enters, leaves, x = projected.transpose(1, 2).chunk(3, dim=1)
    bias = x.new_zeros(x.shape[1]) if layer.conv.bias is None else layer.conv.bias.detach()
    operator = DenseMixing(leaves[..., None] * _matrices(site.operator) * enters[..., None, :])
    offset = (leaves * bias[:, None])[..., None]
    return GatedPath(operator, x[..., None], offset, _of_tokens(layer.out_proj))


def _mamba2_path(site: CapturedMixer, call: RecordedCall, projected: Tensor) -> GatedPath | None:
    """Channels of a head share its scan; each channel has its own convolution."""
    mixer: Any = call.module
    normed = bool(getattr(mixer, "mamba_rms_norm", True))  # Falcon-H1 may have no norm
    if normed and getattr(mixer.norm, "norm_before_gate", False):
        return None
    multiplier = getattr(mixer, "mup_vector", None)  # of Falcon-H1
    projected = projected if multiplier is None else projected * multiplier
    gate, given, _ = projected.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
    width, heads = mixer.intermediate_size // mixer.num_heads, site.operator
    assert isinstance(heads, SemiseparableMixing)
    assert heads.step is not None
    channels = SemiseparableMixing(
        heads.c,
        heads.b,
        heads.log_decay.repeat_interleave(width, 1),
        heads.step.repeat_interleave(width, 1),
    )

    def apply_output(tokens: Tensor) -> Tensor:
        return mixer.out_proj((mixer.norm(tokens) if normed else tokens).to(gate.dtype))

    given = given[..., : mixer.intermediate_size].transpose(1, 2)
    skip = mixer.D.detach().repeat_interleave(width)
    return _path(call, channels, given, gate.transpose(1, 2), skip, apply_output)


def _path(
    call: RecordedCall,
    scan: MixingOperator,
    given: Tensor,
    gate: Tensor,
    skip: Tensor,
    apply_output: Callable[[Tensor], Tensor],
) -> GatedPath:
    """Multiply the factors of the path, all of (B, D, T) but D of the channels, (D)."""
    layer: Any = call.module
    sequences, channels, tokens = given.shape
    weight, bias = layer.conv1d.weight[:channels], layer.conv1d.bias
    convolution = short_convolution(weight, sequences, tokens)
    convolved = (convolution @ given[..., None])[..., 0]
    added = given.new_zeros(channels) if bias is None else bias.detach()[:channels].to(given.dtype)
    share = torch.sigmoid(convolved + added[:, None])
    mask = ModuleCall(call.name, call.module, call.args, call.kwargs).argument("attention_mask")
    if mask is not None and mask is not ABSENT:
        share = share * mask[:, None, :].to(share.dtype)
    mixed = _matrices(scan) + torch.diag_embed(skip.double()[:, None].expand(-1, tokens))
    rest = F.silu(gate)[..., None] * mixed * share[..., None, :]
    offset = rest @ added.double()[:, None, None].expand(sequences, -1, tokens, 1)
    operator = DenseMixing(rest @ _matrices(convolution))
    return GatedPath(operator, given[..., None], offset, _of_tokens(apply_output))


def _matrices(operator: MixingOperator) -> Float64[Tensor, "B D T T"]:
    """Return the matrices of a tiny operator in float64."""
    return operator.map_tensors(Tensor.double).dense()


def _of_tokens(apply_output: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda gated: apply_output(gated[..., 0].transpose(1, 2))


def from_path(path: GatedPath) -> Tensor:
    """Return the output of the layer, computed from the operator of its whole path."""
    return path.apply_output((path.operator @ path.values.double() + path.offset).float())
