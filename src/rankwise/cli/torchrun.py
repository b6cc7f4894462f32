"""Find the processes that torchrun started, exchange values and errors between them, and silence all but one.

torch is only imported inside functions, because every command imports this module first.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from rankwise.errors import InputError, RankwiseError

T = TypeVar("T")
TIMEOUT = timedelta(days=7)
"""Time that processes wait for the slowest one: shards can differ by hours. A dead process shows at once."""


@dataclass
class Processes:
    """Place of this process among the processes that torchrun started; by default the only process."""

    rank: int = 0
    local_rank: int = 0
    """Rank among the processes on this machine."""
    world: int = 1
    """Number of processes on all machines."""
    interrupted: bool = False
    """True if Ctrl-C was pressed during a collective operation."""

    @property
    def several(self) -> bool:
        """True if there is more than one process."""
        return self.world > 1

    @property
    def is_main(self) -> bool:
        """True for the process that prints and writes results."""
        return self.rank == 0

    def device(self, name: str | None) -> str | None:
        """Return the device of this process; for ``cuda``, the GPU whose number is the local rank."""
        return f"cuda:{self.local_rank}" if self.several and name == "cuda" else name

    @contextmanager
    def process_group(self) -> Iterator[None]:
        """Join the process group; SIGTERM (from torchrun or a scheduler) then has the effect of Ctrl-C."""
        if not self.several:
            yield
            return
        import torch
        from torch import distributed as dist

        if own := not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=TIMEOUT)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
        try:
            yield
        finally:
            if own:
                dist.destroy_process_group()

    def all_gather(self, value: T) -> list[T]:
        """Return the values (small ones) of all processes, ordered by rank; raise if a process has ended."""
        found: list[Any] = [None] * self.world
        self._exchange(lambda dist: dist.all_gather_object(found, value))
        if self.interrupted:
            raise KeyboardInterrupt
        return found

    def gather(self, value: T) -> list[T]:
        """Return what `all_gather` returns in the main process, and an empty list in the others."""
        found: list[Any] | None = [None] * self.world if self.is_main else None
        self._exchange(lambda dist: dist.gather_object(value, found))
        return found or []

    def _exchange(self, exchange: Callable[[Any], None]) -> None:
        """Run a collective operation; signals wait for its end, because the other processes do as well."""
        from torch import distributed

        try:
            with _held_signals() as signals:
                exchange(distributed)
            self.interrupted = self.interrupted or bool(signals)
        except RuntimeError as error:
            process, expected = f"process {self.rank} of {self.world}", "all of them to the end"
            fix = "Read its last message; if it was killed, there was too little memory or time."
            got = "another that has ended before"
            raise RankwiseError(process, expected=expected, got=got, fix=fix) from error


def from_environment() -> Processes:
    """Return this process by torchrun's environment variables; raise `InputError` if they are invalid."""
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return Processes()
    found = {name: os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    decimal = all(value.isdecimal() for value in found.values())
    if not decimal or int(found["RANK"]) >= int(found["WORLD_SIZE"]):
        expected = "RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them"
        got = ", ".join(f"{name}={value!r}" for name, value in found.items())
        fix = "Start it with torchrun, or unset them."
        raise InputError("environment", expected=expected, got=got, fix=fix)
    rank, local_rank, world = map(int, found.values())
    return Processes(rank, local_rank, world)


def as_rankwise_error(error: Exception) -> RankwiseError:
    """Return the error as `RankwiseError`, because errors of other libraries may not be picklable."""
    if isinstance(error, RankwiseError):
        return error
    got, fix = f"{type(error).__name__}: {error}", "Run it in a single process to see the whole traceback."
    return RankwiseError("audit", expected="no error", got=got, fix=fix)


def first_error(errors: Sequence[RankwiseError | None]) -> RankwiseError | None:
    """Return the first error by rank; it names its process, unless all processes have the same error."""
    failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if not failed:
        return None
    rank, first = failed[0]
    if len(failed) == len(errors) and len({error.got for _, error in failed}) == 1:
        return first
    subject = f"process {rank} of {len(errors)}: {first.subject}"
    return RankwiseError(subject, expected=first.expected, got=first.got, fix=first.fix)


@contextmanager
def silence_other_ranks() -> Iterator[None]:
    """Context manager that silences all processes but the main process, which reports their errors."""
    if os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as out, redirect_stdout(out), redirect_stderr(out):
        try:
            yield
        except SystemExit as leaving:  # Python would print a text as exit status
            sys.exit(leaving.code if isinstance(leaving.code, int | None) else 1)


@contextmanager
def _held_signals() -> Iterator[list[int]]:
    """Context manager that collects signals in a list in place of acting on them."""
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    for name in before:
        signal.signal(name, lambda number, frame: arrived.append(number))
    try:
        yield arrived
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
