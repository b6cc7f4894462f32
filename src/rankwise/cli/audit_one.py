"""One audit of `rankwise audit`: by this process alone, or by several that share the sequences."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rankwise.errors import InputError, RankwiseError

if TYPE_CHECKING:
    from torch import nn

    from rankwise.auditing import Audit
    from rankwise.auditing.widths import HeadMoments
    from rankwise.cli.audit_job import AuditTask, Ready
    from rankwise.cli.torchrun import Processes

INTERRUPTED = 130
NEEDS_ALL = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Classes whose modules wait, as they run, for the other processes to run them too."""


@dataclass
class Found:
    """What a process found of its sequences."""

    audit: "Audit | None" = None
    failure: Exception | None = None
    interrupted: bool = False
    moments: "HeadMoments" = field(default_factory=list)
    """Of each head of the audit, where several processes share the sequences."""


def audit_one(
    task: "AuditTask", out: Path, processes: "Processes", *, facts: dict[str, Any], brief: bool = False
) -> "Audit":
    """Audit one model and write what was found; Ctrl-C and failures leave the command when that is done.

    Args:
        task: what is asked for.
        out: the folder of the report.
        processes: those that share the sequences; the first writes.
        facts: of the provenance, what the task does not say.
        brief: say in one line what was found.

    Returns:
        The audit.

    Raises:
        RankwiseError: if it failed, in any of the processes; what was measured is written before.
        typer.Exit: after Ctrl-C, and in all processes but the first.
    """
    from rankwise.auditing.text_inputs import Shard
    from rankwise.cli.audit_job import prepare
    from rankwise.cli.output import show_progress, write_report

    with processes.agreed():
        own = replace(
            task,
            device=processes.device(task.device),
            matrices=_of_this_process(task.matrices, processes),
        )
        ready = prepare(own, Shard(processes.rank, processes.world))
        _check_alone(ready.subject.model, processes)
    _check_same_weights(ready, processes)
    with show_progress() as say:
        found = _measured(ready, facts, processes, say)
        if processes.several:
            found = _joined(found, task, out, processes)
        stopped = found.interrupted
        if found.audit is not None and found.audit.complete and not stopped:
            found.audit, stopped = _advised(found.audit, ready.subject.model, ready.first[0], say)
    if found.audit is not None:
        write_report(found.audit, out, brief=brief)
    if found.failure is not None:
        raise found.failure
    if found.audit is None:
        raise KeyboardInterrupt
    if stopped or not found.audit.complete:
        raise typer.Exit(INTERRUPTED)
    return found.audit


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


def _check_same_weights(ready: "Ready", processes: "Processes") -> None:
    """Refuse, before anything is measured, weights that each process has drawn for itself."""
    from rankwise.auditing.digests import weights_digest

    if not processes.several:
        return
    digests = processes.all_of(weights_digest(ready.subject.model, ready.subject.drawn))
    if len(set(filter(None, digests))) > 1:
        raise InputError(
            f"model {ready.subject.name}",
            expected="the same weights in all processes",
            got=f"others in process {next(n for n, one in enumerate(digests) if one != digests[0])}",
            fix="Set a seed in the factory before the model is built, or load a checkpoint.",
        )


def _measured(
    ready: "Ready", facts: dict[str, Any], processes: "Processes", say: Callable[[str], None]
) -> Found:
    """What this process finds; of several, whatever happens the others are to hear of it."""
    from rankwise.auditing import AuditError
    from rankwise.auditing.widths import keeping_moments
    from rankwise.cli.audit_job import run

    sequences = len(range(processes.rank, ready.task.sequences, processes.world))
    moments: HeadMoments = []
    keeping: AbstractContextManager[HeadMoments] = (
        keeping_moments() if processes.several else nullcontext(moments)
    )
    try:
        if processes.several and ready.is_empty:
            return Found()
        with keeping as moments:
            audit = run(ready, facts, lambda done, site: say(_doing(done, sequences, site)))
    except AuditError as error:
        if error.audit is None and not processes.several:
            raise
        return Found(error.audit, error, moments=moments)
    except KeyboardInterrupt:
        if not processes.several:
            raise
        return Found(interrupted=True)
    except Exception as error:
        if not processes.several:
            raise
        return Found(failure=error)
    return Found(audit, interrupted=processes.several and not audit.complete, moments=moments)


def _doing(done: int, sequences: int, what: str) -> str:
    return what if what.startswith("importance") else f"batch {done + 1} (of {sequences} sequences): {what}"


def _joined(found: Found, task: "AuditTask", out: Path, processes: "Processes") -> Found:
    """In the first process, what all of them found; the others leave."""
    said = None if found.failure is None else processes.said(found.failure)
    found.audit = None if found.audit is None else _of_share(found.audit, processes)
    text = "" if found.audit is None else found.audit.model_dump_json()
    try:
        shares = processes.to_first((text, said, found.interrupted, found.moments))
    except RankwiseError as error:
        if found.audit is not None:
            path = _rescued(found.audit, out / f"process-{processes.rank}.json")
            kept = f"What process {processes.rank} measured is kept: {path}"
            with suppress(OSError):
                print(f"rankwise: {kept}", file=sys.__stderr__, flush=True)
        raise error from found.failure
    if not processes.first:
        raise typer.Exit
    return merged_shares(shares, task.matrices, found.failure, processes.interrupted)


def _of_share(audit: "Audit", processes: "Processes") -> "Audit":
    """A repeated line of a text may give two processes the same sequences: here these are no mistake."""
    parts = [f"{part}-{processes.rank}of{processes.world}" for part in audit.provenance.parts]
    about = audit.provenance.model_copy(update={"parts": parts})
    return audit.model_copy(update={"provenance": about})


def _rescued(audit: "Audit", path: Path) -> Path:
    try:
        return audit.save(path)
    except InputError:
        return audit.save(Path(tempfile.mkdtemp(prefix="rankwise-")) / path.name)


Share = tuple[str, dict[str, str] | None, bool, "HeadMoments"]
"""What a process found: its audit as JSON, its error, whether it was interrupted, and moments of heads."""


def merged_shares(
    shares: Sequence[Share], matrices: str | None, own: Exception | None = None, interrupted: bool = False
) -> Found:
    """The audit of all sequences, and the first error.

    Args:
        shares: of each process; some may have had no sequences.
        matrices: heads whose picture is kept.
        own: the error of this process.
        interrupted: whether Ctrl-C came while they were collected.
    """
    from rankwise.auditing import Audit, chosen_heads
    from rankwise.auditing.merge import merge
    from rankwise.cli.torchrun import raise_first

    stopped = interrupted or any(one for _, _, one, _ in shares)
    failure: Exception | None = None
    try:
        raise_first([said for _, said, _, _ in shares], own)
    except RankwiseError as error:
        failure = error
    audits = [Audit.model_validate_json(text) for text, *_ in shares if text]
    if not audits:
        return Found(None, failure, stopped)
    merged = merge(audits, moments=[moments for text, _, _, moments in shares if text])
    chosen = chosen_heads(matrices)
    heads = merged.heads if chosen is None else chosen.kept(merged.heads, merged.findings)
    notes = [*merged.provenance.notes, f"sequences shared by {len(shares)} processes"]
    about = merged.provenance.model_copy(update={"notes": notes})
    whole = merged.complete and failure is None and not stopped
    return Found(
        merged.model_copy(update={"heads": heads, "provenance": about, "complete": whole}), failure, stopped
    )


def _advised(
    result: "Audit", model: "nn.Module", batch: Any, say: Callable[[str], None]
) -> "tuple[Audit, bool]":
    """The audit with advice on its skip connections; the audit alone, and True, where Ctrl-C came first.

    What of it fails does not cost the audit: the notes of the report say it.
    """
    from rankwise.skips import recommend

    try:
        return recommend(result, model, batch, lambda what: say(f"on the first batch: {what}"), say), False
    except KeyboardInterrupt:
        notes = [*result.provenance.notes, "skip connections not looked at: interrupted from the keyboard"]
        about = result.provenance.model_copy(update={"notes": notes})
        return result.model_copy(update={"provenance": about}), True
