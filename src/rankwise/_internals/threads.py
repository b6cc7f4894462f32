"""Threads: parallel work on many matrices with one thread per matrix, and one thread that changes models.

If several threads share the decomposition of one small matrix, they wait for each other at every step. When
other programs use the cores, this takes up to a hundred times as long. With one thread per matrix, threads
never wait, and results do not depend on the number of threads. Decision 004 reports both.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from threadpoolctl import ThreadpoolController

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Item = TypeVar("Item")
Answer = TypeVar("Answer")

PARALLEL_BYTES = 2**29
"""Total bytes of float64 matrices processed in parallel; a larger matrix is processed alone."""


class _Inside(threading.local):
    """Number of torch threads before `one_thread`, per Python thread. It is 0 outside of `one_thread`."""

    threads = 0


_inside = _Inside()
_lock = threading.Lock()
_exclusive = threading.RLock()
"""Lock of the functions that hook or change a model."""
_limits: list[Any] = []
"""One limit of numpy's BLAS per active `one_thread`. The first stores the original number of threads."""


def exclusive(function: FunctionT) -> FunctionT:
    """Return a function that waits until no other thread runs an exclusive function.

    Hooks and changes of a model act in all threads.
    """

    @wraps(function)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        with _exclusive:
            return function(*args, **kwargs)

    return waiting  # type: ignore[return-value]


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager that limits torch and numpy to one thread in its block.

    torch stores the limit per Python thread; a Python thread that starts in the block inherits the limit 1.
    """
    if _inside.threads:
        yield
        return
    with _lock:
        _limits.append(_blas().limit(limits=1))
    _inside.threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(_inside.threads)
        _inside.threads = 0
        with _lock:
            last = _limits.pop()
            if not _limits:  # no other Python thread is inside `one_thread`
                last.restore_original_limits()


def map_threads(
    work: Callable[[Item], Answer], items: Sequence[Item], at_once: int | None = None
) -> list[Answer]:
    """Return ``work(item)`` for all items, in order. Each call runs on one thread, in the caller's grad mode.

    The number of parallel calls is at most torch's number of threads. Nested calls run serially. After an
    error, the remaining items are skipped, and the error is raised when the running calls have ended.

    Args:
        work: function of one item, which must not modify data that other calls use.
        items: arguments of ``work``.
        at_once: number of items that fit in memory together. If it is 1, each item gets all threads, and the
            last digits of its result may depend on the number of threads.
    """
    if at_once is not None and at_once < 2:
        here = torch.get_num_threads()
        try:
            torch.set_num_threads(_inside.threads or here)
            return [work(item) for item in items]
        finally:
            torch.set_num_threads(here)
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
    """Return True if numpy's LAPACK is limited to one thread, so that numpy is faster than torch."""
    return torch.get_num_threads() == 1 and bool(_limits) and bool(_blas().lib_controllers)


@lru_cache(maxsize=1)
def _blas() -> ThreadpoolController:
    """Return the BLAS libraries of the process, cached because the search takes milliseconds."""
    return ThreadpoolController().select(user_api="blas")
