"""Running a compiled loop over tasks on as many threads as torch uses.

A pool of our own, since numba's parallel loops end a forked process and, on some systems, threads that
call them at once.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch

SMALL = 1 << 18
"""Below this many numbers a second thread costs more than it saves."""

_lock = Lock()
_pool: ThreadPoolExecutor | None = None


def threads(numbers: int) -> int:
    """How many threads a call should use.

    Args:
        numbers: numbers it reads.

    Returns:
        1 for little work, otherwise `torch.get_num_threads()`.
    """
    return 1 if numbers < SMALL else torch.get_num_threads()


def spread(run: Callable[[int, int], object], tasks: int, workers: int) -> None:
    """Call ``run(low, high)`` on slices of the tasks until all are done, the caller itself among the workers.

    Slices are taken, not given, so that a thread the system keeps waiting holds nobody up.

    Args:
        run: does the tasks from low up to high, and lets go of the interpreter lock meanwhile.
        tasks: how many there are; each writes its own part of the result.
        workers: how many threads at most.
    """
    workers = min(workers, tasks)
    if workers <= 1:
        run(0, tasks)
        return
    size = -(-tasks // (4 * workers))
    todo = deque((low, min(low + size, tasks)) for low in range(0, tasks, size))

    def work() -> None:
        while True:
            try:
                low, high = todo.popleft()
            except IndexError:
                return
            run(low, high)

    helpers = [_workers().submit(work) for _ in range(workers - 1)]
    work()
    for helper in helpers:
        if not helper.cancel():  # one that has not begun has nothing left to do
            helper.result()


def _workers() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="rankwise-tssa")
        return _pool


def _forget() -> None:
    """A forked process has none of its parent's threads."""
    global _pool, _lock
    _pool, _lock = None, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
