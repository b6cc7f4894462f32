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
from rankwise.cli.audit_job import AuditJob, run_job
from rankwise.cli.audit_many import jobs_of, run_here, run_on_ray
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

    def __init__(self, given: dict[str, Any] | None = None, *, refusal: str = "", waits: int = 9) -> None:
        super().__init__("ray")
        self.given, self.refusal, self.waits = given or {}, refusal, waits
        self.inits: list[dict[str, Any]] = []
        self.options: dict[str, Any] = {}
        self.stops = 0
        self.exceptions = EXCEPTIONS

    def init(self, **options: Any) -> None:
        self.inits.append(options)
        if self.refusal:
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


def test_a_cluster_that_refuses_is_an_error(results: Any) -> None:
    with pytest.raises(InputError, match=r"--ray head:1: .*token is missing.*RAY_AUTH_MODE=token"):
        results(ray := FakeRay(refusal="Authentication token is missing."), "head:1")
    assert [options["address"] for options in ray.inits] == ["head:1"]


def test_tasks_larger_than_the_cluster_are_said_to_wait(results: Any, capsys) -> None:
    assert len(results(FakeRay(), gpus=1)) == 3
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "rankwise: Ray cluster at head:6379: 2 CPUs, 0 GPUs"
    assert said[1] == "rankwise: tasks wait for 1 CPUs and 1 GPUs each"


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
