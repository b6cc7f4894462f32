"""Mamba, its variants and Mamba-2, as transformers computes them, and the whole path through such a layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.operators import (
    DiagonalMixing,
    MixingOperator,
    ProductMixing,
    SelectiveMixing,
    SemiseparableMixing,
    SumMixing,
)
from rankwise.tracing.adapters.base import (
    Adapter,
    CallsInside,
    call_of,
    check_on_device,
    named,
    why_not_from_scratch,
)
from rankwise.tracing.adapters.short_conv import convolved, short_convolution
from rankwise.tracing.mixing_calls import MixingCall
from rankwise.tracing.module_calls import ABSENT, ModuleCall
from rankwise.tracing.trace import Path

SILU = ("silu", "swish")
"""Activations x·σ(x): what they keep of a token, σ(x), is a factor."""


class MambaAdapter(Adapter):
    """One operator for each channel: Δ, B and C are what the layer's own projections gave.

    Values are the channels after the short convolution, its activation and the padding mask, one number a
    token; D·x, the gate and the output projection come after.
    """

    watched = ("in_proj", "x_proj", "dt_layernorm", "b_layernorm", "c_layernorm", "dt_proj")
    classes = frozenset({"MambaMixer", "FalconMambaMixer", "JambaMambaMixer"})

    def reads(self, module: nn.Module) -> bool:
        """Whether it is a Mamba layer of transformers."""
        return named(module, self.classes)

    def why_not(self, call: ModuleCall) -> str | None:
        """It goes on from earlier tokens, or holds several sequences in a row."""
        return why_not_from_scratch(call)

    def output_projection(self, module: nn.Module) -> tuple[str, int] | None:
        """Its channels, after the D-term and the gate."""
        return "out_proj", 0

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """The selective scan of a whole sequence."""
        mixer: Any = call.module
        check_on_device(mixer.A_log, mixer.D, mixer.dt_proj.weight, mixer.dt_proj.bias)
        projected = call_of(inside, "x_proj")
        x, size = projected.given, mixer.ssm_state_size
        parts = projected.gave.split([mixer.time_step_rank, size, size], dim=-1)
        time_step, b, c = (
            inside[norm].gave if norm in inside else part
            for norm, part in zip(("dt_layernorm", "b_layernorm", "c_layernorm"), parts, strict=True)
        )
        operator = SelectiveMixing(
            c.unsqueeze(1),
            b.float().unsqueeze(1),
            -mixer.A_log.detach().float().exp(),
            _step(mixer, time_step, inside),
        )
        if not values:
            return MixingCall(operator, whole=True)
        channels = x.transpose(1, 2)
        given, gate = call_of(inside, "in_proj").gave.transpose(1, 2).chunk(2, dim=1)
        path = gated_path(call, operator, given, gate, mixer.D, _projection(mixer, channels.dtype))
        finish = _mamba_finish(mixer, channels, gate, mixer.D)
        return MixingCall(operator, channels[..., None], apply_output=finish, path=path, whole=True)


def _step(mixer: Any, time_step: Tensor, inside: CallsInside) -> Tensor:
    """Δ (B, D, T)."""
    bias = mixer.dt_proj.bias
    if "dt_proj" in inside:  # called as a module where the model is quantized
        raw = inside["dt_proj"].gave.transpose(1, 2)
    else:
        raw = mixer.dt_proj.weight.detach() @ time_step.transpose(1, 2)
        raw = raw if bias is None else raw + bias.detach().float().to(raw.dtype)[:, None]
    return F.softplus(raw)


def _mamba_finish(mixer: Any, channels: Tensor, gate: Tensor, skip: Tensor) -> Callable[[Tensor], Tensor]:
    def finish(mixed: Tensor) -> Tensor:
        skipped = mixed[..., 0] + channels * skip.float()[:, None]
        return _projection(mixer, channels.dtype)((skipped * F.silu(gate))[..., None])

    return finish


def _projection(mixer: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda gated: mixer.out_proj(gated[..., 0].transpose(1, 2).to(dtype))


class ZambaAdapter(Adapter):
    """One operator for each channel; the channels of a head share what enters its state and what reads it.

    Values are the channels after the short convolution, its activation and the padding mask, one number a
    token; D·x, the gate and the output projection come after.
    """

    watched = ("in_proj",)
    classes = frozenset({"ZambaMambaMixer"})

    def reads(self, module: nn.Module) -> bool:
        """Whether it is a Mamba layer of transformers' Zamba."""
        return named(module, self.classes)

    def why_not(self, call: ModuleCall) -> str | None:
        """It goes on from earlier tokens, or holds several sequences in a row."""
        return why_not_from_scratch(call)

    def output_projection(self, module: nn.Module) -> tuple[str, int] | None:
        """Its channels, after the D-term and the gate."""
        return "out_proj", 0

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """The selective scan of a whole sequence, head by head."""
        mixer: Any = call.module
        weights = (mixer.A_log, mixer.D, mixer.x_proj_weight, mixer.dt_proj_weight, mixer.dt_proj_bias)
        check_on_device(*weights, mixer.conv1d.weight, mixer.conv1d.bias)
        # Channel by channel, what is mixed and then its gate.
        given, gate = call_of(inside, "in_proj").gave.transpose(1, 2).unflatten(1, (-1, 2)).unbind(2)
        inner = convolved(mixer.conv1d, given.transpose(1, 2), mixer.act)
        channels = without_padding(inner, call.argument("attention_mask")).transpose(1, 2)
        heads = channels.unflatten(1, (mixer.n_mamba_heads, -1))
        parts = (mixer.x_proj_weight.detach() @ heads).mT  # (B, H, T, ·)
        size = mixer.ssm_state_size
        time_step, b, c = parts.split([mixer.time_step_rank, size, size], dim=-1)
        step = mixer.dt_proj_weight.detach() @ time_step.mT + mixer.dt_proj_bias.detach().float()[..., None]
        width = heads.shape[2]
        operator = SelectiveMixing(
            c.repeat_interleave(width, 1),
            b.float().repeat_interleave(width, 1),
            -mixer.A_log.detach().float().exp().flatten(0, 1),
            F.softplus(step).flatten(1, 2),
        )
        if not values:
            return MixingCall(operator, whole=True)
        skip = mixer.D.detach().flatten()
        path = gated_path(call, operator, given, gate, skip, _projection(mixer, channels.dtype))
        finish = _mamba_finish(mixer, channels, gate, skip)
        return MixingCall(operator, channels[..., None], apply_output=finish, path=path, whole=True)


class Mamba2Adapter(Adapter):
    """One operator for each head, from what the layer's input projection gave and its short convolution.

    Values are the heads after the short convolution, its activation and the padding mask; D·x, the gate with
    its norm and the output projection come after.
    """

    watched = ("in_proj",)
    classes = frozenset(
        {
            "Mamba2Mixer",
            "BambaMixer",
            "FalconH1Mixer",
            "GraniteMoeHybridMambaLayer",
            "NemotronHMamba2Mixer",
            "Zamba2MambaMixer",
        }
    )

    def reads(self, module: nn.Module) -> bool:
        """Whether it is a Mamba-2 layer of transformers."""
        return named(module, self.classes)

    def why_not(self, call: ModuleCall) -> str | None:
        """It goes on from earlier tokens, or holds several sequences in a row."""
        return why_not_from_scratch(call)

    def output_projection(self, module: nn.Module) -> tuple[str, int] | None:
        """Its heads, after the D-term, the gate and the norm."""
        mixer: Any = module
        return "out_proj", mixer.num_heads

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """The chunked scan of a whole sequence."""
        mixer: Any = call.module
        conv = mixer.conv1d
        check_on_device(mixer.A_log, mixer.D, mixer.dt_bias, conv.weight, conv.bias)
        projected = call_of(inside, "in_proj").gave
        multiplier = getattr(mixer, "mup_vector", None)  # of Falcon-H1
        projected = projected if multiplier is None else projected * multiplier
        gate, inner, dt = projected.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
        given = inner
        inner = without_padding(convolved(mixer.conv1d, inner, mixer.act), call.argument("attention_mask"))
        shared = (mixer.conv_dim - mixer.intermediate_size) // 2
        x, b, c = inner.split([mixer.intermediate_size, shared, shared], dim=-1)
        b, c = (part.unflatten(-1, (mixer.n_groups, -1)).transpose(1, 2).float() for part in (b, c))
        heads = x.unflatten(-1, (mixer.num_heads, -1)).transpose(1, 2)
        delta = F.softplus(dt + mixer.dt_bias.detach().to(dt.dtype))
        delta = delta.clamp(*mixer.time_step_limit).float().transpose(1, 2)
        rate = -mixer.A_log.detach().float().exp()
        operator = SemiseparableMixing(c, b, rate[:, None] * delta, delta)
        if not values:
            return MixingCall(operator, whole=True)
        finish = _mamba2_finish(mixer, heads, gate)
        path = _mamba2_path(call, operator, given[..., : mixer.intermediate_size].transpose(1, 2), gate)
        return MixingCall(operator, heads.float(), apply_output=finish, path=path, whole=True)


def _mamba2_path(call: ModuleCall, heads: SemiseparableMixing, given: Tensor, gate: Tensor) -> Path | None:
    """The whole way of each channel; those of a head share its scan, and each has its own convolution."""
    mixer: Any = call.module
    width = mixer.intermediate_size // mixer.num_heads
    if _normed(mixer) and getattr(mixer.norm, "norm_before_gate", False):
        return None
    decay, step = (heads.log_decay, heads.step)
    assert step is not None
    channels = SemiseparableMixing(
        heads.c, heads.b, decay.repeat_interleave(width, 1), step.repeat_interleave(width, 1)
    )

    def finish(gated: Tensor) -> Tensor:
        tokens = gated[..., 0].transpose(1, 2)
        tokens = mixer.norm(tokens) if _normed(mixer) else tokens
        return mixer.out_proj(tokens.to(gate.dtype))

    skip = mixer.D.repeat_interleave(width)
    return gated_path(call, channels, given, gate.transpose(1, 2), skip, finish)


def _normed(mixer: Any) -> bool:
    """Whether the gate has a norm after it; Falcon-H1 may have none."""
    return bool(getattr(mixer, "mamba_rms_norm", True))


def _mamba2_finish(mixer: Any, heads: Tensor, gate: Tensor) -> Callable[[Tensor], Tensor]:
    def finish(mixed: Tensor) -> Tensor:
        skipped = (mixed + mixer.D[:, None, None] * heads.float()).transpose(1, 2).flatten(2)
        gated = mixer.norm(skipped, gate) if _normed(mixer) else skipped * F.silu(gate)
        return mixer.out_proj(gated.to(gate.dtype))

    return finish


def without_padding(tokens: Tensor, mask: object) -> Tensor:
    """Zeros where a token is padding, as transformers sets them."""
    if mask is None or mask is ABSENT:
        return tokens
    assert isinstance(mask, Tensor)
    return (tokens * mask[:, :, None]).to(tokens.dtype)


def gated_path(
    call: ModuleCall,
    mixing: MixingOperator,
    given: Tensor,
    gate: Tensor,
    skip: Tensor,
    finish: Callable[[Tensor], Tensor],
) -> Path | None:
    """diag(silu(z)) (M + diag(D)) diag(σ(u)) K, where u = K x + bias is what the short convolution gave.

    Args:
        call: the call of the layer.
        mixing: M, one for each channel.
        given: x (B, D, T), what the short convolution reads.
        gate: z (B, D, T).
        skip: D (D).
        finish: from what the gate gave to what the layer gave.

    Returns:
        None where the layer's activation is no SiLU.
    """
    layer: Any = call.module
    if layer.activation not in SILU:
        return None
    with torch.autocast(given.device.type, enabled=False):  # which the operators' own sums are none of
        return _gated_path(call, mixing, given, gate, skip, finish)


def _gated_path(
    call: ModuleCall,
    mixing: MixingOperator,
    given: Tensor,
    gate: Tensor,
    skip: Tensor,
    finish: Callable[[Tensor], Tensor],
) -> Path:
    layer: Any = call.module
    sequences, channels, tokens = given.shape
    weight, bias = layer.conv1d.weight[:channels], layer.conv1d.bias
    convolution = short_convolution(weight, sequences, tokens)
    convolved = (convolution @ given[..., None])[..., 0]
    added = given.new_zeros(channels) if bias is None else bias.detach()[:channels].to(given.dtype)
    share = torch.sigmoid(convolved + added[:, None])
    mask = call.argument("attention_mask")
    if mask is not None and mask is not ABSENT:
        share = share * mask[:, None, :].to(share.dtype)
    kept = DiagonalMixing(share)
    skipped = DiagonalMixing(skip.detach().float()[:, None].expand(sequences, -1, tokens))
    scan = ProductMixing(DiagonalMixing(F.silu(gate)), SumMixing(mixing, skipped), kept)
    offset = scan @ added[:, None, None].expand(sequences, -1, tokens, 1)
    return Path(ProductMixing(scan, convolution), given[..., None], offset, finish)
