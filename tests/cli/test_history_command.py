"""`rankwise audit` of several checkpoints and `rankwise compare` of any number, as their user meets them."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from rankwise.auditing import Audit, History
from rankwise.cli import app
from rankwise.errors import RankwiseError

Run = Callable[..., Result]
TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 20


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of a tiny model, whose queries grow with the steps, and their audits."""
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

    home = tmp_path_factory.mktemp("home")
    (home / "text.txt").write_text(TEXT)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
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
            "audit.json", "index.html", "heads.csv", "layers.csv",
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


def test_each_is_the_audit_of_that_model_alone(audited: Result, run: Run, home: Path) -> None:
    assert run("audit", "run/checkpoint-200", *DATA, "--out", "alone").exit_code == 0
    alone, among = Audit.load(home / "alone"), Audit.load(home / "audits" / "checkpoint-200")
    assert [head.effective_rank for head in alone.heads] == [head.effective_rank for head in among.heads]
    assert alone.provenance.data == among.provenance.data


def test_one_that_fails_is_told_of_and_the_others_are_audited(run: Run, home: Path) -> None:
    result = run("audit", "run/checkpoint-90", "run/checkpoint-95", *DATA, "--out", "some")
    assert result.exit_code == 1
    assert "run/checkpoint-95" in result.stderr
    assert [path.name for path in (home / "some").glob("check*")] == ["checkpoint-90"]
    assert (home / "some" / "index.html").exists()
    failed = run("audit", "run/checkpoint-1", "run/checkpoint-2", *DATA, "--out", "none")
    assert isinstance(failed.exception, RankwiseError)
    assert "checkpoint-1" in str(failed.exception)


def test_a_code_found_in_any_of_them_fails_the_command(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("audit", *CHECKPOINTS[1:], *DATA, "--out", "gate", "--fail-on", "NONFINITE")
    assert result.exit_code == 0
    found = {f.code for audit in History.load(home / "gate").audits for f in audit.findings}
    code = sorted(found)[0]
    assert run("audit", *CHECKPOINTS[1:], *DATA, "--out", "gate", "--fail-on", code).exit_code == 3


def test_ctrl_c_keeps_those_that_were_done(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwise.cli import audit_job as tasks

    load, calls = tasks.load_model, iter(range(9))

    def interrupted(*arguments: object, **options: object) -> object:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return load(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tasks, "load_model", interrupted)
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


def test_two_of_them_are_a_comparison_with_a_page(audited: Result, run: Run, home: Path) -> None:
    paths = ("audits/checkpoint-90", "audits/checkpoint-1000")
    result = run("compare", *paths, "--out", "c.html", "--out", "c.json")
    assert result.exit_code == 0, result.output
    assert "Changes by layer" in result.output
    assert "Where heads changed" in (home / "c.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["audits/checkpoint-90"], "expected two audits or more to compare, got one"),
        (["audits", "--out", "a.json"], "expected a file ending in .html or .csv, got .json"),
        (["audits/checkpoint-90", "audits/checkpoint-200", "--out", "a"], "got no ending"),
        (["audits", "nowhere"], "no such file"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    audited: Result, run: Run, arguments: list[str], says: str
) -> None:
    result = run("compare", *arguments)
    assert isinstance(result.exception, RankwiseError)
    assert says in str(result.exception)
