"""One λ for each channel: what is promised holds for any signs and sizes, and nothing else is promised."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rankwise.skips import SkipCertificate, add_lambda_skip, certify_skip

WIDTH = 8
SIGNS = torch.tensor([1.0, -1.0] * 4)


class PreNorm(nn.Module):
    """x + attention(norm(x)), read by a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.out(x + self.attention(h, h, h, need_weights=False)[0])


def post_norm(size: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        layer.self_attn.out_proj.weight.mul_(size)
    return layer


def certified(model: nn.Module, scales: Tensor, x: Tensor, a: float = 0.5) -> SkipCertificate:
    skips = add_lambda_skip(model, per="channel", example=torch.randn(2, 5, WIDTH))
    with torch.no_grad():
        next(iter(skips.values())).copy_(scales)
    return certify_skip(model, x, a)


channels = given(
    seed=st.integers(0, 10**6),
    centre=st.sampled_from([0.0, 0.5, 1.0, -3.0]),
    apart=st.sampled_from([0.01, 0.3, 3.0, 1e3]),
    flips=st.sampled_from([0.0, 0.2, 0.5]),
    like_signs=st.booleans(),
)


@settings(max_examples=4, deadline=None)
@channels
def test_the_bound_behind_a_norm_holds(
    seed: int, centre: float, apart: float, flips: float, like_signs: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = centre + apart * torch.randn(WIDTH, generator=generator)
    scales *= torch.where(torch.rand(WIDTH, generator=generator) < flips, -1.0, 1.0)
    x = torch.randn(2, 5, WIDTH, generator=generator)
    if like_signs:  # states along diag(sign): what centring takes away
        x = 0.01 * x + x[..., :1] * scales.sign()
    layer = certified(post_norm(0.001), scales, x).layers[0]
    assert layer.norm == "LayerNorm"
    assert layer.kept_lower_bound <= layer.kept * (1 + 1e-5)
    assert layer.min_lambda_proved is layer.min_lambda_any_mixing is layer.paper_guaranteed is None


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), largest=st.sampled_from([1.0, 3.0, 1e3]))
def test_before_no_norm_each_channel_may_be_any_above_the_least(seed: int, largest: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, x = PreNorm().eval(), torch.randn(2, 5, WIDTH, generator=generator)
    skips = add_lambda_skip(model, per="channel", example=x)
    least = certify_skip(model, x).layers[0].min_lambda_proved
    assert least is not None
    factors = 1 + (largest - 1) * torch.rand(WIDTH, generator=generator)
    with torch.no_grad():
        next(iter(skips.values())).copy_(least * (1 + 1e-5) * factors * SIGNS)
    layer = certify_skip(model, x).layers[0]
    assert layer.norm == "none"
    assert layer.kept >= math.sqrt(0.5)
    assert layer.kept_lower_bound <= layer.kept * (1 + 1e-5)
    assert layer.min_lambda_proved == pytest.approx(least)
    assert layer.min_lambda_proved_relative is None


def test_signs_that_centring_takes_away() -> None:
    x = torch.tensor([1.0, -1, 1, -1, 1])[None, :, None] * SIGNS + 0.001 * torch.randn(1, 5, WIDTH)
    layer = certified(post_norm(0.001), SIGNS, x).layers[0]
    assert layer.kept_lower_bound <= layer.kept < 0.5


def test_one_large_channel_turns_all_tokens_to_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, WIDTH)
    x[..., 0] = x[..., 0].abs() + 1
    common = certified(post_norm(), torch.ones(WIDTH), x).layers[0].min_lambda_proved
    assert common is not None
    scales = torch.full((WIDTH,), 1.01 * common)
    scales[0] = 1e4
    certificate = certified(post_norm(), scales, x)
    assert certificate.layers[0].kept < 0.01
    assert certificate.layers[0].min_lambda_proved is None
    assert certificate.stacks[0].min_lambda_proved is None
    assert any("no single least |λ|" in note for note in certificate.notes)


def test_nearly_equal_channels_are_promised_something() -> None:
    layer = certified(post_norm(), torch.linspace(9.0, 11.0, WIDTH), torch.randn(2, 5, WIDTH)).layers[0]
    assert 0.5 < layer.kept_lower_bound <= layer.kept


@pytest.mark.parametrize("scale", [2.0, -0.7])
def test_equal_channels_are_one_number(scale: float) -> None:
    x = torch.randn(2, 5, WIDTH)
    model = post_norm()
    add_lambda_skip(model, init=scale, example=x)
    assert certified(post_norm(), torch.full((WIDTH,), scale), x) == certify_skip(model, x)
