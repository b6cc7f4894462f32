"""Sums handed from piece to piece of a sequence, between threads that run one compiled loop.

A board holds 1 + P numbers: how much has been taken, then how far each piece is. Pieces are taken in order,
so that whoever waits waits for one that has been taken: it comes, whatever the number of threads.
"""

from collections.abc import Callable
from time import sleep
from typing import Any, no_type_check

import numpy as np
from numba import types
from numba.extending import intrinsic

from rankwise.ops.tssa.cpu.compiled import inlined, place
from rankwise.ops.tssa.cpu.threads import together

NAP = 50e-6
"""Seconds a thread sleeps when what it waits for is still not there."""
PATIENCE = 1 << 18
"""Looks at the board, some fifty microseconds, as a piece takes, before a loop lets its thread sleep."""


def board(pieces: int) -> np.ndarray:
    """Nothing taken, nothing done.

    Args:
        pieces: P.

    Returns:
        (1 + P,).
    """
    return np.zeros(1 + pieces, np.int64)


def relay(loop: Callable[..., bool], every: tuple[Any, ...], spot: list[int], workers: int) -> None:
    """Run a compiled loop on several threads until each has found nothing left to take.

    Args:
        loop: True then; False where it has waited a while, to be called again.
        every: what all threads hand it, the board last.
        spot: where a thread begins; it hands its own behind them and the loop remembers in it where it was.
        workers: how many threads at most.
    """

    def work(stopped: Callable[[], bool]) -> None:
        own = np.array(spot)
        while not loop(*every, own) and not stopped():
            sleep(NAP)

    together(work, workers)


@intrinsic
def _load(typing: Any, array: Any, index: Any) -> Any:
    """Read a number; what its writer wrote before can be read after."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.load_atomic(place(context, builder, signature.args[0], *given), "acquire", 8)

    return array.dtype(array, types.intp), generate


@intrinsic
def _store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write a number, behind all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        at = place(context, builder, signature.args[0], *given[:2])
        builder.store_atomic(given[2], at, "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


@intrinsic
def _next(typing: Any, array: Any, index: Any) -> Any:
    """Add one and give what was there."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        at = place(context, builder, signature.args[0], *given)
        one = context.get_constant(types.int64, 1)
        return builder.atomic_rmw("add", at, one, "acq_rel")

    return array.dtype(array, types.intp), generate


@inlined
@no_type_check
def take(board):
    """The next piece, one that nobody else gets; P or more when there is none."""
    return _next(board, 0)


@inlined
@no_type_check
def post(board, piece, stage):
    """Say how far a piece is."""
    _store(board, 1 + piece, stage)


@inlined
@no_type_check
def there(board, piece, stage):
    """Whether a piece is that far."""
    return _load(board, 1 + piece) >= stage


@inlined
@no_type_check
def posted(board, piece, stage):
    """The same; waits a little where it is not."""
    for _ in range(PATIENCE):  # noqa: SIM110 - a compiled loop knows no any()
        if there(board, piece, stage):
            return True
    return False
