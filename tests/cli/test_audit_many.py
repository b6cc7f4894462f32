"""`rankwise audit` of several models: folders, `--resume`, failures, Ctrl-C; `compare` of their audits."""

import csv
import errno
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tests.support.nets import NETS
from torch import nn
from typer.testing import CliRunner, Result

import rankwise as rw
from rankwise.auditing import Audit, History
from rankwise.cli import app, audit_job
from rankwise.cli.audit_job import AuditJob
from rankwise.cli.audit_many import audit_many, jobs_of, run_here
from rankwise.errors import InputError, RankwiseError

Run = Callable[..., Result]
TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 20


@pytest.fixture(scope="module")
def home(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of a tiny model, whose queries grow with the steps, and a text."""
    from transformers import ByT5Tokenizer, LlamaForCausalLM

    home = tmp_path_factory.mktemp("home")
    (home / "text.txt").write_text(TEXT)
    model = LlamaForCausalLM.from_pretrained(tiny)
    for step in (90, 200, 1000):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight *= 6 if "q_proj" in name else 1
        model.save_pretrained(home / "run" / f"checkpoint-{step}")
        ByT5Tokenizer(extra_ids=0).save_pretrained(home / "run" / f"checkpoint-{step}")
    return home


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(home)
    monkeypatch.setenv("COLUMNS", "120")
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


DATA = ("--text", "text.txt", "--tokens", 24, "--sequences", 2)
CHECKPOINTS = ("run/checkpoint-1000", "run/checkpoint-200", "run/checkpoint-90")
"""As a shell lists them."""


@pytest.fixture(scope="module")
def audited(home: Path) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("COLUMNS", "120")
        return CliRunner().invoke(app, ["audit", *CHECKPOINTS, *map(str, DATA), "--out", "audits"])


def rows_of(result: Result) -> list[list[str]]:
    """Rows of the table of a history, which begin with a step."""
    return [words for line in result.output.splitlines() if (words := line.split()) and words[0].isdigit()]


def test_checkpoints_are_audited_in_the_order_of_their_steps(audited: Result, home: Path) -> None:
    assert audited.exit_code == 0, audited.output
    out = home / "audits"
    assert {path.name for path in out.iterdir()} == {
        "checkpoint-90", "checkpoint-200", "checkpoint-1000", "index.html", "history.csv",
    }  # fmt: skip
    for folder in out.glob("checkpoint-*"):
        assert {path.name for path in folder.iterdir()} == {
            "audit.json", "index.html", "heads.csv", "states.csv",
        }  # fmt: skip
    history = History.load(out)
    assert history.steps == [90, 200, 1000]
    ranks = [sum(head.stable_rank for head in audit.heads) for audit in history.audits]
    assert ranks == sorted(set(ranks))  # sharper attention, higher stable rank
    page = (out / "index.html").read_text()
    assert page.index('href="checkpoint-90/index.html"') < page.index('href="checkpoint-1000/index.html"')
    assert [row[0] for row in rows_of(audited)] == ["90", "200", "1000"]
    with (out / "history.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["90"] * 4 + ["200"] * 4 + ["1000"] * 4


def test_the_loss_of_checkpoints_is_measured_and_compared(run: Run, home: Path) -> None:
    result = run("audit", *CHECKPOINTS, *DATA, "--loss", "--out", "losses")
    assert result.exit_code == 0, result.output
    audits = dict(History.load(home / "losses"))
    losses = {step: audit.importance.value for step, audit in audits.items() if audit.importance is not None}
    best = min(losses, key=losses.__getitem__)
    said = " ".join(result.output.split())
    assert f"checkpoint-{best} has the lowest loss, {losses[best]:.4g} nats per token" in said
    assert {row[0]: row[2] for row in rows_of(result)} == {
        str(at): f"{one:.4g}" for at, one in losses.items()
    }
    assert shlex.split(audits[90].provenance.command)[-1] == "--loss"
    compared = run("compare", "losses/checkpoint-90", "losses/checkpoint-1000")
    assert f"Loss {losses[90]:.4g} → {losses[1000]:.4g} nats per token" in " ".join(compared.output.split())


def test_each_is_the_audit_of_that_model_alone(audited: Result, run: Run, home: Path) -> None:
    assert run("audit", "run/checkpoint-200", *DATA, "--out", "alone").exit_code == 0
    alone, among = Audit.load(home / "alone"), Audit.load(home / "audits" / "checkpoint-200")
    assert [head.effective_rank for head in alone.heads] == [head.effective_rank for head in among.heads]
    assert among.provenance.data.endswith(alone.provenance.data)
    assert among.provenance.command.startswith(
        f"rankwise audit {home}/run/checkpoint-200 --text {home}/text.txt"
    )


def test_a_model_that_fails_is_reported_and_the_others_are_audited(run: Run, home: Path) -> None:
    result = run("audit", "run/checkpoint-90", "run/checkpoint-95", *DATA, "--out", "some")
    assert result.exit_code == 1
    assert "run/checkpoint-95" in result.stderr
    assert [path.name for path in (home / "some").glob("check*")] == ["checkpoint-90"]
    assert (home / "some" / "index.html").exists()
    failed = run("audit", "run/checkpoint-1", "run/checkpoint-2", *DATA, "--out", "none")
    assert isinstance(failed.exception, RankwiseError)
    assert "checkpoint-1" in str(failed.exception)


@pytest.mark.parametrize("broken", [["1000"], ["200", "1000"], ["90"]])
def test_the_first_sentence_of_a_history_names_the_checkpoint_that_failed_and_why(
    broken: list[str], run: Run, home: Path
) -> None:
    from transformers import LlamaForCausalLM

    name = f"broken-{'-'.join(broken)}"
    for checkpoint in CHECKPOINTS:
        step = checkpoint.partition("-")[2]
        shutil.copytree(home / checkpoint, home / name / f"checkpoint-{step}")
        if step in broken:
            model = LlamaForCausalLM.from_pretrained(home / checkpoint)
            model.model.layers[0].mlp.down_proj.weight.data[:] = torch.nan
            model.save_pretrained(home / name / f"checkpoint-{step}")
    models = [f"{name}/{Path(one).name}" for one in CHECKPOINTS]
    result = run("audit", *models, *DATA, "--loss", "--out", f"{name}-audits")
    said = " ".join(result.stdout.split())
    assert result.exit_code == 1, result.output
    before, _, after = said.partition(f"checkpoint-{broken[-1]} could not be audited: ")
    assert after, said
    assert "Last audit" not in before
    assert "not finite" in after.partition(". ")[0]


def test_a_code_in_any_audit_fails_the_command(run: Run, home: Path) -> None:
    from transformers import LlamaForCausalLM

    shutil.copytree(home / CHECKPOINTS[0], home / "nan")
    model = LlamaForCausalLM.from_pretrained(home / CHECKPOINTS[0])
    model.model.layers[0].self_attn.q_proj.weight.data[:] = torch.nan
    model.save_pretrained(home / "nan")
    words = ("audit", CHECKPOINTS[1], "nan", *DATA, "--out", "gate", "--resume")
    assert run(*words, "--fail-on", "COLLAPSE").exit_code == 0
    again = run(*words, "--fail-on", "NONFINITE")
    assert (again.exit_code, "kept 2" in again.output) == (3, True)


def test_ctrl_c_keeps_finished_audits_and_their_history(run, home, monkeypatch) -> None:
    load, calls = audit_job.load_model, iter(range(9))

    def interrupted(*arguments: object, **options: object) -> object:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return load(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(audit_job, "load_model", interrupted)
    result = run("audit", *CHECKPOINTS, *DATA, "--out", "cut")
    assert result.exit_code == 130
    assert [path.parent.name for path in (home / "cut").glob("*/audit.json")] == ["checkpoint-90"]
    assert (home / "cut" / "index.html").exists()


def test_a_folder_of_audits_is_compared_in_order(audited: Result, run: Run, home: Path) -> None:
    result = run("compare", "audits", "--out", "h.html", "--out", "h.csv")
    assert result.exit_code == 0, result.output
    assert [row[0] for row in rows_of(result)] == ["90", "200", "1000"]
    assert "checkpoint-90 to checkpoint-1000" in result.output
    assert f"history: {home / 'h.html'}" in result.output
    assert (home / "h.csv").stat().st_size > 0
    same = run("compare", *sorted((home / "audits").glob("check*")))
    assert rows_of(same) == rows_of(result)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["audits/checkpoint-90"], "two or more to compare, got audits/checkpoint-90"),
        (["audits", "--out", "a.json"], "ending of --out a.json: expected one of .html, .csv"),
        (["audits/checkpoint-90", "audits/checkpoint-200", "--out", "a"], "ending of --out a: expected"),
        (
            ["audits/checkpoint-90", "audits/checkpoint-200", "--out", "a.csv"],
            "one of .html, .json, got '.csv'",
        ),
        (["audits", "nowhere"], "no such file"),
        (["audits/checkpoint-90", "text.txt"], "got Invalid JSON"),
    ],
)
def test_wrong_arguments_of_a_comparison_are_refused(audited, run, home, arguments, says) -> None:
    before = set(home.iterdir())
    result = run("compare", *arguments)
    assert isinstance(result.exception, RankwiseError)
    assert says in str(result.exception)
    assert set(home.iterdir()) == before


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """Return a copy of the factories, which tests can change."""
    return Path(shutil.copy(NETS, tmp_path / "net.py"))


def test_resume_audits_missing_models_and_says_why_audits_are_not_kept(
    run: Run, home: Path, tmp_path: Path, net: Path
) -> None:
    out = tmp_path / "out"
    first, second = models = [tmp_path / name for name in ("checkpoint-90", "checkpoint-200")]
    for model in models:
        shutil.copytree(home / "run" / model.name, model)

    def resumed(*arguments: object) -> str:
        done = run("audit", *arguments, *DATA, "--out", out, "--resume")
        assert done.exit_code == 0, done.output
        return done.output

    assert "audited 1, kept 0" in resumed(first)
    assert "audited 1, kept 1, failed 0" in resumed(*models)
    (out / "checkpoint-90").rename(out / "another name")
    assert "audited 0, kept 2, failed 0" in resumed(*models)
    assert len(History.load(out)) == 2
    os.utime(first / "config.json", (0, 0))
    said = resumed(*models)
    assert "the audit in another name is not kept: files that it read have changed" in said
    assert "audited 1, kept 1" in said
    path = out / "checkpoint-200" / "audit.json"
    Audit.load(path).model_copy(update={"complete": False}).save(path)
    (out / "checkpoint-90" / "audit.json").write_text("{")
    said = resumed(*models)
    assert "the audit in checkpoint-200 is not kept: it is incomplete" in said
    assert "checkpoint-90 is not kept: " in said
    assert "audited 2, kept 0" in said
    assert "is not kept: its command is `rankwise audit" in (said := resumed(second, "--delta", 0.1))
    assert "audited 1, kept 0" in said
    for reason in ("audited 1, kept 0", "not kept: a factory can return other weights or batches"):
        assert reason in run("audit", f"{net}:counted", "--out", out, "--resume").output


@pytest.mark.parametrize("options", [["--resume"], ["--ray", "local"], ["again.py:counted"]])
def test_the_audit_of_one_model_is_not_replaced_by_a_history(net, tmp_path, options) -> None:
    out = tmp_path / "out"
    words = ["audit", f"{net}:counted", "--out", str(out)]
    assert CliRunner().invoke(app, words).exit_code == 0
    page = (out / "index.html").read_text()
    refused = CliRunner().invoke(app, [*words, *options])
    assert "got the audit of one model. Choose another folder" in str(refused.exception)
    assert (out / "index.html").read_text() == page
    assert (tmp_path / "built").read_text() == "x"


@pytest.mark.parametrize("command", ["audit", "merge"])
def test_the_audits_of_several_models_are_not_replaced_by_one(audited, run, home, command) -> None:
    before = {path: path.read_bytes() for path in (home / "audits").rglob("*") if path.is_file()}
    given = {"audit": (CHECKPOINTS[0], *DATA), "merge": ("audits/checkpoint-90",)}
    refused = run(command, *given[command], "--out", "audits")
    assert "a folder without other audits, got audits of several models" in str(refused.exception)
    assert {path: path.read_bytes() for path in (home / "audits").rglob("*") if path.is_file()} == before


def test_ctrl_c_in_an_audit_stops_all_and_writes_no_folder(net: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["audit", f"{net}:interrupted", f"{net}:counted", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, "`--resume`" in done.output) == (130, True), done.output
    assert not out.exists()
    assert not (tmp_path / "built").exists()
    (tmp_path / "repaired").touch()
    assert "audited 2, kept 0, failed 0" in CliRunner().invoke(app, [*words, "--resume"]).output


@pytest.mark.parametrize(
    ("option", "step"),
    [
        ("--importance", "auditing.run.measure_importance"),
        ("--importance=exact", "importance.ablation._remove_each"),
        ("--at-init", "auditing.run.Run._for_copy"),
    ],
)
def test_ctrl_c_after_the_batches_stops_all_and_resume_measures_again(
    net: Path, tmp_path: Path, option: str, step: str
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    words = ["audit", f"{net}:layer", f"{net}:counted", option, "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"rankwise.{step}", stop)
        assert CliRunner().invoke(app, words).exit_code == 130
        assert not (tmp_path / "built").exists()
        assert CliRunner().invoke(app, ["audit", f"{net}:layer", *words[3:]]).exit_code == 130
    kept = Audit.load(out)
    assert (kept.complete, len(kept.heads)) == (False, 2)
    words[-1] = str(tmp_path / "several")
    assert "audited 2, kept 0, failed 0" in CliRunner().invoke(app, [*words, "--resume"]).output


def test_the_part_before_a_failure_is_written_and_audited_again(tmp_path: Path) -> None:
    for _ in range(2):  # the second call finds the incomplete audit of the first
        options = ["--importance", "exact", "--resume", "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(app, ["audit", f"{NETS}:nan", *options])
        assert isinstance(result.exception, RankwiseError)
        audit = Audit.load(tmp_path / "out" / "nets.py-nan")
        assert len(audit.heads) == 2
        assert not audit.complete
        assert [folder.name for folder in (tmp_path / "out").iterdir()] == ["nets.py-nan"]
        assert "2 heads, 0 findings, incomplete: " in result.output


def test_one_model_named_in_two_ways_is_audited_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home / "run")
    [job] = jobs_of(AuditJob(model=""), ["checkpoint-90", "./checkpoint-90", f"{home}/run/checkpoint-90/"])
    assert job.model == str(home / "run" / "checkpoint-90")


def test_a_factory_that_leaves_fails_its_job_alone(net: Path) -> None:
    jobs = jobs_of(AuditJob(model=""), [f"{net}:leaves", f"{net}:counted"])
    (_, failed), (_, audit) = run_here(jobs)
    assert "SystemExit: no license. Try `rankwise audit" in str(failed)
    assert isinstance(audit, Audit)


def fake_runner(
    ran: list[str] | None = None,
) -> Callable[[Sequence[AuditJob]], Iterator[tuple[AuditJob, Audit]]]:
    """A runner whose audits have the commands and digests of their jobs, in reverse order, without models."""

    def run(jobs: Sequence[AuditJob]) -> Iterator[tuple[AuditJob, Audit]]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        for job in reversed(jobs):
            (ran if ran is not None else []).append(job.model)
            known = {"model": job.model, "command": job.command, "file_digests": job.file_digests()}
            yield job, rw.audit(layer, [torch.randn(1, 9, 8)], provenance=known)

    return run


def test_adding_models_moves_no_audit_and_replaces_none(tmp_path, capsys) -> None:
    def resumed(*models: str) -> list[str]:
        jobs = jobs_of(AuditJob(model=""), models)
        audits, error = audit_many(jobs, tmp_path, fake_runner(), resume=True)
        assert error is None
        return [*audits, capsys.readouterr().out.split(", ")[-2]]

    assert resumed("org/m") == ["m", "kept 0"]
    assert resumed("org/m", "other/m", "m@step1") == ["m", "other-m", "m-step1", "kept 1"]
    for models in (("M", "other/m"), ("a/x", "A/x", "a-x")):
        with pytest.raises(InputError, match="one folder name per model, not that of another audit, got"):
            resumed(*models)
    assert len(list(tmp_path.glob("*/audit.json"))) == 3


def test_audits_of_other_models_stay(tmp_path: Path) -> None:
    for home in ("one", "other", "other"):
        jobs = jobs_of(AuditJob(model=""), [f"{home}/m", f"{home}/n"])
        audit_many(jobs, tmp_path, fake_runner(), resume=False)
    models = sorted(Audit.load(path).provenance.model for path in tmp_path.glob("*/audit.json"))
    assert models == ["one/m", "one/n", "other/m", "other/n"]


def test_a_full_disk_keeps_the_audits_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, whole, written = jobs_of(AuditJob(model=""), ["a", "b", "c"]), Path.write_text, []

    def until_full(self: Path, *given: object, **named: object) -> int:
        written.append(self)
        if len(written) > 4 and tmp_path in self.parents:  # the files of one audit
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(self, *given, **named)

    monkeypatch.setattr(Path, "write_text", until_full)
    with pytest.raises(InputError, match=r"No space left on device.*kept in"):
        audit_many(jobs, tmp_path, fake_runner(), resume=True)
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.part"))
    ran: list[str] = []
    audit_many(jobs, tmp_path, fake_runner(ran), resume=True)
    assert ran == ["b", "a"]


OPTIONS = [
    [], ["--text", "/t.txt"], ["--images", "/i"], ["--dataset", "d:test:text"],
    ["--tokens", "3"], ["--sequences", "3"], ["--batch-size", "3"], ["--delta", "0.5"],
    ["--rank-method", "exact"], ["--attention-maps", "0:1,2:3"], ["--device", "cuda:1"],
    ["--device-map", '{"": "cpu"}'], ["--offload-folder", "/o"], ["--dtype", "float16"], ["--tokenizer", "t"],
    ["--trust-remote-code"], ["--loss"], ["--shards", "2"], ["--shards", "1/2"],
    ["--at-init"], ["--at-init", "1"], ["--importance"],
    ["--importance", "exact"], ["--importance", "exact", "--importance-tolerance", "0.5"],
    ["--importance", "--importance-loss", "causal"],
]  # fmt: skip


def test_the_command_of_a_job_carries_every_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise `--resume` would keep an audit with other settings; the command itself makes the same job."""
    seen: list[AuditJob] = []

    def stop(jobs: Sequence[AuditJob], *_: object, **__: object) -> None:
        seen.extend(jobs)
        raise KeyboardInterrupt

    monkeypatch.setattr("rankwise.cli.audit_many.audit_many", stop)
    for check in ("load_data.check_data", "load_model.check_loading"):  # neither the files nor a GPU exist
        monkeypatch.setattr(f"rankwise.cli.{check}", lambda *_, **__: None)
    commands: set[str] = set()
    for options in OPTIONS:
        words = ["audit", "m", *options]
        for _ in range(2):
            CliRunner().invoke(app, [*words, "--resume", "--out", str(tmp_path / "out")])
            words = shlex.split(seen[-1].command)[1:]
        first, again = seen
        assert first == again, options
        commands.add(first.command)
        seen.clear()
    assert len(commands) == len(OPTIONS)


def test_digests_change_with_any_file_that_is_read_and_with_nothing_else(tmp_path: Path) -> None:
    folder, text, photos = tmp_path / "model", tmp_path / "t.txt", tmp_path / "photos" / "deep"
    (folder / "results").mkdir(parents=True)
    photos.mkdir(parents=True)
    weights = folder / "model.safetensors"
    weights.touch()
    text.write_text("some text")
    job = AuditJob(
        model=str(folder), text=text, images=photos.parent, dataset="org/on-the-hub@one:train:text"
    )
    found = job.file_digests()
    assert set(found) == {"model", "text", "images"}
    (folder / ".hidden").touch()
    (folder / "results" / "audit.json").touch()
    for home in (folder, photos):  # the audit can be in the folder of the model
        for name in ("audit.json", "index.html", "heads.csv", "states.csv"):
            (home / name).touch()
    for name in ("index.html", "history.csv"):
        (photos.parent / name).touch()
    assert job.file_digests() == found
    os.utime(weights, (0, 0))
    text.write_text("some other text")
    (photos / "new.png").touch()
    after = job.file_digests()
    assert all(after[name] != found[name] for name in found)
    assert set(AuditJob(model="m", dataset=f"{photos.parent}@one:train").file_digests()) == {"dataset"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "data: expected one of --text, --images, --dataset, got none. Pass one, such as --text FILE"),
        (["--text", "none.txt"], r"none\.txt: expected a text file, got no such file"),
        (["--images", "none"], "none: expected a folder of images, got no such folder"),
        (["--text", __file__, "--device", "cuda:99"], "--device cuda:99"),
        (["--loss", "--importance"], "--loss: expected no --importance next to it"),
        (["--shards", "2", "--at-init"], "--at-init: expected no --shards next to it"),
        *((["--shards", wrong], "--shards: expected N, or K/N") for wrong in ("0", "3/2", "0/2", "two")),
        (["--resume", "--delta", "-1"], "delta"),
        (["--resume", "--attention-maps", "3;7"], "flagged"),
        (["--resume", "--fail-on", "COLAPSE"], "Did you mean COLLAPSE"),
        (["--ray", "--text", __file__, "--dtype", "float99"], "float99"),
        (["--ray", "--text", "t.txt", "--images", "i"], "got --text and --images"),
        (["--ray", "--dataset", "a:b:c:d"], "--dataset 'a:b:c:d'"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(options, says, tmp_path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["audit", "a", "b", *options, "--out", str(out)])
    assert isinstance(done.exception, InputError)
    with pytest.raises(InputError, match=says):
        raise done.exception
    assert done.stderr == ""
    assert not out.exists()
