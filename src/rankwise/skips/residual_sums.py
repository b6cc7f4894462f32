"""Find skip connections: the sums x + f(x) of a forward pass in which f mixes tokens, by derivatives."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rankwise._internals.batches import Batch, map_tensors, tensors_in
from rankwise._internals.forward import eval_mode, run_model
from rankwise._internals.torch_private import base_of, changes_in_place, uncompiled
from rankwise.errors import SkipError
from rankwise.importance.gated_passes import graph_nodes
from rankwise.skips.hooks import Argument, Key, items
from rankwise.tracing.module_calls import ModuleCall, ModuleCalls, parameter_names
from rankwise.tracing.torch_functions import ADDED_PRODUCTS, LINEAR_LAYERS, SUMS
from rankwise.tracing.torch_functions import PRODUCTS as TENSOR_PRODUCTS

COPIES = frozenset((
    "CloneBackward0", "ToCopyBackward0", "UnsafeViewBackward0", "CatBackward0", "StackBackward0",
    "torch::autograd::CopyBackwards",
))  # fmt: skip
"""Names of autograd nodes of functions that return the values of one tensor in another tensor."""
PRODUCTS = LINEAR_LAYERS | TENSOR_PRODUCTS | ADDED_PRODUCTS | {torch.einsum, F.multi_head_attention_forward}
"""Matrix products. A function in this set cannot be the norm that reads a sum."""

Version = tuple[int, int]
"""State of a tensor: its Python id, and how often the tensor was changed in place before."""
SumName = tuple[str, int, int]
"""Name of a sum in a forward pass: (innermost module, index of its call, index of the sum in that call)."""
SumChange = Callable[[Tensor, Tensor], Tensor]
"""Replacement of a sum: a function of its two operands."""


@dataclass
class Sum:
    """Recorded sum x + y of two tensors of equal shape."""

    name: SumName
    time: int
    operands: tuple[Version, Version]
    edges: tuple[GradientEdge, GradientEdge]
    origins: tuple[GradientEdge, GradientEdge]
    """Edges of the original tensors if operands are copies. Otherwise the edges of the operands."""
    result: Version
    out: GradientEdge
    like: Tensor
    """Result of the sum, detached from the graph."""
    frames: tuple[ModuleCall, ...]
    """Calls of the modules around the sum, outermost first."""


@dataclass
class Use:
    """Recorded call of a function with a tensor as an argument."""

    time: int
    sum: SumName | None
    """Name of the sum, if the function is a sum."""
    running: frozenset[int]
    """Serial numbers of the module calls around this call."""
    copies: bool
    """True if the function returns a copy of the tensor."""
    function: str
    numbers: int
    """Number of entries of the largest output. 0 for a matrix product.

    A function that reads a sum may be a norm only if its output has as many entries as the sum.
    """


@dataclass(frozen=True)
class Passage:
    """Record of a tensor that a module received or returned in a call."""

    time: int
    call: ModuleCall
    place: Any
    """`Argument` of a received tensor, or the key of a returned tensor in the output."""
    shape: torch.Size


@dataclass
class ForwardRecord:
    """Record of one forward pass: sums, copies and uses of tensors, and their passages through modules."""

    sums: list[Sum] = field(default_factory=list)
    sources: dict[Version, tuple[Version, str, GradientEdge]] = field(default_factory=dict)
    """For each copied tensor: its source, "copy" or "dropout", and the edge of the source. Casts and views of
    all values count as copies."""
    uses: dict[Version, list[Use]] = field(default_factory=dict)
    received: dict[Version, list[Passage]] = field(default_factory=dict)
    returned: dict[Version, list[Passage]] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)
    """Tensors kept alive, so that Python does not reuse their identity for a new tensor."""
    time: int = 0

    def tick(self) -> int:
        """Return the time of a new event: the number of events including the new event."""
        self.time += 1
        return self.time

    def enter(self, call: ModuleCall) -> None:
        """Record the tensors in the arguments of a module call."""
        time, names = self.tick(), parameter_names(call.module)
        for i, value in enumerate(call.args):
            self._pass(self.received, time, call, value, Argument(names[i] if i < len(names) else None, i))
        for name, value in call.kwargs.items():
            position = names.index(name) if name in names else None
            self._pass(self.received, time, call, value, Argument(name, position))

    def leave(self, call: ModuleCall) -> None:
        """Record the tensors in the output of a module call."""
        time = self.tick()
        for key, value in items(call.output):
            self._pass(self.returned, time, call, value, key)

    def _pass(self, notes: Any, time: int, call: ModuleCall, value: Any, place: Argument | Key) -> None:
        if isinstance(value, Tensor):
            self.alive.append(value)
            notes.setdefault(version(value), []).append(Passage(time, call, place, value.shape))

    def origin(self, tensor: Version, edge: Any = None) -> tuple[Version, Any]:
        """Return the tensor from which a tensor was copied, maybe in several steps, and its edge.

        A tensor that is not a copy is returned with the given edge.
        """
        while tensor in self.sources and self.sources[tensor][1] == "copy":
            tensor, _, edge = self.sources[tensor]
        return tensor, edge

    def same_numbers(self, tensor: Version) -> list[Version]:
        """Return a tensor with its copies and dropout outputs, which are equal in evaluation mode."""
        equal = [tensor]
        for made, (source, *_) in self.sources.items():
            if source in equal:
                equal.append(made)
        return equal

    def copies_of(self, origin: Version) -> list[Version]:
        """Return a tensor and its copies, without outputs of dropout."""
        return [tensor for tensor in self.same_numbers(origin) if self.origin(tensor)[0] == origin]


@no_type_check
def version(tensor):
    """Return the identity of a tensor, and how often it was changed in place."""
    return id(tensor), changes_in_place(tensor)


class SumNames:
    """Counter that names the sums of a forward pass in order, independent of the batch size.

    Sums are counted per call of a module, so that a scan with one sum per token does not shift other names.
    """

    def __init__(self, running: Sequence[ModuleCall]) -> None:
        self._running = running
        self._counts: dict[str, dict[int, int]] = {}  # by module: the number of sums in each of its calls

    def next(self) -> SumName:
        """Return the name of the next sum, which belongs to the innermost running module."""
        call = self._running[-1] if self._running else None  # a hook may run after all modules
        name, serial = (call.name, call.serial) if call else ("", -1)
        counts = self._counts.setdefault(name, {})
        counts[serial] = counts.get(serial, -1) + 1
        return name, list(counts).index(serial), counts[serial]


class SumRecorder(TorchFunctionMode):
    """Mode that records sums, copies and uses of tensors, with the autograd graph between them.

    Functional dropout returns a copy in this mode. Otherwise, in evaluation mode, dropout would return its
    input itself.
    """

    def __init__(self, running: Sequence[ModuleCall], record: ForwardRecord) -> None:
        super().__init__()
        self._running, self._record, self._names = running, record, SumNames(running)

    @no_type_check  # runtime type checks would slow down every operation of a model, here and below
    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run a function and record it."""
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        record, pair = self._record, operands(func, args, kwargs)
        states = pair is not None and pair[0].shape == pair[1].shape and 0 not in pair[0].shape
        edges = None
        if states and self._running and pair[0].requires_grad and pair[1].requires_grad:
            edges = tuple(map(get_gradient_edge, pair))  # read before an operand changes in place
        given = floating(tensors_in((args, kwargs)))
        versions = {id(value): version(value) for value in given}
        out = func(*args, **kwargs)
        name = None if pair is None else self._names.next()
        if edges is not None and isinstance(out, Tensor) and out.requires_grad:
            before = versions[id(pair[0])], versions[id(pair[1])]
            origins = tuple(record.origin(*operand)[1] for operand in zip(before, edges, strict=True))
            total = Sum(
                name, record.tick(), before, edges, origins, result=version(out), out=get_gradient_edge(out),
                like=out.detach(), frames=tuple(self._running),
            )  # fmt: skip
            record.sums.append(total)
        self._used(func, given, versions, out, name)
        return out

    @no_type_check
    def _used(self, func, given, versions, out, name):
        record, made = self._record, floating(out if isinstance(out, tuple | list) else (out,))
        record.alive.extend(made)
        inputs = set(versions.values())
        fresh = [tensor for tensor in made if version(tensor) not in inputs]
        if not any(tensor.requires_grad for tensor in fresh):
            return
        source = source_of(given, fresh[0]) if len(fresh) == 1 else None
        if source is not None:
            edge = get_gradient_edge(source)
            record.sources[version(fresh[0])] = (versions[id(source)], "copy", edge)
        use = Use(
            record.tick(), name, frozenset(call.serial for call in self._running), source is not None,
            function=getattr(func, "__name__", str(func)),
            numbers=0 if func in PRODUCTS else max(tensor.numel() for tensor in fresh),
        )  # fmt: skip
        for tensor in inputs:
            record.uses.setdefault(tensor, []).append(use)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        out = input.clone()
        self._record.alive.extend((input, out))
        self._record.tick()
        if input.requires_grad:
            how = "dropout" if p > 0 else "copy"
            self._record.sources[version(out)] = (version(input), how, get_gradient_edge(input))
        return out


class ReplaceSums(TorchFunctionMode):
    """Mode that replaces chosen sums of a forward pass."""

    def __init__(self, running: Sequence[ModuleCall], changes: Mapping[SumName, SumChange]) -> None:
        super().__init__()
        self._names, self._changes = SumNames(running), changes

    @no_type_check
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
    """Return the two operands of a plain sum with as many axes as token states. Return None otherwise.

    Sums that broadcast an operand are included, because names of sums must not depend on the batch size. For
    example, positions + words broadcasts only in batches of several sequences.
    """
    if func not in SUMS or kwargs.get("alpha", 1) != 1:
        return None
    given = [*args, *(kwargs[name] for name in ("input", "other") if name in kwargs)]
    if len(given) != 2 or len(floating(given)) != 2:
        return None
    # token states are (B, T, D), or (T, D) where sequences are laid end to end
    return tuple(given) if max(given[0].dim(), given[1].dim()) in (2, 3) else None


@no_type_check
def source_of(given, made):
    """Return the tensor that `made` copies, casts or views in full. Return None if `made` is new."""
    node, behind = made.grad_fn, set()
    while (
        node is not None and node.name() in COPIES and not any(other for other, _ in node.next_functions[:-1])
    ):
        node = node.next_functions[-1][0]
        behind.add(node)
    for source in given:
        if source is not made and source.requires_grad and source.numel() == made.numel():
            view = base_of(made) is base_of(source) and base_of(made) is not made
            if view or get_gradient_edge(source).node in behind:
                return source
    return None


@no_type_check
def floating(values):
    """Return the floating-point tensors among values."""
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


class Residual(NamedTuple):
    """Residual connection around a mixer: a sum, the index of its operand x, and the axis of tokens in x."""

    sum: Sum
    which: int
    axis: int


def find_residuals(model: nn.Module, example: Batch) -> tuple[list[Residual], ForwardRecord]:
    """Run a model once. Return its residual connections around mixers, and the record of the pass.

    A sum x + y is a residual connection around a mixer if y = f(x), that is ∂y/∂x ≠ 0, and f mixes tokens:
    some ∂y_t/∂x_u with t ≠ u is not zero. A feed-forward part has ∂y_t/∂x_u = 0 for t ≠ u. If y depends in
    this way on an earlier residual connection, by a path around x, f is a cross-attention to that sequence. A
    sum inside the branch of a larger sum belongs to that branch. If several sums are inside, the larger one
    is a long skip connection around a stack, and is left out.

    Cost: a forward pass, and two backward passes from one token for each sum of token states.
    """
    record = ForwardRecord()
    calls = ModuleCalls(model, on_enter=record.enter, on_leave=record.leave)

    def learning(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_().clone() if tensor.is_floating_point() else tensor

    floats = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    frozen = [parameter for parameter in floats if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        # backward passes may run checkpointed blocks again, which must happen in the same mode
        with probe_mode(model):
            with calls.following(), SumRecorder(calls.running, record):
                output = run_model(model, map_tensors(example, learning))
            candidates = [_residual(total, record.sums) for total in record.sums]
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    residuals = [residual for residual in candidates if residual is not None]
    if any(bool(tensor.isnan().any()) for tensor in floating(tensors_in(output))):  # a mask may be infinite
        raise _not_finite("the output of the model")
    dropped: set[SumName] = set()
    for outer in residuals:
        x, branch = outer.sum.origins[outer.which], outer.sum.edges[1 - outer.which]
        between = graph_nodes(branch.node, around=x.node)
        inside = [
            inner.sum
            for inner in residuals
            if inner is not outer and inner.sum.out.node in between
            if x.node in graph_nodes(inner.sum.out.node)
        ]
        dropped.update(total.name for total in ([outer.sum] if len(inside) > 1 else inside))
    return [residual for residual in residuals if residual.sum.name not in dropped], record


def _residual(total: Sum, sums: Sequence[Sum]) -> Residual | None:
    """Return the residual connection of a sum. Return None if f mixes no tokens of x or an earlier sum."""
    sides = [(which, total.origins[which], total.edges[1 - which]) for which in (0, 1)]
    sides = [(which, x, y) for which, x, y in sides if x.node is not y.node and x.node in graph_nodes(y.node)]
    if sides and not bool(total.like.isfinite().all()):
        raise _not_finite(f"a sum x + f(x) in {total.name[0] or 'the model itself'}")
    for which, x, y in sides:
        axis = _mixed_axis(y, x, total, total.edges[which])
        if axis is not None:
            return Residual(total, which, axis)
    for which, x, y in sides:
        around = graph_nodes(y.node, around=x.node)
        earlier = [other for other in sums if other.time < total.time and other.out.node in around]
        others = [other for other in earlier if x.node not in graph_nodes(other.out.node)]
        axis = _mixed_axis(y, others[-1].out, total) if others else None
        if axis is not None:
            return Residual(total, which, axis)
    return None


def _mixed_axis(
    y: GradientEdge, x: GradientEdge, total: Sum, operand: GradientEdge | None = None
) -> int | None:
    """Return the axis of x along which the last or first token of y depends on several tokens.

    Return None if there is no such axis. If `operand` is a copy of x, the axis is an axis of the copy.
    """
    like = total.like
    ramp = torch.linspace(0.5, 1.5, like.shape[-1], dtype=torch.float32).cos().to(like)
    for token in (-1, 0):
        weights = torch.zeros_like(like)  # unequal weights: with equal weights, entries may cancel
        weights[(token,) * (like.dim() - 1)] = ramp
        try:
            (gradient,) = torch.autograd.grad([y], [x], [weights], retain_graph=True, allow_unused=True)
        except RuntimeError:  # a state that was changed in place has no derivative
            continue
        if gradient is None:
            continue
        if bool(gradient.isnan().any()):
            block = total.name[0] or "the model itself"
            raise _not_finite(f"the derivative of an f in x + f(x) in {block}")
        if operand is not None and operand.node is not x.node:  # a view may have its axes in another order
            weights = torch.zeros_like(like, requires_grad=True)
            (back,) = torch.autograd.grad([operand], [x], [weights], create_graph=True)
            (gradient,) = torch.autograd.grad(back, weights, gradient)
        places = (gradient != 0).any(-1).nonzero()
        for axis in reversed(range(places.shape[1])):
            if len(places[:, axis].unique()) > 1:
                return axis
    return None


def _not_finite(what: str) -> SkipError:
    expected, got = "finite numbers in a forward pass and its derivatives", f"NaN or infinity in {what}"
    fix = "Check the weights; in float16, add the skips in float32 or bfloat16. Or pass another `example`."
    return SkipError("the example, or the weights of the model", expected=expected, got=got, fix=fix)


def run_with(model: nn.Module, example: Batch, changes: Mapping[SumName, SumChange]) -> list[Tensor]:
    """Return the floating-point outputs of a model on an example, with some sums replaced."""
    with probe_mode(model), replacing_sums(model, changes):
        return [tensor.detach() for tensor in floating(tensors_in(run_model(model, example)))]


@contextmanager
def replacing_sums(model: nn.Module, changes: Mapping[SumName, SumChange]) -> Iterator[None]:
    """Context manager in which sums of a model are replaced, chosen by name."""
    calls = ModuleCalls(model)
    with calls.following(), ReplaceSums(calls.running, changes):
        yield


@contextmanager
def probe_mode(model: nn.Module) -> Iterator[None]:
    """Context manager in which models run in evaluation mode, with gradients, without compiled functions."""
    with uncompiled(), eval_mode(model), torch.enable_grad():
        yield
