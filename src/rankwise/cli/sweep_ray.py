"""The jobs of a sweep as tasks of Ray: workers that die, jobs that fail and lost clusters are told apart."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rankwise.cli.sweep_jobs import Job, Result, Runner, WorkerDiedError, in_worker, result_of
from rankwise.errors import InputError, RankwiseError, first_line

LOCAL = "local"
"""In place of an address: a cluster of this machine alone, for as long as the sweep runs."""


class ClusterLostError(RankwiseError):
    """The cluster that ran the jobs of a sweep does not answer any more."""


@contextmanager
def ray_tasks(address: str, cpus: int | float = 1, gpus: int | float = 0) -> Iterator[Runner]:
    """Run each job as a task of Ray, as many at once as its cluster has room for.

    Args:
        address: of the cluster, such as ``auto`` or ``ray://head:10001``; ``local`` starts one here.
        cpus: that each job takes.
        gpus: that each job takes.

    Raises:
        InputError: if Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError:
        raise InputError(
            f"--ray {address}",
            expected="the package ray",
            got="an environment without it",
            fix="pip install 'rankwise[sweep]'",
        ) from None
    started = {"include_dashboard": False} if address == LOCAL else {}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # they are sent over the network
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **started)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise InputError(
            f"--ray {address}",
            expected="a Ray cluster that answers",
            got=first_line(error),
            fix="Start one with `ray start --head`, or use --ray local.",
        ) from error
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(in_worker)

    def run_jobs(jobs: Sequence[Job]) -> Iterator[tuple[Job, Result]]:
        if address == LOCAL:  # a cluster may grow
            check_room(ray, cpus, gpus)
        yield from results(ray, task, jobs)

    try:
        yield run_jobs
    finally:
        ray.shutdown()


def results(ray: Any, task: Any, jobs: Sequence[Job]) -> Iterator[tuple[Job, Result]]:
    """The results of jobs in the order in which they end; where the cluster is lost, each job left says so.

    Args:
        ray: the module, connected.
        task: `in_worker`, as a function of Ray.
        jobs: what to run.
    """
    left = list(jobs)
    try:
        waiting = {task.remote(job.task): job for job in jobs}
        while waiting:
            ended, _ = ray.wait(list(waiting))
            for reference in ended:
                job = waiting.pop(reference)
                try:
                    result = result_of(*ray.get(reference))
                except ray.exceptions.RayError as error:
                    result = failure(ray, job, error)
                left.remove(job)
                yield job, result
    except (ConnectionError, ray.exceptions.RayError) as error:
        for job in left:
            yield (
                job,
                ClusterLostError(
                    job.name,
                    expected="a Ray cluster that answers until the sweep ends",
                    got=f"{type(error).__name__}: {first_line(error).rstrip('.')}",
                    fix="Look at it with `ray status`; `--resume` runs what is missing.",
                ),
            )


def failure(ray: Any, job: Job, error: Exception) -> RankwiseError:
    """Why a task gave no result: its worker died, so that it can be run again, or the task failed.

    Args:
        ray: the module.
        job: whose task it was.
        error: what `ray.get` raised.
    """
    known = ray.exceptions
    if isinstance(error, known.OutOfMemoryError):
        return _died(job, error, "Memory ran out: take a smaller --batch-size, or more --cpus for each job.")
    lost = (known.WorkerCrashedError, known.NodeDiedError, known.LocalRayletDiedError, known.ObjectLostError)
    if isinstance(error, lost):
        return _died(job, error, "The system's log may say who ended it, as where memory ran out.")
    cause = error.cause if isinstance(error, known.RayTaskError) else error
    return RankwiseError(
        job.name,
        expected="an audit",
        got=f"{type(cause).__name__}: {_all_lines(cause)}",
        fix=f"Try `{job.task.command}` on the machine that ran it.",
    )


def _died(job: Job, error: Exception, fix: str) -> WorkerDiedError:
    return WorkerDiedError(
        job.name,
        expected="a worker that lives until the audit is done",
        got=first_line(error).rstrip("."),
        fix=f"{fix} `--resume` runs what is missing.",
    )


def _all_lines(error: BaseException) -> str:
    """What an error says: where a module is missing on a machine of the cluster, the last line names it."""
    return " ".join(str(error).split()).rstrip(".")


def check_room(ray: Any, cpus: int | float, gpus: int | float) -> None:
    """Refuse jobs that ask for more than there is: Ray would wait for ever.

    Args:
        ray: the module, its cluster started.
        cpus: of each job.
        gpus: of each job.

    Raises:
        InputError: saying what there is.
    """
    there = ray.cluster_resources()
    found = {"CPU": there.get("CPU", 0), "GPU": there.get("GPU", 0)}
    if found["CPU"] < cpus or found["GPU"] < gpus:
        raise InputError(
            f"--cpus {cpus:g} --gpus {gpus:g}",
            expected="no more for a job than this machine has",
            got=f"{found['CPU']:g} CPUs and {found['GPU']:g} GPUs",
            fix="Ask for less, or give the address of a cluster.",
        )
