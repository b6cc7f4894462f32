"""Patches of a picture lie in its rows and columns, all of them, or in no grid at all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rankwise as rw
from rankwise.auditing import measure
from rankwise.auditing.examples import patch_grid
from rankwise.models import ToSTConfig, ToSTForImageClassification


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 16))
def test_a_grid_of_patches_is_found(rows: int, columns: int, patch: int) -> None:
    assert patch_grid(rows * columns, (rows * patch, columns * patch)) == (rows, columns)


@given(st.integers(1, 2000), st.tuples(st.integers(1, 100), st.integers(1, 100)))
def test_a_grid_holds_every_token(tokens: int, picture: tuple[int, int]) -> None:
    grid = patch_grid(tokens, picture)
    assert grid is None or grid[0] * grid[1] == tokens


def test_three_rows_of_ten_patches_are_no_grid() -> None:
    assert patch_grid(10, (9, 10)) is None


@pytest.mark.parametrize(("pixels", "grid"), [(8, (4, 4)), (12, None)])
def test_the_first_tokens_of_a_large_picture_are_not_drawn_as_one(
    pixels: int, grid: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "MAP_TOKENS", 16)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = ToSTConfig(**sizes, image_size=pixels, patch_size=2, num_labels=2, causal=False)
    model = ToSTForImageClassification(config).eval()
    audit = rw.audit(model, [{"pixel_values": torch.randn(1, 3, pixels, pixels)}])
    mapped = [head for head in audit.heads if head.membership_map]
    assert {len(head.membership_map) for head in mapped} == {16}
    assert {head.membership_grid for head in mapped} == {grid}
