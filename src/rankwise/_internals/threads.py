"""Threads: parallel work on many matrices with one thread per matrix, and one thread per model.

If several threads share the decomposition of one small matrix, they wait for each other at every step. When
other programs use the cores, this takes up to a hundred times as long. With one thread per matrix, threads
never wait, and results do not depend on the number of threads. Decision 004 reports both.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Item = TypeVar("Item")
Answer = TypeVar("Answer")

PARALLEL_BYTES = 2**29
"""Total bytes of float64 matrices processed in parallel; a larger matrix is processed alone."""


class _Inside(threading.local):
    """Number of torch threads before `one_thread`, per Python thread. It is 0 outside of `one_thread`."""

    threads = 0


_inside = _Inside()
_changed = threading.Condition()
_in_use: list[tuple[int, set[int]]] = []
"""Thread, and `id` of each module, of the running functions that use a model alone."""


def exclusive(function: FunctionT) -> FunctionT:
    """Return a function that waits until no other thread uses the model among its arguments.

    Hooks and changes of a model act in all threads. Two models are in each other's way if they share a
    module. Threads with other models run in parallel.
    """

    @wraps(function)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        models = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        modules = {id(module) for model in models for module in model.modules()}
        thread = threading.get_ident()

        def free() -> bool:
            return not any(modules & used for other, used in _in_use if other != thread)

        with _changed:
            _changed.wait_for(free)
            _in_use.append((thread, modules))
        try:
            return function(*args, **kwargs)
        finally:
            with _changed:
                _in_use.remove((thread, modules))
                _changed.notify_all()

    return waiting  # type: ignore[return-value]


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager that limits torch to one thread in its block.

    torch stores the limit per Python thread; a Python thread that starts in the block inherits the limit 1.
    """
    if _inside.threads:
        yield
        return
    _inside.threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(_inside.threads)
        _inside.threads = 0


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
