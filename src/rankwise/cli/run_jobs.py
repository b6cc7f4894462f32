"""Load and run audit jobs: in this process, or as tasks of a Ray cluster."""

import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import typer

from rankwise.auditing import Audit, AuditError, audit
from rankwise.auditing.batches import ALL
from rankwise.auditing.provenance import weights_digest
from rankwise.cli.audit_job import AuditJob
from rankwise.cli.load_data import LoadedData, load_data
from rankwise.cli.load_model import LoadedModel, demo_model, demo_text, load_model
from rankwise.cli.output import show_progress, write_report
from rankwise.errors import INTERRUPTED, InputError, RankwiseError, first_line, need_package
from rankwise.skips import recommend

Say = Callable[[str], None]
"""Function that shows the user which step is running."""


Result = tuple[AuditJob, Audit | RankwiseError]
Results = Generator[Result, None, None]
"""Generator of pairs (job, its audit or error), in the order in which jobs finish."""


class LoadedJob(NamedTuple):
    """Job with a loaded model and opened data."""

    job: AuditJob
    model: LoadedModel
    data: LoadedData


def load(job: AuditJob) -> LoadedJob:
    """Load the model of a job with its saved λ-skips, and open the data of its shard."""
    whole = load_model(
        job.model, trust_remote_code=job.trust_remote_code, tokenizer=job.tokenizer, **job.loading
    )
    model = whole.part_for("text" if job.images is None else "vision")
    data = load_data(
        model, text=job.text, images=job.images, dataset=job.dataset, tokens=job.tokens,
        sequences=job.sequences, batch_size=job.batch_size, shard=job.shard,
    )  # fmt: skip
    return LoadedJob(job, model, data)


def measure(
    loaded: LoadedJob, say: Say = lambda step: None, provenance: Mapping[str, Any] | None = None
) -> tuple[Audit, bool]:
    """Return the audit of a loaded job, and True if Ctrl-C stopped the audit or the recommendation of λ.

    An audit of all sequences recommends λ, which runs the model on the first batch again. If that fails, a
    note of the audit says why. Entries of `provenance` replace those of the job.
    """
    job, model, data = loaded
    first: list[Any] = []

    def batches() -> Iterator[Any]:
        for batch in data.batches:
            first[:] = first or [batch]
            yield batch

    about = {
        "model": "the bundled demo" if model.name == str(demo_model()) else model.name,
        "revision": model.revision,
        "data": data.data.replace(str(demo_text()), "the bundled text"),
        "command": job.command,
        "arguments": [] if model.is_part else replace(job, shards=None).arguments,
        "notes": [*model.notes, *data.notes],
        "weights_digest": weights_digest(model.model, model.random_weights),
        "random_weights": model.random_blocks,
    }
    result = audit(
        model.model, batches(), job.delta, rank_method=job.rank_method, attention_maps=job.attention_maps,
        at_init=job.at_init or False, importance=job.importance, tokenizer=data.tokenizer,
        provenance=about | dict(provenance or {}),
        on_progress=lambda done, step: say(f"batch {done + 1}: {step}"),
    )  # fmt: skip
    if job.shard != ALL:
        # repeated lines of a text can give two shards equal data
        digests = [f"{digest}-{job.shards}" for digest in result.provenance.data_digests]
        return _with_provenance(result, data_digests=digests), not result.complete
    if not result.complete:
        return result, True
    try:
        return recommend(result, model.model, first[0], model.loss), False
    except KeyboardInterrupt:
        note, stopped = "skip connections not looked at: interrupted from the keyboard", True
    except Exception as error:  # it must not lose the audit
        reason = str(error) if isinstance(error, RankwiseError | RuntimeError) else repr(error)
        note, stopped = f"no λ is named for COLLAPSE: {reason}", False
        say(note)
    return _with_provenance(result, notes=[*result.provenance.notes, note]), stopped


def _with_provenance(result: Audit, **fields: Any) -> Audit:
    return result.model_copy(update={"provenance": result.provenance.model_copy(update=fields)})


def run_job(job: AuditJob, say: Say = lambda step: None) -> Audit:
    """Load and run a job; return the complete audit, with digests of the files that the job read.

    Raise `RankwiseError` for each failure, which Ray can send between processes.
    """
    try:
        digests = job.file_digests()  # taken before the files are read, so that --resume sees later changes
        result, interrupted = measure(
            load(job), lambda step: say(f"{job.model}, {step}"), {"file_digests": digests}
        )
    except RankwiseError:
        raise
    except (Exception, SystemExit) as error:  # a factory may call sys.exit, which would end a Ray worker
        got, fix = f"{type(error).__name__}: {error}", f"Try `{job.command}`."
        raise RankwiseError(job.model, expected="an audit", got=got, fix=fix) from error
    if interrupted:
        raise KeyboardInterrupt
    return result


def audit_one(job: AuditJob, out: Path, command: str, *, verbose: bool) -> tuple[Audit, RankwiseError | None]:
    """Audit one model and write the report; return the audit, and the error if it failed after a batch.

    Raise `typer.Exit` after Ctrl-C; the report then contains the finished measurements.
    """
    loaded, error = load(job), None
    with show_progress() as say:
        try:
            result, interrupted = measure(loaded, say, {"command": command})
        except AuditError as failed:
            if failed.audit is None:
                raise
            result, interrupted, error = failed.audit, False, failed
    write_report(result, out, verbose=verbose)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    return result, error


def merge_shards(job: AuditJob, audits: list[Audit]) -> Audit:
    """Return the audit of a job, merged from the audits of all its shards."""
    merged = Audit.merge(audits, [f"shard {shard.shards} of {job.model}" for shard in job.parts])
    files = set.intersection(*(set(result.provenance.file_digests.items()) for result in audits))
    return _with_provenance(merged, command=job.command, file_digests=dict(files))


def run_here(jobs: Sequence[AuditJob], say: Say = lambda step: None) -> Results:
    """Run jobs one after the other in this process, and yield each job with its audit or error."""
    for job in jobs:
        try:
            yield job, run_job(job, say)
        except RankwiseError as error:
            yield job, error


def run_on_ray(
    jobs: Sequence[AuditJob], address: str | None, *, cpus: int | float = 1, gpus: int | float = 0
) -> Results:
    """Run jobs as Ray tasks with reserved CPUs and GPUs, and yield each result as soon as it is finished.

    Without an address, Ray uses RAY_ADDRESS, a running cluster, or a new cluster on this machine (also if the
    address is ``local``). Ray repeats a task if its worker or machine died, but not if the audit failed.
    """
    ray: Any = need_package("ray", "--ray", "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends statistics over the network
    os.environ.setdefault("RAY_task_oom_retries", "3")  # the default repeats tasks forever
    is_local = _connect(ray, address)
    try:
        room = ray.cluster_resources()
        where = "started on this machine" if is_local else f"at {ray.get_runtime_context().gcs_address}"
        has = f"{room.get('CPU', 0):g} CPUs, {room.get('GPU', 0):g} GPUs"
        print(f"rankwise: Ray cluster {where}: {has}", file=sys.stderr)
        if is_local and (room.get("CPU", 0) < cpus or room.get("GPU", 0) < gpus):  # Ray would wait forever
            asked, fix = f"--cpus {cpus:g} --gpus {gpus:g}", "Reserve less, or name a cluster."
            expected = "at most the processors of this machine per job"
            raise InputError(asked, expected=expected, got=has, fix=fix)
        task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=3)(run_job)
        yield from _results(ray, task, jobs)
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str | None) -> bool:
    """Connect to a cluster; return True if the cluster was started here, so that it cannot grow."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    asked = address or os.environ.get("RAY_ADDRESS") or None
    try:
        if asked != "local":
            try:
                ray.init(address=asked or "auto", **quiet)
                return False
            except ConnectionError as error:
                if asked or "Could not find any running Ray instance" not in str(error):
                    raise  # a cluster runs but refuses: audits must not start elsewhere without a word
        ray.init(address="local", include_dashboard=False, **quiet)
        return True
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        option, got = f"--ray {asked or ''}".rstrip(), first_line(error)
        fix = "Start one with `ray start --head`, or use --ray local. With tokens, set RAY_AUTH_MODE=token."
        raise InputError(option, expected="a Ray cluster that answers", got=got, fix=fix) from error


def _results(ray: Any, task: Any, jobs: Sequence[AuditJob]) -> Results:
    """Yield results as tasks finish; if the cluster is lost, yield its error for each remaining job."""
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
        # All lines of the message, because the last line names a module that is missing on a machine.
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
