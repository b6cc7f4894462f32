"""The table of λ-skips by family: "yes" where a family is as claimed, and "no" where something is wrong."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from experiments.skips import skip_families
from experiments.skips.skip_families import Row, cells, check_skips, is_right, measure
from experiments.zoo.transformers import nano_gpt, text_inputs
from torch import nn

from rankwise.skips import Skips, add_lambda_skip

SOUND = {
    "name": "sound",
    "skips": 3,
    "captured": 1e-15,
    "identical": True,
    "learns": True,
    "error": 1e-7,
    "undone": True,
}
Change = Callable[[nn.Module, Skips], Any]


def checked(monkeypatch: pytest.MonkeyPatch, change: Change = lambda model, skips: None) -> Row:
    """Check a model that is changed after its skips are added."""

    def add(model: nn.Module, **settings: Any) -> Skips:
        skips = add_lambda_skip(model, **settings)
        change(model, skips)
        return skips

    monkeypatch.setattr(skip_families, "add_lambda_skip", add)
    return check_skips("tiny", nano_gpt(), text_inputs(), None)


def wrong(row: Row) -> set[str]:
    return {name for name in ("identical", "learns", "undone") if not row[name]}


def test_every_kept_family_is_as_claimed() -> None:
    rows = skip_families.STUDY.kept()["rows"]
    assert [row["name"] for row in rows] == list(skip_families.NAMES)
    assert all(is_right(row) for row in rows)


def test_families_are_checked_by_name() -> None:
    bert, fnet = map(cells, measure({"BERT", "FNet"})["rows"])
    assert (bert[:2], bert[3:5]) == (("BERT", "3"), ("yes", "yes"))
    assert fnet[:5] == ("FNet", "3", "not captured", "yes", "yes")


def test_every_claim_that_fails_makes_a_family_wrong() -> None:
    assert is_right(SOUND)
    assert is_right({**SOUND, "captured": None})  # FNet has no operator that is captured
    for name in ("skips", "identical", "learns", "undone"):
        assert not is_right({**SOUND, name: False}), name
        assert name == "skips" or "no" in cells({**SOUND, name: False})
    for error in (0.1, math.inf, math.nan):
        assert not is_right({**SOUND, "error": error})
        assert not is_right({**SOUND, "captured": error})


def gradient(value: float) -> Change:
    return lambda _, skips: list(skips.values())[1].register_hook(lambda one: one.new_full((1,), value))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        pytest.param(lambda *_: None, set(), id="none"),
        pytest.param(
            lambda model, _: model.lm_head.register_forward_hook(lambda *args: args[2] * (1 + 2**-23)),
            {"identical", "undone"},
            id="hook that rounds",
        ),
        pytest.param(
            lambda model, _: model.lm_head.register_forward_hook(lambda *_: None), {"undone"}, id="hook"
        ),
        pytest.param(
            lambda model, _: model.register_parameter("left", nn.Parameter(torch.zeros(1))),
            {"undone"},
            id="parameter",
        ),
        *(pytest.param(gradient(value), {"learns"}, id=str(value)) for value in (0.0, math.nan, math.inf)),
    ],
)
def test_changes_of_a_model_are_found(
    monkeypatch: pytest.MonkeyPatch, change: Change, found: set[str]
) -> None:
    row = checked(monkeypatch, change)
    assert (row["skips"], wrong(row)) == (3, found)
    assert is_right(row) == (not found)


def test_a_scale_that_differs_from_the_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, tried = skip_families.scaled_sums, []

    def other(sites: Any, scales: dict[str, Any]) -> Any:
        tried.extend(float(scale) for scale in scales.values())
        return exact(sites, {name: 1.1 * scale for name, scale in scales.items()})

    monkeypatch.setattr(skip_families, "scaled_sums", other)
    row = checked(monkeypatch)
    assert wrong(row) == set()
    assert len({*tried, 1.0}) == 4  # each of three sites has its own
    assert row["error"] > skip_families.ROUNDING
    assert not is_right(row)
