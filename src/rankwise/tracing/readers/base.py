"""Base class of readers, the reader for modules that describe their own mixing, and `RunningReaders`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rankwise._internals.batches import map_tensors
from rankwise.errors import RankwiseError, described
from rankwise.operators import MixingOperator
from rankwise.tracing.module_calls import ABSENT, ModuleCall, ModuleCalls, RecordedCall
from rankwise.tracing.read_operators import MixingCall, has_cache
from rankwise.tracing.uncaptured import Sightings, has_no_operator

FUSED = (
    "a fused kernel ran in place of its submodules, so its operator is unknown; call model.eval(), or run it "
    "without the kernel"
)
OFFLOADED = "its weights are offloaded again once it has run; capture it with all weights on a device"
NO_MATRIX = (
    "it mixes tokens, but not by a matrix that capture can read; name it in `sites=` with a function of "
    "your own to capture it"
)
NO_TOKENS = "it was called with no tokens or no sequences"
PACKED = "a row holds several sequences, as its arguments say; pass each sequence as a separate row"
CONTINUED = (
    "it continued from a cache that holds earlier tokens, which are not columns of its operator; capture the "
    "whole sequence in one call"
)

InnerCalls = Mapping[str, RecordedCall]
"""Recorded calls of the submodules in `OperatorReader.inner`, by name relative to the mixer."""


class NotExactError(RankwiseError):
    """Raised if the recorded calls do not determine the operator exactly; the message is the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__("this call", expected="one whose operator can be read", got="another", fix=reason)
        self.reason = reason


class OperatorReader(ABC):
    """Base class of readers. A reader reads the operators of one family of layers exactly, or not at all.

    A reader reads weights of the mixer, and inputs and outputs of submodules. It changes nothing and runs
    no module again.
    """

    classes: ClassVar[frozenset[str]] = frozenset()
    """Names of transformers classes that the reader reads."""
    inner: ClassVar[tuple[str, ...]] = ()
    """Names of submodules whose calls are recorded until the mixer's call ends."""
    output_projection: ClassVar[str | None] = None
    """Submodule that reads the concatenated heads (B, T, H·V). It is "" if the mixer returns these heads
    itself, and None if they are not visible."""
    head_count: ClassVar[str] = ""
    """Name of the mixer's attribute with the number of heads. It is "" if each channel is a head."""

    def reads(self, module: nn.Module) -> bool:
        """Return True if the reader reads modules of this class."""
        return named(module, self.classes)

    def why_not(self, call: ModuleCall) -> str | None:
        """Return why the operator of a starting call cannot be read exactly. Return None if it can."""
        return None

    def joined_heads(self, module: nn.Module) -> tuple[str, int] | None:
        """Return the submodule that reads the concatenated heads, and the number of heads.

        The number is 0 if each channel is a head. Return None if concatenated heads are not visible.
        """
        if self.output_projection is None:
            return None
        return self.output_projection, getattr(module, self.head_count) if self.head_count else 0

    @abstractmethod
    def mixing(self, call: ModuleCall, inner: InnerCalls, values: bool) -> MixingCall:
        """Return the operator of a finished call. If ``values``, also return V and ``apply_output``.

        Raises:
            NotExactError: if the recorded calls do not determine the operator.
        """


def named(module: nn.Module, classes: frozenset[str]) -> bool:
    """Return True if the module's class or a base class is among these transformers classes, by name."""
    return any(
        kind.__name__ in classes and kind.__module__.startswith("transformers.models.")
        for kind in type(module).__mro__
    )


def output_of(inner: InnerCalls, name: str) -> Tensor:
    """Return the output of a submodule. Raise `NotExactError` if the submodule was not called."""
    if name not in inner:
        raise NotExactError(FUSED)
    output: Tensor = inner[name].output
    return output


def split_heads(tokens: Tensor, heads: int) -> Tensor:
    """Return projected tokens (B, T, H·K) as heads (B, H, T, K)."""
    return tokens.unflatten(-1, (heads, -1)).transpose(1, 2)


def check_on_device(*weights: Tensor | None) -> None:
    """Raise `NotExactError` if a weight is offloaded (on the meta device)."""
    if any(weight is not None and weight.is_meta for weight in weights):
        raise NotExactError(OFFLOADED)


class StateSpaceReader(OperatorReader):
    """Base of readers for transformers layers with a short convolution and a recurrent state."""

    output_projection = "out_proj"

    def why_not(self, call: ModuleCall) -> str | None:
        """Return why not to read a call if a cache holds earlier tokens or a row packs several sequences."""
        layer = getattr(call.module, "layer_idx", None)
        for cache in map(call.argument, ("cache_params", "past_key_values")):
            if cache not in (None, ABSENT) and cache.get_conv_state(layer) is not None:
                return CONTINUED
        packed = any(call.kwargs.get(name) is not None for name in ("seq_idx", "cu_seq_lens_q"))
        return PACKED if packed else None


class ProtocolReader(OperatorReader):
    """Reader of modules that describe their own mixing by methods, which are called after ``forward``.

    ``mixing_operator`` returns the operator (B, H, T, S) that ``forward`` applies to the same arguments. All
    other attributes are optional. ``mixing_values`` returns the values (B, H, S, V). ``mixing_projection``
    returns the tokens in the subspace of each head (B, T, H, K). ``output_projection`` is the name of the
    submodule that reads the concatenated heads (B, T, H V), and ``num_heads`` is the number of heads.
    """

    def reads(self, module: nn.Module) -> bool:
        """Return True if the module has a method ``mixing_operator``."""
        return callable(getattr(module, "mixing_operator", None))

    def why_not(self, call: ModuleCall) -> str | None:
        """Return why not to read a call with a cache: the module's own methods would change the cache."""
        if has_cache([call]):
            return "it was called with a cache that a second call would change; capture it without one"
        return None

    def joined_heads(self, module: nn.Module) -> tuple[str, int] | None:
        """Return the module's ``output_projection`` and ``num_heads``. A missing ``num_heads`` counts as 0.

        Return None if ``output_projection`` is missing, or if an attribute has the wrong type.
        """
        name, heads = getattr(module, "output_projection", None), getattr(module, "num_heads", 0)
        return (name, heads) if isinstance(name, str) and isinstance(heads, int) else None

    def mixing(self, call: ModuleCall, inner: InnerCalls, values: bool) -> MixingCall:
        """Return the operator, values and projection that the module's own methods return."""
        operator = _own_method(call, "mixing_operator", *call.args, **call.kwargs)
        if not isinstance(operator, MixingOperator) or len(operator.shape) != 4:
            raise NotExactError(
                f"its `mixing_operator` returned {described(operator)}, expected a MixingOperator of shape "
                "(B, H, T, S)"
            )
        applied = _own_method(call, "mixing_values", *call.args, **call.kwargs) if values else None
        projected = _own_method(call, "mixing_projection", *call.tensors[:1])
        return MixingCall(
            operator, applied, projection=None if projected is None else projected.transpose(1, 2)
        )


def _own_method(call: ModuleCall, name: str, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a method (None if the module lacks it), and restore torch's random state."""
    method = getattr(call.module, name, None)
    devices = {tensor.device for tensor in (*call.module.parameters(), *call.tensors)}
    drawn = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=drawn):
        return method(*args, **kwargs) if callable(method) else None


class NoOperatorReader(OperatorReader):
    """Reader that refuses layers without a readable operator, so that no part of them counts as a mixer."""

    def reads(self, module: nn.Module) -> bool:
        """Return True for a layer that mixes tokens, but not by one readable matrix."""
        return has_no_operator(module)

    def mixing(self, call: ModuleCall, inner: InnerCalls, values: bool) -> MixingCall:
        """Raise `NotExactError`, because no matrix describes the layer."""
        raise NotExactError(NO_MATRIX)


class RunningReaders:
    """Uses readers, given by module name, to read the operators of calls in a running model."""

    def __init__(
        self, readers: Mapping[str, OperatorReader], calls: ModuleCalls, sightings: Sightings, values: bool
    ) -> None:
        self._readers, self._calls, self._sightings, self._values = readers, calls, sightings, values

    @property
    def inside(self) -> bool:
        """True during a call that a reader reads."""
        return any(call.reader is not None for call in self._calls.running)

    def entered(self, call: ModuleCall) -> None:
        """When a call begins, set its reader, or register why its operator cannot be read exactly."""
        reader = self._readers.get(call.name)
        if reader is None or self.inside:
            return
        try:
            reason = reader.why_not(call)
        except Exception as error:
            reason = _unreadable(error)
        if reason is None:
            call.reader = reader
        else:
            self._sightings.leave_out(call.name, reason, exact=True)

    def left(self, call: ModuleCall) -> MixingCall | None:
        """When a call ends, return its operator, or record the call for the reader of an outer call."""
        if call.reader is None:
            self._keep(call)
            return None
        reason = NO_TOKENS
        try:
            if not any(0 in tensor.shape for tensor in call.tensors[:1]):
                mixing: MixingCall = call.reader.mixing(call, call.inner, self._values)
                return mixing
        except torch.OutOfMemoryError:
            raise
        except NotExactError as error:
            reason = error.reason
        except Exception as error:  # any error, because the module may differ in other versions
            reason = _unreadable(error)
        self._sightings.leave_out(call.name, reason, exact=True)
        return None

    def _keep(self, call: ModuleCall) -> None:
        mixer = next((other for other in reversed(self._calls.running[:-1]) if other.reader), None)
        name = "" if mixer is None else call.name.removeprefix(f"{mixer.name}.")
        if mixer is None or name not in mixer.reader.inner:
            return
        if call.tokens is not None and isinstance(call.output, Tensor):
            args = map_tensors(call.args, Tensor.detach)
            mixer.inner[name] = RecordedCall(name, call.module, args, call.kwargs, call.output.detach())


def _unreadable(error: Exception) -> str:
    return f"its operator could not be read ({type(error).__name__}: {error})"
