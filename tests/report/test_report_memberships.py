"""Membership maps: every token in its place, and nothing where there are none."""

import pytest
from tests.report import samples

from rankwise.report.heatmap_grid import grids_of
from rankwise.report.memberships import membership_maps
from rankwise.report.page import page_context


def maps(name: str) -> list[dict]:
    heads = samples.ALL[name]().heads
    return membership_maps(grids_of(heads), heads)


def test_a_text_is_heads_by_tokens_and_a_picture_its_heads_side_by_side() -> None:
    text, picture = maps("memberships")
    heads = samples.memberships().heads
    assert [[layer["columns"] for layer in map["layers"]] for map in (text, picture)] == [[0] * 3, [6] * 3]
    assert [layer["name"] for layer in text["layers"]] == ["layer 0", "layer 1", "layer 2"]
    first = [head for head in heads if (head.stack, head.layer) == ("text", 1)]
    grid = text["layers"][1]["z"]
    assert (len(grid), len(grid[0])) == (4, 40)
    assert grid[2][7] == pytest.approx(first[2].membership_map[7], rel=5e-3)  # three digits are written
    patches = [head for head in heads if (head.stack, head.layer) == ("picture", 2)]
    tiles = picture["layers"][2]["z"]
    assert (len(tiles), len(tiles[0])) == (4, 4 * 6 + 3)
    assert tiles[3][2 * 7 + 5] == pytest.approx(patches[2].membership_map[3 * 6 + 5], rel=5e-3)
    assert [row[6] for row in tiles] == [None] * 4
    assert text["largest"] == max(max(head.membership_map) for head in heads[:12])


def test_without_memberships_there_is_no_section() -> None:
    assert maps("encoder") == []
    assert page_context(samples.encoder())["memberships"] == []
