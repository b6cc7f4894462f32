"""Follows the running calls that an adapter reads."""

import torch
from torch import Tensor, nn

from rankwise.capture.adapters.base import Adapter, NotExactError, Step
from rankwise.capture.adapters.families import adapter_of
from rankwise.capture.calls import Call
from rankwise.capture.frames import Frame, Frames, first_tokens


class Reader:
    """Asks adapters for the operators of the modules they read, as these are called and left.

    Args:
        model: the model.
        frames: its running calls.
        values: whether what operators are applied to is asked for.
    """

    def __init__(self, model: nn.Module, frames: Frames, values: bool) -> None:
        self._adapters = {
            name: adapter for name, module in model.named_modules() if (adapter := adapter_of(module))
        }
        self._frames, self._values = frames, values
        self.left_out: dict[tuple[str, str], None] = {}
        """Names of modules of which a call's operator was not exact, with the reason."""

    @property
    def names(self) -> set[str]:
        """The modules that an adapter reads."""
        return set(self._adapters)

    @property
    def inside(self) -> bool:
        """Whether a call that an adapter reads is under way."""
        return any(frame.adapter is not None for frame in self._frames.running)

    def entered(self, frame: Frame) -> None:
        """A call begins: is it read, and will its operator be exact?"""
        adapter = self._adapters.get(frame.name)
        if adapter is None or self.inside:
            return
        reason = self._reason(adapter, frame)
        if reason is None:
            frame.adapter = adapter
        else:
            self._leave_out(frame.name, reason)

    def left(self, frame: Frame) -> Call | None:
        """A call has ended: its operator, if an adapter reads it; else it may be a step of one."""
        if frame.adapter is None:
            self._note(frame)
            return None
        if any(0 in tensor.shape for tensor in frame.tensors[:1]):
            self._leave_out(frame.name, "it was called with no tokens or no sequences")
            return None
        try:
            call: Call = frame.adapter.call(frame, frame.steps, self._values)
        except torch.OutOfMemoryError:
            raise
        except NotExactError as error:
            self._leave_out(frame.name, error.reason)
        except Exception as error:  # of a class that another version of its library has changed
            self._leave_out(frame.name, _unreadable(error))
        else:
            return call
        return None

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out[name, reason] = None

    def _reason(self, adapter: Adapter, frame: Frame) -> str | None:
        try:
            return adapter.why_not(frame)
        except Exception as error:
            return _unreadable(error)

    def _note(self, frame: Frame) -> None:
        outer = next((other for other in reversed(self._frames.running[:-1]) if other.adapter), None)
        if outer is None or not frame.name.startswith(f"{outer.name}."):
            return
        inner, given, gave = frame.name[len(outer.name) + 1 :], first_tokens(frame.tensors), frame.output
        if inner in outer.adapter.watched and given is not None and isinstance(gave, Tensor):
            outer.steps[inner] = Step(given.detach(), gave.detach())


def _unreadable(error: Exception) -> str:
    return f"its operator could not be read ({type(error).__name__}: {error})"
