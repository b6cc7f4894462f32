"""The Mamba layers of Zamba, as transformers computes them: Mamba with a Δ, B and C for each head."""

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
from rankwise.operators import SelectiveMixing


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

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """The selective scan of a whole sequence, head by head."""
        mixer: Any = call.module
        weights = (mixer.A_log, mixer.D, mixer.x_proj_weight, mixer.dt_proj_weight, mixer.dt_proj_bias)
        check_on_device(*weights, mixer.conv1d.weight, mixer.conv1d.bias)
        # Channel by channel, what is mixed and then its gate.
        given, gate = call_of(inside, "in_proj").gave.transpose(1, 2).unflatten(1, (-1, 2)).unbind(2)
        inner = convolved(mixer, given.transpose(1, 2))
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

        def finish(mixed: Tensor) -> Tensor:
            skipped = mixed[..., 0] + channels * skip.float()[:, None]
            return _projection(mixer, channels.dtype)((skipped * F.silu(gate))[..., None])

        return MixingCall(operator, channels[..., None], finish=finish, path=path, whole=True)


def _projection(mixer: Any, dtype: Any) -> Callable[[Tensor], Tensor]:
    return lambda gated: mixer.out_proj(gated[..., 0].transpose(1, 2).to(dtype))
