"""Compile the loops of the CPU kernels with numba, cache the machine code, and run it on threads."""

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
"""Changes the compiler may make: reorder sums, fuse a product and a sum, multiply by 1/y, drop the sign of 0.

The compiler may not assume that NaN and infinity do not occur, because they must reach the output. It may
not approximate functions either.
"""
TWO_THREADS_FROM = 1 << 19
"""Number of entries of the input w from which several threads are faster than one."""


class Loop:
    """Function with a loop over arrays, compiled for each combination of dtypes; runs without the GIL.

    The disk cache of numba keeps all signatures of a function in one index file. Two processes can overwrite
    this file such that it names the wrong machine code. So each signature is compiled as a separate function.
    Its name contains a hash of signature, sources, versions and processor, so that equal names mean equal
    machine code.
    """

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def of(self, *given: Any) -> Callable[..., Any]:
        """Return the function compiled for the dtypes of the arguments; compile it on the first call."""
        key = tuple(x.dtype for x in given if isinstance(x, np.ndarray))
        if key not in self._compiled:
            self._compiled[key] = _compile(self.function, tuple(map(numba.typeof, given)))
        return self._compiled[key]

    def run(self, given: tuple[Any, ...], tasks: int, threads: int) -> None:
        """Call the compiled function with ``(*given, low, high)`` for slices low ≤ i < high of all tasks.

        Each task writes to its own part of the result arrays. A thread that is done takes the next slice, so
        no thread waits for a slow thread. The calling thread works too, and cancels threads that have not
        begun when no slice is left.
        """
        run = self.of(*given, 0, tasks)  # compiled before the threads start, so that only one compiles
        if min(threads, tasks) <= 1:
            run(*given, 0, tasks)
            return
        size = -(-tasks // (4 * threads))
        todo = deque((low, min(low + size, tasks)) for low in range(0, tasks, size))

        def work() -> None:
            while True:
                try:
                    low, high = todo.popleft()
                except IndexError:  # no slice is left
                    return
                run(*given, low, high)

        helpers = [thread_pool(os.getpid(), threads - 1).submit(work) for _ in range(threads - 1)]
        try:
            work()
        finally:
            todo.clear()  # if Ctrl-C was pressed, the other threads find no slice and stop
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def inlined(function: FunctionType, allowed: set[str] = ALLOWED) -> Callable[..., Any]:
    """Return a function that numba inlines into each loop that calls it, with only ``allowed`` changes."""
    return numba.njit(nogil=True, fastmath=allowed, error_model="numpy", forceinline=True)(function)


def threads_for(numbers: int) -> int:
    """Return 1 if the input has few entries, otherwise torch's number of threads, at most one per core."""
    return 1 if numbers < TWO_THREADS_FROM else min(torch.get_num_threads(), os.cpu_count() or 1)


@cache
def thread_pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return a thread pool; the process id is a key, because a forked process has none of the threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="rankwise-tssa")


def _compile(function: FunctionType, signature: tuple[Any, ...]) -> Callable[..., Any]:
    """Compile a function for one signature, under a name with a hash of all inputs of the compiler."""
    own = FunctionType(function.__code__, function.__globals__, function.__name__)
    origin = _origin(Path(function.__code__.co_filename))
    digest = sha256(f"{signature} {origin}".encode()).hexdigest()[:16]
    own.__module__, own.__qualname__ = function.__module__, f"{function.__name__}_{digest}"
    return numba.njit(signature, nogil=True, cache=True, fastmath=ALLOWED, error_model="numpy")(own)


@cache
def _origin(file: Path) -> str:
    """Return a text that identifies sources, versions and processor, on which compiled loops depend."""
    files = {file, *Path(__file__).parent.glob("cpu_*.py")}
    sources = b"".join(path.read_bytes() for path in sorted(files))
    versions = f"{numba.__version__} {llvmlite.__version__}"
    processor = f"{get_host_cpu_name()} {get_host_cpu_features().flatten()}"
    return f"{sha256(sources).hexdigest()} {versions} {processor}"
