"""Record every sum of two token states in a forward pass, and replace sums."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, no_type_check

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rankwise._internals.torch_private import base_of, changes_in_place
from rankwise.tracing.module_calls import ModuleCall

SUMS = frozenset(
    {
        torch.add,
        Tensor.add,
        Tensor.add_,
        Tensor.__add__,
        Tensor.__radd__,
        Tensor.__iadd__,
    }
)
COPIES = frozenset(
    {
        Tensor.to,
        Tensor.type_as,
        Tensor.float,
        Tensor.half,
        Tensor.bfloat16,
        Tensor.double,
        Tensor.clone,
        Tensor.contiguous,
        torch.clone,
    }
)
"""Functions that return the same numbers in another tensor."""
RESHAPES = frozenset({torch.reshape, torch.flatten, Tensor.reshape, Tensor.flatten, Tensor.reshape_as})
"""Functions that copy if a view is impossible."""
PRODUCTS = frozenset(
    {
        F.linear,
        F.conv1d,
        F.conv2d,
        F.multi_head_attention_forward,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        torch.einsum,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        Tensor.mm,
        Tensor.bmm,
    }
)
"""Products with a matrix; a norm has none."""
STATE_AXES = (2, 3)
"""Axes of token states: (B, T, D), or (T, D) where sequences are laid end to end."""

Version = tuple[int, int]
"""A tensor as it was at one time: its identity, and how often it had been changed in place."""
SumName = tuple[str, int, int]
"""A sum in a forward pass: the innermost module running, which of its calls, which sum of that call."""
Change = Callable[[Tensor, Tensor], Tensor]
"""Function of the two operands that replaces a sum."""


@no_type_check
def version(tensor):
    """Return the identity of a tensor and how often it was changed in place."""
    return id(tensor), changes_in_place(tensor)


@dataclass
class Sum:
    """One sum x + y of two tensors of one shape."""

    name: SumName
    time: int
    operands: tuple[Version, Version]
    edges: tuple[GradientEdge, GradientEdge]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    finite: bool
    result: Version
    out: GradientEdge
    frames: tuple[ModuleCall, ...]
    """Calls of modules around it, outermost first."""


@dataclass
class Copy:
    """A tensor with the numbers of another."""

    source: Version
    drops: bool
    """True if it differs in training: functional dropout, which no hook can see."""


@dataclass
class Use:
    """A call of a function with a tensor."""

    time: int
    sum: SumName | None
    """Name of the sum, if the function is a sum."""
    running: frozenset[int]
    """Serials of the calls around it."""
    copies: bool
    """True if it only copied."""
    function: str = ""
    passes: bool = False
    """True if it returned the same numbers, as a copy or in another shape."""
    numbers: int = 0
    """Number of entries of its largest output."""
    product: bool = False
    """True if it is a product with a matrix."""


@dataclass
class History:
    """Sums, copies and uses of token states in one forward pass."""

    sums: list[Sum] = field(default_factory=list)
    results: dict[Version, Sum] = field(default_factory=dict)
    copies: dict[Version, Copy] = field(default_factory=dict)
    passed: dict[Version, list[Version]] = field(default_factory=dict)
    """Tensors with the numbers of another: its copies, views of all of it, and what dropout made of it."""
    uses: dict[Version, list[Use]] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    """Kept so that no identity is given twice."""
    time: int = 0
    _origins: dict[Version, Version] = field(default_factory=dict)
    _names: dict[Version, list[Version]] = field(default_factory=dict)

    def tick(self) -> int:
        """Return the next time."""
        self.time += 1
        return self.time

    def copied(self, source: Version, made: Version, drops: bool) -> None:
        """Record a copy."""
        self.copies[made] = Copy(source, drops)
        self.passed.setdefault(source, []).append(made)
        if not drops:
            origin = self.origin(source)
            self._origins[made] = origin
            self._names.setdefault(origin, [origin]).append(made)

    def origin(self, tensor: Version) -> Version:
        """Return the first tensor with the same numbers."""
        return self._origins.get(tensor, tensor)

    def names(self, origin: Version) -> list[Version]:
        """Return a tensor and its copies."""
        return self._names.get(origin, [origin])

    def same_numbers(self, tensor: Version) -> list[Version]:
        """Return a tensor with its copies, views and outputs of dropout, which does nothing here."""
        found = [tensor]
        for version in found:
            found.extend(made for made in self.passed.get(version, ()) if made not in found)
        return found


class SumNames:
    """Names of sums in the order of a forward pass, independent of the batch size.

    Sums are counted per call of a module, so that a scan with a sum per token does not shift other names.
    """

    def __init__(self, running: Sequence[ModuleCall]) -> None:
        self._running = running
        self._calls: dict[str, list[int]] = {}
        self._taken: dict[int, int] = {}

    def next(self) -> SumName:
        """Return the name of the current sum."""
        name, serial = (self._running[-1].name, self._running[-1].serial) if self._running else ("", -1)
        calls = self._calls.setdefault(name, [])
        if serial not in calls:
            calls.append(serial)
        at = self._taken.get(serial, 0)
        self._taken[serial] = at + 1
        return name, calls.index(serial), at


class SumRecorder(TorchFunctionMode):
    """Records sums, copies and uses of token states, with the autograd graph that joins them.

    Functional dropout, which does nothing in evaluation mode, returns a new tensor here, to distinguish the
    tensors before and after it.
    """

    def __init__(self, running: Sequence[ModuleCall], history: History) -> None:
        super().__init__()
        self._running, self._history, self._names = running, history, SumNames(running)

    @no_type_check  # called for every operation of a model, as all below
    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run a function and record it."""
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        pair = operands(func, args, kwargs)
        before = None if pair is None else _edges(*pair)
        given = _floating((*args, *kwargs.values()))
        versions = {id(value): version(value) for value in given}
        names = None if pair is None else (versions[id(pair[0])], versions[id(pair[1])])
        out = func(*args, **kwargs)
        name = None if pair is None else self._names.next()
        if before is not None and names is not None and isinstance(out, Tensor) and out.requires_grad:
            self._sum(name, out, names, before)
        self._used(func, given, versions, out, name)
        return out

    def _sum(
        self, name: SumName, out: Tensor, names: tuple[Version, Version], edges: tuple[GradientEdge, ...]
    ) -> None:
        history = self._history
        history.alive.append(out)
        sum_ = Sum(
            name,
            history.tick(),
            names,
            (edges[0], edges[1]),
            out.shape,
            out.dtype,
            out.device,
            bool(out.isfinite().all()),
            version(out),
            get_gradient_edge(out),
            tuple(self._running),
        )
        history.sums.append(sum_)
        history.results[sum_.result] = sum_

    @no_type_check  # called for every operation of a model
    def _used(self, func, given, versions, out, name):
        history, made = self._history, _floating(out if isinstance(out, tuple | list) else (out,))
        history.alive.extend(made)
        known = set(versions.values())
        fresh = [tensor for tensor in made if version(tensor) not in known]
        if not any(tensor.requires_grad for tensor in fresh):
            return
        copies = func in COPIES and len(fresh) == 1 and bool(versions)
        reshapes = len(known) == len(fresh) == 1 and _reshaped(func, given[0], fresh[0])
        running = frozenset(frame.serial for frame in self._running)
        use = Use(
            history.tick(),
            name,
            running,
            copies,
            function=getattr(func, "__name__", str(func)),
            passes=copies or reshapes,
            numbers=max(tensor.numel() for tensor in fresh),
            product=func in PRODUCTS,
        )
        for tensor in known:
            history.uses.setdefault(tensor, []).append(use)
        if copies:
            history.copied(next(iter(versions.values())), version(fresh[0]), drops=False)
        elif reshapes:
            history.passed.setdefault(next(iter(known)), []).append(version(fresh[0]))

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        out = input.clone()
        self._history.alive.extend((input, out))
        self._history.tick()
        self._history.copied(version(input), version(out), drops=p > 0)
        return out


class ReplaceSums(TorchFunctionMode):
    """Replace chosen sums."""

    def __init__(self, running: Sequence[ModuleCall], changes: Mapping[SumName, Change]) -> None:
        super().__init__()
        self._names, self._changes = SumNames(running), changes

    @no_type_check  # called for every operation of a model, as all below
    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run a function, or the replacement of a sum."""
        kwargs = kwargs or {}
        pair = operands(func, args, kwargs)
        change = None if pair is None else self._changes.get(self._names.next())
        if change is None:
            return func(*args, **kwargs)
        out = change(*pair)
        return pair[0].copy_(out) if func in (Tensor.__iadd__, Tensor.add_) else out


@no_type_check
def operands(func, args, kwargs):
    """Return the two operands of a plain sum that is a state by its axes; None for anything else.

    Sums that broadcast one operand count as well: positions + words broadcasts or not by the number of
    sequences alone, and the names of the other sums must not depend on it.
    """
    if func not in SUMS or kwargs.get("alpha", 1) != 1:
        return None
    given = [*args, *(kwargs[name] for name in ("input", "other") if name in kwargs)]
    if len(given) != 2 or not all(isinstance(value, Tensor) for value in given):
        return None
    first, other = given
    if max(first.dim(), other.dim()) not in STATE_AXES:
        return None
    return (first, other) if first.is_floating_point() and other.is_floating_point() else None


@no_type_check
def _edges(first, other):
    """Return the graph edges of the operands, if they are two states of one shape."""
    if first.shape != other.shape or 0 in first.shape or not (first.requires_grad and other.requires_grad):
        return None
    return get_gradient_edge(first), get_gradient_edge(other)


@no_type_check
def _reshaped(func, given, made):
    """Return True if a tensor has all numbers of another tensor in another shape."""
    if made.numel() != given.numel():
        return False
    base = base_of(given)
    return func in RESHAPES or (base_of(made) is base and made is not base and made is not given)


@no_type_check
def _floating(values):
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
