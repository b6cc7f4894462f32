"""Sweeps on Ray: a worker that dies is told from a job that fails and from a cluster that is lost."""

import sys
from types import SimpleNamespace

import pytest
from tests.auditing.same_audits import compared

from rankwise.auditing import Audit
from rankwise.cli.audit_job import AuditTask
from rankwise.cli.sweep_jobs import WorkerDiedError, jobs_of, run_here, sweep
from rankwise.cli.sweep_ray import ClusterLostError, check_room, failure, ray_tasks, results
from rankwise.errors import InputError

FACTORY = """
import os, signal, sys, torch
from pathlib import Path
from torch import nn

HERE = Path(__file__).parent

def build():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    torch.manual_seed(1)
    return layer, [torch.randn(2, 9, 8)]

def killed():
    if not (HERE / "killed").exists():
        (HERE / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return build()

def leaves():
    (HERE / "left").open("a").write("x")
    sys.exit("no licence")
"""
JOBS = jobs_of(AuditTask(model=""), ["a", "b", "c"])


class RayError(Exception):
    """As Ray's; the classes below it have the names and parents that Ray 2.60 gives them."""


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__("ray::in_worker() (pid=1, ip=10.0.0.1)\n  File x")
        self.cause = cause


DIED = ("WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "OutOfMemoryError", "ObjectLostError")
EXCEPTIONS = SimpleNamespace(
    RayError=RayError, RayTaskError=RayTaskError, **{name: type(name, (RayError,), {}) for name in DIED}
)


def fake_ray(given: dict[str, object], lost_after: int = 99) -> SimpleNamespace:
    """A Ray whose tasks end in turn as ``given`` says by model, and whose cluster is lost at some time."""
    waits = []

    def wait(references: list[str]) -> tuple[list[str], list[str]]:
        waits.append(1)
        if len(waits) > lost_after:
            raise ConnectionError("Client is shutting down.")
        return references[:1], references[1:]

    def get(reference: str) -> object:
        if isinstance(found := given.get(reference, ("an audit", {})), Exception):
            raise found
        return found

    return SimpleNamespace(wait=wait, get=get, exceptions=EXCEPTIONS)


TASK = SimpleNamespace(remote=lambda task: task.model)


@pytest.mark.parametrize("name", DIED)
def test_what_ends_a_worker_or_its_machine_is_run_again(name, tmp_path) -> None:
    ray = fake_ray({"b": getattr(EXCEPTIONS, name)("ended")})
    found = {job.task.model: result for job, result in results(ray, TASK, JOBS)}
    assert (found["a"], found["c"]) == ("an audit", "an audit")
    assert isinstance(found["b"], WorkerDiedError)
    assert "got ended" in str(found["b"])
    assert ("Memory ran out" in str(found["b"])) == (name == "OutOfMemoryError")


@pytest.mark.parametrize("wrapped", [True, False])
def test_what_fails_of_itself_is_said_in_its_own_words_and_not_run_again(wrapped, tmp_path) -> None:
    cause = RuntimeError("not on the worker:\n\nModuleNotFoundError: No module named 'rankwise'")
    error = RayTaskError(cause) if wrapped else RayError("its task was cancelled")
    ran: list[str] = []
    ray = fake_ray({"b": error})

    def runner(jobs):
        ran.extend(job.name for job in jobs)
        yield from ((job, result) for job, result in results(ray, TASK, jobs) if result != "an audit")

    outcome = sweep(JOBS, tmp_path, runner)
    assert ran == [job.name for job in JOBS]
    told = str(outcome.failed[JOBS[1]])
    own = (
        "got RuntimeError: not on the worker: ModuleNotFoundError: No module named 'rankwise'. Try `rankwise"
    )
    assert (own if wrapped else "got RayError: its task was cancelled. Try `rankwise audit b`") in told
    assert "emory" not in told


def test_a_lost_cluster_is_said_of_each_job_left_and_keeps_what_is_there() -> None:
    found = {job.task.model: result for job, result in results(fake_ray({}, lost_after=1), TASK, JOBS)}
    assert found["a"] == "an audit"
    for model in ("b", "c"):
        assert isinstance(found[model], ClusterLostError)
        assert "ConnectionError: Client is shutting down. Look at it with `ray status`" in str(found[model])


def test_the_errors_of_ray_are_those_that_are_told_apart() -> None:
    known = pytest.importorskip("ray").exceptions
    assert all(issubclass(getattr(known, name), known.RayError) for name in (*DIED, "RayTaskError"))
    lost = failure(SimpleNamespace(exceptions=known), JOBS[0], known.OwnerDiedError("00", None, ""))
    assert isinstance(lost, WorkerDiedError)


def test_without_ray_the_install_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'rankwise\[sweep\]'"), ray_tasks("local"):
        pass


def test_a_worker_of_ray_that_is_killed_loses_nothing(tmp_path, monkeypatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # at 15 they starve on a busy machine
    factory = tmp_path / "net.py"
    factory.write_text(FACTORY, encoding="utf-8")
    jobs = jobs_of(AuditTask(model=""), [f"{factory}:build", f"{factory}:killed", f"{factory}:leaves"])
    with ray_tasks("local", cpus=1) as runner:
        outcome = sweep(jobs, tmp_path / "ray", runner)
        with pytest.raises(InputError, match="--gpus 99: expected no more for a job than this machine has"):
            check_room(ray, 1, 99)
        raises = ray.remote(max_retries=0)(lambda task: {}[task.tokens])
        [(_, raised)] = results(ray, raises, jobs[:1])
    assert "got KeyError: 256" in str(raised)
    assert (tmp_path / "killed").exists(), "no worker was killed"
    assert (tmp_path / "left").read_text() == "x", "what failed of itself was run again"
    assert (len(outcome.done), list(outcome.failed)) == (2, jobs[2:])
    assert "SystemExit: no licence" in str(outcome.failed[jobs[2]])
    here = sweep(jobs, tmp_path / "here", run_here)
    assert (len(here.done), list(here.failed)) == (2, jobs[2:])
    for job in jobs[:2]:
        found, alone = Audit.load(job.path(tmp_path / "ray")), Audit.load(job.path(tmp_path / "here"))
        assert compared(alone, found, {"versions"}) == []  # a worker has not loaded transformers
