"""What an adapter is, and the adapter of modules that say themselves what they mix with."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rankwise.errors import RankwiseError
from rankwise.operators import MixingOperator
from rankwise.tracing.masks import CACHE_ARGUMENTS
from rankwise.tracing.mixing_calls import MixingCall
from rankwise.tracing.module_calls import ABSENT, ModuleCall

FUSED = (
    "a fused kernel ran in place of its own inside, so that what it mixed with was not seen; call "
    "model.eval(), or run it without the kernel"
)
OFFLOADED = "its weights are offloaded and gone when it has run; capture it with the weights on a device"
PACKED = "it was told that a row holds several sequences (`seq_idx`); pass each sequence as a row of its own"
CONTINUED = (
    "it went on from a cache that holds earlier tokens, which are no columns of its operator; capture the "
    "whole sequence in one call"
)

CACHES = ("cache_params", "past_key_values")
"""What layers of transformers call their cache."""


class NotExactError(RankwiseError):
    """A call whose operator does not follow from what was seen of it; its text is the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__("this call", expected="one whose operator can be read", got="another", fix=reason)
        self.reason = reason


@dataclass(frozen=True)
class CallInside:
    """A call of a module inside a mixer."""

    given: Tensor
    gave: Any


CallsInside = Mapping[str, CallInside]
"""The calls of the modules that an adapter watches, by their names inside the mixer."""


class Adapter(ABC):
    """Reads the operator of one family of layers, exactly or not at all.

    It changes nothing and runs nothing of the model a second time: it reads what the modules inside the mixer
    were given and gave, and its weights.
    """

    watched: ClassVar[tuple[str, ...]] = ()
    """Modules inside the mixer whose calls are kept until the mixer ends."""

    @abstractmethod
    def reads(self, module: nn.Module) -> bool:
        """Whether a module is of this family."""

    def why_not(self, call: ModuleCall) -> str | None:
        """Why the operator of a call that now begins will not be exact; None where it will."""
        return None

    def output_projection(self, module: nn.Module) -> tuple[str, int] | None:
        """The module inside that reads the heads side by side, (B, T, H V), and how many heads these are.

        ``""`` for what the mixer itself gives; 0 heads: each channel is one. None where they are not seen so.
        """
        return None

    @abstractmethod
    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """The operator of a call that has just ended.

        Args:
            call: the call.
            inside: the calls of the watched modules inside it.
            values: whether what it was applied to is asked for, and how the layer goes on from there.

        Raises:
            NotExactError: where it does not follow from what was seen.
        """


def named(module: nn.Module, classes: frozenset[str]) -> bool:
    """Whether a module's class, or one it is made from, is one of these of transformers."""
    return any(
        kind.__name__ in classes and kind.__module__.startswith("transformers.models.")
        for kind in type(module).__mro__
    )


def call_of(inside: CallsInside, name: str) -> CallInside:
    """The call of one watched module.

    Raises:
        NotExactError: if it was not called.
    """
    if name not in inside:
        raise NotExactError(FUSED)
    return inside[name]


def why_not_from_scratch(call: ModuleCall, state_idx: int = 0) -> str | None:
    """Why a state-space layer of transformers does not start from an empty state; None where it does.

    Args:
        call: the call of the layer, which has ``layer_idx``.
        state_idx: which of the convolution states of that index in the cache is the layer's.
    """
    layer = getattr(call.module, "layer_idx", None)
    for cache in (call.argument(name) for name in CACHES):
        if cache not in (None, ABSENT) and cache.get_conv_state(layer, state_idx=state_idx) is not None:
            return CONTINUED
    if call.kwargs.get("seq_idx") is not None:
        return PACKED
    return None


def check_on_device(*weights: Tensor | None) -> None:
    """Refuse weights that are not there.

    Raises:
        NotExactError: if one of them is offloaded.
    """
    if any(weight is not None and weight.is_meta for weight in weights):
        raise NotExactError(OFFLOADED)


class ProtocolAdapter(Adapter):
    """Calls the methods with which a module describes its own mixing.

    ``mixing_operator`` returns the operator, (B, H, T, S), that ``forward`` applies to the same arguments.
    The rest is optional: ``mixing_values`` returns what the operator is applied to, (B, H, S, V);
    ``mixing_projection`` returns the tokens in the subspaces of the heads, (B, T, H, K);
    ``output_projection`` names the module inside that reads the concatenated heads, (B, T, H V), and
    ``num_heads`` counts them. Methods are called after the module has run.
    """

    def reads(self, module: nn.Module) -> bool:
        """Whether it has the method."""
        return callable(getattr(module, "mixing_operator", None))

    def why_not(self, call: ModuleCall) -> str | None:
        """A cache is changed in place by every call: it cannot be asked a second time."""
        if any(call.argument(name) not in (None, ABSENT) for name in CACHE_ARGUMENTS):
            return "it was called with a cache that a second call would change; capture it without one"
        return None

    def output_projection(self, module: nn.Module) -> tuple[str, int] | None:
        """As it says; without a number of heads every channel is one."""
        name, heads = getattr(module, "output_projection", None), getattr(module, "num_heads", 0)
        return (name, heads) if isinstance(name, str) and isinstance(heads, int) else None

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """Ask it."""
        module: Any = call.module
        with _own_random_numbers(call):
            operator = module.mixing_operator(*call.args, **call.kwargs)
        if not isinstance(operator, MixingOperator) or len(operator.shape) != 4:
            shape = getattr(operator, "shape", None)
            given = type(operator).__name__ if shape is None else f"{type(operator).__name__} {tuple(shape)}"
            raise NotExactError(
                f"its `mixing_operator` gave {given}, expected a MixingOperator of shape (B, H, T, S)"
            )
        applied: Tensor | None = None
        if values and callable(getattr(module, "mixing_values", None)):
            with _own_random_numbers(call):
                applied = module.mixing_values(*call.args, **call.kwargs)
        return MixingCall(operator, applied, projection=_projected(module, call))


def _projected(module: Any, call: ModuleCall) -> Tensor | None:
    """Tokens in the subspaces of the heads, (B, H, T, K): what a TSSA takes its statistics of."""
    if not callable(getattr(module, "mixing_projection", None)):
        return None
    with _own_random_numbers(call):
        projected: Tensor = module.mixing_projection(call.tensors[0])
    return projected.transpose(1, 2)


def _own_random_numbers(call: ModuleCall) -> AbstractContextManager[None]:
    """Random numbers drawn inside, as by dropout, are none of the model's own."""
    devices = {tensor.device for tensor in (*call.module.parameters(), *call.tensors)}
    drawn = [device for device in devices if device.type == "cuda"]
    return torch.random.fork_rng(devices=drawn)
