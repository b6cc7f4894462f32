"""How the loops of this folder are compiled and cached, and what the compiler may change in them."""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba
import numpy as np
import torch
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

ALLOWED = {"reassoc", "contract", "arcp", "nsz"}
"""Sums over channels may be reordered, products fused into sums, x/y become x·(1/y), zeros lose their sign.

Not allowed: to take NaN or infinity for impossible (they must reach the output), or approximate functions.
"""

CHUNK = 64
"""Tokens summed in the dtype of the sums before they are added to a float64 total.

So a sum over T tokens is off by the rounding of 64 additions, not of T.
"""


class Loop:
    """A loop over arrays in order, compiled without the interpreter lock when dtypes are first met.

    numba's cache keeps all signatures of a function in one index, which two processes can overwrite for each
    other so that it names the machine code of the wrong one. Here each signature is a function with a name
    of its own, as is each version of this folder and of numba, and each processor: all that is ever written
    under a name is the same code.
    """

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def of(self, *given: Any) -> Callable[..., Any]:
        """The compiled function for arguments of these types."""
        key = tuple(x.dtype for x in given if isinstance(x, np.ndarray))
        if key not in self._compiled:
            self._compiled[key] = _compile(self.function, tuple(map(numba.typeof, given)))
        return self._compiled[key]

    def __call__(self, *given: Any) -> Any:
        """Run it."""
        return self.of(*given)(*given)


def _compile(function: FunctionType, signature: tuple[Any, ...]) -> Callable[..., Any]:
    own = FunctionType(function.__code__, function.__globals__, function.__name__)
    origin = _origin(Path(function.__code__.co_filename))
    digest = sha256(f"{signature} {origin}".encode()).hexdigest()[:16]
    own.__module__, own.__qualname__ = function.__module__, f"{function.__name__}_{digest}"
    return numba.njit(signature, nogil=True, cache=True, fastmath=ALLOWED, error_model="numpy")(own)


@cache
def _origin(file: Path) -> str:
    """Return everything that the machine code of a loop in this file depends on, except its signature."""
    files = {file, *Path(__file__).parent.glob("cpu_*.py")}
    sources = b"".join(path.read_bytes() for path in sorted(files))
    versions = f"{numba.__version__} {llvmlite.__version__}"
    processor = f"{get_host_cpu_name()} {get_host_cpu_features().flatten()}"
    return f"{sha256(sources).hexdigest()} {versions} {processor}"


def inlined(function: FunctionType, allowed: set[str] = ALLOWED) -> Callable[..., Any]:
    """Compile what a loop does with a row as part of every loop that calls it: a call takes too long.

    What is ``allowed`` to the compiler is so here only, also where the loop around it allows more.
    """
    return numba.njit(nogil=True, fastmath=allowed, error_model="numpy", forceinline=True)(function)


SMALL = 1 << 19
"""Below this many numbers a second thread costs more than it saves."""


def threads_for(numbers: int) -> int:
    """Threads for a call that reads so many numbers: torch's, at most as many as cores, 1 for little work."""
    return 1 if numbers < SMALL else min(torch.get_num_threads(), os.cpu_count() or 1)


def run_tasks(loop: Loop, given: tuple[Any, ...], tasks: int, workers: int) -> None:
    """Call ``loop(*given, low, high)`` on slices of the tasks until all are done.

    Each task writes its own part of the result. Slices are taken, not given, so that a thread the system
    keeps waiting holds nobody up; the caller is a worker too and waits for no thread that has not begun.
    """
    run = loop.of(*given, 0, tasks)  # compiled here, once
    if min(workers, tasks) <= 1:
        run(*given, 0, tasks)
        return
    size = -(-tasks // (4 * workers))
    todo = deque((low, min(low + size, tasks)) for low in range(0, tasks, size))

    def work() -> None:
        while True:
            try:
                low, high = todo.popleft()
            except IndexError:  # nothing is left
                return
            run(*given, low, high)

    helpers = [_pool(os.getpid(), workers - 1).submit(work) for _ in range(workers - 1)]
    try:
        work()
    finally:
        todo.clear()  # after an interrupt the others stop too
    for helper in helpers:
        if not helper.cancel():
            helper.result()


@cache
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """Threads of this process: a forked one has none of its parent's."""
    return ThreadPoolExecutor(workers, thread_name_prefix="rankwise-tssa")
