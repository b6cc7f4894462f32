"""Find residual connections around mixers: run a model and test its sums by derivatives."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from rankwise._internals.forward import Batch, eval_mode, preserve_random_state, run_model
from rankwise.errors import SkipError
from rankwise.skips.sums import Change, History, ReplaceSums, Sum, SumName
from rankwise.tracing.module_calls import ModuleCalls


@dataclass
class Residual:
    """Sum x + f(x) in which f moves information between tokens."""

    sum: Sum
    which: int
    """Operand that is x."""
    axis: int
    """Axis of the tokens."""

    @property
    def skip(self) -> GradientEdge:
        """Edge of x in the autograd graph."""
        return self.sum.edges[self.which]

    @property
    def branch(self) -> GradientEdge:
        """Edge of f(x) in the autograd graph."""
        return self.sum.edges[1 - self.which]


def find_residuals(history: History) -> list[Residual]:
    r"""Find the residual connections around mixers in a recorded forward pass.

    A sum x + y is one if y = f(x), that is ∂y/∂x ≠ 0, and some ∂y_t/∂x_u with t ≠ u is not zero: f mixes
    tokens. A feed-forward part has ∂y_t/∂x_u = 0 for t ≠ u. Where y depends in this way on the result of
    another residual connection, by a path around x, it is cross-attention to that sequence. Sums inside the
    branch of a larger one belong to that branch, unless they are several: then the larger one is a long
    skip around a stack of them.

    Cost: two backward passes from one entry for each sum of token states.
    """
    found: list[Residual] = []
    for sum_ in history.sums:
        residual = _self_mixing(sum_) or _cross_mixing(sum_, history.sums)
        if residual is not None:
            found.append(residual)
    return _outermost(found)


def _self_mixing(sum_: Sum) -> Residual | None:
    for which in (0, 1):
        x, y = sum_.edges[which], sum_.edges[1 - which]
        if x.node is not y.node and x.node in reached(y):
            if not sum_.finite:
                raise not_finite(f"a sum x + f(x) in {block_of(sum_)}")
            axis = mixed_axis(y, x, sum_)
            if axis is not None:
                return Residual(sum_, which, axis)
    return None


def _cross_mixing(sum_: Sum, sums: Sequence[Sum]) -> Residual | None:
    for which in (0, 1):
        x, y = sum_.edges[which], sum_.edges[1 - which]
        if x.node is y.node or x.node not in reached(y):
            continue
        around = reached(y, past=x)
        others = [other for other in sums if other.time < sum_.time and other.out.node in around]
        others = [other for other in others if x.node not in reached(other.out)]
        for other in others[-1:]:
            axis = mixed_axis(y, other.out, sum_)
            if axis is not None:
                return Residual(sum_, which, axis)
    return None


@no_type_check  # thousands of nodes, each looked at by type checks
def reached(start, past=None):
    """Return the nodes that a tensor depends on; with ``past``, not through that node."""
    seen = set()
    todo = [start.node]
    while todo:
        node = todo.pop()
        if node in seen or (past is not None and node is past.node):
            continue
        seen.add(node)
        todo.extend(after for after, _ in node.next_functions if after is not None)
    return seen


def mixed_axis(y: GradientEdge, x: GradientEdge, like: Sum) -> int | None:
    """Return the axis along which the last or first token of y depends on several tokens of x, or None."""
    for at in (-1, 0):
        gradient = _gradient(y, x, like, at)
        if gradient is None:
            continue
        if bool(gradient.isnan().any()):
            raise not_finite(f"the derivative of an f in x + f(x) in {block_of(like)}")
        moved = (gradient != 0).any(-1)
        for axis in reversed(range(moved.dim())):
            others = tuple(other for other in range(moved.dim()) if other != axis)
            if int((moved.any(others) if others else moved).sum()) > 1:
                return axis
    return None


def not_finite(what: str) -> SkipError:
    """Return the error for numbers that are not finite."""
    return SkipError(
        "the example, or the weights of the model",
        expected="finite numbers in a forward pass and its derivatives",
        got=f"NaN or infinity in {what}",
        fix="Check the weights; in float16, add the skips in float32 or bfloat16. Or pass another `example`.",
    )


def block_of(sum_: Sum) -> str:
    """Return the name of the innermost module that takes a sum, for messages."""
    return (sum_.frames[-1].name if sum_.frames else "") or "the model itself"


def _gradient(y: GradientEdge, x: GradientEdge, like: Sum, at: int) -> Tensor | None:
    """Return the derivative of one token of y; unequal weights prevent that its entries cancel."""
    weights = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    weights[(at,) * (len(like.shape) - 1)] = torch.linspace(0.5, 1.5, like.shape[-1]).cos().to(weights)
    try:
        (gradient,) = torch.autograd.grad([y], [x], [weights], retain_graph=True, allow_unused=True)
    except RuntimeError:  # a state that was changed in place has no derivative any more
        return None
    return gradient


def _outermost(found: list[Residual]) -> list[Residual]:
    dropped: set[SumName] = set()
    for outer in found:
        inside = list(_inside(outer, found))
        if len(inside) > 1:
            dropped.add(outer.sum.name)
        else:
            dropped.update(inner.sum.name for inner in inside)
    return [residual for residual in found if residual.sum.name not in dropped]


def _inside(outer: Residual, found: Sequence[Residual]) -> Iterator[Residual]:
    """Yield the residual connections between x and f(x) of another connection."""
    between = reached(outer.branch, past=outer.skip)
    for inner in found:
        if inner is not outer and inner.sum.out.node in between and outer.skip.node in reached(inner.sum.out):
            yield inner


# --- runs ------------------------------------------------------------------------------------------------


def run_with(model: nn.Module, example: Batch, changes: Mapping[SumName, Change]) -> list[Tensor]:
    """Return the floating-point outputs of a model on an example, with some sums replaced."""
    with probe_mode(model), replacing_sums(model, changes):
        return [tensor.detach() for tensor in tensors_in(run_model(model, example))]


@contextmanager
def replacing_sums(model: nn.Module, changes: Mapping[SumName, Change]) -> Iterator[None]:
    """Context manager that replaces some sums of a model."""
    frames = ModuleCalls(model)
    with frames.following(), ReplaceSums(frames.running, changes):
        yield


@contextmanager
def probe_mode(model: nn.Module) -> Iterator[None]:
    """Context manager with evaluation mode, gradients and a fixed seed; it restores all of them."""
    with eval_mode(model), preserve_random_state(model), torch.enable_grad():
        torch.manual_seed(0)
        yield


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Context manager in which frozen weights require gradients."""
    frozen = [
        parameter
        for parameter in model.parameters()
        if parameter.is_floating_point() and not parameter.requires_grad
    ]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def tensors_in(output: Any) -> list[Tensor]:
    """Return all floating-point tensors in an output."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if not isinstance(output, tuple | list):
        return []
    return [tensor for value in output for tensor in tensors_in(value)]
