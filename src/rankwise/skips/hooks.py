"""Hooks that apply λ in modules of a model, also after the model is copied, pickled or compiled."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from torch import Tensor

from rankwise._internals.torch_private import in_backward
from rankwise.errors import SkipError

Key = int | str | None
"""Key of an item in a module's output: an index or a name. None means the output itself."""


@dataclass(frozen=True)
class Argument:
    """Argument of a module, by name, by position, or by both."""

    name: str | None
    position: int | None

    @no_type_check  # torch.compile traces this method and all functions below, and cannot trace type checks
    def read(self, args, kwargs):
        """Return the argument of a call. Return None if the call does not have this argument."""
        if self.name is not None and self.name in kwargs:
            return kwargs[self.name]
        return args[self.position] if self.position is not None and self.position < len(args) else None


@dataclass
class HeldTensor:
    """State x of a skip connection, held from the module that reads it until the module that adds it."""

    residual: Tensor | None = None
    open: bool = False
    """True while the module that computes the sum runs. Only states read in this time are added."""


class ThreadSlot(threading.local):
    """Slot for x, one per thread that runs the model. Slots are empty in copies and pickles of the model."""

    def __init__(self) -> None:
        self.slot = HeldTensor()  # an object, so that torch.compile tracks writes to it by several hooks

    def __reduce__(self) -> tuple[type["ThreadSlot"], tuple[()]]:
        return ThreadSlot, ()


@no_type_check
def recomputing():
    """Return True if autograd recomputes a checkpointed part, maybe without the modules around it."""
    return not torch.compiler.is_compiling() and in_backward()


class SkipHook:
    """Base class of all hooks of λ-skips, so that code can find these hooks among others."""


@dataclass(eq=False)
class AddResidual(SkipHook):
    """Hook after a module that adds (λ − 1)·x, with x from the slot, to the branch f(x) in the output."""

    parameter: str
    key: Key
    held: ThreadSlot

    @no_type_check
    def __call__(self, module, args, kwargs, output):
        """Return the corrected output. Return None if no x was read, because the module is used elsewhere."""
        slot = self.held.slot
        if not slot.open and not recomputing():
            return None
        residual, slot.residual = slot.residual, None
        if residual is None and not slot.open:  # the recomputation has not read x
            subject = f"gradient checkpointing of {type(module).__name__}"
            expected = "a checkpoint around the whole block, which reads the residual again"
            fix = "Checkpoint the block in place of the mixer."
            raise SkipError(subject, expected=expected, got="one around the mixer alone", fix=fix)
        if residual is None:
            return None
        total = corrected(picked(output, self.key), residual, getattr(module, self.parameter))
        return with_value(output, self.key, total)


@dataclass(eq=False)
class HoldResidual(SkipHook):
    """Hook before a module that receives x, which stores x in the slot."""

    argument: Argument
    held: ThreadSlot

    @no_type_check
    def __call__(self, module, args, kwargs):
        """Store x in the slot if the slot is open, or if autograd recomputes a checkpoint."""
        slot = self.held.slot
        if slot.open or recomputing():
            slot.residual = self.argument.read(args, kwargs)


@dataclass(eq=False)
class Scope(SkipHook):
    """Hook that opens the slot before the module in which x is read and added, or closes it after."""

    held: ThreadSlot

    @no_type_check
    def __call__(self, module, args, *output):
        """Empty the slot, and open or close it."""
        slot = self.held.slot
        slot.residual, slot.open = None, len(output) == 0  # torch.compile does not trace `not output`


@no_type_check
def corrected(tensor, residual, scale):
    """Return tensor + (λ − 1)·x, which is bit-identical to the tensor at λ = 1."""
    if tensor.is_nested:  # torch's encoder packs padded rows in evaluation mode; nested tensors lack addcmul
        if scale.numel() > 1:
            got = "nested ones, which torch.nn.TransformerEncoder makes of padded rows in evaluation"
            fix = "Build the encoder with enable_nested_tensor=False, or use per='layer'."
            raise SkipError(
                "λ-skips by channel on nested tensors", expected="padded tensors", got=got, fix=fix
            )
        return tensor + residual * (scale.reshape(()) - 1)
    wide = torch.addcmul(tensor, residual, scale - 1)
    return wide.to(torch.promote_types(tensor.dtype, residual.dtype))


def items(output: Any) -> Iterator[tuple[Key, Any]]:
    """Yield (key, item) for each item of a module's output. A single tensor has the key None."""
    if isinstance(output, Tensor):
        yield None, output
    elif isinstance(output, tuple | list):
        yield from enumerate(output)
    elif isinstance(output, dict):
        yield from output.items()


@no_type_check
def picked(output, key):
    """Return an output that is a tensor, or its item with a key. The key None means the first item."""
    return output if isinstance(output, Tensor) else output[0 if key is None else key]


@no_type_check
def with_value(output, key, value):
    """Return an output with one item replaced. Namedtuples and ModelOutputs keep their type."""
    if isinstance(output, Tensor):
        return value
    key = 0 if key is None else key
    if isinstance(output, tuple):
        changed = (*output[:key], value, *output[key + 1 :])
        return type(output)(*changed) if hasattr(output, "_fields") else changed
    if isinstance(output, dict) and not isinstance(key, str):  # transformers' outputs are set by name only
        key = list(output)[key]
    output[key] = value
    return output
