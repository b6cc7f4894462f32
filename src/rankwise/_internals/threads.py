"""Work on many matrices: each on one thread, several of them beside each other.

Threads that share one small decomposition wait for each other at every step. On an idle machine that gains
little; where other programs run too, a thread that has to wait for a core holds up all others, and the same
decomposition takes up to a hundred times as long. Threads with a matrix each never wait, and the arithmetic
of a matrix does not depend on how many there are. `benchmarks/audit.py --busy 4` shows both.
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
"""How builds of OpenBLAS name the functions that tell and set their threads."""
NAMES = [("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")]


class _Inside(threading.local):
    """Of the running thread: how many threads torch had before `one_thread` was entered; 0 outside."""

    threads = 0


_inside = _Inside()
_lock = threading.Lock()
_limits: list[int] = []
"""Threads of numpy's OpenBLAS before each `one_thread` that is entered now: it has one number for all."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch and numpy compute on the calling thread alone; afterwards as before, also after an error.

    torch counts threads for each thread of Python; a thread that is started meanwhile begins with one.
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
    """Inside `one_thread`: the threads that torch had before."""
    here = torch.get_num_threads()
    try:
        torch.set_num_threads(_inside.threads or here)
        yield
    finally:
        torch.set_num_threads(here)


def map_threads(
    work: Callable[[Item], Answer], items: Sequence[Item], at_once: int | None = None
) -> list[Answer]:
    """The answers to all items in order, each computed on one thread, as many at once as torch has threads.

    Called from such work it goes through the items one by one. Gradient and inference mode are the caller's.
    The first error is raised when the items under way are done; those that wait are left.

    Args:
        work: a function of one item, free of what other threads may change.
        items: what it is to be called with.
        at_once: items that memory allows beside each other. One that is too large for a second beside it
            gets all threads: only its numbers may differ in their last digits with the number of threads.
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
    """Whether numpy's LAPACK, the faster one on one thread, would keep to it now."""
    return torch.get_num_threads() == 1 and bool(_limits)


@contextmanager
def _numpy_on_one_thread() -> Iterator[None]:
    """Limit the OpenBLAS of numpy, where numpy has it; the last to leave restores what the first found."""
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
    """Tell and set the threads of the OpenBLAS that numpy has loaded; None where it has another library."""
    file = numpy_linalg_file()
    if file is None:
        return None
    library = ctypes.CDLL(file)
    for before, after in NAMES:
        tell, limit = (getattr(library, OPENBLAS.format(before, do, after), None) for do in ("get", "set"))
        if tell is not None and limit is not None:
            return tell, limit
    return None
