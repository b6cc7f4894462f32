"""`rankwise plan`: plans from numbers and trained models; refusals; Ctrl-C."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.support.nets import NETS
from transformers import LlamaForCausalLM
from typer.testing import Result

import rankwise as rw
from rankwise.cli.load_model import demo_model, demo_text
from rankwise.plan import HeadDimPlan

Run = Callable[..., Result]
FEW = ("--tokens", 32, "--trials", 2)


@pytest.fixture
def run(run: Run) -> Run:
    """Run `rankwise plan` in a folder with text.txt."""
    return lambda *arguments: run("plan", *arguments)


def test_the_plan_is_printed_and_written(run: Run) -> None:
    few = ("--tokens", 64, "--trials", 2, "--out", "here")
    done = run(*few, "--hidden-size", 64, "--heads", 2, "--kv-heads", 1)
    assert done.exit_code == 0, done.output
    plan = HeadDimPlan.load("here")
    assert f"Rank at random weights saturates at K* = {plan.head_dim} (95 %" in done.output
    assert (plan.heads, plan.kv_heads, plan.costs[0].head_dim) == (2, 1, 32)
    assert f"{plan.costs[0].parameters:,}" in done.output
    assert "plan: here/plan.json" in done.output.replace(str(Path.cwd()) + "/", "")
    assert Path("here/index.html").read_text().startswith("<!doctype html>")
    assert "Choose another name" in str(run(*few).exception)


def test_options_are_those_of_the_function(run: Run) -> None:
    done = run(
        "--tokens", 48, "--mask", "causal", "--positions", "rope", "--least-gain", 0.02, "--trials", 3,
        "--seed", 5,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    plan = HeadDimPlan.load("rankwise-plan")
    same = rw.plan_head_dim(48, "causal", "rope", least_gain=0.02, trials=3, seed=5)
    assert plan.model_copy(update={"about": {}}) == same


def test_trained_heads_require_the_widths_of_an_audit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    audits = []
    audit = rw.audit
    monkeypatch.setattr("rankwise.auditing.audit", lambda *inputs: audits.append(audit(*inputs)) or audits[0])
    few = ("--tokens", 48, "--mask", "causal", "--trials", 2)
    done = run("--model", demo_model(), "--text", demo_text(), *few)
    assert done.exit_code == 0, done.output
    plan = HeadDimPlan.load("rankwise-plan")
    assert plan.curve == rw.plan_head_dim(48, "causal", trials=2).curve
    required = {head.head: head.required_head_dim for head in plan.trained}
    assert required == {head.id: head.required_head_dim for head in audits[0].heads}
    assert len(required) == 16
    wider = sum(width > plan.head_dim for width in required.values())
    assert f"{wider} of 16 require more than K*" in " ".join(done.output.split())
    assert "Widths that trained heads require" in done.output
    assert any(note.startswith("Trained heads: ") for note in plan.notes)


@pytest.mark.parametrize(
    "wrong", [("--mask", "causall"), ("--trials", 1), ("--kv-heads", 0), ("--heads", 4), ("--text", "no.txt")]
)
def test_wrong_arguments_are_refused_before_the_model_is_loaded(run, monkeypatch, wrong) -> None:
    def load(*_: object, **__: object) -> None:
        pytest.fail("the model was loaded")

    monkeypatch.setattr("rankwise.cli.load_model.load_model", load)
    done = run("--model", demo_model(), "--text", "text.txt", *wrong)
    said = f"{done.exception} {done.output}"
    assert str(wrong[0]).removeprefix("--") in said or f"{wrong[1]}: expected a text file" in said
    assert not Path("rankwise-plan").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hidden-size", 0), "--hidden-size"),
        (("--tokens", 1), "--tokens"),
        (("--least-gain", 1), "--least-gain: "),
        (("--hidden-size", 64), "Add --heads."),
        (("--heads", 4), "Add --hidden-size."),
        (("--heads", 3, "--kv-heads", 2, "--hidden-size", 12), "--kv-heads: expected a divisor"),
        (("--text", "text.txt"), "got no --model"),
        (("--model", demo_model(), "--text", "none.txt"), "none.txt"),
        (("--model", demo_model()), "one of --text, --images"),
        (("--out", "text.txt"), "a file"),
    ],
)
def test_bad_input_is_named(run: Run, arguments: tuple[object, ...], said: str) -> None:
    done = run(*arguments, "--trials", 2)
    assert done.exit_code != 0
    assert said in f"{done.exception} {done.output}"


def test_a_model_without_softmax_attention_is_noted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.auditing.audit", lambda *_: SimpleNamespace(heads=[], complete=True))
    assert run("--model", f"{NETS}:build", "--text", "text.txt", *FEW).exit_code == 0
    plan = HeadDimPlan.load("rankwise-plan")
    assert not plan.trained
    assert plan.notes[-1].startswith("No softmax attention was captured")


def test_the_number_of_heads_with_nan_is_noted(run: Run, tiny: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny)
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = torch.nan
    model.save_pretrained("nan")
    shutil.copytree(tiny, "nan", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    assert run("--model", "nan", "--text", "text.txt", *FEW).exit_code == 0
    assert "NaN or infinity in 1 of 4 heads" in HeadDimPlan.load("rankwise-plan").notes[-1]


def test_ctrl_c_keeps_the_curve(run, monkeypatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rankwise.auditing.audit", stop)
    done = run("--model", demo_model(), "--text", demo_text(), *FEW, "--out", "here")
    assert done.exit_code == 130
    plan = HeadDimPlan.load("here")
    assert not plan.complete
    assert plan.curve
    assert Path("here/index.html").exists()


def test_heads_of_the_demo_require_the_widths_that_plans_without_a_model_state(run: Run) -> None:
    stated = " ".join(run("--tokens", 16, "--trials", 2, "--out", "none").output.split())
    assert "15 to 30 of 32 channels in the bundled demo (K* = 12)" in stated
    rope = ("--mask", "causal", "--positions", "rope")
    assert run("--model", demo_model(), "--text", demo_text(), "--tokens", 256, *rope).exit_code == 0
    plan = HeadDimPlan.load("rankwise-plan")
    assert plan.head_dim == 12
    assert all(15 <= head.required_head_dim <= 30 and head.head_dim == 32 for head in plan.trained)
