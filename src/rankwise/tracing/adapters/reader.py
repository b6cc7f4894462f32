"""Follows the running calls that an adapter reads."""

import torch
from torch import Tensor, nn

from rankwise.tracing.adapters import adapter_of
from rankwise.tracing.adapters.base import Adapter, CallInside, NotExactError
from rankwise.tracing.mixing_calls import MixingCall
from rankwise.tracing.module_calls import ModuleCall, ModuleCalls, first_tokens


class AdapterReader:
    """Asks adapters for the operators of the modules they read, as these are called and left.

    Args:
        model: the model.
        calls: its running calls.
        values: whether what operators are applied to is asked for.
    """

    def __init__(self, model: nn.Module, calls: ModuleCalls, values: bool) -> None:
        self._adapters = {
            name: adapter for name, module in model.named_modules() if (adapter := adapter_of(module))
        }
        self._calls, self._values = calls, values
        self.left_out: dict[tuple[str, str], None] = {}
        """Names of modules of which a call's operator was not exact, with the reason."""

    @property
    def names(self) -> set[str]:
        """The modules that an adapter reads."""
        return set(self._adapters)

    @property
    def inside(self) -> bool:
        """Whether a call that an adapter reads is under way."""
        return any(call.adapter is not None for call in self._calls.running)

    def entered(self, call: ModuleCall) -> None:
        """A call begins: is it read, and will its operator be exact?"""
        adapter = self._adapters.get(call.name)
        if adapter is None or self.inside:
            return
        reason = self._reason(adapter, call)
        if reason is None:
            call.adapter = adapter
        else:
            self._leave_out(call.name, reason)

    def left(self, call: ModuleCall) -> MixingCall | None:
        """A call has ended: its operator, if an adapter reads it; else an adapter may watch for it."""
        if call.adapter is None:
            self._note(call)
            return None
        if any(0 in tensor.shape for tensor in call.tensors[:1]):
            self._leave_out(call.name, "it was called with no tokens or no sequences")
            return None
        try:
            mixing: MixingCall = call.adapter.mixing(call, call.watched, self._values)
        except torch.OutOfMemoryError:
            raise
        except NotExactError as error:
            self._leave_out(call.name, error.reason)
        except Exception as error:  # of a class that another version of its library has changed
            self._leave_out(call.name, _unreadable(error))
        else:
            return mixing
        return None

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out[name, reason] = None

    def _reason(self, adapter: Adapter, call: ModuleCall) -> str | None:
        try:
            return adapter.why_not(call)
        except Exception as error:
            return _unreadable(error)

    def _note(self, call: ModuleCall) -> None:
        outer = next((other for other in reversed(self._calls.running[:-1]) if other.adapter), None)
        if outer is None or not call.name.startswith(f"{outer.name}."):
            return
        inner, given, gave = call.name[len(outer.name) + 1 :], first_tokens(call.tensors), call.output
        if inner in outer.adapter.watched and given is not None and isinstance(gave, Tensor):
            outer.watched[inner] = CallInside(given.detach(), gave.detach())


def _unreadable(error: Exception) -> str:
    return f"its operator could not be read ({type(error).__name__}: {error})"
