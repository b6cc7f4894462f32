"""Several processes of a command, as torchrun starts them: which this is, and what all of them say.

Nothing of torch is imported before processes are joined.
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
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""What torchrun sets."""
PATIENCE = timedelta(days=7)
"""How long a process waits for the slowest: shares may differ by hours. An end is seen at once."""


@dataclass
class Processes:
    """Which of several processes this is."""

    rank: int = 0
    local_rank: int = 0
    """Among those of this machine."""
    world: int = 1
    """How many there are."""
    interrupted: bool = False
    """Whether Ctrl-C came while they exchanged something."""

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.world > 1

    @property
    def first(self) -> bool:
        """Whether it is the process that prints and writes."""
        return self.rank == 0

    def device(self, name: str | None) -> str | None:
        """The device of this process: of ``cuda``, the GPU with its number on this machine.

        Args:
            name: as the user wrote it.

        Raises:
            InputError: if there are fewer GPUs than processes.
        """
        if not self.several or name != "cuda":
            return name
        import torch

        found = torch.cuda.device_count()
        if self.local_rank >= found:
            raise InputError(
                "--device cuda",
                expected=f"a GPU for process {self.local_rank + 1} of this machine",
                got=f"{found} GPUs",
                fix="Start one for each GPU, `torchrun --nproc-per-node gpu`; or pass --device cpu.",
            )
        return f"cuda:{self.local_rank}"

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Join the others; a signal to end (of torchrun, or a scheduler) then counts as Ctrl-C."""
        if not self.several:
            yield
            return
        import torch
        from torch import distributed as dist

        own = not dist.is_initialized()
        if own:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=PATIENCE)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
        try:
            yield
        finally:
            if own:
                dist.destroy_process_group()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """What all processes do alike: where one of them fails, all leave with what it says.

        Raises:
            RankwiseError: of the first process that failed.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if not self.several:
                raise
            failure = error
        if self.several:
            raise_first(self.all_of(None if failure is None else self.said(failure)), failure)

    def all_of(self, value: T) -> list[T]:
        """What each process says, in their order; in all of them.

        Args:
            value: of this process; small.

        Raises:
            RankwiseError: if one of them has ended.
        """
        if not self.several:
            return [value]
        from torch import distributed as dist

        found: list[Any] = [None] * self.world
        self._exchange(lambda: dist.all_gather_object(found, value))
        if self.interrupted:
            raise KeyboardInterrupt
        return found

    def to_first(self, value: T) -> list[T]:
        """What each process says, in their order; an empty list in all but the first.

        Args:
            value: of this process.

        Raises:
            RankwiseError: if one of them has ended.
        """
        if not self.several:
            return [value]
        from torch import distributed as dist

        found: list[Any] | None = [None] * self.world if self.first else None
        self._exchange(lambda: dist.gather_object(value, found))
        return found or []

    def said(self, error: Exception) -> dict[str, str]:
        """An error as the others can read it.

        Args:
            error: of this process.
        """
        if not isinstance(error, RankwiseError):
            error = RankwiseError(
                "audit",
                expected="no error",
                got=f"{type(error).__name__}: {error}",
                fix="Run it in a single process to see the whole traceback.",
            )
        said = {"subject": error.subject, "expected": error.expected, "got": error.got, "fix": error.fix}
        return said | {"process": str(self.rank)}

    def _exchange(self, exchange: Callable[[], None]) -> None:
        """An interrupt in the middle would leave the others waiting: it is left for afterwards."""
        try:
            with _uninterrupted() as pressed:
                exchange()
            self.interrupted = self.interrupted or bool(pressed)
        except RuntimeError as error:
            raise RankwiseError(
                f"process {self.rank} of {self.world}",
                expected="all of them to the end",
                got="another that has ended before",
                fix="See what it said; where it was killed, there was too little memory or time.",
            ) from error


def raise_first(said: Sequence[dict[str, str] | None], own: Exception | None = None) -> None:
    """Raise what the first process that failed has said, if any did.

    Args:
        said: of each process `Processes.said`; None where all is well.
        own: the error of this process.

    Raises:
        RankwiseError: with the number of the process, where others did not fail alike.
    """
    failures = [failure for failure in said if failure is not None]
    if not failures:
        return
    first = failures[0]
    alike = len(failures) == len(said) and len({failure["got"] for failure in failures}) == 1
    subject = first["subject"] if alike else f"process {first['process']} of {len(said)}: {first['subject']}"
    raise RankwiseError(subject, expected=first["expected"], got=first["got"], fix=first["fix"]) from own


def from_environment() -> Processes:
    """Which process this is, by the variables that torchrun sets.

    Raises:
        InputError: if only some are set, or they are no numbers.

    Examples:
        >>> from_environment()
        Processes(rank=0, local_rank=0, world=1, interrupted=False)
    """
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return Processes()
    found = {name: os.environ.get(name, "") for name in VARIABLES}
    if not all(value.isdecimal() for value in found.values()) or int(found["RANK"]) >= int(
        found["WORLD_SIZE"]
    ):
        raise InputError(
            "environment",
            expected="RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them",
            got=", ".join(f"{name}={value!r}" for name, value in found.items()),
            fix="Start it with torchrun, or unset them.",
        )
    rank, local_rank, world = (int(found[name]) for name in VARIABLES)
    return Processes(rank, local_rank, world)


@contextmanager
def first_speaks() -> Iterator[None]:
    """Nothing is printed in all processes but the first; what they have to say is said by that."""
    if os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    with (
        open(os.devnull, "w", encoding="utf-8") as out,
        redirect_stdout(out),
        redirect_stderr(out),
    ):
        try:
            yield
        except SystemExit as leaving:  # a text would be printed
            sys.exit(leaving.code if isinstance(leaving.code, int | None) else 1)


@contextmanager
def _uninterrupted() -> Iterator[list[int]]:
    """Signals that come meanwhile, in a list."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    for name in before:
        signal.signal(name, lambda number, frame: pressed.append(number))
    try:
        yield pressed
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
