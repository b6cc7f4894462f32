"""Run audit jobs as tasks of a Ray cluster, for `rankwise audit --ray`."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from rankwise.auditing import Audit
from rankwise.cli.audit_job import AuditJob
from rankwise.cli.audit_many import Results
from rankwise.cli.run_job import run_job
from rankwise.errors import InputError, RankwiseError, first_line, need_package


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
