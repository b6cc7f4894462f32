"""Sweeps: the list of jobs, what is kept, what is run again."""

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import rankwise as rw
from rankwise.auditing import Audit, History
from rankwise.cli import app
from rankwise.cli.audit_job import AuditTask
from rankwise.cli.file_digests import PIECE, WHOLE
from rankwise.cli.sweep_jobs import (
    Job,
    Result,
    WorkerDiedError,
    in_worker,
    is_finished,
    jobs_of,
    merged,
    result_of,
    sweep,
    why_again,
)
from rankwise.cli.sweep_names import named, write_names
from rankwise.errors import InputError, RankwiseError, RecordError

FACTORY = """
import torch
from pathlib import Path
from torch import nn

HERE = Path(__file__).parent

def model(seed=0):
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    torch.manual_seed(seed + 1)
    return layer, [torch.randn(2, 9, 8)]

def build():
    (HERE / "built").open("a").write("x")
    return model()

def fails():
    if not (HERE / "weights").exists():
        raise OSError("no weights")
    return model(1)

def interrupted():
    layer, batches = model()

    def read():
        yield from batches
        if not (HERE / "goes-on").exists():
            raise KeyboardInterrupt
    return layer, read()
"""


@pytest.fixture
def factory(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(FACTORY, encoding="utf-8")
    return str(path)


def audits() -> Iterator[str]:
    """Audits of other data each, as JSON."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    while True:
        yield rw.audit(layer, [torch.randn(1, 9, 8)], provenance={"command": "?"}).model_dump_json()


class Workers:
    """Runs jobs without a model; those named in ``die`` so often first, those in ``fail`` always.

    Args:
        die: how often the worker of a job dies.
        fail: jobs that fail.
    """

    def __init__(self, die: dict[str, int] | None = None, fail: Sequence[str] = ()) -> None:
        self.die, self.fail, self.ran = dict(die or {}), fail, []
        self._audits = audits()

    def __call__(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Result]]:
        for job in reversed(jobs):  # the order in which they end is no order to rely on
            self.ran.append(job.name)
            said = {"expected": "x", "got": "y", "fix": "z"}
            if self.die.get(job.name, 0):
                self.die[job.name] -= 1
                yield job, WorkerDiedError(job.name, **said)
            elif job.name in self.fail:
                yield job, RankwiseError(job.name, **said)
            else:
                text = next(self._audits).replace('"command":"?"', f'"command":"{job.task.command}"')
                yield job, text


def four() -> list[Job]:
    return jobs_of(AuditTask(model=""), ["org/a", "b"], data=[{"dataset": "x"}, {"dataset": "y"}])


def test_jobs_are_models_times_revisions_times_data() -> None:
    task = AuditTask(model="", tokens=16)
    jobs = jobs_of(
        task, ["m", "m", "n"], ["r1", "r2"], [{"text": Path("s/x.txt")}, {"text": Path("t/x.txt")}]
    )
    assert len(jobs) == len({job.name for job in jobs}) == 8
    assert [job.folder for job in jobs[::2]] == ["m-r1", "m-r2", "n-r1", "n-r2"]
    assert jobs[0].part != jobs[1].part
    assert jobs[1].task.command == "rankwise audit m --revision r1 --text t/x.txt --tokens 16"
    assert [job.name for job in jobs_of(task, ["a/m", "b/m"])] == ["a-m/data", "b-m/data"]
    assert [job.folder for job in jobs_of(task, ["a/M", "A/m"])] == ["000-a-M", "001-A-m"]


def test_all_is_written_and_the_parts_of_a_model_are_merged(tmp_path) -> None:
    outcome = sweep(four(), tmp_path, Workers())
    assert [len(outcome.done), len(outcome.kept), len(outcome.failed)] == [4, 0, 0]
    found = merged(four(), tmp_path)
    assert [(name, audit.provenance.audits) for name, audit in found.items()] == [("a", 2), ("b", 2)]


def test_a_job_whose_worker_dies_is_run_again_and_no_other(tmp_path) -> None:
    workers = Workers(die={"a/x": 2})
    outcome = sweep(four(), tmp_path, workers, retries=2)
    assert (len(outcome.done), outcome.failed) == (4, {})
    assert sorted(workers.ran) == ["a/x", "a/x", "a/x", "a/y", "b/x", "b/y"]
    outcome = sweep(four(), tmp_path / "again", Workers(die={"a/x": 2}), retries=1)
    assert [job.name for job in outcome.failed] == ["a/x"]
    assert list(merged(four(), tmp_path / "again")) == ["b"]


def test_what_is_finished_is_kept_and_what_is_not_is_run(tmp_path) -> None:
    assert [job.name for job in sweep(four(), tmp_path, Workers(fail=["b/y"])).failed] == ["b/y"]
    jobs = four()
    jobs[1].path(tmp_path).write_text("{", encoding="utf-8")  # damaged
    whole = Audit.load(jobs[0].path(tmp_path))
    whole.model_copy(update={"complete": False}).save(jobs[0].path(tmp_path))
    workers = Workers()
    outcome = sweep(jobs, tmp_path, workers, resume=True)
    assert [job.name for job in outcome.kept] == ["b/x"]
    assert sorted(workers.ran) == ["a/x", "a/y", "b/y"]
    others = jobs_of(AuditTask(model="", tokens=3), ["org/a"], data=[{"dataset": "x"}])
    assert not is_finished(others[0], tmp_path), "an audit of other settings is another"


def test_a_full_disk_keeps_what_is_there(tmp_path, monkeypatch) -> None:
    whole, written = Path.write_text, []

    def until_full(self: Path, *given: object, **named: object) -> int:
        written.append(self)
        if len(written) > 3:  # the names, and two audits
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(self, *given, **named)

    monkeypatch.setattr(Path, "write_text", until_full)
    with pytest.raises(InputError, match="No space left on device"):
        sweep(four(), tmp_path, Workers())
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.part"))
    workers = Workers()
    outcome = sweep(four(), tmp_path, workers, resume=True)
    assert (len(outcome.kept), len(workers.ran)) == (2, 2)


def test_the_command_resumes_and_leaves_with_status_1_where_a_job_fails(factory, tmp_path) -> None:
    asked = ["sweep", f"{factory}:build", f"{factory}:fails", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 1
    assert "1 audits done, 0 kept, 1 failed" in done.output
    assert "OSError: no weights" in done.output
    assert Audit.load(tmp_path / "out" / "net.py-build").provenance.audits == 1
    (tmp_path / "weights").touch()
    done = CliRunner().invoke(app, [*asked, "--resume"])
    assert (done.exit_code, "1 audits done, 1 kept, 0 failed" in done.output) == (0, True), done.output
    assert (tmp_path / "built").read_text() == "x"
    assert len(History.load(tmp_path / "out")) == 2
    assert (tmp_path / "out" / "index.html").exists()


def test_ctrl_c_in_an_audit_ends_the_sweep_and_what_it_was_at_is_not_done(factory, tmp_path) -> None:
    out = tmp_path / "out"
    asked = ["sweep", f"{factory}:interrupted", f"{factory}:build", "--out", str(out)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 130, done.output
    assert "stopped; `--resume` runs what is missing" in done.output
    assert not list(out.rglob("parts/*.json"))
    assert not (tmp_path / "built").exists(), "the next job was started"
    (tmp_path / "goes-on").touch()
    done = CliRunner().invoke(app, [*asked, "--resume"])
    assert (done.exit_code, "2 audits done, 0 kept, 0 failed" in done.output) == (0, True), done.output


def test_what_is_finished_is_run_again_where_a_file_it_reads_has_changed(factory, tmp_path) -> None:
    asked = ["sweep", f"{factory}:build", "--out", str(tmp_path / "out"), "--resume"]
    assert CliRunner().invoke(app, asked).exit_code == 0
    with Path(factory).open("a", encoding="utf-8") as code:
        code.write("# other weights\n")
    done = CliRunner().invoke(app, asked)
    assert "net.py-build/data is run again: the model changed since" in done.output
    assert "1 audits done, 0 kept" in done.output
    assert "0 audits done, 1 kept" in CliRunner().invoke(app, asked).output


def test_a_finished_job_that_is_not_kept_is_said(factory, tmp_path) -> None:
    asked = ["sweep", f"{factory}:build", "--out", str(tmp_path / "out"), "--resume"]
    first = CliRunner().invoke(app, asked)
    assert (first.exit_code, "is run again" in first.output) == (0, False)
    other = CliRunner().invoke(app, [*asked, "--sequences", "2"])
    assert "net.py-build/data is run again: its audit is of `rankwise audit" in other.output
    part = tmp_path / "out" / "net.py-build" / "parts" / "data.json"
    Audit.load(part).model_copy(update={"complete": False}).save(part)
    half = CliRunner().invoke(app, [*asked, "--sequences", "2"])
    assert "net.py-build/data is run again: its audit is not complete" in half.output
    part.write_text(part.read_text()[:500])
    damaged = CliRunner().invoke(app, [*asked, "--sequences", "2"])
    assert "net.py-build/data is run again: its audit cannot be read (" in damaged.output
    assert "1 audits done, 0 kept" in damaged.output


def test_a_model_that_changed_during_a_sweep_has_no_report_and_the_others_have_theirs(
    factory, tmp_path
) -> None:
    other = tmp_path / "other.py"
    other.write_text(Path(factory).read_text(encoding="utf-8"), encoding="utf-8")
    jobs, out = jobs_of(AuditTask(model=""), [f"{factory}:build", f"{other}:build"]), tmp_path / "out"
    outcome = sweep(jobs, out, lambda these: ((job, result_of(*in_worker(job.task))) for job in these))
    assert len(outcome.done) == 2
    with Path(factory).open("a", encoding="utf-8") as code:
        code.write("# other weights\n")
    changed, same = merged(jobs, out).values()
    assert "changed since net.py-build/data was audited: model" in str(changed)
    assert "--resume" in str(changed)
    assert isinstance(same, Audit)


def test_a_model_without_a_report_is_said_and_leaves_with_status_1(factory, tmp_path, monkeypatch) -> None:
    refused = RankwiseError("audits of net.py-build", expected="x", got="y", fix="z")
    monkeypatch.setattr("rankwise.cli.sweep_jobs._merged", lambda jobs, out: refused)
    done = CliRunner().invoke(app, ["sweep", f"{factory}:build", "--out", str(tmp_path / "out")])
    assert (done.exit_code, "no report of net.py-build: audits of" in done.output) == (1, True), done.output


def test_sources_change_with_any_file_in_a_folder_and_with_nothing_else(tmp_path) -> None:
    folder, text = tmp_path / "model", tmp_path / "t.txt"
    (folder / "results").mkdir(parents=True)
    large = folder / "large.safetensors"
    large.write_bytes(bytes(WHOLE + PIECE))
    text.write_text("some text")
    task = AuditTask(model=str(folder), text=text, dataset="org/on-the-hub:train:text")
    found = task.sources()
    assert set(found) == {"model", "text"}
    (folder / ".hidden").touch()
    (folder / "results" / "audit.json").touch()
    assert task.sources() == found
    large.write_bytes(b"x" * (WHOLE + PIECE))
    text.write_text("some tex.")
    after = task.sources()
    assert all(after[name] != found[name] for name in found)


def test_data_that_a_model_would_read_twice_is_refused_before_it_runs(tmp_path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the same")
    task, workers = AuditTask(model=""), Workers()
    for data in ([{"dataset": "x"}] * 2, [{"text": tmp_path / "a.txt"}, {"text": tmp_path / "b.txt"}]):
        with pytest.raises(InputError, match="expected each data set once, got the same as --") as told:
            sweep(jobs_of(task, ["m"], data=data), tmp_path / "out", workers)
    assert "b.txt" in str(told.value)
    assert "a.txt" in str(told.value)
    assert not workers.ran


def texts(tmp_path: Path, *names: str) -> list[dict[str, Path]]:
    return [{"text": tmp_path / name} for name in names]


def test_what_is_finished_is_kept_where_models_or_data_of_the_same_file_name_come_and_go(tmp_path) -> None:
    task, out = AuditTask(model=""), tmp_path / "out"

    def resumed(models: list[str], revisions: list[str], *names: str) -> tuple[int, int]:
        jobs = jobs_of(task, models, revisions, texts(tmp_path, *names), out)
        outcome = sweep(jobs, out, Workers(), resume=True)
        assert len(merged(jobs, out)) == len({job.folder for job in jobs})
        return len(outcome.kept), len(outcome.done)

    assert resumed(["org/m"], [], "ta/x.txt") == (0, 1)
    assert (out / "m" / "parts" / "x.txt.json").exists()
    assert resumed(["org/m"], [], "ta/x.txt", "tb/x.txt") == (1, 1)
    assert resumed(["org/m"], [], "tb/x.txt") == (1, 0)
    assert resumed(["other/m", "org/m"], [], "tb/x.txt", "ta/x.txt", "tc/X.txt") == (2, 4)
    assert resumed(["other/m", "org/m"], ["r", "s"], "ta/x.txt") == (0, 4)
    assert resumed(["other/m"], ["s"], "ta/x.txt") == (1, 0)
    assert resumed(["org/m"], [], "tc/X.txt", "ta/x.txt") == (2, 0)
    assert len(list(out.glob("*/parts/*.json"))) == 10, "an audit was replaced, or has two names"


def test_a_sweep_without_resume_replaces_nothing_of_other_data(tmp_path) -> None:
    for name in ("ta/x.txt", "tb/x.txt"):
        jobs = jobs_of(AuditTask(model=""), ["m"], data=texts(tmp_path, name), out=tmp_path)
        sweep(jobs, tmp_path, Workers())
    assert len(list(tmp_path.glob("m/parts/*.json"))) == 2


def test_a_name_that_stands_for_other_data_is_refused_before_anything_runs(tmp_path) -> None:
    """Jobs that were named without the folder may have names that mean something else there."""
    there, here = (
        jobs_of(AuditTask(model=""), [f"{place}/m"], data=texts(tmp_path, f"{place}.txt")) for place in "ab"
    )
    assert there[0].folder == here[0].folder == "m"
    write_names(tmp_path, [(job.folder, job.model) for job in there], [])
    workers = Workers()
    with pytest.raises(InputError, match=r"expected m to stand for a/m, as in names\.json .*got b/m"):
        sweep(here, tmp_path, workers)
    with pytest.raises(InputError, match=r"expected m to stand for a/m.* or for another job, got b/m"):
        sweep([*there, *here], tmp_path / "new", workers)
    data = [jobs_of(AuditTask(model=""), [p], data=texts(tmp_path, f"{p}/x.txt"))[0] for p in "ab"]
    with pytest.raises(InputError, match=r"expected x\.txt to stand for .*a/x\.txt.*got .*b/x\.txt"):
        sweep(data, tmp_path / "new", workers)
    assert not workers.ran
    assert not (tmp_path / "new").exists()


def test_names_that_were_given_stay_and_new_ones_are_free() -> None:
    assert named(["b-x", "b/x", "A-x"], {"x": "a/x"}) == [
        "001-b-x",
        "002-b-x",
        "003-A-x",
    ]
    given = {"001-b-x": "y", "x": "a/x"}
    first = named(["b/x", "b-x"], given)
    again = named(["b-x", "b/x", "c"], given | dict(zip(first, ["b/x", "b-x"], strict=True)))
    assert again == [*reversed(first), "c"]
    assert len({*first, *given}) == 4


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "JSONDecodeError"), ("[]", "TypeError"), ('{"models": {}, "data": {"../x": "x"}}', "'../x'")],
)
def test_damaged_names_are_refused_before_anything_runs(content, said, tmp_path) -> None:
    (tmp_path / "names.json").write_text(content)
    with pytest.raises(RecordError, match=r"names .*names\.json: expected .*Remove it") as told:
        jobs_of(AuditTask(model=""), ["m"], out=tmp_path)
    assert said in str(told.value)
    workers = Workers()
    with pytest.raises(RecordError):
        sweep(four(), tmp_path, workers)
    assert not workers.ran


@pytest.mark.parametrize("option", ["--cpus", "--gpus", "--retries"])
def test_options_of_ray_are_refused_without_it(option, tmp_path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["sweep", "m", option, "1", "--out", str(out)])
    assert isinstance(done.exception, InputError)
    assert f"{option} 1: expected --ray beside it" in str(done.exception)
    assert ("--device cuda" in str(done.exception)) == (option == "--gpus")
    assert not out.exists()


@pytest.mark.parametrize("device", [(), ("--device", "cpu")])
def test_gpus_that_no_job_would_use_are_refused(device, tmp_path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["sweep", "m", "--ray", "x", "--gpus", "1", *device, "--out", str(out)])
    assert isinstance(done.exception, InputError)
    assert "--gpus 1: expected jobs that use the GPUs they hold, got --device cpu." in str(done.exception)
    assert not out.exists()


def test_an_audit_that_is_not_kept_is_read_once(tmp_path, monkeypatch) -> None:
    job = four()[0]
    job.path(tmp_path).parent.mkdir(parents=True)
    job.path(tmp_path).write_text("{")
    read, load = [], Audit.load
    monkeypatch.setattr(Audit, "load", lambda path: (read.append(path), load(path))[1])
    assert "cannot be read" in why_again(job, tmp_path)
    assert len(read) == 1


def test_two_jobs_never_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text file and a data set of the same name."""
    monkeypatch.chdir(tmp_path)
    Path("x").write_text("a text")
    jobs = jobs_of(AuditTask(model=""), ["m"], data=[{"text": Path("x")}, {"dataset": "x"}])
    with pytest.raises(InputError, match="data x: expected data of different names"):
        sweep(jobs, tmp_path / "out", lambda jobs: iter(()))
