"""The block: every option does what its formula says."""

import itertools

import pytest
import torch
from tost_cases import WIDTH, config, stirred

from rankwise.models.block import Block, LayerScale, make_scale

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
X = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_formula(block: Block, x: torch.Tensor, position: str, skip: torch.Tensor | float) -> torch.Tensor:
    """The docstring's formula, with the block's own parts."""
    read = block.mixer_norm(x) if position == "pre" else x
    mixed = block.mixer(read).output
    if block.gate is not None:
        gate = block.gate(read)
        mixed = mixed * gate * gate.sigmoid()
    y = skip * x + block.mixer_scale(mixed)
    y = block.mixer_norm(y) if position == "post" else y
    if block.mlp is None:
        return y
    if position == "post":
        return block.mlp_norm(y + block.mlp_scale(block.mlp(y)))
    return y + block.mlp_scale(block.mlp(block.mlp_norm(y)))


OPTIONS = [
    (*one, norm)
    for one, norm in zip(
        itertools.product(["pre", "post"], [True, False], [None, 0.3], [0, 20]),
        itertools.cycle(["layer", "rms", "none"]),
        strict=False,
    )
]


@pytest.mark.parametrize(("position", "gate", "scale", "inner", "norm"), OPTIONS, ids=lambda v: f"{v}")
def test_the_block_is_its_formula(
    position: str, gate: bool, scale: float | None, inner: int, norm: str
) -> None:
    made = config(
        norm=norm, norm_position=position, gate=gate, layer_scale=scale, intermediate_size=inner,
        skip="channel", skip_init=-0.5,
    )  # fmt: skip
    block = stirred(Block(made, 0).double())
    expected = by_formula(block, X, position, block.skip.weight)
    torch.testing.assert_close(block(X)[0], expected, **CLOSE)
    assert (block.mlp is None) == (inner == 0)
    assert isinstance(block.mixer_scale, LayerScale) == (scale is not None)


def test_scales() -> None:
    scale = make_scale(WIDTH, 0.25)
    assert torch.equal(scale(X), 0.25 * X)
    assert repr(scale) == "LayerScale(init=0.25)"
    assert make_scale(WIDTH, None)(X) is X
