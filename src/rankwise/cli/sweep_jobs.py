"""Many audits, of models × revisions × data: a job each, run here or elsewhere; none is lost."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from rankwise._internals.files import write_file
from rankwise.auditing import Audit
from rankwise.cli.audit_job import AuditTask, prepare, run
from rankwise.cli.file_digests import source_digests
from rankwise.cli.sweep_names import KINDS, named, read_names, write_names
from rankwise.errors import InputError, RankwiseError, RecordError

RETRIES = 3


class WorkerDiedError(RankwiseError):
    """The process or machine that ran a job ended in the middle; the job can be run again."""


@dataclass(frozen=True)
class Job:
    """One audit of a sweep."""

    task: AuditTask
    folder: str
    """Of its model and revision, in the folder of the sweep."""
    part: str
    """What its data is called."""

    @property
    def name(self) -> str:
        """What a reader calls it."""
        return f"{self.folder}/{self.part}"

    @property
    def model(self) -> str:
        """What its folder stands for."""
        task = self.task
        return f"{task.model}@{task.revision}" if task.revision else task.model

    @property
    def data(self) -> str:
        """What its part stands for."""
        return str(self.task.text or self.task.images or self.task.dataset or "data")

    def path(self, out: Path) -> Path:
        """Of its audit.

        Args:
            out: the folder of the sweep.
        """
        return out / self.folder / "parts" / f"{self.part}.json"


Result = str | RankwiseError
"""The JSON of an audit, or why there is none."""
Runner = Callable[[Sequence[Job]], Iterator[tuple[Job, Result]]]
"""Runs jobs and gives each with its result, in the order in which they end."""


@dataclass
class Outcome:
    """What became of the jobs of a sweep."""

    done: list[Job] = field(default_factory=list)
    kept: list[Job] = field(default_factory=list)
    """Those that were finished before."""
    failed: dict[Job, RankwiseError] = field(default_factory=dict)


def jobs_of(
    task: AuditTask,
    models: Sequence[str],
    revisions: Sequence[str] = (),
    data: Sequence[Mapping[str, Any]] = ({},),
    out: Path | None = None,
) -> list[Job]:
    """A job for each model, revision and data set.

    Args:
        task: what they have in common.
        models: names or folders.
        revisions: of each model; none for what is newest.
        data: of each job ``text``, ``images`` or ``dataset``.
        out: the folder of the sweep: what has a name there keeps it.

    Raises:
        RecordError: if the names in the folder are damaged.

    Examples:
        >>> jobs = jobs_of(AuditTask(model=""), ["org/a", "b"], data=[{"dataset": "x"}, {"dataset": "y"}])
        >>> [job.name for job in jobs]
        ['a/x', 'a/y', 'b/x', 'b/y']
    """
    kinds = product(dict.fromkeys(models), dict.fromkeys(revisions) or [None], data)
    jobs = [
        Job(replace(task, model=model, revision=revision, **given), "", "")
        for model, revision, given in kinds
    ]
    of_models, of_data = ({}, {}) if out is None else (read_names(out)[kind] for kind in KINDS)
    folders = named([job.model for job in jobs], of_models)
    parts = named([job.data for job in jobs], of_data)
    return [
        replace(job, folder=folder, part=part) for job, folder, part in zip(jobs, folders, parts, strict=True)
    ]


def sweep(
    jobs: Sequence[Job],
    out: Path,
    runner: Runner,
    *,
    resume: bool = False,
    retries: int = RETRIES,
    on_result: Callable[[Job, Result], None] | None = None,
) -> Outcome:
    """Run jobs and write the audit of each as soon as it is there.

    Args:
        jobs: what to run.
        out: the folder of the sweep.
        runner: what runs them.
        resume: whether audits that are there are kept: complete ones, of the same task and the same files.
        retries: how often a job is run again whose worker died.
        on_result: called with each result.

    Raises:
        InputError: if an audit cannot be written, those before it are; if a model has the same data twice.
        RecordError: if the names in the folder are damaged.
    """
    _check_apart(jobs)
    write_names(out, [(job.folder, job.model) for job in jobs], [(job.part, job.data) for job in jobs])
    tell = on_result or (lambda job, result: None)
    outcome = Outcome(kept=[job for job in jobs if resume and is_finished(job, out)])
    pending = [job for job in jobs if job not in outcome.kept]
    for left in range(retries, -1, -1):
        died: list[Job] = []
        for job, result in runner(pending) if pending else ():
            if isinstance(result, WorkerDiedError) and left:
                died.append(job)
            elif isinstance(result, RankwiseError):
                outcome.failed[job] = result
                tell(job, result)
            else:
                write_file(job.path(out), result, "audit")
                outcome.done.append(job)
                tell(job, result)
        pending = died
    return outcome


def _check_apart(jobs: Sequence[Job]) -> None:
    """The audits of a model are merged: what it reads twice would be counted twice."""
    known: dict[tuple[str, str, str], Job] = {}
    places: dict[str, Job] = {}
    for job in jobs:
        digests = source_digests(job.task.data)
        for option, value in job.task.data.items():
            other = known.setdefault((job.folder, option, digests.get(option, str(value))), job)
            if value and other is not job:
                raise InputError(
                    f"--{option} {value}",
                    expected="each data set once",
                    got=f"the same as --{option} {other.task.data[option]}",
                    fix="Leave one of them out: merged, its sequences would be counted twice.",
                )
        if places.setdefault(job.name, job) is not job:
            raise InputError(
                f"data {job.data}",
                expected="data of different names",
                got="two of this one",
                fix="Rename the file or the folder, or sweep them into two folders.",
            )


def is_finished(job: Job, out: Path) -> bool:
    """Whether the audit of a job is there, whole, of the same task and of files as they are now.

    Args:
        job: the job.
        out: the folder of the sweep.
    """
    found = _found(job, out)
    return isinstance(found, Audit) and not _changed(job, found)


def _found(job: Job, out: Path) -> Audit | str:
    """The whole audit of the task of a job, or why there is none, in words; empty where it was not run."""
    if not job.path(out).exists():
        return ""
    try:
        found = Audit.load(job.path(out))
    except (InputError, RecordError) as error:
        return f"its audit cannot be read ({error.got})"
    if found.provenance.command != job.task.command:
        return f"its audit is of `{found.provenance.command}`"
    return found if found.complete else "its audit is not complete"


def _changed(job: Job, found: Audit) -> list[str]:
    """Which local files have changed since a job was finished, by the options that name them."""
    before, now = found.provenance.sources, job.task.sources()
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def why_again(job: Job, out: Path) -> str:
    """Why a job that was finished is run again, in words; empty where it was not, or is kept.

    Args:
        job: the job.
        out: the folder of the sweep.
    """
    found = _found(job, out)
    if isinstance(found, str):
        return found
    names = [f"--{name}" if name != "model" else "the model" for name in _changed(job, found)]
    return " and ".join(names) + " changed since" if names else ""


def merged(jobs: Sequence[Job], out: Path) -> dict[str, Audit | RankwiseError]:
    """The audit of each model and revision over all its data, by its folder, or why there is none.

    Args:
        jobs: of the sweep.
        out: its folder.

    Returns:
        Nothing of a model without all its audits; an error where they cannot be merged, or files of some
        have changed since.
    """
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.folder, []).append(job)
    joined: dict[str, Audit | RankwiseError] = {}
    for folder, group in groups.items():
        audits = [audit for job in group if isinstance(audit := _found(job, out), Audit)]
        if len(audits) == len(group):
            joined[folder] = _merged(group, audits)
    return joined


def _merged(jobs: Sequence[Job], audits: Sequence[Audit]) -> Audit | RankwiseError:
    for job, audit in zip(jobs, audits, strict=True):
        if names := _changed(job, audit):
            return RecordError(
                f"audits of {job.folder}",
                expected="files that stay while a sweep runs",
                got=f"changed since {job.name} was audited: {', '.join(names)}",
                fix="Run the sweep again with --resume: it audits anew what has changed.",
            )
    try:
        return Audit.merge(audits)
    except RankwiseError as error:
        return error


def in_worker(task: AuditTask) -> tuple[str, dict[str, str]]:
    """Run a task; its audit as JSON, or what went wrong, in words that any process can read.

    Args:
        task: what is asked for.

    Raises:
        KeyboardInterrupt: if Ctrl-C came, also where an audit would hold what was measured until then.
    """
    from rankwise.auditing.run import build_audit
    from rankwise.auditing.settings import chosen_heads

    try:
        sources = task.sources()  # before they are read: what changes meanwhile is seen by --resume
        found = run(prepare(task), {"sources": sources})
        if not found.complete:
            raise KeyboardInterrupt
        audit = build_audit(found, chosen_heads(task.matrices))
        return audit.model_dump_json(indent=1) + "\n", {}
    except RankwiseError as error:
        return "", {"subject": error.subject, "expected": error.expected, "got": error.got, "fix": error.fix}
    except (Exception, SystemExit) as error:  # a factory may call sys.exit
        got = f"{type(error).__name__}: {error}"
        return "", {
            "subject": task.model,
            "expected": "an audit",
            "got": got,
            "fix": f"Try `{task.command}`.",
        }


def result_of(text: str, said: dict[str, str]) -> Result:
    """What `in_worker` gave, as a result.

    Args:
        text: the JSON of an audit.
        said: what went wrong, in words.
    """
    if not said:
        return text
    return RankwiseError(said["subject"], expected=said["expected"], got=said["got"], fix=said["fix"])


def run_here(jobs: Sequence[Job]) -> Iterator[tuple[Job, Result]]:
    """Run jobs in this process, one after the other.

    Args:
        jobs: what to run.
    """
    for job in jobs:
        yield job, result_of(*in_worker(job.task))
