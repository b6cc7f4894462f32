"""`rankwise plan`: plans from numbers; refusals; Ctrl-C."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import rankwise as rw
from rankwise.cli.load_data import load_data
from rankwise.cli.load_model import demo_model, demo_text, load_model
from rankwise.plan import HeadDimPlan
from rankwise.plan.ranks import RandomHead

Run = Callable[..., Result]


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


def test_options_are_passed_to_the_function(run: Run) -> None:
    done = run(
        "--tokens", 48, "--mask", "causal", "--positions", "rope", "--least-gain", 0.02, "--trials", 3,
        "--seed", 5,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    plan = HeadDimPlan.load("rankwise-plan")
    same = rw.plan_head_dim(48, "causal", "rope", least_gain=0.02, trials=3, seed=5)
    assert plan.model_copy(update={"about": {}}) == same


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hidden-size", 0), "--hidden-size"),
        (("--tokens", 1), "--tokens"),
        (("--least-gain", 1), "--least-gain: "),
        (("--hidden-size", 64), "Add --heads."),
        (("--heads", 4), "Add --hidden-size."),
        (("--heads", 3, "--kv-heads", 2, "--hidden-size", 12), "--kv-heads: expected a divisor"),
        (("--mask", "causall"), "--mask"),
        (("--kv-heads", 0), "--kv-heads"),
        (("--out", "text.txt"), "a file"),
    ],
)
def test_bad_input_is_named(run: Run, arguments: tuple[object, ...], said: str) -> None:
    done = run(*arguments, "--trials", 2)
    assert done.exit_code != 0
    assert said in f"{done.exception} {done.output}"


def test_ctrl_c_keeps_the_curve(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RandomHead.trial

    def trial(head: RandomHead, widths: tuple[int, ...], number: int) -> Any:
        if number == 2:
            raise KeyboardInterrupt
        return whole(head, widths, number)

    monkeypatch.setattr(RandomHead, "trial", trial)
    assert run("--tokens", 32, "--trials", 4, "--out", "here").exit_code == 130
    plan = HeadDimPlan.load("here")
    assert not plan.complete
    assert plan.curve
    assert Path("here/index.html").exists()


def test_heads_of_the_demo_require_the_widths_that_plans_without_a_model_state(run: Run) -> None:
    stated = " ".join(run("--tokens", 16, "--trials", 2, "--out", "none").output.split())
    assert "15 to 30 of 32 channels in the bundled demo (K* = 12)" in stated
    assert rw.plan_head_dim(256, "causal", "rope").head_dim == 12
    demo = load_model(str(demo_model()))
    heads = rw.audit(demo.model, load_data(demo, text=demo_text()).batches).heads
    assert all(15 <= head.required_head_dim <= 30 and head.head_dim == 32 for head in heads)
