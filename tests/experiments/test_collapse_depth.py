"""Collapse through depth: stacks are what their settings say, and the kept results support the page."""

import json
import math
from dataclasses import asdict
from xml.etree import ElementTree

import pytest
import torch
from experiments.skips import collapse_depth as experiment
from experiments.skips.collapse_depth import COLORS, STUDY, VARIANTS, Settings, Stack

from rankwise.measures import spread
from rankwise.models.block import Block

SMALL = Settings(depth=3, tokens=5, width=8, heads=2, seeds=2)


@pytest.mark.parametrize("mixer", sorted(VARIANTS))
def test_a_row_of_a_group_equals_its_own_blocks(mixer: str) -> None:
    group = [Stack(mixer=mixer, norm="post", gate=True, skip=skip) for skip in COLORS]
    *_, together = experiment.states_of(group, SMALL, seed=1)
    for row, stack in zip(together, group, strict=True):
        x = next(experiment.states_of([stack], SMALL, seed=1))
        block = Block(experiment.config_of(stack, SMALL), 0).double().eval()
        for layer in (1, 2, 3):
            with torch.no_grad():
                experiment.redraw(block, 1.0, 1000 + layer)
                x = block(x)[0]
        torch.testing.assert_close(row, x[0], rtol=1e-9, atol=1e-11)  # float64, three normed layers


def test_curves_are_means_over_seeds() -> None:
    group = [Stack(mixer="softmax", skip=skip) for skip in (0.0, 1.0)]
    found = experiment.curves_of(group, SMALL)
    assert [Stack(**one["setting"]) for one in found] == group
    first = [float(spread(next(experiment.states_of(group, SMALL, seed)))[0]) for seed in (0, 1)]
    assert found[0]["share"][0] == pytest.approx(sum(first) / 2, rel=1e-3)  # four digits are kept
    assert found[0]["share_std"][0] == pytest.approx(abs(first[0] - first[1]) / 2, rel=1e-3)
    assert {len(one[name]) for one in found for name in ("share", "share_std", "log10_mu", "rank")} == {4}
    (alone,) = experiment.curves_of(group[:1], SMALL)
    assert alone["share"] == pytest.approx(found[0]["share"], rel=1e-3)
    assert experiment.curves_of(group, SMALL) == found


def test_the_share_of_s4d_depends_neither_on_input_nor_on_weight_size() -> None:
    """S4D is linear; other mixers are not, so the test can fail."""
    sizes = [Stack(mixer="s4d", inputs=size) for size in (1.0, 8.0)]
    one, other = experiment.curves_of(sizes, SMALL)
    (heavy,) = experiment.curves_of([Stack(mixer="s4d", weights=4.0)], SMALL)
    for curve in (other, heavy):
        assert curve["share"] == pytest.approx(one["share"], rel=1e-3)
    assert other["log10_mu"][-1] == pytest.approx(one["log10_mu"][-1] + math.log10(8), abs=2e-3)
    one, other = experiment.curves_of([Stack(mixer="mamba", inputs=size) for size in (1.0, 8.0)], SMALL)
    assert other["log10_mu"][-1] > one["log10_mu"][-1] + 2 * math.log10(8)


def test_a_small_run_is_shown() -> None:
    settings = Settings(depth=2, tokens=4, width=8, heads=2, seeds=1, mixers=("tssa", "s4d"))
    report = json.loads(json.dumps(experiment.measure(settings)))
    assert report["layers"] == [0, 1, 2]
    assert len(report["curves"]) == 2 * (3 * 2 * len(COLORS) + 3 * 3 - 1)
    assert "post-norm, gate on, layer 2" in "".join(experiment.grid_tables(report))
    root = ElementTree.fromstring(experiment.figures(report)["collapse-depth.svg"])
    lines = [one for one in root.iter() if one.tag.endswith("polyline")]
    assert len(lines) == 3 * (len(experiment.DRAWN) + 2 * len(COLORS))  # frames, and a line for each λ


def last(**wanted) -> dict[str, float | None]:
    """Return the kept μ/‖Y‖ at the last layer, by mixer."""
    usual = {"skip": 0, "norm": "none", "gate": False, **wanted}
    return {one["setting"]["mixer"]: one["share"][-1] for one in experiment.select(STUDY.kept(), **usual)}


ATTENTION = {"softmax", "softmax, full", "linear", "linear, full"}
MAMBAS = {"mamba", "mamba2"}


def test_the_kept_results_are_complete() -> None:
    report = STUDY.kept()
    assert report["settings"] == json.loads(json.dumps(asdict(Settings())))
    assert len(report["curves"]) == sum(map(len, experiment.groups(Settings())))


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
def test_the_kept_results_support_the_page(norm: str) -> None:
    plain, gated = last(norm=norm), last(norm=norm, gate=True)
    assert all(plain[mixer] < 1e-14 for mixer in ATTENTION)  # float64 rounding of 64 tokens
    assert all(plain[mixer] == 0 for mixer in MAMBAS)
    assert plain["tssa"] > 0.95
    assert plain["s4d"] > 0.6
    small = last(norm=norm, skip=0.5)
    assert all(small[mixer] < 1e-9 for mixer in ATTENTION)
    for skip in (-2, -1, 1, 2):
        assert last(norm=norm, skip=skip)["tssa"] > 0.9
        if norm != "none":
            assert all(last(norm=norm, skip=skip)[mixer] > 0.95 for mixer in MAMBAS)
    if norm != "none":
        assert all(gated[mixer] > 0.4 for mixer in ATTENTION)


@pytest.mark.parametrize(
    ("norm", "skips", "low", "high"),
    [
        ("post", (-1, 1), 0, 1e-4),
        ("pre", (-1, 1), 0.05, 0.34),
        ("post", (-2, 2), 1e-3, 0.1),
        ("pre", (-2, 2), 0.95, 1),
    ],
)
def test_the_kept_results_support_the_page_on_strong_skips(norm, skips, low, high) -> None:
    for skip in skips:
        assert all(low <= last(norm=norm, skip=skip)[mixer] <= high for mixer in ATTENTION)


def test_the_kept_results_support_the_page_on_sizes() -> None:
    for weights in (0.5, 1.0, 4.0):
        assert len({last(weights=weights, inputs=size)["s4d"] for size in (0.1, 1.0, 10.0)}) == 1
    assert all(last(inputs=0.1)[mixer] == 0 and last(inputs=10.0)[mixer] is None for mixer in MAMBAS)
