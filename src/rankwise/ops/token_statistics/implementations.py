"""The kernels by name; a folder is imported when it first runs."""

from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def kernels(impl: str, causal: bool) -> ModuleType:
    """The module whose ``forward`` and ``backward`` run.

    ``forward(problem, keep)`` gives the output in the dtype of w and, in that of the sums, memberships,
    scores and the sums over all tokens, if causal the last ones. Unless scores are to be kept, memberships
    lie in their place. ``backward(problem, membership, score, sums, given, given_membership)``, causal
    ``backward(problem, membership, score, given, given_membership, given_end)``, takes the gradients of the
    output, of Π and of the last sums, and gives those of w and of the temperature, causal also of the
    scores' offset and of the first sums.
    """
    return import_module(f"rankwise.ops.token_statistics.{impl}.{'causal' if causal else 'bidirectional'}")
