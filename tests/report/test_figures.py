"""Figures: each number in its place, references on the scale, no NaN."""

import base64
import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support import documents, records
from tests.support.documents import RANK, Figure
from tests.support.records import DRAWN, AtInit

from rankwise.auditing import AttentionMap
from rankwise.auditing.attention_maps import block_averages
from rankwise.operators import DenseMixing
from rankwise.report.figures import depth_curves, membership_maps, severity_signs
from rankwise.report.head_columns import head_columns
from rankwise.report.head_details import NONE, coarser, pack_attention_maps, pack_spectra
from rankwise.report.heatmap_grid import grids_of


def column(heads, name):
    return next(one for one in head_columns(heads) if one.name == name).data()


def test_columns_hold_the_numbers_of_the_records() -> None:
    heads = records.encoder_decoder().heads
    ranks = column(heads, "numerical_rank")
    assert ranks["values"] == [pytest.approx(RANK.value(head), rel=1e-5) for head in heads]
    assert "spread" not in ranks  # lengths vary, too
    assert column(heads, "sigma_max")["spread"][0] == pytest.approx(heads[0].std["sigma_max"], rel=1e-5)
    assert column(heads, "first_token_mass")["values"] == [
        pytest.approx(h.first_token_mass, rel=1e-5) for h in heads
    ]


def test_references_have_their_means_on_the_scale_and_notes() -> None:
    expected = 1 - (1 - 1 / 128) ** 128
    (winners,) = column(records.encoder().heads, "numerical_rank")["references"]
    assert (winners["name"], winners["at"]) == ("one-hot rows", pytest.approx(expected, rel=1e-5))
    assert winners["label"] == f"{expected:.2g}"
    assert " not " in winners["note"]
    (winners,) = column(records.mixed().heads, "numerical_rank")["references"]
    assert winners["label"] == "0.5–0.63"  # under a causal and a full mask


def test_initial_weights_are_a_reference_on_every_scale_and_a_second_spectrum() -> None:
    audit = records.encoder()
    fresh = AtInit(seeds=2, mean={"numerical_rank": 64.0, "sigma_max": 1.5}, seed_std={}, spectrum=[1.0, 0.1])
    heads = [head.model_copy(update={"at_init": fresh}) for head in audit.heads]
    first, *others = column(heads, "numerical_rank")["references"]
    assert (first["name"], first["at"], first["label"]) == ("at initialization", 0.5, "0.5")
    assert "2 seeds" in first["note"]
    assert [one["name"] for one in others] == ["one-hot rows"]
    assert column(heads, "sigma_max")["references"][0]["at"] == 1.5
    assert column(heads, "first_token_mass")["references"] == []
    data = documents.data(audit.model_copy(update={"heads": heads}))
    assert set(data["initial_spectra"]["points"]) == {2}
    assert documents.data(audit)["initial_spectra"] is None


def test_infinite_numbers_have_no_value_and_no_reference() -> None:
    for one in head_columns(records.only_nan().heads):
        assert set(one.data()["values"]) == {None}
        assert not one.data().get("references")


def test_an_outlier_does_not_stretch_the_scale_and_is_counted() -> None:
    heads = records.encoder().heads
    before = column(heads, "sigma_max")
    heads = [heads[0].model_copy(update={"sigma_max": 1e6}), *heads[1:]]
    after = column(heads, "sigma_max")
    assert after["ends"][1][0] == pytest.approx(before["ends"][1][0], rel=0.5)
    assert (before["beyond"][0], after["beyond"]) == (0, [1, 1e6])


def test_measures_without_information_on_a_diagonal_are_undefined_for_it() -> None:
    heads = records.memberships().heads
    assert column(heads, "numerical_rank")["undefined_for"] == list(range(len(heads)))
    assert column(heads, "effective_rank")["undefined_for"] == []
    assert column(records.encoder().heads, "numerical_rank")["undefined_for"] == []


def test_an_estimate_is_marked_in_its_column() -> None:
    words = column(records.estimated().heads, "numerical_rank")["labels"]
    assert words[4].startswith("≈")
    assert "–" in words[8]
    assert set(words) == set(range(4, 12))


def test_signs_are_in_the_cells_of_their_heads() -> None:
    heads = records.grid(2, 3)
    signs = severity_signs(grids_of(heads)[0], {4: "error", 0: "info"})
    found = {sign["meta"]["severity"]: (round(sign["x"][0]), round(sign["y"][0])) for sign in signs}
    assert found == {"error": (1, 1), "info": (0, 0)}


def depth(layers) -> list[Figure]:
    return [depth_curves(measure, layers) for measure in DRAWN]


def test_a_depth_curve_passes_through_the_records_within_its_band() -> None:
    layers = records.encoder_decoder().states
    for measure, figure in zip(DRAWN, depth(layers), strict=True):
        for series, stack in enumerate(["encoder.block", "decoder.block"]):
            upper, lower, line = [trace for trace in figure.data if trace["meta"]["series"] == series]
            mine = [layer for layer in layers if layer.stack == stack]
            assert line["x"] == [layer.blocks for layer in mine]
            assert line["y"] == [measure.value(layer) for layer in mine]
            for low, value, high in zip(lower["y"], line["y"], upper["y"], strict=True):
                assert low < value < high or value == pytest.approx(high)


def test_the_band_stays_within_the_range_of_the_measure() -> None:
    layer = records.random_states(0)[0]
    layer = layer.model_copy(update={"direction_spread": 0.9, "std": {"direction_spread": 0.5}})
    upper, lower, _ = depth([layer])[0].data
    assert (lower["y"], upper["y"]) == ([0.4], [1.0])


@pytest.mark.parametrize("layers", [1, 5, 6, 48])
def test_depth_is_counted_in_whole_blocks_and_scales_start_at_0(layers: int) -> None:
    for figure in depth(records.random_states(layers)):
        ticks = figure.layout["xaxis"]["tickvals"]
        assert ticks[0] == 0
        assert len(ticks) <= 9
        assert all(isinstance(tick, int) for tick in ticks)
        axis = figure.layout["yaxis"]
        assert axis.get("rangemode") == "tozero" or axis["range"][0] == 0


def test_memberships_are_drawn_by_heads_and_tokens() -> None:
    heads = records.memberships().heads
    figures = membership_maps(grids_of(heads), heads)
    assert [figure.title for figure in figures] == ["layer 0", "layer 1", "layer 2"] * 2
    text = figures[1].data[0]
    first = [head for head in heads if (head.stack, head.layer) == ("text", 1)]
    assert (len(text["z"]), len(text["z"][0]), len(text["x"]), len(text["y"])) == (4, 40, 40, 4)
    assert text["z"][2][7] == pytest.approx(first[2].membership_map[7], rel=5e-3)  # three digits are written
    assert text["zmax"] == max(max(head.membership_map) for head in heads[:12])
    assert membership_maps(grids_of(records.encoder().heads), records.encoder().heads) == []


def decoded(packed, head):
    codes = np.frombuffer(base64.b64decode(packed["values"]), dtype="<u2")
    start = sum(packed["points"][:head])
    return codes[start : start + packed["points"][head]]


def test_spectra_are_shares_of_the_largest_on_a_logarithmic_scale() -> None:
    first, last = records.grid(1, 2)
    first = first.model_copy(update={"spectrum": [2.0, 1.0, 0.02, 0.0, 1e-15]})
    packed = pack_spectra([first.spectrum, last.spectrum])
    codes = decoded(packed, 0)
    shares = 10.0 ** (-12 * codes[:3].astype(float) / (NONE - 1))
    np.testing.assert_allclose(shares, [1.0, 0.5, 0.01], rtol=1e-3)  # a step is 12/65534 decades: 4e-4
    assert list(codes[3:]) == [NONE, NONE]
    assert len(decoded(packed, 1)) == 64


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_a_head_without_a_usable_spectrum_draws_none(values: list[float]) -> None:
    head = records.grid(1, 1)[0].model_copy(update={"spectrum": values})
    assert pack_spectra([head.spectrum])["points"] == [0]


def test_many_heads_have_fewer_points_each() -> None:
    (head,) = records.grid(1, 1)
    packed = pack_spectra([head.spectrum] * 5000)
    assert set(packed["points"]) == {20}
    assert decoded(packed, 4999)[0] == 0


@given(st.booleans(), st.integers(1, 5))
def test_a_map_is_decoded_up_to_the_square_of_a_step(signed: bool, seed: int) -> None:
    values = np.random.default_rng(seed).uniform(-1.0 if signed else 0.0, 1.0, (5, 7)).astype(np.float32)
    picture = AttentionMap.of(values, tokens=5, sources=7, row_tokens="input_ids")
    audit = records.encoder()
    heads = [audit.heads[0].model_copy(update={"attention_map": picture}), *audit.heads[1:]]
    found, left_out = pack_attention_maps(audit.model_copy(update={"heads": heads}))
    (packed,) = found.values()
    codes = np.frombuffer(zlib.decompress(base64.b64decode(packed["values"])), np.uint8).astype(float)
    root = 2 * codes / packed["steps"] - 1 if packed["signed"] else codes / packed["steps"]
    again = (np.sign(root) * root**2 * packed["largest"]).reshape(5, 7)
    # the root is off by half a step, 1/254 of signed ones, and the square by twice the root times that
    assert np.abs(again - values).max() <= 2 / 254 + 1 / 254**2 + 2**-11
    assert left_out == 0


def test_many_maps_are_coarser_and_omitted_maps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).uniform(0, 1, (64, 64)).astype(np.float32)
    picture = AttentionMap.of(noise, tokens=64, sources=64)
    audit = records.encoder()
    heads = [head.model_copy(update={"attention_map": picture}) for head in audit.heads]
    audit = audit.model_copy(update={"heads": heads})
    monkeypatch.setattr("rankwise.report.head_details.MAP_BYTES", 72 * 5000)
    packed, left_out = pack_attention_maps(audit)
    assert (len(packed), left_out) == (72, 0)
    assert packed[0]["steps"] < 254
    monkeypatch.setattr("rankwise.report.head_details.MAP_BYTES", 20_000)
    packed, left_out = pack_attention_maps(audit, flagged=[71, 70])
    assert len(packed) + left_out == 72
    assert left_out > 0
    assert {70, 71} <= set(packed)
    monkeypatch.setattr("rankwise.report.head_details.MAP_BYTES", 0)
    assert pack_attention_maps(audit) == ({}, 72)


@given(st.integers(65, 200), st.integers(3, 200))
def test_a_coarser_matrix_is_the_means_of_larger_blocks(tokens: int, sources: int) -> None:
    matrix = torch.rand(tokens, sources, generator=torch.Generator().manual_seed(tokens)).double()
    fine = AttentionMap.of(block_averages(DenseMixing(matrix)).float().numpy(), tokens, sources, "input_ids")
    coarse = coarser(fine, 64)
    assert (coarse.rows, coarse.columns, coarse.row_tokens) == (64, min(sources, 64), "input_ids")
    # both are kept in float16, shares of at most 1
    np.testing.assert_allclose(coarse.matrix(), block_averages(DenseMixing(matrix), 64), atol=2 * 2**-11)
