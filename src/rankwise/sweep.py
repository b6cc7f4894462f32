"""Many audits, of models × revisions × data: a job each, run here or elsewhere; none is lost."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from rankwise.audit import Audit
from rankwise.audit.history import folder_name
from rankwise.errors import InputError, RankwiseError, RecordError
from rankwise.files import write_whole
from rankwise.sources import source_digests
from rankwise.tasks import AuditTask, prepare, run

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
) -> list[Job]:
    """A job for each model, revision and data set.

    Args:
        task: what they have in common.
        models: names or folders.
        revisions: of each model; none for what is newest.
        data: of each job ``text``, ``images`` or ``dataset``.

    Examples:
        >>> jobs = jobs_of(AuditTask(model=""), ["org/a", "b"], data=[{"dataset": "x"}, {"dataset": "y"}])
        >>> [job.name for job in jobs]
        ['a/x', 'a/y', 'b/x', 'b/y']
    """
    kinds = list(product(dict.fromkeys(models), dict.fromkeys(revisions) or [None]))
    folders = _names([f"{model}@{revision}" if revision else model for model, revision in kinds])
    parts = _names([str(next(iter(given.values()), "data")) for given in data])
    return [
        Job(replace(task, model=model, revision=revision, **given), folder, part)
        for (model, revision), folder in zip(kinds, folders, strict=True)
        for given, part in zip(data, parts, strict=True)
    ]


def _names(names: Sequence[str]) -> list[str]:
    """Names of files: the last part of each, whole where these are not all different, else numbered."""
    for names_tried in ([name.rstrip("/").rpartition("/")[2] for name in names], names):
        files = [folder_name(name) for name in names_tried]
        if len({name.lower() for name in files}) == len(files):  # disks may not tell case
            return files
    return [f"{number:03d}-{name}" for number, name in enumerate(files)]


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
    """
    _check_apart(jobs)
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
                write_whole(job.path(out), result, "audit")
                outcome.done.append(job)
                tell(job, result)
        pending = died
    return outcome


def _check_apart(jobs: Sequence[Job]) -> None:
    """The audits of a model are merged: what it reads twice would be counted twice."""
    known: dict[tuple[str, str, str], Job] = {}
    for job in jobs:
        digests = source_digests(job.task.data)
        for option, value in job.task.data.items():
            other = known.setdefault((job.folder, option, digests.get(option, str(value))), job)
            if value and other is not job:
                raise InputError(
                    f"--{option} {value}",
                    wanted="each data set once",
                    got=f"the same as --{option} {other.task.data[option]}",
                    fix="Leave one of them out: merged, its sequences would be counted twice.",
                )


def is_finished(job: Job, out: Path) -> bool:
    """Whether the audit of a job is there, whole, of the same task and of files as they are now.

    Args:
        job: the job.
        out: the folder of the sweep.
    """
    return changed_since(job, out) == []


def changed_since(job: Job, out: Path) -> list[str] | None:
    """Which local files have changed since a job was finished, by the options that name them.

    Args:
        job: the job.
        out: the folder of the sweep.

    Returns:
        The options; None where there is no whole audit of the same task.
    """
    try:
        found = Audit.load(job.path(out))
    except (InputError, RecordError):
        return None
    if not found.complete or found.provenance.command != job.task.command:
        return None
    before, now = found.provenance.sources, job.task.sources()
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def why_again(job: Job, out: Path) -> str:
    """Why a job that was finished is run again, in words; empty where it was not, or is kept.

    Args:
        job: the job.
        out: the folder of the sweep.
    """
    if not job.path(out).exists():
        return ""
    if names := changed_since(job, out):
        return (
            " and ".join(f"--{name}" if name != "model" else "the model" for name in names) + " changed since"
        )
    if names is not None:
        return ""
    try:
        return f"its audit is of `{Audit.load(job.path(out)).provenance.command}`"
    except (InputError, RecordError) as error:
        return f"its audit cannot be read ({error.got})"


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
    whole = {
        folder: group
        for folder, group in groups.items()
        if all(changed_since(job, out) is not None for job in group)
    }
    return {folder: _merged(group, out) for folder, group in whole.items()}


def _merged(jobs: Sequence[Job], out: Path) -> Audit | RankwiseError:
    for job in jobs:
        if names := changed_since(job, out):
            return RecordError(
                f"audits of {job.folder}",
                wanted="files that stay while a sweep runs",
                got=f"changed since {job.name} was audited: {', '.join(names)}",
                fix="Run the sweep again with --resume: it audits anew what has changed.",
            )
    try:
        return Audit.merge([Audit.load(job.path(out)) for job in jobs])
    except RankwiseError as error:
        return error


def in_worker(task: AuditTask) -> tuple[str, dict[str, str]]:
    """Run a task; its audit as JSON, or what went wrong, in words that any process can read.

    Args:
        task: what is asked for.

    Raises:
        KeyboardInterrupt: if Ctrl-C came, also where an audit would hold what was measured until then.
    """
    try:
        sources = task.sources()  # before they are read: what changes meanwhile is seen by --resume
        found = run(prepare(task), {"sources": sources})
        if not found.complete:
            raise KeyboardInterrupt
        return found.model_dump_json(indent=1) + "\n", {}
    except RankwiseError as error:
        return "", {"subject": error.subject, "wanted": error.wanted, "got": error.got, "fix": error.fix}
    except (Exception, SystemExit) as error:  # a factory may call sys.exit
        got = f"{type(error).__name__}: {error}"
        return "", {"subject": task.model, "wanted": "an audit", "got": got, "fix": f"Try `{task.command}`."}


def result_of(text: str, said: dict[str, str]) -> Result:
    """What `in_worker` gave, as a result.

    Args:
        text: the JSON of an audit.
        said: what went wrong, in words.
    """
    if not said:
        return text
    return RankwiseError(said["subject"], wanted=said["wanted"], got=said["got"], fix=said["fix"])


def run_here(jobs: Sequence[Job]) -> Iterator[tuple[Job, Result]]:
    """Run jobs in this process, one after the other.

    Args:
        jobs: what to run.
    """
    for job in jobs:
        yield job, result_of(*in_worker(job.task))
