"""Map a function over matrices, one thread each.

Threads that share one small decomposition wait for each other at every step. If other programs use the cores,
the same decomposition takes up to a hundred times as long. Threads with a matrix each never wait, and the
arithmetic of a matrix does not depend on their number. `benchmarks/audit.py --busy 4` shows both.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch

from rankwise._internals.torch_private import numpy_linalg_file

Item = TypeVar("Item")
Answer = TypeVar("Answer")

OPENBLAS = "{}openblas_{}_num_threads{}"
"""Names of the functions that get and set the number of threads, in builds of OpenBLAS."""
NAMES = [("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")]


class _Inside(threading.local):
    """Threads of torch before this Python thread entered `one_thread`; 0 outside."""

    threads = 0


_inside = _Inside()
_lock = threading.Lock()
_limits: list[int] = []
"""Threads of numpy's OpenBLAS, one entry per active `one_thread`: OpenBLAS has one number per process."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch and numpy to the calling thread inside the block.

    torch counts threads per Python thread; a thread that is started inside begins with one.
    """
    if _inside.threads:
        yield
        return
    _inside.threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with _numpy_on_one_thread():
            yield
    finally:
        torch.set_num_threads(_inside.threads)
        _inside.threads = 0


@contextmanager
def _all_threads() -> Iterator[None]:
    """Give torch the threads that it had before `one_thread`."""
    here = torch.get_num_threads()
    try:
        torch.set_num_threads(_inside.threads or here)
        yield
    finally:
        torch.set_num_threads(here)


def map_threads(
    work: Callable[[Item], Answer], items: Sequence[Item], at_once: int | None = None
) -> list[Answer]:
    """Return the results for all items in order; each call computes on one thread, with the caller's modes.

    As many calls run at once as torch has threads; nested calls run one by one. The first error is raised
    after the running calls have ended; the other items are skipped.

    Args:
        work: function of one item that shares no mutable state.
        items: arguments of the calls.
        at_once: number of items that fit in memory together. If it is 1, each item gets all threads, and
            its last digits may depend on their number.
    """
    if at_once is not None and at_once < 2:
        with _all_threads():
            return [work(item) for item in items]
    with one_thread():
        workers = min(_inside.threads, len(items), at_once or len(items))
        if workers < 2:
            return [work(item) for item in items]
        gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def in_the_same_mode(item: Item) -> Answer:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                return work(item)

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(in_the_same_mode, items))


def numpy_is_on_one_thread() -> bool:
    """Return True if numpy's LAPACK, the faster one on one thread, is limited to one thread."""
    return torch.get_num_threads() == 1 and bool(_limits)


@contextmanager
def _numpy_on_one_thread() -> Iterator[None]:
    """Limit numpy's OpenBLAS, if numpy has it; the last block to end restores the first block's number."""
    functions = _openblas()
    if functions is None:
        yield
        return
    tell, limit = functions
    with _lock:
        _limits.append(_limits[0] if _limits else tell())
        limit(1)
    try:
        yield
    finally:
        with _lock:
            before = _limits.pop()
            if not _limits:
                limit(before)


@lru_cache(maxsize=1)
def _openblas() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    """Return the getter and setter of threads of numpy's OpenBLAS; None for another library."""
    file = numpy_linalg_file()
    if file is None:
        return None
    library = ctypes.CDLL(file)
    for before, after in NAMES:
        tell, limit = (getattr(library, OPENBLAS.format(before, do, after), None) for do in ("get", "set"))
        if tell is not None and limit is not None:
            return tell, limit
    return None
