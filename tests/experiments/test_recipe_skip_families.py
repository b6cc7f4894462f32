"""The table of λ-skips by family: "yes" where a family is as claimed, and "no" where something is not."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import skip_families as recipe
from experiments.families import FAMILIES
from experiments.skip_families import HEADINGS, Row, look_at, main
from experiments.tiny_models import nano_gpt, text_inputs
from torch import nn

from rankwise.skips import Skips, add_lambda_skip

NO_OP, GRADIENT, UNDO = HEADINGS[3], HEADINGS[4], HEADINGS[6]
SOUND = Row("sound", skips=3, captured=1e-15, identical=True, learns=True, error=1e-7, undone=True)


def cells(page: str, family: str) -> dict[str, str]:
    """The row of a family by heading."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {family} |")]
    return dict(zip(HEADINGS, (cell.strip() for cell in line.strip("|").split("|")), strict=True))


def look() -> Row:
    return look_at("tiny", nano_gpt(), text_inputs(), None)


def denied(row: Row) -> set[str]:
    """What the table says no to."""
    return {heading for heading, cell in cells(row.line(), row.name).items() if cell == "no"}


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module, Skips], Any]) -> None:
    """Change a model once its skips are in."""

    def put(model: nn.Module, **settings: Any) -> Skips:
        skips = add_lambda_skip(model, **settings)
        change(model, skips)
        return skips

    monkeypatch.setattr(recipe, "add_lambda_skip", put)


def test_a_family_that_is_as_claimed() -> None:
    row = look()
    assert (row.skips, row.identical, row.learns, row.undone, row.right) == (3, True, True, True, True)
    assert denied(row) == set()


def test_the_command_writes_the_families_it_was_asked_for(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert main(["--families", "hand-written einsum", "FNet", "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert list(cells(text, "hand-written einsum").values())[1:5] == ["3", "0", "yes", "yes"]
    assert list(cells(text, "FNet").values())[1:5] == ["3", "not captured", "yes", "yes"]
    assert "| BERT |" not in text


def test_every_claim_that_fails_makes_a_family_wrong() -> None:
    assert SOUND.right
    assert replace(SOUND, captured=None).right  # FNet: nothing to capture is nothing wrong
    for name in ("skips", "identical", "learns", "undone"):
        assert not replace(SOUND, **{name: False}).right, name
    for error in (0.1, math.inf, math.nan):
        assert not replace(SOUND, error=error).right
        assert not replace(SOUND, captured=error).right


def test_a_hook_that_changes_outputs_by_a_rounding_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(
        monkeypatch,
        lambda model, _: model.lm_head.register_forward_hook(lambda *args: args[2] * (1 + 2**-23)),
    )
    row = look()
    assert denied(row) == {NO_OP, UNDO}
    assert not row.right
    page = tmp_path / "page.md"
    assert main(["--families", "nanoGPT style", "--page", str(page)]) == 1
    assert cells(page.read_text(encoding="utf-8"), "nanoGPT style")[NO_OP] == "no"
    assert capsys.readouterr().err == "not as claimed: nanoGPT style\n"


@pytest.mark.parametrize(
    "leave",
    [
        lambda model, _: model.lm_head.register_forward_hook(lambda *_: None),
        lambda model, _: model.lm_head.register_forward_pre_hook(lambda *_: None),
        lambda model, _: model.register_parameter("left", nn.Parameter(torch.zeros(1))),
    ],
    ids=["hook", "hook before", "parameter"],
)
def test_what_stays_is_told_though_it_does_nothing(
    monkeypatch: pytest.MonkeyPatch, leave: Callable[[nn.Module, Skips], Any]
) -> None:
    spoil(monkeypatch, leave)
    assert denied(look()) == {UNDO}


def test_weights_that_do_not_come_back_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda model, _: model.lm_head.weight.data.mul_(2))
    assert denied(look()) == {NO_OP, UNDO}


@pytest.mark.parametrize("gradient", [0.0, math.nan, math.inf])
def test_one_gradient_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch, gradient: float) -> None:
    spoil(
        monkeypatch,
        lambda _, skips: list(skips.values())[1].register_hook(lambda one: one.new_full((1,), gradient)),
    )
    row = look()
    assert denied(row) == {GRADIENT}
    assert not row.right


def test_a_scale_that_is_not_that_of_the_sum_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, tried = recipe.scaled_sums, []

    def other(sites: Any, scales: dict[str, Any]) -> Any:
        tried.extend(float(scale) for scale in scales.values())
        return exact(sites, {name: 1.1 * scale for name, scale in scales.items()})

    monkeypatch.setattr(recipe, "scaled_sums", other)
    row = look()
    assert denied(row) == set()
    assert len({*tried, 1.0}) == 4  # one of its own for each of three sites
    assert row.error > recipe.ROUNDING
    assert not row.right


@pytest.mark.parametrize("lost", [0, 1])
def test_no_output_that_is_lost_hides_behind_another(monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    bert, exact = FAMILIES[0], recipe.run_with

    def losing(*args: Any) -> Any:
        found = list(exact(*args))
        assert len(found) == 2
        found[lost] = found[lost] * math.nan
        return found

    monkeypatch.setattr(recipe, "run_with", losing)
    assert not look_at(bert.name, bert.build("sdpa"), bert.inputs(), None).right
