"""Which gates a gradient reaches whole: through every operation between them and the loss."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

WITHOUT = "WarnNotImplemented"
"""What autograd records of an operation that has no backward, such as int8 products: it gives no gradient."""


def cut_off(scalar: Tensor, gates: Iterable[Tensor]) -> set[int]:
    """Of the gates, by `id`, those with a path to a scalar through an operation that has no gradient.

    Through a residual stream some gradient comes past such an operation, and is not the whole one.

    Args:
        scalar: in the graph of the gates.
        gates: leaves of the graph.
    """
    behind = _nodes(node for node in _nodes([scalar.grad_fn]) if WITHOUT in node.name())
    leaves = {id(getattr(node, "variable", None)) for node in behind}
    return {id(gate) for gate in gates if id(gate) in leaves}


def _nodes(starts: Iterable[Any]) -> set[Any]:
    """All nodes that a backward pass comes to."""
    seen: set[Any] = set()
    open_nodes = [node for node in starts if node is not None]
    while open_nodes:
        node = open_nodes.pop()
        if node not in seen:
            seen.add(node)
            open_nodes += [following for following, _ in node.next_functions if following is not None]
    return seen
