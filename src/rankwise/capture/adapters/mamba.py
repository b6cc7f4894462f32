"""Mamba, Falcon-Mamba and the Mamba layers of Jamba, as transformers computes them."""

from collections.abc import Callable
from typing import Any

import torch
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
from rankwise.capture.adapters.gated_path import gated_path
from rankwise.capture.mixing_calls import MixingCall
from rankwise.capture.module_calls import ModuleCall
from rankwise.operators import SelectiveMixing


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
        finish = _finish(mixer, channels, gate)
        return MixingCall(operator, channels[..., None], finish=finish, path=path, whole=True)


def _step(mixer: Any, time_step: Tensor, inside: CallsInside) -> Tensor:
    """Δ (B, D, T)."""
    bias = mixer.dt_proj.bias
    if "dt_proj" in inside:  # called as a module where the model is quantized
        raw = inside["dt_proj"].gave.transpose(1, 2)
    else:
        raw = mixer.dt_proj.weight.detach() @ time_step.transpose(1, 2)
        raw = raw if bias is None else raw + bias.detach().float().to(raw.dtype)[:, None]
    return F.softplus(raw)


def _finish(mixer: Any, channels: Tensor, gate: Tensor) -> Callable[[Tensor], Tensor]:
    def finish(mixed: Tensor) -> Tensor:
        skipped = mixed[..., 0] + channels * mixer.D.float()[:, None]
        return _projection(mixer, channels.dtype)((skipped * F.silu(gate))[..., None])

    return finish


def _projection(mixer: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda gated: mixer.out_proj(gated[..., 0].transpose(1, 2).to(dtype))
