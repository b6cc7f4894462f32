"""Hooks of a λ-skip, which stay in a model when it is copied, pickled or compiled."""

import threading
from typing import no_type_check

import torch
from torch import Tensor, nn

from rankwise._internals.torch_private import in_backward
from rankwise.errors import SkipError

Key = int | str | None
"""Item of a module's output: None for the output itself, an index or a key."""


class Argument:
    """Argument of a module, by name or position."""

    def __init__(self, name: str | None, position: int | None) -> None:
        self.name, self.position = name, position

    @no_type_check  # traced by torch.compile, as all below
    def of(self, args, kwargs):
        """Return this argument of a call; None if it is missing."""
        if self.name is not None and self.name in kwargs:
            return kwargs[self.name]
        if self.position is not None and self.position < len(args):
            return args[self.position]
        return None

    @no_type_check
    def put(self, args, kwargs, value):
        """Return the arguments with this argument replaced."""
        if self.name is not None and self.name in kwargs:
            return args, {**kwargs, self.name: value}
        return (*args[: self.position], value, *args[self.position + 1 :]), kwargs

    def __repr__(self) -> str:
        return self.name or f"argument {self.position}"


class HeldTensor:
    """State x of a skip connection, held from a module that reads it to the module that adds it."""

    def __init__(self) -> None:
        self.residual: Tensor | None = None
        self.open = False
        """True while the module that takes the sum runs; a state read outside of it is not added."""


class ThreadSlot(threading.local):
    """A slot per thread that runs the model; copies and pickles of the model have an empty one."""

    def __init__(self) -> None:
        self.slot = HeldTensor()  # an object, because torch.compile follows writes to it from several hooks

    def __reduce__(self) -> tuple[type["ThreadSlot"], tuple[()]]:
        return ThreadSlot, ()

    @no_type_check
    def hold(self, residual):
        """Hold a state for the hook that adds it."""
        if self.slot.open or recomputing():
            self.slot.residual = residual


@no_type_check
def recomputing():
    """Return True if autograd runs a checkpointed part again, possibly without the modules around it."""
    return not torch.compiler.is_compiling() and in_backward()


class SkipHook:
    """Base class of the hooks of a λ-skip."""

    def __init__(self, parameter: str = "") -> None:
        self.parameter = parameter


class ScaleArgument(SkipHook):
    """Before a module: multiply the argument that it adds unchanged by λ."""

    def __init__(self, parameter: str, argument: Argument) -> None:
        super().__init__(parameter)
        self.argument = argument

    @no_type_check
    def __call__(self, module, args, kwargs):
        """Return the arguments with the scaled argument."""
        residual = self.argument.of(args, kwargs)
        if residual is None:
            return None
        scaled = (residual * getattr(module, self.parameter)).to(residual.dtype)
        return self.argument.put(args, kwargs, scaled)


class CorrectSum(SkipHook):
    """After a module that adds one of its arguments to a branch: add (λ − 1)·argument to its output."""

    def __init__(self, parameter: str, argument: Argument, key: Key) -> None:
        super().__init__(parameter)
        self.argument, self.key = argument, key

    @no_type_check
    def __call__(self, module, args, kwargs, output):
        """Return the corrected output."""
        residual = self.argument.of(args, kwargs)
        if residual is None:
            return None
        total = corrected(picked(output, self.key), residual, getattr(module, self.parameter))
        return with_value(output, self.key, total)


class OpenSlot(SkipHook):
    """Before the module in which x is read and added: open the slot, without the state of another call."""

    def __init__(self, held: ThreadSlot) -> None:
        super().__init__()
        self.held = held

    @no_type_check
    def __call__(self, module, args):
        """Open the slot."""
        slot = self.held.slot
        slot.residual, slot.open = None, True


class CloseSlot(OpenSlot):
    """After the same module, also if it raised: close the slot."""

    @no_type_check
    def __call__(self, module, args, output):
        """Close the slot."""
        slot = self.held.slot
        slot.residual, slot.open = None, False


class HoldInput(SkipHook):
    """Before a module that reads x: hold x."""

    def __init__(self, argument: Argument, held: ThreadSlot) -> None:
        super().__init__()
        self.argument, self.held = argument, held

    @no_type_check
    def __call__(self, module, args, kwargs):
        """Hold x."""
        self.held.hold(self.argument.of(args, kwargs))


class HoldOutput(SkipHook):
    """After a module that returns x: hold x."""

    def __init__(self, key: Key, held: ThreadSlot) -> None:
        super().__init__()
        self.key, self.held = key, held

    @no_type_check
    def __call__(self, module, args, output):
        """Hold x."""
        self.held.hold(picked(output, self.key))


class CorrectBranch(SkipHook):
    """After a module that returns the branch f(x): add (λ − 1)·x, so that the sum is λ·x + f(x)."""

    def __init__(self, parameter: str, key: Key, held: ThreadSlot) -> None:
        super().__init__(parameter)
        self.key, self.held = key, held

    @no_type_check
    def __call__(self, module, args, output):
        """Return the corrected output; without a held x the module is used for something else."""
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
    """Return tensor + (λ − 1)·x, bit-identical to the tensor at λ = 1."""
    if tensor.is_nested:  # torch's encoder packs padded rows so in evaluation mode; they know no addcmul
        if scale.numel() > 1:
            raise _nested_by_channel()
        return tensor + residual * (scale.reshape(()) - 1)
    wide = torch.addcmul(tensor, residual, scale - 1)
    return wide.to(torch.promote_types(tensor.dtype, residual.dtype))


@no_type_check
def picked(output, key):
    """Return one item of an output, which may be a tuple with a cache and a tensor without a cache."""
    if key is None and isinstance(output, tuple):
        return output[0]
    return output if key is None or (key == 0 and isinstance(output, Tensor)) else output[key]


@no_type_check
def with_value(output, key, value):
    """Return an output with one item replaced; namedtuples and ModelOutputs keep their type."""
    if isinstance(output, Tensor):
        return value
    key = 0 if key is None else key
    if isinstance(output, tuple):
        changed = (*output[:key], value, *output[key + 1 :])
        return type(output)(*changed) if hasattr(output, "_fields") else changed
    output[key] = value
    return output
