"""One audit of `rankwise audit`: by this process alone, or by several that share the sequences."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rankwise.errors import InputError, RankwiseError

if TYPE_CHECKING:
    from torch import nn

    from rankwise.auditing import Audit
    from rankwise.auditing.statistics import AuditStatistics
    from rankwise.cli.audit_job import AuditJob, LoadedJob
    from rankwise.cli.torchrun import Processes

INTERRUPTED = 130
NEEDS_ALL = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Classes whose modules wait, as they run, for the other processes to run them too."""


@dataclass
class Found:
    """What a process found on its sequences."""

    statistics: "AuditStatistics | None" = None
    failure: Exception | None = None
    interrupted: bool = False


def audit_one(job: "AuditJob", out: Path, processes: "Processes", *, facts: dict[str, Any]) -> "Audit":
    """Audit one model and write what was found; Ctrl-C and failures leave the command when that is done.

    Args:
        job: what is asked for.
        out: the folder of the report.
        processes: those that share the sequences; the first writes.
        facts: of the provenance, what the task does not say.

    Returns:
        The audit.

    Raises:
        RankwiseError: if it failed, in any of the processes; what was measured is written before.
        typer.Exit: after Ctrl-C, and in all processes but the first.
    """
    from rankwise.auditing.text_inputs import Shard
    from rankwise.cli.audit_job import build, load
    from rankwise.cli.output import show_progress, write_report

    with processes.agreed():
        own = replace(
            job,
            device=processes.device(job.device),
            matrices=_of_this_process(job.matrices, processes),
        )
        ready = load(own, Shard(processes.rank, processes.world))
        _check_alone(ready.model.model, processes)
    _check_same_weights(ready, processes)
    with show_progress() as say:
        found = _measured(ready, facts, processes, say)
        if processes.several:
            found = _joined(found, out, processes)
        stopped, audit = found.interrupted, None
        if found.statistics is not None:
            audit, stopped = build(ready._replace(job=job), found.statistics, say)
    if audit is not None:
        write_report(audit, out)
    if found.failure is not None:
        raise found.failure
    if audit is None:
        raise KeyboardInterrupt
    if stopped or not audit.complete:
        raise typer.Exit(INTERRUPTED)
    return audit


def _of_this_process(matrices: str | None, processes: "Processes") -> str | None:
    """Pictures are of the first sequence, and which heads are flagged is known of all sequences only."""
    if not processes.several or matrices is None:
        return matrices
    if not processes.first:
        return None
    return "all" if matrices.strip().lower() == "flagged" else matrices


def _check_alone(model: "nn.Module", processes: "Processes") -> None:
    classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    waiting = sorted(classes.intersection(NEEDS_ALL))
    if processes.several and waiting:
        raise InputError(
            f"model {type(model).__name__}",
            expected=f"in each of {processes.world} processes a model that runs on its own sequences",
            got=f"a {waiting[0]}, which waits for all of them to run as many batches",
            fix="Return the model without that wrapper; one that no device holds is audited by a single "
            "process with --device-map auto.",
        )


def _check_same_weights(ready: "LoadedJob", processes: "Processes") -> None:
    """Refuse, before anything is measured, weights that each process has drawn for itself."""
    from rankwise.auditing.provenance import weights_digest

    if not processes.several:
        return
    digests = processes.all_of(weights_digest(ready.model.model, ready.model.random_weights))
    if len(set(filter(None, digests))) > 1:
        raise InputError(
            f"model {ready.model.name}",
            expected="the same weights in all processes",
            got=f"others in process {next(n for n, one in enumerate(digests) if one != digests[0])}",
            fix="Set a seed in the factory before the model is built, or load a checkpoint.",
        )


def _measured(
    ready: "LoadedJob", facts: dict[str, Any], processes: "Processes", say: Callable[[str], None]
) -> Found:
    """What this process finds; of several, whatever happens the others are to hear of it."""
    from rankwise.auditing import AuditError
    from rankwise.cli.audit_job import run

    sequences = len(range(processes.rank, ready.job.sequences, processes.world))
    try:
        if processes.several and ready.is_empty:
            return Found()
        statistics = run(ready, facts, lambda done, site: say(_doing(done, sequences, site)))
    except AuditError as error:
        if error.statistics is None and not processes.several:
            raise
        return Found(error.statistics, error)
    except KeyboardInterrupt:
        if not processes.several:
            raise
        return Found(interrupted=True)
    except Exception as error:
        if not processes.several:
            raise
        return Found(failure=error)
    return Found(statistics, interrupted=processes.several and not statistics.complete)


def _doing(done: int, sequences: int, what: str) -> str:
    return what if what.startswith("importance") else f"batch {done + 1} (of {sequences} sequences): {what}"


def _joined(found: Found, out: Path, processes: "Processes") -> Found:
    """In the first process, what all of them found; the others leave."""
    from rankwise.auditing import Audit

    said = None if found.failure is None else processes.said(found.failure)
    if found.statistics is not None:
        _name_share(found.statistics, processes)
    try:
        shares = processes.to_first((found.statistics, said, found.interrupted))
    except RankwiseError as error:
        if found.statistics is not None:
            audit = Audit.from_statistics(found.statistics)
            path = _rescued(audit, out / f"process-{processes.rank}.json")
            kept = f"What process {processes.rank} measured is kept: {path}"
            with suppress(OSError):
                print(f"rankwise: {kept}", file=sys.__stderr__, flush=True)
        raise error from found.failure
    if not processes.first:
        raise typer.Exit
    return merged_shares(shares, found.failure, processes.interrupted)


def _name_share(statistics: "AuditStatistics", processes: "Processes") -> None:
    """Name the data of a share: two processes may have the same sequences, from repeated lines of a text."""
    parts = [f"{part}-{processes.rank}of{processes.world}" for part in statistics.provenance.parts]
    statistics.provenance = statistics.provenance.model_copy(update={"parts": parts})


def _rescued(audit: "Audit", path: Path) -> Path:
    try:
        return audit.save(path)
    except InputError:
        return audit.save(Path(tempfile.mkdtemp(prefix="rankwise-")) / path.name)


Share = tuple["AuditStatistics | None", dict[str, str] | None, bool]
"""What a process found: its statistics, its error, and whether it was interrupted."""


def merged_shares(shares: Sequence[Share], own: Exception | None = None, interrupted: bool = False) -> Found:
    """Return the statistics of all sequences, and the first error.

    Args:
        shares: what each process found; some may have had no sequences.
        own: error of this process.
        interrupted: True if Ctrl-C came while they were collected.
    """
    from rankwise.cli.torchrun import raise_first

    stopped = interrupted or any(one for *_, one in shares)
    failure: Exception | None = None
    try:
        raise_first([said for _, said, _ in shares], own)
    except RankwiseError as error:
        failure = error
    measured = [statistics for statistics, *_ in shares if statistics is not None]
    if not measured:
        return Found(None, failure, stopped)
    whole, *others = measured
    for other in others:
        whole.merge_audit(other)
    whole.note(f"sequences shared by {len(shares)} processes")
    whole.complete = whole.complete and failure is None and not stopped
    return Found(whole, failure, stopped)
