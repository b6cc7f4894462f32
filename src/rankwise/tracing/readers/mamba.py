"""Readers for Mamba, Mamba-2 and variants, and for the gated convolution of LFM2 and LFM3."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.operators import SelectiveMixing, SemiseparableMixing
from rankwise.operators.toeplitz import short_convolution
from rankwise.tracing.module_calls import ModuleCall
from rankwise.tracing.read_operators import MixingCall
from rankwise.tracing.readers.base import InnerCalls, StateSpaceReader, check_on_device, output_of


class MambaReader(StateSpaceReader):
    """Reads Mamba: one selective scan per channel; step Δ and vectors B, C come from the layer's projections.

    Values are the channels after the short convolution, its activation and the padding mask, one number per
    token. The layer applies D·x, the gate and the output projection after M V.
    """

    classes = frozenset({"MambaMixer", "FalconMambaMixer", "JambaMambaMixer"})
    norms = ("dt_layernorm", "b_layernorm", "c_layernorm"), ("dt_layernorm", "B_layernorm", "C_layernorm")
    inner = ("in_proj", "x_proj", "dt_proj", *norms[0], *norms[1])
    parts = frozenset({"in_proj", "conv1d", "x_proj", "dt_proj", "out_proj", "A_log", "D"})

    def reads(self, module: nn.Module) -> bool:
        """Return True for the listed classes, and for layers of other libraries with the same parts."""
        return super().reads(module) or self.parts <= _parts(module)

    def why_not(self, call: ModuleCall) -> str | None:
        """Return why not to read a call, also if a layer of another library has further parts."""
        others = _parts(call.module) - {*self.parts, *self.inner, "act"}
        if others and not super().reads(call.module):
            return (
                f"next to the parts of a Mamba layer it has {', '.join(sorted(others))}, such as a second "
                "scan from the end, which no reader knows"
            )
        return super().why_not(call)

    def mixing(self, call: ModuleCall, inner: InnerCalls, values: bool) -> MixingCall:
        """Return the operator: one selective scan per channel."""
        mixer: Any = call.module
        check_on_device(mixer.A_log, mixer.D, mixer.dt_proj.weight, mixer.dt_proj.bias)
        size = mixer.A_log.shape[-1]
        projected = output_of(inner, "x_proj")
        parts = projected.split([projected.shape[-1] - 2 * size, size, size], dim=-1)
        time_step, b, c = (
            next((inner[norm].output for norm in norms if norm in inner), projection)
            for norms, projection in zip(zip(*self.norms, strict=True), parts, strict=True)
        )
        bias = mixer.dt_proj.bias
        if "dt_proj" in inner:  # quantized models call the projection as a module
            step = inner["dt_proj"].output.transpose(1, 2)
        else:
            step = mixer.dt_proj.weight.detach() @ time_step.transpose(1, 2)
            step = step if bias is None else step + bias.detach().float().to(step.dtype)[:, None]
        rate = -mixer.A_log.detach().float().exp()
        operator = SelectiveMixing(c.unsqueeze(1), b.float().unsqueeze(1), rate, F.softplus(step))
        channels = inner["x_proj"].args[0].transpose(1, 2)
        gate = output_of(inner, "in_proj").transpose(1, 2).chunk(2, dim=1)[1]
        return _gated_channels(mixer, operator, channels, gate, mixer.D)


def _parts(module: nn.Module) -> set[str]:
    """Return the names of a module's own submodules and weights."""
    return {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}


def _gated_channels(
    mixer: Any, operator: SelectiveMixing, channels: Tensor, gate: Tensor, skip: Tensor
) -> MixingCall:
    def apply_output(mixed: Tensor) -> Tensor:
        skipped = mixed[..., 0] + channels * skip.float()[:, None]
        return mixer.out_proj((skipped * F.silu(gate)).transpose(1, 2).to(channels.dtype))

    return MixingCall(operator, channels[..., None], apply_output=apply_output, whole=True)


class ZambaReader(StateSpaceReader):
    """Reads Zamba: one selective scan per channel; the channels of a head share the vectors B and C.

    Values are the channels after the short convolution, its activation and the padding mask, one number per
    token. The layer applies D·x, the gate and the output projection after M V.
    """

    classes = frozenset({"ZambaMambaMixer"})
    inner = ("in_proj",)

    def mixing(self, call: ModuleCall, inner: InnerCalls, values: bool) -> MixingCall:
        """Return the operator: one selective scan per channel, with B and C per head."""
        mixer: Any = call.module
        weights = (mixer.A_log, mixer.D, mixer.x_proj_weight, mixer.dt_proj_weight, mixer.dt_proj_bias)
        check_on_device(*weights, mixer.conv1d.weight, mixer.conv1d.bias)
        # per channel, the projection returns two numbers: input of the convolution, and gate
        x, gate = output_of(inner, "in_proj").transpose(1, 2).unflatten(1, (-1, 2)).unbind(2)
        x = convolved(mixer.conv1d, x.transpose(1, 2), mixer.act)
        channels = without_padding(x, call.argument("attention_mask")).transpose(1, 2)
        heads = channels.unflatten(1, (mixer.n_mamba_heads, -1))
        parts = (mixer.x_proj_weight.detach() @ heads).mT  # shape (B, H, T, ·)
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
        return _gated_channels(mixer, operator, channels, gate, mixer.D.detach().flatten())


class Mamba2Reader(StateSpaceReader):
    """Reads Mamba-2: one scan per head, from outputs of the input projection and the short convolution.

    Values are the heads after the short convolution, its activation and the padding mask. The layer applies
    D·x, the gate with its norm and the output projection after M V.
    """

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
    inner = ("in_proj",)
    head_count = "num_heads"

    def mixing(self, call: ModuleCall, inner: InnerCalls, values: bool) -> MixingCall:
        """Return the operator: one scan per head, with one decay per token."""
        mixer: Any = call.module
        conv = mixer.conv1d
        check_on_device(mixer.A_log, mixer.D, mixer.dt_bias, conv.weight, conv.bias)
        projected = output_of(inner, "in_proj")
        multiplier = getattr(mixer, "mup_vector", None)  # Falcon-H1 scales the projection
        projected = projected if multiplier is None else projected * multiplier
        gate, x, dt = projected.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
        x = without_padding(convolved(conv, x, mixer.act), call.argument("attention_mask"))
        shared = (mixer.conv_dim - mixer.intermediate_size) // 2
        x, b, c = x.split([mixer.intermediate_size, shared, shared], dim=-1)
        b, c = (
            projection.unflatten(-1, (mixer.n_groups, -1)).transpose(1, 2).float() for projection in (b, c)
        )
        heads = x.unflatten(-1, (mixer.num_heads, -1)).transpose(1, 2)
        delta = F.softplus(dt + mixer.dt_bias.detach().to(dt.dtype))
        delta = delta.clamp(*mixer.time_step_limit).float().transpose(1, 2)
        rate = -mixer.A_log.detach().float().exp()
        operator = SemiseparableMixing(c, b, rate[:, None] * delta, delta)

        def apply_output(mixed: Tensor) -> Tensor:
            skipped = (mixed + mixer.D[:, None, None] * heads.float()).transpose(1, 2).flatten(2)
            normed = getattr(mixer, "mamba_rms_norm", True)  # Falcon-H1 may have no norm
            gated = mixer.norm(skipped, gate) if normed else skipped * F.silu(gate)
            return mixer.out_proj(gated.to(gate.dtype))

        return MixingCall(operator, heads.float(), apply_output=apply_output, whole=True)


class ShortConvReader(StateSpaceReader):
    """Reads the gated convolution of LFM models: one Toeplitz matrix per channel, from the weights alone.

    Values are the channels after the first gate. The layer applies the bias of the convolution, the second
    gate and the output projection after M V.
    """

    classes = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"})
    inner = ("in_proj",)

    def mixing(self, call: ModuleCall, inner: InnerCalls, values: bool) -> MixingCall:
        """Return the operator: the convolution of each channel."""
        layer: Any = call.module
        check_on_device(layer.conv.weight, layer.conv.bias)
        enters, leaves, x = output_of(inner, "in_proj").transpose(1, 2).chunk(3, dim=1)
        operator = short_convolution(layer.conv.weight, x.shape[0], x.shape[-1])
        bias = x.new_zeros(x.shape[1]) if layer.conv.bias is None else layer.conv.bias.detach()

        def apply_output(mixed: Tensor) -> Tensor:
            gated = leaves[..., None] * mixed + (leaves * bias[:, None])[..., None]
            return layer.out_proj(gated[..., 0].transpose(1, 2))

        return MixingCall(operator, (enters * x)[..., None], apply_output=apply_output, whole=True)


def convolved(conv: nn.Conv1d, tokens: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply the short causal convolution of a layer and its activation to (B, T, C), as transformers does."""
    weight, bias = conv.weight.detach(), conv.bias
    count, channels = tokens.shape[1:]
    out = F.conv1d(
        tokens.transpose(1, 2).to(weight.dtype),
        weight,
        None if bias is None else bias.detach(),
        padding=weight.shape[-1] - 1,
        groups=channels,
    )
    return activation(out[..., :count]).to(tokens.dtype).transpose(1, 2)


def without_padding(tokens: Tensor, mask: object) -> Tensor:
    """Return tokens with padding set to zero, as transformers does."""
    return (tokens * mask[:, :, None]).to(tokens.dtype) if isinstance(mask, Tensor) else tokens
