"""What the figures show: the right number at the right place, the null where it is, NaN nowhere."""

import math

import pytest
from tests.report import samples

from rankwise.audit.measures import MISSING
from rankwise.report.curves import draw_depth, opening_heads, spectra
from rankwise.report.heatmap import draw_panel
from rankwise.report.panels import make_panels
from rankwise.report.text import rank_share


def test_each_cell_shows_its_own_head() -> None:
    heads = samples.encoder_decoder().heads
    for panel in make_panels(heads):
        figure = draw_panel(panel, heads, {})
        for index, (x, y) in figure["places"].items():
            assert figure["data"][0]["customdata"][y][x] == index
            assert figure["views"]["sink_mass"]["z"][y][x] == pytest.approx(heads[index].sink_mass, rel=1e-4)
            assert figure["views"]["numerical_rank"]["text"][y][x] == f"{rank_share(heads[index]):.2f}"


def test_one_null_stands_on_the_scale_of_shares() -> None:
    heads = samples.encoder().heads
    view = draw_panel(make_panels(heads)[0], heads, {})["views"]["numerical_rank"]
    expected = 1 - (1 - 1 / 128) ** 128
    assert (view["low"], view["high"], view["difference"]) == (0.0, 1.0, False)
    assert view["null"] == pytest.approx(expected)
    assert view["nulls"] == f"{expected:.2f}"


def test_under_several_masks_each_head_is_held_against_its_own_null() -> None:
    heads = samples.mixed().heads
    figure = draw_panel(make_panels(heads)[0], heads, {})
    view = figure["views"]["numerical_rank"]
    assert view["difference"]
    assert (view["low"], view["null"]) == (pytest.approx(-(1 - (1 - 1 / 128) ** 128)), 0.0)
    assert view["high"] == pytest.approx(1 - 64.5 / 128)
    for index, (x, y) in figure["places"].items():
        distance = (heads[index].numerical_rank - heads[index].null_rank) / 128
        assert view["z"][y][x] == pytest.approx(distance, rel=1e-4)


def test_what_is_not_finite_has_no_colour_and_a_dash() -> None:
    heads = samples.only_nan().heads
    for view in draw_panel(make_panels(heads)[0], heads, {})["views"].values():
        assert view["z"] == [[None, None], [None, None]]
        assert view["text"] == [[MISSING, MISSING], [MISSING, MISSING]]
        assert view["null"] is None


def test_a_head_that_is_not_there_leaves_a_gap_not_a_dash() -> None:
    heads = [head for head in samples.grid(2, 3) if (head.layer, head.head) != (1, 1)]
    view = draw_panel(make_panels(heads)[0], heads, {})["views"]["sink_mass"]
    assert view["text"][1][1] == ""
    assert view["z"][1][1] is None


def test_marks_stand_in_the_cells_of_their_heads() -> None:
    heads = samples.grid(2, 3)
    signs = draw_panel(make_panels(heads)[0], heads, {4: "error", 0: "info"})["data"][1:]
    found = {sign["meta"]["severity"]: (round(sign["x"][0]), round(sign["y"][0])) for sign in signs}
    assert found == {"error": (1, 1), "info": (0, 0)}


def test_a_depth_curve_passes_through_the_records_within_its_band() -> None:
    layers = samples.encoder_decoder().layers
    for figure in draw_depth(layers):
        for series, stack in enumerate(["encoder.block", "decoder.block"]):
            upper, lower, line = [trace for trace in figure["data"] if trace["meta"]["series"] == series]
            mine = [layer for layer in layers if layer.stack == stack]
            assert line["x"] == [layer.layer for layer in mine]
            assert line["y"] == [getattr(layer, figure["name"]) for layer in mine]
            for low, value, high in zip(lower["y"], line["y"], upper["y"], strict=True):
                assert low < value < high or value == pytest.approx(high)


def test_the_band_stays_within_what_the_measure_can_be() -> None:
    layer = samples.states(0)[0]
    layer = layer.model_copy(update={"relative_collapse": 0.9, "spread": {"relative_collapse": 0.5}})
    upper, lower, _ = draw_depth([layer])[0]["data"]
    assert (lower["y"], upper["y"]) == ([0.4], [1.0])


def test_spectra_are_relative_and_mark_the_last_value_that_counts() -> None:
    head = samples.grid(1, 1)[0].model_copy(update={"spectrum": [2.0, 1.0, 0.02, 0.005, 0.0, 1e-15]})
    (spectrum,) = spectra([head], delta=0.02)
    assert spectrum == {"values": [1.0, 0.5, 0.01, 0.0025, None, None], "last": 2}


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_a_head_without_a_usable_spectrum_draws_none(values: list[float]) -> None:
    head = samples.grid(1, 1)[0].model_copy(update={"spectrum": values})
    assert spectra([head], delta=0.01) == [{"values": [], "last": None}]


def test_no_value_counts_where_all_are_below_the_threshold() -> None:
    assert spectra(samples.grid(1, 1), delta=100.0)[0]["last"] is None


def test_the_heads_shown_first_span_the_ranks() -> None:
    heads = samples.encoder().heads
    shares = [rank_share(heads[index]) for index in opening_heads(heads)]
    finite = [share for share in map(rank_share, heads) if math.isfinite(share)]
    assert (shares[0], shares[-1]) == (min(finite), max(finite))
    assert shares == sorted(shares)
    assert len(shares) == 3


def test_no_head_is_shown_first_where_none_has_a_number() -> None:
    assert opening_heads(samples.only_nan().heads) == []
    assert opening_heads([]) == []
    assert opening_heads(samples.grid(1, 1)) == [0]
