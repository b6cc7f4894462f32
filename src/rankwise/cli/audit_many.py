"""Audit several models, in this process or on a Ray cluster, and write the audits and their history."""

import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from rankwise._internals.files import folder_name
from rankwise._internals.forward import Progress
from rankwise.auditing import Audit, AuditError, History, sort_by_step
from rankwise.cli.audit_job import AuditJob, merge_shards, run_job
from rankwise.cli.load_model import split_factory, split_revision
from rankwise.cli.output import new_folder, print_results, write_report
from rankwise.errors import INTERRUPTED, InputError, RankwiseError, RecordError, first_line, need_package
from rankwise.report import write_page
from rankwise.report.comparison_report import history_document

Result = tuple[AuditJob, Audit | RankwiseError]
Results = Generator[Result, None, None]
"""Generator of pairs (job, its audit or error), in the order in which jobs finish."""


def jobs_of(job: AuditJob, models: Sequence[str]) -> list[AuditJob]:
    """Return one job per model, sorted by training step.

    Paths become absolute, because Ray workers may run in another folder.
    """
    shared = replace(
        job,
        text=job.text and job.text.absolute(),
        images=job.images and job.images.absolute(),
        offload_folder=job.offload_folder and job.offload_folder.absolute(),
        tokenizer=job.tokenizer and _absolute(job.tokenizer),
    )
    return list(dict.fromkeys(replace(shared, model=_absolute(model)) for model in sort_by_step(models)))


def _absolute(name: str) -> str:
    """Return the absolute path of a model or factory; names on the Hub are returned unchanged."""
    path, factory = split_factory(name)
    if path:
        return f"{Path(path).absolute()}:{factory}"
    return str(Path(name).absolute()) if Path(name).exists() else name


def audit_many(
    jobs: Sequence[AuditJob], out: Path, runner: Callable[[Sequence[AuditJob]], Results], *, resume: bool
) -> tuple[dict[str, Audit], Exception | None]:
    """Write each audit to ``OUT/NAME`` as soon as it finishes, then the history of all audits.

    Audits of shards are written to ``OUT/NAME/shard-K-of-N``, and merged into ``OUT/NAME``.

    Return the audits by NAME, and the exception to raise if a job failed. If a job fails, its error is
    printed, its finished part is written as incomplete, and the other jobs continue. If nothing was measured,
    the first error is raised. After Ctrl-C, the history contains the finished audits, and `typer.Exit` is
    raised. Audits of other models in `out` are kept. With `resume`, a job is skipped if any folder in `out`
    has its finished audit. A shard is skipped if its own folder has its finished audit.
    """
    saved = {path.parent.name: audit for path in sorted(out.glob("*/audit.json")) if (audit := _saved(path))}
    names = {job: name for job in jobs if resume and (name := _find(job, saved))}
    audits = {job: saved[name] for job, name in names.items()}
    kept, pending = len(audits), [job for job in jobs if job not in audits]
    models = {split_revision(job.model)[0] for job in pending}
    others = {name for name, audit in saved.items() if audit.provenance.model not in models}
    names |= _new_folders(pending, {*names.values(), *others}, out)
    shards: dict[AuditJob, Audit] = {}
    for job in pending:
        for shard in (shard for shard in job.parts if shard != job):
            names[shard] = f"{names[job]}/shard-{(shard.shards or '').replace('/', '-of-')}"
            audit = _saved(out / names[shard] / "audit.json") if resume else None
            if audit is not None and _find(shard, {names[shard]: audit}):
                shards[shard] = audit
    tasks = [task for job in pending for task in job.parts if task not in shards]
    partial: dict[str, Audit] = {}
    failures: dict[AuditJob, RankwiseError] = {}
    interrupted = False
    with new_folder(out, shared=True):  # shared, because other processes may write other models
        try:
            with closing(runner(tasks)) as results:
                for job, result in _with_merged(results if tasks else (), pending, shards):
                    if not isinstance(result, RankwiseError):
                        write_report(result, out / names[job], brief=True)
                        audits[job] = result
                        continue
                    failures[job] = result
                    print(f"rankwise: {names[job]}: {result}", file=sys.stderr)
                    if isinstance(result, AuditError):
                        cut = result.audit.model_copy(update={"complete": False})  # so --resume repeats it
                        write_report(cut, out / names[job], brief=True)
                        partial[names[job]] = cut
        except KeyboardInterrupt:
            interrupted = True
        finished = {names[job]: audits[job] for job in jobs if job in audits}
        if finished:
            history = History.of(list(finished.values()), list(finished))
            last = max(failures, key=list(names).index, default=None)
            failed = f"{names[last]} could not be audited: {failures[last]} " if last else ""
            document = history_document(history, {name: f"{name}/index.html" for name in finished}, failed)
            page, table = write_page(document, out / "index.html"), history.to_csv(out / "history.csv")
            print_results(document, [("history", page), ("table", table)])
        if interrupted:
            print("rankwise: stopped; `--resume` audits what is left", file=sys.stderr)
            raise typer.Exit(INTERRUPTED)
        if not finished and not partial:
            raise next(iter(failures.values()))
    if not finished:
        return partial, next(iter(failures.values()))
    print(f"audited {len(finished) - kept}, kept {kept}, failed {len(failures)}: {out}")
    return finished | partial, typer.Exit(1) if failures else None


def _with_merged(
    results: Iterable[Result], jobs: Sequence[AuditJob], shards: dict[AuditJob, Audit]
) -> Results:
    """Yield results; after the last shard of a job, also yield the job with the merged audit."""

    def merged(job: AuditJob) -> Results:
        if job.parts != [job] and all(shard in shards for shard in job.parts):
            try:
                yield job, merge_shards(job, [shards[shard] for shard in job.parts])
            except RankwiseError as error:
                yield job, error

    for job in jobs:
        yield from merged(job)
    whole = {shard: job for job in jobs for shard in job.parts}
    for shard, result in results:
        yield shard, result
        if isinstance(result, Audit):
            shards[shard] = result
            yield from merged(whole[shard])


def _saved(path: Path) -> Audit | None:
    """Return a saved audit. Return None if the file is missing, or damaged, which is printed."""
    try:
        return Audit.load(path) if path.exists() else None
    except (InputError, RecordError) as error:
        print(f"rankwise: {path.parent.name} is not kept: {error}", file=sys.stderr)
        return None


def _find(job: AuditJob, saved: Mapping[str, Audit]) -> str:
    """Return the folder of a job's finished audit, or "". Print why audits of the model are not kept."""
    digests = job.file_digests()
    for folder, audit in saved.items():
        about = audit.provenance
        reasons = {
            f"its command is `{about.command}`": about.command != job.command,
            "it is incomplete": not audit.complete,
            "files that it read have changed": about.file_digests != digests,
            "a factory can return other weights or batches": bool(split_factory(job.model)[0]),
        }
        why = next((reason for reason, holds in reasons.items() if holds), "")
        if not why:
            return folder
        if about.model == split_revision(job.model)[0]:
            print(f"rankwise: the audit in {folder} is not kept: {why}", file=sys.stderr)
    return ""


def _new_folders(jobs: Sequence[AuditJob], taken: set[str], out: Path) -> dict[AuditJob, str]:
    """Return an unused folder name per job: short names of the models, or full names if short names clash.

    Raise `InputError` if full names clash too.
    """
    names = [job.model for job in jobs]
    lower = {folder.lower() for folder in taken}  # file systems may ignore case
    for tried in ([Path(name).name for name in names], names):
        folders = [folder_name(name) for name in tried]
        different = {folder.lower() for folder in folders}
        if len(different) == len(jobs) and not different & lower:
            return dict(zip(jobs, folders, strict=True))
    expected, got = "one folder name per model, not that of another audit", ", ".join(folders)
    raise InputError(f"--out {out}", expected=expected, got=got, fix="Choose another folder.")


def run_here(jobs: Sequence[AuditJob], say: Progress = lambda step, done: None) -> Results:
    """Run jobs one after the other in this process, and yield each job with its audit or error."""
    for number, job in enumerate(jobs, 1):

        def report(step: str, done: float, which: str = f"{number} of {len(jobs)}: ") -> None:
            say(which + step, done)

        try:
            yield job, run_job(job, report)
        except RankwiseError as error:
            yield job, error


def run_on_ray(
    jobs: Sequence[AuditJob], address: str | None, *, cpus: int | float = 1, gpus: int | float = 0
) -> Results:
    """Run jobs as Ray tasks with reserved CPUs and GPUs, and yield each result as soon as it is finished.

    Without an address, Ray uses RAY_ADDRESS, a running cluster, or a new cluster on this machine. The address
    ``local`` starts a new cluster. Ray repeats a task if its worker or machine died, not if the audit failed.
    """
    ray: Any = need_package("ray", "--ray", "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # by default, Ray sends statistics over the network
    os.environ.setdefault("RAY_task_oom_retries", "3")  # the default repeats tasks forever
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        option, got = f"--ray {address or ''}".rstrip(), first_line(error)
        fix = "Start one with `ray start --head`, or use --ray local. With tokens, set RAY_AUTH_MODE=token."
        raise InputError(option, expected="a Ray cluster that answers", got=got, fix=fix) from error
    try:
        room = ray.cluster_resources()
        has = f"{room.get('CPU', 0):g} CPUs, {room.get('GPU', 0):g} GPUs"
        print(f"rankwise: Ray cluster at {ray.get_runtime_context().gcs_address}: {has}", file=sys.stderr)
        if room.get("CPU", 0) < cpus or room.get("GPU", 0) < gpus:
            print(f"rankwise: tasks wait for {cpus:g} CPUs and {gpus:g} GPUs each", file=sys.stderr)
        task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=3)(run_job)
        yield from _results(ray, task, jobs)
    finally:
        ray.shutdown()


def _results(ray: Any, task: Any, jobs: Sequence[AuditJob]) -> Results:
    """Yield results as tasks finish. If the cluster is lost, yield an error for each remaining job."""
    left = list(jobs)
    try:
        waiting = {task.remote(job): job for job in jobs}
        while waiting:
            [reference], _ = ray.wait(list(waiting))
            job = waiting.pop(reference)
            result = _result(ray, job, reference)
            left.remove(job)
            yield job, result
    except (ConnectionError, ray.exceptions.RayError) as error:
        yield from ((job, _lost(job, error)) for job in left)


def _result(ray: Any, job: AuditJob, reference: Any) -> Audit | RankwiseError:
    try:
        audit: Audit = ray.get(reference)
        return audit
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RankwiseError):
            return error.cause
        # Keep all lines of the message: if a module is missing on a machine, only the last line names it.
        got = " ".join(f"{type(error.cause).__name__}: {error.cause}".split())
        fix = f"Try `{job.command}` on the machine that ran it."
        return RankwiseError(job.model, expected="an audit", got=got, fix=fix)
    except ray.exceptions.RayError as error:
        return _lost(job, error)


def _lost(job: AuditJob, error: Exception) -> RankwiseError:
    """Return the error for a job that Ray could not finish."""
    got = f"{type(error).__name__}: {first_line(error)}"
    fix = "If memory ran out, use a smaller --batch-size or more --cpus. `--resume` audits what is missing."
    return RankwiseError(job.model, expected="a worker that finishes the audit", got=got, fix=fix)
