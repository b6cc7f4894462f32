"""Run one audit in several torchrun processes, and merge their statistics and errors.

torch is only imported inside functions, because every command imports this module first.
"""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from rankwise.errors import InputError, RankwiseError

if TYPE_CHECKING:
    from rankwise.auditing import Audit
    from rankwise.auditing.statistics import AuditStatistics
    from rankwise.cli.audit_job import AuditJob, LoadedJob

T = TypeVar("T")
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Environment variables that torchrun sets."""
TIMEOUT = timedelta(days=7)
"""Time that processes wait for the slowest one: shards can differ by hours. A dead process shows at once."""
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Classes of modules that wait for other processes in each forward pass."""


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
        if not self.several:
            return [value]
        from torch import distributed as dist

        found: list[Any] = [None] * self.world
        self._exchange(lambda: dist.all_gather_object(found, value))
        if self.interrupted:
            raise KeyboardInterrupt
        return found

    def gather(self, value: T) -> list[T]:
        """Return what `all_gather` returns in the main process, and an empty list in the others."""
        if not self.several:
            return [value]
        from torch import distributed as dist

        found: list[Any] | None = [None] * self.world if self.is_main else None
        self._exchange(lambda: dist.gather_object(value, found))
        return found or []

    def _exchange(self, exchange: Callable[[], None]) -> None:
        """Run a collective operation; signals wait for its end, because the other processes do as well."""
        try:
            with _held_signals() as signals:
                exchange()
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
    found = {name: os.environ.get(name, "") for name in VARIABLES}
    decimal = all(value.isdecimal() for value in found.values())
    if not decimal or int(found["RANK"]) >= int(found["WORLD_SIZE"]):
        expected = f"{', '.join(VARIABLES[:2])} and {VARIABLES[2]} as torchrun sets them"
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


@dataclass
class ShardResult:
    """Result of one process for its shard of the data."""

    statistics: "AuditStatistics | None" = None
    error: RankwiseError | None = None
    interrupted: bool = False


def audit_shards(
    job: "AuditJob", out: Path, processes: Processes, provenance: dict[str, Any]
) -> "tuple[Audit, RankwiseError | None]":
    """Audit one model, each process on its shard of the data; the main process writes the report.

    Return the audit, and the error if a process failed after the first batch. Raise `typer.Exit` after
    Ctrl-C, and in all processes except the main process.
    """
    from rankwise.cli.audit_job import build
    from rankwise.cli.output import INTERRUPTED, show_progress, write_report

    loaded = _load_shard(job, processes)
    with show_progress() as say:
        result = _measure(loaded, processes, provenance, say)
        if processes.several:
            result = _gather_shards(result, out, processes)
        if result.statistics is None:
            raise result.error or KeyboardInterrupt
        audit, interrupted = build(loaded._replace(job=job), result.statistics, say)
    write_report(audit, out)
    if result.error is None and interrupted:
        raise typer.Exit(INTERRUPTED)
    return audit, result.error


def _load_shard(job: "AuditJob", processes: Processes) -> "LoadedJob":
    """Load the job in every process; raise in all if one fails, waits for others or has other weights."""
    from rankwise.auditing.provenance import weights_digest
    from rankwise.auditing.text_inputs import Shard
    from rankwise.cli.audit_job import load

    if not processes.several:
        return load(job)
    if job.matrices and job.matrices.strip().lower() == "flagged":
        job = replace(job, matrices="all")  # findings are only known after the merge
    error, digest = None, ""
    try:
        own = replace(job, matrices=job.matrices if processes.is_main else None)
        own = replace(own, device=processes.device(job.device))
        loaded = load(own, Shard(processes.rank, processes.world))
        model = loaded.model.model
        classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
        if waiting := sorted(classes.intersection(WRAPPERS)):
            expected = f"in each of {processes.world} processes a model that runs on its own sequences"
            got = f"a {waiting[0]}, which waits for all of them to run as many batches"
            fix = "Return the model itself. If no device holds it, use one process and --device-map auto."
            raise InputError(f"model {type(model).__name__}", expected=expected, got=got, fix=fix)
        digest = weights_digest(model, loaded.model.random_weights)
    except Exception as failed:
        error = as_rankwise_error(failed)
    errors, digests = zip(*processes.all_gather((error, digest)), strict=True)
    if (first := first_error(errors)) is not None:
        raise first
    if len(set(filter(None, digests))) > 1:  # for example if a factory draws weights at random
        got = f"others in process {next(n for n, one in enumerate(digests) if one != digests[0])}"
        fix = "Set a seed in the factory before the model is built, or load a checkpoint."
        name, expected = f"model {loaded.model.name}", "the same weights in all processes"
        raise InputError(name, expected=expected, got=got, fix=fix)
    return loaded


def _measure(
    loaded: "LoadedJob", processes: Processes, provenance: dict[str, Any], say: Callable[[str], None]
) -> ShardResult:
    """Measure the model on the shard of this process; return errors, to send them to other processes."""
    from rankwise.auditing import AuditError
    from rankwise.cli.audit_job import run

    if loaded.is_empty:
        return ShardResult()
    try:
        statistics = run(loaded, provenance, lambda batches, step: say(f"batch {batches + 1}: {step}"))
    except AuditError as error:
        result = ShardResult(error.statistics, error)
        error.statistics = error.audit = None  # they would be sent to the main process twice
        return result
    except KeyboardInterrupt:
        return ShardResult(interrupted=True)
    except Exception as error:
        if not processes.several:
            raise
        return ShardResult(error=as_rankwise_error(error))
    return ShardResult(statistics, interrupted=not statistics.complete)


def _gather_shards(result: ShardResult, out: Path, processes: Processes) -> ShardResult:
    """Return the merged result in the main process; exit in the others.

    If a process has ended, save the measurements of this process and raise the error.
    """
    from rankwise.auditing import Audit

    if result.statistics is not None:  # repeated lines of a text can give two processes equal data
        known = result.statistics.provenance
        parts = [f"{part}-{processes.rank}of{processes.world}" for part in known.parts]
        result.statistics.provenance = known.model_copy(update={"parts": parts})
    try:
        shards = processes.gather(result)
    except RankwiseError as error:
        if result.statistics is not None:
            audit, path = Audit.from_statistics(result.statistics), out / f"process-{processes.rank}.json"
            try:
                audit.save(path)
            except InputError:
                path = audit.save(Path(tempfile.mkdtemp(prefix="rankwise-")) / path.name)
            with suppress(OSError):
                said = f"rankwise: the audit of process {processes.rank} is saved in {path}"
                print(said, file=sys.__stderr__, flush=True)
        raise error from result.error
    if not processes.is_main:
        raise typer.Exit
    return merge_shards(shards, processes.interrupted)


def merge_shards(shards: Sequence[ShardResult], interrupted: bool = False) -> ShardResult:
    """Return the merged statistics of all shards that are not empty, with the first error."""
    error = first_error([shard.error for shard in shards])
    stopped = interrupted or any(shard.interrupted for shard in shards)
    measured = [shard.statistics for shard in shards if shard.statistics is not None]
    if not measured:
        return ShardResult(None, error, stopped)
    whole, *others = measured
    for other in others:
        whole.merge_audit(other)
    whole.note(f"sequences shared by {len(shards)} processes")
    whole.complete = whole.complete and error is None and not stopped
    return ShardResult(whole, error, stopped)
