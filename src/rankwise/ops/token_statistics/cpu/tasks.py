"""Running a compiled loop over tasks on as many threads as torch uses."""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from rankwise.ops.token_statistics.cpu.compiled import Loop

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
