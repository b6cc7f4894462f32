"""Running a compiled loop over tasks on as many threads as torch uses, on torch's own threads where it can.

Torch's threads wait for their next work in a busy loop of some milliseconds. Threads of ours beside them
would fight them for the cores in just the place where TSSA stands: between two linear maps.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

import torch

SMALL = 1 << 19
"""Below this many numbers a second thread costs more than it saves."""

_lock = Lock()
_pool: ThreadPoolExecutor | None = None
_forked = False


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
    if min(workers, tasks) <= 1:
        run(0, tasks)
        return
    size = -(-tasks // (4 * workers))
    todo = deque((low, min(low + size, tasks)) for low in range(0, tasks, size))

    def work(stopped: Callable[[], bool]) -> None:
        while not stopped():
            try:
                low, high = todo.popleft()
            except IndexError:  # another took the last
                return
            run(low, high)

    together(work, min(workers, tasks))


def together(work: Callable[[Callable[[], bool]], object], workers: int) -> None:
    """Call ``work(stopped)`` on several threads at once, the caller's among them; it may run on fewer.

    Args:
        work: ends early where ``stopped()``: another has failed, and its failure will be raised.
        workers: how many threads at most.
    """
    failures: list[BaseException] = []
    entered: set[int] = set()

    def stopped() -> bool:
        return bool(failures)

    def once(_: object = None) -> None:
        try:
            entered.add(get_ident())
            work(stopped)
        except BaseException as failure:  # an interrupt too: a callback cannot pass it on
            failures.append(failure)

    parallel = None if _forked or workers <= 1 else _torch_threads()
    if workers <= 1:
        work(stopped)
    elif parallel is not None:
        _jobs[id(once)] = once
        try:
            parallel(_enter, id(once), workers, 0)
        finally:
            del _jobs[id(once)]
        if get_ident() not in entered:  # an interrupt as the callback began, which ctypes only prints
            raise KeyboardInterrupt
    else:
        _own_threads(once, workers)
    if failures:
        raise failures[0]


def _own_threads(work: Callable[[], None], workers: int) -> None:
    helpers = [_workers().submit(work) for _ in range(workers - 1)]
    work()
    for helper in helpers:
        if not helper.cancel():  # one that has not begun has nothing left to do
            helper.result()


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_jobs: dict[int, Callable[[], None]] = {}


@_CALLBACK
def _enter(job: int) -> None:
    """What every thread calls; a callback made for each call took a twentieth of a bidirectional one."""
    _jobs[job]()


@cache
def _torch_threads() -> Callable[..., Any] | None:
    """GCC's entry to the OpenMP runtime that torch is linked with; None where torch has another."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        parallel = library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [_CALLBACK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def _workers() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="rankwise-tssa")
        return _pool


def _forget() -> None:
    """A forked process has none of its parent's threads, and OpenMP would wait for them for ever."""
    global _pool, _lock, _forked
    _pool, _lock, _forked = None, Lock(), True
    _jobs.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
