"""Modules that say themselves what they mix with."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.capture.adapters.base import Adapter, CallsInside, NotExactError
from rankwise.capture.mixing_calls import MixingCall
from rankwise.capture.module_calls import ABSENT, ModuleCall
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

    def why_not(self, call: ModuleCall) -> str | None:
        """A cache is changed in place by every call: it cannot be asked a second time."""
        if any(call.argument(name) not in (None, ABSENT) for name in CACHE_ARGUMENTS):
            return "it was called with a cache that a second call would change; capture it without one"
        return None

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """Ask it."""
        module: Any = call.module
        with _own_random_numbers(call):
            operator = module.mixing_operator(*call.args, **call.kwargs)
        if not isinstance(operator, MixingOperator) or len(operator.shape) != 4:
            shape = getattr(operator, "shape", None)
            given = type(operator).__name__ if shape is None else f"{type(operator).__name__} {tuple(shape)}"
            raise NotExactError(
                f"its `mixing_operator` gave {given}, wanted a MixingOperator of shape (B, H, T, S)"
            )
        applied: Tensor | None = None
        if values and callable(getattr(module, "values", None)):
            with _own_random_numbers(call):
                applied = module.values(*call.args, **call.kwargs)
        return MixingCall(operator, applied, projection=_projection(module, call))


def _projection(module: Any, call: ModuleCall) -> Tensor | None:
    """Tokens in the subspaces of the heads, (B, H, T, K): what a TSSA takes its statistics of."""
    if not callable(getattr(module, "projected", None)):
        return None
    with _own_random_numbers(call):
        projected: Tensor = module.projected(call.tensors[0])
    return projected.transpose(1, 2)


def _own_random_numbers(call: ModuleCall) -> AbstractContextManager[None]:
    """Random numbers drawn inside, as by dropout, are none of the model's own."""
    devices = {tensor.device for tensor in (*call.module.parameters(), *call.tensors)}
    drawn = [device for device in devices if device.type == "cuda"]
    return torch.random.fork_rng(devices=drawn)
