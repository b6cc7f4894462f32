"""Mamba, Falcon-Mamba and the Mamba layers of Jamba, as transformers computes them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.capture.adapters.base import (
    Adapter,
    Steps,
    check_on_device,
    named,
    step,
    why_not_from_scratch,
)
from rankwise.capture.adapters.path import gated_path
from rankwise.capture.calls import Call
from rankwise.capture.frames import Frame
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

    def why_not(self, frame: Frame) -> str | None:
        """It goes on from earlier tokens, or holds several sequences in a row."""
        return why_not_from_scratch(frame)

    def call(self, frame: Frame, steps: Steps, values: bool) -> Call:
        """The selective scan of a whole sequence."""
        mixer: Any = frame.module
        check_on_device(mixer.A_log, mixer.D, mixer.dt_proj.weight, mixer.dt_proj.bias)
        projected = step(steps, "x_proj")
        x, size = projected.given, mixer.ssm_state_size
        parts = projected.gave.split([mixer.time_step_rank, size, size], dim=-1)
        time_step, b, c = (
            steps[norm].gave if norm in steps else part
            for norm, part in zip(("dt_layernorm", "b_layernorm", "c_layernorm"), parts, strict=True)
        )
        operator = SelectiveMixing(
            c.unsqueeze(1),
            b.float().unsqueeze(1),
            -mixer.A_log.detach().float().exp(),
            _step(mixer, time_step, steps),
        )
        if not values:
            return Call(operator, whole=True)
        channels = x.transpose(1, 2)
        given, gate = step(steps, "in_proj").gave.transpose(1, 2).chunk(2, dim=1)
        path = gated_path(frame, operator, given, gate, mixer.D, _projection(mixer, channels.dtype))
        finish = _finish(mixer, channels, gate)
        return Call(operator, channels[..., None], finish=finish, path=path, whole=True)


def _step(mixer: Any, time_step: Tensor, steps: Steps) -> Tensor:
    """Δ (B, D, T)."""
    bias = mixer.dt_proj.bias
    if "dt_proj" in steps:  # called as a module where the model is quantized
        raw = steps["dt_proj"].gave.transpose(1, 2)
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
