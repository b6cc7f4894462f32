"""Modules that say themselves what they mix with."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.capture.adapters.base import Adapter, NotExactError, Steps
from rankwise.capture.calls import Call
from rankwise.capture.frames import ABSENT, Frame
from rankwise.capture.padding import CACHE_ARGUMENTS
from rankwise.operators import MixingOperator


class ProtocolAdapter(Adapter):
    """A module with a method ``mixing_operator`` of the same arguments as its ``forward``.

    The method gives the operator, (B, H, T, S), that the same call of ``forward`` applies; a method
    ``values`` of the same arguments, where there is one, gives what it is applied to, (B, H, S, V). Both are
    called when the module has run, with the arguments it had.
    """

    def reads(self, module: nn.Module) -> bool:
        """Whether it has the method."""
        return callable(getattr(module, "mixing_operator", None))

    def why_not(self, frame: Frame) -> str | None:
        """A cache is changed in place by every call: it cannot be asked a second time."""
        if any(frame.argument(name) not in (None, ABSENT) for name in CACHE_ARGUMENTS):
            return "it was called with a cache that a second call would change; capture it without one"
        return None

    def call(self, frame: Frame, steps: Steps, values: bool) -> Call:
        """Ask it."""
        module: Any = frame.module
        with _own_random_numbers(frame):
            operator = module.mixing_operator(*frame.args, **frame.kwargs)
        if not isinstance(operator, MixingOperator) or len(operator.shape) != 4:
            shape = getattr(operator, "shape", None)
            given = type(operator).__name__ if shape is None else f"{type(operator).__name__} {tuple(shape)}"
            raise NotExactError(
                f"its `mixing_operator` gave {given}, wanted a MixingOperator of shape (B, H, T, S)"
            )
        applied: Tensor | None = None
        if values and callable(getattr(module, "values", None)):
            with _own_random_numbers(frame):
                applied = module.values(*frame.args, **frame.kwargs)
        return Call(operator, applied, projection=_projection(module, frame))


def _projection(module: Any, frame: Frame) -> Tensor | None:
    """Tokens in the subspaces of the heads, (B, H, T, K): what a TSSA takes its statistics of."""
    if not callable(getattr(module, "projected", None)):
        return None
    with _own_random_numbers(frame):
        projected: Tensor = module.projected(frame.tensors[0])
    return projected.transpose(1, 2)


def _own_random_numbers(frame: Frame) -> AbstractContextManager[None]:
    """Random numbers drawn inside, as by dropout, are none of the model's own."""
    devices = {tensor.device for tensor in (*frame.module.parameters(), *frame.tensors)}
    drawn = [device for device in devices if device.type == "cuda"]
    return torch.random.fork_rng(devices=drawn)
