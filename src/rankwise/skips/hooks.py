"""Hooks of a λ-skip, which stay in a model when it is copied, pickled or compiled."""

import threading
from dataclasses import dataclass
from typing import no_type_check

import torch
from torch import Tensor

from rankwise._internals.torch_private import in_backward
from rankwise.errors import SkipError

Key = int | str | None
"""Item of a module's output: None for the output itself, an index or a key."""


@dataclass(frozen=True)
class Port:
    """A tensor that a module receives as an argument, or returns as an item of its output."""

    module: str
    argument: tuple[str | None, int | None] | None = None
    """Name and position of the argument; None for an item of the output."""
    key: Key = None

    @no_type_check  # traced by torch.compile, as all below
    def read(self, args, kwargs, output):
        """Return the tensor of a call; None if an argument is missing."""
        if self.argument is None:
            return picked(output[0], self.key)
        name, position = self.argument
        if name is not None and name in kwargs:
            return kwargs[name]
        return args[position] if position is not None and position < len(args) else None


@dataclass
class HeldTensor:
    """State x of a skip connection, held from a module that reads it to the module that adds it."""

    residual: Tensor | None = None
    open: bool = False
    """True while the module that takes the sum runs; a state read outside of it is not added."""


class ThreadSlot(threading.local):
    """A slot per thread that runs the model; copies and pickles of the model have an empty one."""

    def __init__(self) -> None:
        self.slot = HeldTensor()  # an object, because torch.compile follows writes to it from several hooks

    def __reduce__(self) -> tuple[type["ThreadSlot"], tuple[()]]:
        return ThreadSlot, ()


@no_type_check
def recomputing():
    """Return True if autograd runs a checkpointed part again, possibly without the modules around it."""
    return not torch.compiler.is_compiling() and in_backward()


class SkipHook:
    """Base class of the hooks of a λ-skip."""


@dataclass(eq=False)
class ScaleArgument(SkipHook):
    """Before a module: multiply the argument that it adds unchanged by λ."""

    parameter: str
    port: Port

    @no_type_check
    def __call__(self, module, args, kwargs):
        """Return the arguments with the scaled argument."""
        residual = self.port.read(args, kwargs, ())
        if residual is None:
            return None
        scaled = (residual * getattr(module, self.parameter)).to(residual.dtype)
        name, position = self.port.argument
        if name is not None and name in kwargs:
            return args, {**kwargs, name: scaled}
        return (*args[:position], scaled, *args[position + 1 :]), kwargs


@dataclass(eq=False)
class AddResidual(SkipHook):
    """After a module: add (λ − 1)·x to an item of its output, the sum x + f(x) or the branch f(x).

    x is an argument of the same call, or the state in the slot.
    """

    parameter: str
    key: Key
    source: Port | ThreadSlot

    @no_type_check
    def __call__(self, module, args, kwargs, output):
        """Return the corrected output; without x the module is used for something else."""
        if isinstance(self.source, Port):
            residual = self.source.read(args, kwargs, ())
        else:
            slot = self.source.slot
            if not slot.open and not recomputing():
                return None
            residual, slot.residual = slot.residual, None
            if residual is None and not slot.open:  # the same call had a residual in the forward pass
                raise SkipError(
                    f"gradient checkpointing of {type(module).__name__}",
                    expected="a checkpoint around the whole block, which reads the residual again",
                    got="one around the mixer, without the norm or block that reads the residual",
                    fix="Checkpoint the block in place of the mixer.",
                )
        if residual is None:
            return None
        total = corrected(picked(output, self.key), residual, getattr(module, self.parameter))
        return with_value(output, self.key, total)


@dataclass(eq=False)
class HoldResidual(SkipHook):
    """Before a module that receives x, or after a module that returns x: hold x."""

    port: Port
    held: ThreadSlot

    @no_type_check
    def __call__(self, module, args, kwargs, *output):
        """Hold x."""
        slot = self.held.slot
        if slot.open or recomputing():
            slot.residual = self.port.read(args, kwargs, output)


@dataclass(eq=False)
class Scope(SkipHook):
    """Before the module in which x is read and added: open the slot; after it: close the slot."""

    held: ThreadSlot

    @no_type_check
    def __call__(self, module, args, *output):
        """Empty the slot, and open or close it."""
        slot = self.held.slot
        slot.residual, slot.open = None, len(output) == 0  # torch.compile does not trace `not output`


@no_type_check
def corrected(tensor, residual, scale):
    """Return tensor + (λ − 1)·x, bit-identical to the tensor at λ = 1."""
    if tensor.is_nested:  # torch's encoder packs padded rows so in evaluation mode; they know no addcmul
        if scale.numel() > 1:
            raise SkipError(
                "λ-skips by channel on nested tensors",
                expected="padded tensors",
                got="nested ones, which torch.nn.TransformerEncoder makes of padded rows in evaluation",
                fix="Build the encoder with enable_nested_tensor=False, or use per='layer'.",
            )
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
