"""Rotary positions: one rotation, in every layout of pairs that models use."""

import pytest
import torch
from torch import Tensor
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as gpt_oss
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

from rankwise._internals.rotary import (
    PAIRINGS,
    PairRotation,
    RopeLayout,
    apply_rope,
    fit_rotation,
    fits_layout,
    per_pair,
    rope_angles,
    undo_rope,
)

MODELS = {"halves": llama, "pairs": cohere, "pairs of halves": glm, "halves, short": gpt_oss}
"""A model of transformers for each layout."""
HALF = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def angles_of(layout: RopeLayout) -> Tensor:
    tables = {"pairs": HALF.repeat_interleave(2, -1), "halves, short": HALF}
    return tables.get(layout, torch.cat([HALF, HALF], -1))


def heads(width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, 5, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        dtype
    )


def by_channel(x: Tensor, cos: Tensor, sin: Tensor, layout: RopeLayout) -> Tensor:
    """The formula with an angle per channel: x·cos + turned(x)·sin."""
    if layout == "halves, short":
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    if layout == "pairs of halves":
        cos, sin = cos[..., :3].repeat_interleave(2, -1), sin[..., :3].repeat_interleave(2, -1)
    if PAIRINGS[layout] == "halves":
        turned = torch.cat([-x[..., 3:], x[..., :3]], -1)
    else:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos[:, None] + turned * sin[:, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", PAIRINGS)
def test_it_is_the_rotation_of_models_to_the_bit(layout: RopeLayout, dtype: torch.dtype) -> None:
    x, angles = heads(6).to(dtype), angles_of(layout)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    own = apply_rope(x, *(per_pair(each, layout)[:, None] for each in (cos, sin)), PAIRINGS[layout])
    assert torch.equal(own, by_channel(x, cos, sin, layout))
    if dtype == torch.float32:  # Cohere computes in float32 only
        assert torch.equal(own, MODELS[layout](x, x, cos, sin)[0])


@pytest.mark.parametrize("layout", PAIRINGS)
def test_lengths_stay_and_a_rotation_is_undone(layout: RopeLayout) -> None:
    x, angles, pairing = heads(8), per_pair(angles_of(layout), layout)[:, None], PAIRINGS[layout]
    turned = apply_rope(x, angles.cos(), angles.sin(), pairing)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[..., 6:], x[..., 6:])
    assert not torch.allclose(turned, x)
    scaled = apply_rope(x, 2 * angles.cos(), 2 * angles.sin(), pairing)
    torch.testing.assert_close(undo_rope(scaled, 2 * angles.cos(), 2 * angles.sin(), pairing), x)
    assert torch.equal(apply_rope(x, angles * 0 + 1, angles * 0, pairing), x)


@pytest.mark.parametrize("layout", PAIRINGS)
def test_a_layout_fits_if_both_channels_of_a_pair_have_one_angle(layout: RopeLayout) -> None:
    angles = angles_of(layout)
    assert fits_layout(angles, layout, 6)
    assert not fits_layout(angles, layout, 4)
    one_each = torch.arange(6.0).expand(1, 5, 6)
    assert fits_layout(one_each, layout, 12) == (layout in ("pairs of halves", "halves, short"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_angles_are_computed_in_float32_at_least(dtype: torch.dtype) -> None:
    positions = torch.tensor([[0, 1, 7], [2, 300, 4000]])
    wide = torch.promote_types(dtype, torch.float32)
    exponents = -torch.tensor([0, 2, 4], dtype=wide) / 6
    angle = positions[..., None] * 50.0**exponents
    cos, sin = rope_angles(positions, 6, 50.0, dtype)
    assert torch.equal(cos, angle.cos().to(dtype))
    assert torch.equal(sin, angle.sin().to(dtype))


@pytest.mark.parametrize("pairs", [[[0, 3], [2, 5]], [[0, 1], [4, 5]], [[1, 0]]])
def test_a_rotation_of_some_pairs_is_fitted_and_leaves_the_other_channels(pairs: list[list[int]]) -> None:
    x, chosen = heads(8), torch.tensor(pairs)
    angles = HALF[..., : len(pairs)]
    rotation = PairRotation(chosen, angles.cos(), angles.sin())
    turned = rotation(x)
    for at, (first, second) in enumerate(pairs):
        cos, sin = angles[:, None, :, at].cos(), angles[:, None, :, at].sin()
        assert torch.equal(turned[..., first], x[..., first] * cos - x[..., second] * sin)
        assert torch.equal(turned[..., second], x[..., first] * sin + x[..., second] * cos)
    rest = [channel for channel in range(8) if channel not in chosen.flatten()]
    assert torch.equal(turned[..., rest], x[..., rest])
    again, off = fit_rotation(chosen, [x, x], [turned, turned])
    assert off < 1e-14
    torch.testing.assert_close(again.cos, rotation.cos)
    torch.testing.assert_close(again.sin, rotation.sin)
