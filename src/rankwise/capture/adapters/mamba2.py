"""Mamba-2, and the Mamba-2 layers of Bamba, Zamba2, Falcon-H1, Nemotron-H and Granite 4, as transformers
computes them.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.capture.adapters.base import (
    Adapter,
    CallsInside,
    call_of,
    check_on_device,
    named,
    why_not_from_scratch,
)
from rankwise.capture.adapters.gated_path import convolved, gated_path, without_padding
from rankwise.capture.mixing_calls import MixingCall
from rankwise.capture.module_calls import ModuleCall
from rankwise.capture.trace import Path
from rankwise.operators import SemiseparableMixing


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
        inner = without_padding(convolved(mixer, inner), call.argument("attention_mask"))
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
        finish = _finish(mixer, heads, gate)
        path = _path(call, operator, given[..., : mixer.intermediate_size].transpose(1, 2), gate)
        return MixingCall(operator, heads.float(), finish=finish, path=path, whole=True)


def _path(call: ModuleCall, heads: SemiseparableMixing, given: Tensor, gate: Tensor) -> Path | None:
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
    """Whether the gate has a norm behind it; Falcon-H1 may have none."""
    return bool(getattr(mixer, "mamba_rms_norm", True))


def _finish(mixer: Any, heads: Tensor, gate: Tensor) -> Callable[[Tensor], Tensor]:
    def finish(mixed: Tensor) -> Tensor:
        skipped = (mixed + mixer.D[:, None, None] * heads.float()).transpose(1, 2).flatten(2)
        gated = mixer.norm(skipped, gate) if _normed(mixer) else skipped * F.silu(gate)
        return mixer.out_proj(gated.to(gate.dtype))

    return finish
