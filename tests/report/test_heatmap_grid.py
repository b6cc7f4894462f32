"""Every head has one cell, every finding leads to a place."""

import math

import pytest
from tests.support import records
from tests.support.records import PICTURED as HEAD_MEASURES

from rankwise.auditing import Audit, Finding
from rankwise.report.figures import map_layout
from rankwise.report.finding_links import Target, find_targets
from rankwise.report.head_columns import color_limits, outer_fence
from rankwise.report.heatmap_grid import HeadIndex, grids_of
from rankwise.tracing import Address


@pytest.mark.parametrize("name", records.ALL)
def test_every_head_is_in_exactly_one_cell_of_its_own_layer_and_number(name: str) -> None:
    heads = records.ALL[name]().heads
    cells = [
        (index, row.layer, number)
        for panel in grids_of(heads)
        for row in panel.rows
        for number, index in row.cells.items()
    ]
    assert sorted(cells) == [(index, head.layer, head.head) for index, head in enumerate(heads)]
    titles = [panel.title for panel in grids_of(heads)]
    assert len(set(titles)) == len(titles)


def test_cross_attention_and_other_mixers_of_a_stack_have_grids_of_their_own() -> None:
    grids = grids_of(records.encoder_decoder().heads)
    assert [grid.title for grid in grids] == ["encoder.block", "decoder.block", "decoder.block, cross"]
    assert grids[2].pattern == "decoder.block.*.layer.*.EncDecAttention"
    assert [grid.title for grid in grids_of(records.mixed().heads)] == ["layers, self_attn", "layers, mamba"]


def test_each_call_of_a_module_has_a_row() -> None:
    heads = records.grid(1, 3)
    (panel,) = grids_of([*heads, *heads])
    assert [row.cells for row in panel.rows] == [{0: 0, 1: 1, 2: 2}, {0: 3, 1: 4, 2: 5}]


def test_columns_have_gaps_where_channels_were_sampled() -> None:
    heads = [head.model_copy(update={"head": 5 * head.head + 1}) for head in records.grid(2, 3)]
    (grid,) = grids_of([*heads[:4], heads[5]])
    assert grid.columns == (1, 6, 11)
    assert grid.cells == [[0, 1, 2], [3, None, 4]]


def test_a_map_of_one_row_has_room_for_the_label_at_the_pointer() -> None:
    assert map_layout(["0"], ["0"])["height"] >= 68
    assert map_layout(["0"] * 4, ["0"])["height"] > map_layout(["0"] * 3, ["0"])["height"]


def test_empty_parts_of_a_place_match_every_head() -> None:
    heads = HeadIndex([head.id for head in records.encoder_decoder().heads])
    assert len(heads.at(Address(stack="decoder.block", layer=4))) == 16
    assert len(heads.at(Address(site="decoder.block.4.layer.1.EncDecAttention"))) == 8
    assert heads.at(Address(stack="nowhere")) == heads.at(Address(layer=99)) == []


def _target(audit: Audit, **fields: object) -> Target:
    return find_targets([records.finding(**fields)], audit)[0]


def test_each_finding_of_an_encoder_leads_to_its_place() -> None:
    audit = records.encoder()
    found = find_targets(audit.findings, audit)
    targets = {finding.code: target for finding, target in zip(audit.findings, found, strict=True)}
    assert targets["COLLAPSE"] == Target("states", stack="encoder.layer", blocks=6)
    assert (targets["SINK"].heads, targets["SINK"].measure) == ((2 * 12 + 7,), "max_token_mass")
    assert (targets["CONSTANT"].heads, targets["CONSTANT"].measure) == ((4 * 12 + 3,), "row_spread")
    [several] = [target for finding, target in zip(audit.findings, found, strict=True) if finding.heads]
    assert (several.heads, several.measure) == ((40, 41), "nearest_head_distance")
    assert targets["IDENTITY"].measure == "identity_distance"
    assert (targets["NONFINITE"].heads, targets["NONFINITE"].measure) == ((71,), "")
    assert targets["NOT_CAPTURED"].section == "uncaptured"


def test_a_site_distinguishes_cross_attention_from_self_attention() -> None:
    audit = records.encoder_decoder()
    (index,) = find_targets(audit.findings[:1], audit)[0].heads
    assert audit.heads[index].cross
    assert (audit.heads[index].layer, audit.heads[index].head) == (4, 6)


def test_the_evidence_chooses_the_measure_of_the_map() -> None:
    audit = records.encoder()
    assert _target(audit, evidence={"row_entropy": 0.1, "sequences": 3.0}).measure == "row_entropy"
    assert _target(audit, code="IDENTITY", evidence={"effective_rank": 9.0}).measure == "effective_rank"
    assert _target(audit, code="SINK", evidence={"numerical_rank": 9.0}).measure == "numerical_rank"
    assert _target(audit, code="NEW", evidence={}).measure == ""


def test_states_are_known_by_the_number_of_blocks_passed() -> None:
    audit = records.encoder()
    layer, evidence = Address(stack="encoder.layer", layer=3), {"sequences": 2.0}
    assert _target(audit, code="NONFINITE", where=layer, evidence=evidence).section == "heads"
    target = _target(audit, code="NONFINITE", where=layer, evidence=evidence | {"blocks": 4.0})
    assert (target.section, target.blocks) == ("states", 4)


def test_only_the_finding_on_removable_heads_is_about_these_heads() -> None:
    audit = records.encoder()
    removable = records.removable([audit.heads[5].id, audit.heads[8].id])
    audit = audit.model_copy(update={"importance": records.importance(removable=removable)})
    assert _target(audit, code="REMOVABLE", where=Address(), evidence={}).heads == (5, 8)
    for code in ("RANDOM_WEIGHTS", "NEW"):
        assert _target(audit, code=code, where=Address(), evidence={}).heads == ()


def test_a_finding_without_a_place_leads_to_the_provenance_and_one_head_to_this_head() -> None:
    general = Finding(code="X", severity="info", where=Address(), evidence={}, meaning="")
    assert find_targets([general], records.encoder())[0].section == "provenance"
    assert find_targets([general], records.empty())[0].section == "provenance"
    assert _target(records.encoder(), code="IDENTITY").heads == (2 * 12 + 7,)


@pytest.mark.parametrize("measure", HEAD_MEASURES, ids=lambda measure: measure.name)
def test_a_scale_contains_all_values_except_far_outliers(measure) -> None:
    for heads in (records.encoder().heads, records.only_nan().heads, records.grid(1, 1)):
        low, high = color_limits(measure, heads)
        assert low < high
        values = [value for head in heads if math.isfinite(value := measure.value(head))]
        fence = outer_fence(values)
        assert all(low <= value <= high or value > fence for value in values)
        assert heads != records.encoder().heads or all(low <= value <= high for value in values)
