"""Audits as Ray tasks: results, errors of audits, workers that die, clusters that are lost or too small."""

import os
import shutil
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.auditing.same_audits import compared
from tests.support.nets import NETS

from rankwise.auditing import Audit, Provenance
from rankwise.cli.audit_job import AuditJob
from rankwise.cli.audit_many import jobs_of
from rankwise.cli.run_jobs import run_here, run_job, run_on_ray
from rankwise.errors import InputError, RankwiseError

RETRIES = "RAY_task_oom_retries"
AUDIT = Audit(provenance=Provenance(model="m", delta=0.01), heads=[], states=[], findings=[])
JOBS = jobs_of(AuditJob(model=""), ["a", "b", "c"])


class RayError(Exception):
    """Base class of Ray's exceptions, with the names and bases of Ray 2.60."""


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__("ray::run_job() (pid=1, ip=10.0.0.1)\n  File x")
        self.cause = cause


DIED = ("WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "OutOfMemoryError", "ObjectLostError")
EXCEPTIONS = SimpleNamespace(
    RayError=RayError, RayTaskError=RayTaskError, **{name: type(name, (RayError,), {}) for name in DIED}
)


class FakeRay(ModuleType):
    """A Ray whose tasks finish in turn, each with a result or an exception by its model."""

    refusal = "Could not find any running Ray instance."

    def __init__(self, given: dict[str, Any] | None = None, *, running: bool = True, waits: int = 9) -> None:
        super().__init__("ray")
        self.given, self.running, self.waits = given or {}, running, waits
        self.inits: list[dict[str, Any]] = []
        self.options: dict[str, Any] = {}
        self.stops = 0
        self.exceptions = EXCEPTIONS

    def init(self, **options: Any) -> None:
        self.inits.append(options)
        if options["address"] != "local" and not self.running:
            raise ConnectionError(self.refusal)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="head:6379")

    def remote(self, **options: Any) -> Any:
        self.options = options
        return lambda function: SimpleNamespace(remote=lambda job: job.model)

    def wait(self, references: list[str]) -> tuple[list[str], list[str]]:
        self.waits -= 1
        if self.waits < 0:
            raise ConnectionError("Client is shutting down.")
        return references[:1], references[1:]

    def get(self, reference: str) -> Any:
        found = self.given.get(reference, AUDIT)
        if isinstance(found, Exception):
            raise found
        return found

    def shutdown(self) -> None:
        self.stops += 1


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run three jobs on a fake Ray and return their results by model."""
    for name in ("RAY_ADDRESS", RETRIES, "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)

    def run(ray: FakeRay, address: str | None = None, **reserved: float) -> dict[str, Any]:
        monkeypatch.setitem(sys.modules, "ray", ray)
        return {job.model: result for job, result in run_on_ray(JOBS, address, **reserved)}

    return run


def test_ray_retries_tasks_sends_no_statistics_and_ends(results, monkeypatch) -> None:
    ray = FakeRay()
    assert results(ray, cpus=2, gpus=0.5) == dict.fromkeys("abc", AUDIT)
    assert ray.options == {"num_cpus": 2, "num_gpus": 0.5, "max_retries": 3}
    assert (os.environ[RETRIES], os.environ["RAY_USAGE_STATS_ENABLED"]) == ("3", "0")
    assert ray.stops == 1
    monkeypatch.setenv(RETRIES, "-1")
    results(ray)
    assert os.environ[RETRIES] == "-1"


@pytest.mark.parametrize("name", DIED)
def test_a_worker_that_dies_for_good_costs_its_own_audit(name: str, results: Any) -> None:
    found = results(FakeRay({"b": getattr(EXCEPTIONS, name)("ended.\nSee the log.")}))
    assert (found["a"], found["c"]) == (AUDIT, AUDIT)
    assert f"got {name}: ended. If memory ran out" in str(found["b"])
    assert "--resume" in str(found["b"])


def test_an_error_of_an_audit_arrives_as_it_was_raised(results: Any) -> None:
    own = InputError("b", expected="a file", got="none", fix="Check it.")
    assert results(FakeRay({"b": RayTaskError(own)}))["b"] is own
    other = RuntimeError("not on the worker:\n\nModuleNotFoundError: No module named 'rankwise'")
    found = results(FakeRay({"b": RayTaskError(other)}))["b"]
    assert "not on the worker: ModuleNotFoundError: No module named 'rankwise'. Try `rankwise" in str(found)


def test_a_lost_cluster_is_an_error_of_each_audit_that_is_left(results: Any) -> None:
    found = results(ray := FakeRay(waits=1))
    assert found["a"] == AUDIT
    for model in ("b", "c"):
        assert "got ConnectionError: Client is shutting down." in str(found[model])
    assert ray.stops == 1


def test_a_cluster_that_refuses_is_an_error_without_a_local_cluster(results: Any) -> None:
    ray = FakeRay(running=False)
    ray.refusal = "Authentication token is missing."
    with pytest.raises(InputError, match=r"--ray: .*token is missing.*RAY_AUTH_MODE=token"):
        results(ray)
    assert [options["address"] for options in ray.inits] == ["auto"]


def test_a_local_cluster_starts_only_without_an_address_and_a_running_cluster(
    results: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results(ray := FakeRay())
    assert [options["address"] for options in ray.inits] == ["auto"]
    assert capsys.readouterr().err == "rankwise: Ray cluster at head:6379: 2 CPUs, 0 GPUs\n"
    results(ray := FakeRay(running=False))
    assert [options["address"] for options in ray.inits] == ["auto", "local"]
    assert ray.inits[-1]["include_dashboard"] is False
    assert "Ray cluster started on this machine: 2 CPUs" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"--ray head:6379: expected a Ray cluster that answers"):
        results(FakeRay(running=False), "head:6379")
    monkeypatch.setenv("RAY_ADDRESS", "head:1")
    with pytest.raises(InputError, match=r"--ray head:1: expected a Ray cluster that answers"):
        results(FakeRay(running=False))


def test_jobs_larger_than_a_local_cluster_are_refused_and_others_wait_for_it_to_grow(results: Any) -> None:
    with pytest.raises(InputError, match=r"--cpus 1 --gpus 1: expected at most .* got 2 CPUs, 0 GPUs"):
        results(ray := FakeRay(), "local", gpus=1)
    assert ray.stops == 1
    assert len(results(FakeRay(), "head:6379", gpus=1)) == 3


def test_without_ray_the_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'rankwise\[ray\]'"):
        next(run_on_ray(JOBS, "local"))


@pytest.mark.extra
def test_a_worker_of_ray_that_is_killed_loses_nothing(tmp_path, monkeypatch) -> None:
    known = pytest.importorskip("ray").exceptions
    assert all(issubclass(getattr(known, name), known.RayError) for name in (*DIED, "RayTaskError"))
    monkeypatch.setenv("RAY_worker_niceness", "0")  # at 15 workers starve on a busy machine
    shutil.copy(NETS, tmp_path / "net.py")
    names = ("layer", "killed_once", "leaves", "raises")
    jobs = jobs_of(AuditJob(model=""), [f"{tmp_path}/net.py:{name}" for name in names])
    jobs += jobs_of(AuditJob(model="", shards="2"), [f"{tmp_path}/net.py:several"])[0].parts
    found = dict(run_on_ray(jobs, "local"))
    assert (tmp_path / "killed").exists(), "no worker was killed"
    assert (tmp_path / "left").read_text() == "x", "an audit that failed by itself was run again"
    for (job, here), audit in zip(run_here(jobs), map(found.get, jobs), strict=True):
        if isinstance(here, Audit):
            assert isinstance(audit, Audit)
            assert audit.provenance.command == job.command
            assert compared(here, audit, {"versions"}) == []  # a worker has not loaded transformers
        else:
            assert isinstance(audit, RankwiseError)
            assert (type(audit), str(audit)) == (type(here), str(here))
    assert run_job(jobs[0]).provenance.file_digests == found[jobs[0]].provenance.file_digests
