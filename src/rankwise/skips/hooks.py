"""What a λ-skip leaves in a model: hooks that travel with it when it is copied, pickled or compiled."""

import threading
from typing import no_type_check

import torch
from torch import Tensor, nn

from rankwise._internals.torch_private import in_backward, remove_forward_hooks
from rankwise.errors import SkipError

Key = int | str | None
"""Where a tensor lies in what a module gave: itself, or an item of a tuple or a mapping."""


class Argument:
    """One argument of a module, by name or by position."""

    def __init__(self, name: str | None, position: int | None) -> None:
        self.name, self.position = name, position

    @no_type_check  # traced by torch.compile, as all below
    def of(self, args, kwargs):
        """The tensor that a call was given; None if it was not."""
        if self.name is not None and self.name in kwargs:
            return kwargs[self.name]
        if self.position is not None and self.position < len(args):
            return args[self.position]
        return None

    @no_type_check
    def put(self, args, kwargs, value):
        """The arguments with this argument replaced."""
        if self.name is not None and self.name in kwargs:
            return args, {**kwargs, self.name: value}
        return (*args[: self.position], value, *args[self.position + 1 :]), kwargs

    def __repr__(self) -> str:
        return self.name or f"argument {self.position}"


class Slot:
    """A residual on its way from where it is read to where it is added."""

    def __init__(self) -> None:
        self.residual: Tensor | None = None
        self.open = False
        """Whether the module that takes the sum is running: what is read outside of it is not added."""


class Held(threading.local):
    """A slot for each thread that runs the model; what it holds is never copied with the model."""

    def __init__(self) -> None:
        self.slot = Slot()  # an object of its own: torch.compile follows writes to it from several hooks

    def __reduce__(self) -> tuple[type["Held"], tuple[()]]:
        return Held, ()

    @no_type_check
    def hold(self, residual):
        """Hold what a hook has read."""
        if self.slot.open or recomputing():
            self.slot.residual = residual


@no_type_check
def recomputing():
    """Whether autograd is running a checkpointed part a second time, perhaps without what is around it."""
    return not torch.compiler.is_compiling() and in_backward()


class SkipHook:
    """Base of the hooks of a λ-skip."""

    def __init__(self, parameter: str = "") -> None:
        self.parameter = parameter


class ScaleArgument(SkipHook):
    """Before a module that adds one of its arguments as it is: λ times that argument."""

    def __init__(self, parameter: str, argument: Argument) -> None:
        super().__init__(parameter)
        self.argument = argument

    @no_type_check
    def __call__(self, module, args, kwargs):
        """Scale it."""
        residual = self.argument.of(args, kwargs)
        if residual is None:
            return None
        scaled = (residual * getattr(module, self.parameter)).to(residual.dtype)
        return self.argument.put(args, kwargs, scaled)


class CorrectSum(SkipHook):
    """After a module that gives the sum of one of its arguments and a branch: (λ − 1)·argument on top."""

    def __init__(self, parameter: str, argument: Argument, key: Key) -> None:
        super().__init__(parameter)
        self.argument, self.key = argument, key

    @no_type_check
    def __call__(self, module, args, kwargs, output):
        """Correct it."""
        residual = self.argument.of(args, kwargs)
        if residual is None:
            return None
        total = corrected(picked(output, self.key), residual, getattr(module, self.parameter))
        return with_value(output, self.key, total)


class OpenSlot(SkipHook):
    """Before the module in which a residual is read and added: forget what is left of another call."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.held = held

    @no_type_check
    def __call__(self, module, args):
        """Open it."""
        slot = self.held.slot
        slot.residual, slot.open = None, True


class CloseSlot(OpenSlot):
    """After the same module, however it ended."""

    @no_type_check
    def __call__(self, module, args, output):
        """Close it."""
        slot = self.held.slot
        slot.residual, slot.open = None, False


class HoldInput(SkipHook):
    """Before a module that reads the residual: hold it."""

    def __init__(self, argument: Argument, held: Held) -> None:
        super().__init__()
        self.argument, self.held = argument, held

    @no_type_check
    def __call__(self, module, args, kwargs):
        """Hold it."""
        self.held.hold(self.argument.of(args, kwargs))


class HoldOutput(SkipHook):
    """After a module that gives the residual: hold it."""

    def __init__(self, key: Key, held: Held) -> None:
        super().__init__()
        self.key, self.held = key, held

    @no_type_check
    def __call__(self, module, args, output):
        """Hold it."""
        self.held.hold(picked(output, self.key))


class CorrectBranch(SkipHook):
    """After a module that gives the branch: (λ − 1)·residual on top, so that the sum is λ·x + f(x)."""

    def __init__(self, parameter: str, key: Key, held: Held) -> None:
        super().__init__(parameter)
        self.key, self.held = key, held

    @no_type_check
    def __call__(self, module, args, output):
        """Correct it; a call without a residual before it is another use of the module."""
        slot = self.held.slot
        if not slot.open and not recomputing():
            return None
        residual, slot.residual = slot.residual, None
        if residual is None:
            if not slot.open:  # the same call had a residual in the forward pass
                raise _recomputed_alone(module)
            return None
        branch = picked(output, self.key)
        return with_value(output, self.key, corrected(branch, residual, getattr(module, self.parameter)))


def _recomputed_alone(module: nn.Module) -> SkipError:
    return SkipError(
        f"gradient checkpointing of {type(module).__name__}",
        expected="a checkpoint around the whole block, whose recomputation reads the residual again",
        got="one around the mixer, without the norm or block that reads the residual",
        fix="Checkpoint the block in place of the mixer.",
    )


def _nested_by_channel() -> SkipError:
    return SkipError(
        "λ-skips by channel on nested tensors",
        expected="padded tensors",
        got="the nested ones that torch.nn.TransformerEncoder makes of padded rows in evaluation mode",
        fix="Build the encoder with enable_nested_tensor=False, or use per='layer'.",
    )


@no_type_check
def corrected(tensor, residual, scale):
    """Add (λ − 1)·residual: exactly nothing at λ = 1."""
    if tensor.is_nested:  # torch's encoder packs padded rows so in evaluation mode; they know no addcmul
        if scale.numel() > 1:
            raise _nested_by_channel()
        return tensor + residual * (scale.reshape(()) - 1)
    wide = torch.addcmul(tensor, residual, scale - 1)
    return wide.to(torch.promote_types(tensor.dtype, residual.dtype))


@no_type_check
def picked(output, key):
    """The tensor at a key of what a module gave, which may be a tuple with a cache and a tensor without."""
    if key is None and isinstance(output, tuple):
        return output[0]
    return output if key is None or (key == 0 and isinstance(output, Tensor)) else output[key]


@no_type_check
def with_value(output, key, value):
    """What a module gave, with one tensor replaced."""
    if isinstance(output, Tensor):
        return value
    key = 0 if key is None else key
    if isinstance(output, tuple):
        changed = (*output[:key], value, *output[key + 1 :])
        return type(output)(*changed) if hasattr(output, "_fields") else changed
    output[key] = value
    return output


def remove_hooks(module: nn.Module, kinds: type | tuple[type, ...] = SkipHook) -> int:
    """Take the hooks of λ-skips off one module; other hooks stay."""
    return remove_forward_hooks(module, lambda hook: isinstance(hook, kinds))
