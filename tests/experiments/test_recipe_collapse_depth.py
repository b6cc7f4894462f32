import json
import math
from dataclasses import asdict
from xml.etree import ElementTree

import pytest
import torch
from experiments import collapse_depth_page as page
from experiments.collapse_depth import (
    MIXERS,
    SKIPS,
    STUDY,
    Curve,
    Recipe,
    RowSkips,
    Setting,
    config_of,
    curves_of,
    gather,
    groups,
    log10,
    measure,
    measured,
    number,
    redraw,
    states_of,
)

from rankwise.measures import token_spread
from rankwise.models.block import Block

SMALL = Recipe(depth=3, tokens=5, width=8, heads=2, seeds=2)


def test_states_are_measured_at_doubling_depths() -> None:
    assert Recipe().layers == [0, 1, 2, 4, 8, 16, 32, 64]
    assert SMALL.layers == [0, 1, 2, 3]


def test_every_mixer_has_every_block_and_every_size() -> None:
    every = [one for group in groups(Recipe()) for one in group]
    assert len(set(every)) == len(every) == len(MIXERS) * (3 * 2 * len(SKIPS) + 3 * 3 - 1)


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_a_row_of_a_group_is_the_stack_of_its_own_blocks(mixer: str) -> None:
    """Rows are run together: each must be what a block with its own skip makes of it."""
    group = [Setting(mixer=mixer, norm="post", gate=True, skip=skip) for skip in SKIPS]
    *_, together = states_of(group, SMALL, seed=1)
    for row, setting in zip(together, group, strict=True):
        x = next(states_of([setting], SMALL, seed=1))
        block = Block(config_of(setting, SMALL), 0).double().eval()
        for layer in (1, 2, 3):
            with torch.no_grad():
                redraw(block, 1.0, 1000 + layer)
                x = block(x)[0]
        torch.testing.assert_close(row, x[0], rtol=1e-9, atol=1e-11)  # float64, three normed layers


def test_a_learned_skip_starts_as_the_fixed_one() -> None:
    config = config_of(Setting(mixer="mamba2", skip=-1.0), SMALL)
    fixed = Block(config, 0).double().eval()
    config.skip = "learned"
    learned = Block(config, 0).double().eval()
    learned.load_state_dict(fixed.state_dict(), strict=False)
    x = torch.randn(1, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(learned(x)[0], fixed(x)[0])


def test_curves_are_means_over_seeds() -> None:
    group = [Setting(mixer="softmax", skip=skip) for skip in (0.0, 1.0)]
    found = curves_of(group, [measured(group, SMALL, seed) for seed in (0, 1)])
    assert [one.setting for one in found] == group
    first = [float(token_spread(next(states_of(group, SMALL, seed)))[0]) for seed in (0, 1)]
    assert found[0].share[0] == pytest.approx(sum(first) / 2, rel=1e-3)  # four digits are kept
    assert found[0].share_std[0] == pytest.approx(abs(first[0] - first[1]) / 2, rel=1e-3)
    for one in found:
        assert len(one.share) == len(one.share_std) == len(one.log10_mu) == len(one.rank) == 4
    (alone,) = curves_of(group[:1], [measured(group[:1], SMALL, seed) for seed in (0, 1)])
    assert alone.share == pytest.approx(found[0].share, rel=1e-3)
    assert measured(group, SMALL, 1) == measured(group, SMALL, 1)


def test_no_skip_passes_nothing_on() -> None:
    """Not even 0·∞."""
    skips = RowSkips([0.0, -2.0])
    x = torch.tensor([math.inf, 1.0], dtype=torch.float64)[:, None, None]
    assert skips(x, torch.ones_like(x)).flatten().tolist() == [1.0, -1.0]


def test_a_block_is_what_its_setting_says() -> None:
    config = config_of(Setting(mixer="softmax, full", skip=-2.0, norm="post", gate=True), SMALL)
    assert (config.layer_types, config.causal) == (["softmax"], False)
    block = Block(config, 0)
    assert block.post_norm
    assert block.mlp is None
    assert block.gate is not None
    assert (block.skip.kind, block.skip.init) == ("fixed", -2.0)
    assert isinstance(Block(config_of(Setting(mixer="s4d"), SMALL), 0).mixer_norm, torch.nn.Identity)


def once(*group: Setting) -> list[Curve]:
    return curves_of(group, [measured(group, SMALL, 0)])


def test_the_share_of_s4d_knows_neither_input_nor_weight_size() -> None:
    """It is linear; other mixers are not, so the test could fail."""
    sizes = [Setting(mixer="s4d", inputs=size) for size in (1.0, 8.0)]
    one, other = once(*sizes)
    (heavy,) = once(Setting(mixer="s4d", weights=4.0))
    for curve in (other, heavy):
        assert curve.share == pytest.approx(one.share, rel=1e-3)
    assert other.log10_mu[-1] == pytest.approx(one.log10_mu[-1] + math.log10(8), abs=2e-3)
    one, other = once(*(Setting(mixer="mamba", inputs=size) for size in (1.0, 8.0)))
    assert other.log10_mu[-1] > one.log10_mu[-1] + 2 * math.log10(8)


def test_numbers_that_are_none_are_said_to_be() -> None:
    assert number(math.inf) is None
    assert number(0.123456) == 0.1235
    assert gather([[[1.0], [math.nan]], [[2.0], [1.0]]], 0) == ([1.5, None], [0.5, None])
    assert (log10(100.0), log10(0.0)) == (2.0, -math.inf)
    assert math.isnan(log10(math.nan))
    names = ("share", "share_std", "rank", "log10_mu")
    for values, cell, power in (
        ((0.5, 0.1, 12.3, 1.04), "0.50 ± 0.10 (12)", "1.0"),
        ((0.5, 0.001, 12.3, -3.0), "0.50 (12)", "-3.0"),
        ((3e-5, 1e-5, 1.0, -3.0), "3e-05 (1)", "-3.0"),
        ((None, None, None, None), "∞", "∞"),
        ((0.0, 0.0, 0.0, None), "0", "−∞"),
    ):
        one = {name: [value] for name, value in zip(names, values, strict=True)}
        assert (page.cell(one), page.power(one)) == (cell, power)


def test_the_figure_floors_and_ends() -> None:
    assert page.depth_of(1.0) == 0
    assert page.depth_of(1e-3) == pytest.approx(0.5)
    assert page.depth_of(0.0) == page.depth_of(1e-9) == 1


def test_a_small_run_is_shown() -> None:
    report = measure(Recipe(depth=2, tokens=4, width=8, heads=2, seeds=1, mixers=("tssa", "s4d")))
    assert report["layers"] == [0, 1, 2]
    assert len(report["curves"]) == 2 * (3 * 2 * len(SKIPS) + 3 * 3 - 1)
    report = json.loads(json.dumps(report))
    assert "post-norm, gate on, layer 2" in "".join(page.grid_tables(report))
    root = ElementTree.fromstring(page.figure(report))
    lines = [one for one in root.iter() if one.tag.endswith("polyline")]
    assert len(lines) == 2 * 3 * len(page.COLOURS)


def kept() -> dict:
    return STUDY.kept()


def last(**wanted) -> dict[str, float | None]:
    """μ/‖Y‖ at the last layer, by mixer."""
    usual = {"skip": 0, "norm": "none", "gate": False, "weights": 1.0, "inputs": 1.0, **wanted}
    found = [one for one in kept()["curves"] if all(one["setting"][name] == usual[name] for name in usual)]
    return {one["setting"]["mixer"]: one["share"][-1] for one in found}


def test_the_kept_results_are_of_the_whole_recipe() -> None:
    report = kept()
    assert report["settings"] == json.loads(json.dumps(asdict(Recipe())))
    assert len(report["curves"]) == sum(map(len, groups(Recipe())))


ATTENTION = {"softmax", "softmax, full", "linear", "linear, full"}
MAMBAS = {"mamba", "mamba2"}


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
def test_the_kept_results_hold_what_the_page_says(norm: str) -> None:
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


def test_the_kept_results_hold_what_the_page_says_of_strong_skips() -> None:
    for skip in (-1, 1):
        assert all(last(norm="post", skip=skip)[mixer] < 1e-4 for mixer in ATTENTION)
        assert all(0.05 < last(norm="pre", skip=skip)[mixer] < 0.34 for mixer in ATTENTION)
    for skip in (-2, 2):
        assert all(1e-3 < last(norm="post", skip=skip)[mixer] < 0.1 for mixer in ATTENTION)
        assert all(last(norm="pre", skip=skip)[mixer] > 0.95 for mixer in ATTENTION)


def test_the_kept_results_hold_what_the_page_says_of_sizes() -> None:
    for weights in (0.5, 1.0, 4.0):
        assert len({last(weights=weights, inputs=size)["s4d"] for size in (0.1, 1.0, 10.0)}) == 1
    assert all(last(inputs=0.1)[mixer] == 0 and last(inputs=10.0)[mixer] is None for mixer in MAMBAS)
