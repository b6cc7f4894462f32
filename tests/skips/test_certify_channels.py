"""Certificates of λ per channel: bounds hold for any signs and sizes of λ, and nothing else is promised."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.modules import Block, SelfAttention
from torch import Tensor, nn

from rankwise.skips import SkipCertificate, add_lambda_skip, certify_skip

WIDTH = 8
SIGNS = torch.tensor([1.0, -1.0] * 4)


def post_norm(size: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True).eval()
    layer.self_attn.out_proj.weight.data.mul_(size)
    return layer


def certified(model: nn.Module, scales: Tensor, x: Tensor) -> SkipCertificate:
    (skip,) = add_lambda_skip(model, per="channel", example=torch.randn(2, 5, WIDTH)).values()
    skip.data.copy_(scales)
    return certify_skip(model, x)


@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    centre=st.sampled_from([0.0, 0.5, 1.0, -3.0]),
    apart=st.sampled_from([0.01, 0.3, 3.0, 1e3]),
    flips=st.sampled_from([0.0, 0.2, 0.5]),
    like_signs=st.booleans(),
)
def test_the_bound_after_a_norm_holds(
    seed: int, centre: float, apart: float, flips: float, like_signs: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = centre + apart * torch.randn(WIDTH, generator=generator)
    scales *= torch.where(torch.rand(WIDTH, generator=generator) < flips, -1.0, 1.0)
    x = torch.randn(2, 5, WIDTH, generator=generator)
    if like_signs:  # λ∘x is then nearly constant over channels, and centering removes it
        x = 0.01 * x + x[..., :1] * scales.sign()
    layer = certified(post_norm(0.001), scales, x).layers[0]
    assert layer.norm == "LayerNorm"
    assert layer.kept_lower_bound <= layer.kept * (1 + 1e-5)
    assert layer.min_lambda_proved is layer.min_lambda_any_mixing is layer.paper_guaranteed is None


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), largest=st.sampled_from([1.0, 3.0, 1e3]))
def test_without_a_norm_each_channel_may_have_any_larger_lambda(seed: int, largest: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    block, x = Block(SelfAttention(), before=nn.LayerNorm(WIDTH)), torch.randn(2, 5, WIDTH)
    model = nn.Sequential(block, nn.Linear(WIDTH, WIDTH)).eval()
    (skip,) = add_lambda_skip(model, per="channel", example=x).values()
    least = certify_skip(model, x).layers[0].min_lambda_proved
    factors = 1 + (largest - 1) * torch.rand(WIDTH, generator=generator)
    skip.data.copy_(least * (1 + 1e-5) * factors * SIGNS)
    layer = certify_skip(model, x).layers[0]
    assert layer.norm == "none"
    assert layer.kept >= math.sqrt(0.5)
    assert layer.kept_lower_bound <= layer.kept * (1 + 1e-5)
    assert layer.min_lambda_proved == pytest.approx(least)
    assert layer.min_lambda_proved_relative is None


def test_a_bound_is_small_if_centering_removes_the_scaled_states() -> None:
    x = torch.tensor([1.0, -1, 1, -1, 1])[None, :, None] * SIGNS + 0.001 * torch.randn(1, 5, WIDTH)
    layer = certified(post_norm(0.001), SIGNS, x).layers[0]
    assert layer.kept_lower_bound <= layer.kept < 0.5


def test_one_large_channel_makes_tokens_similar_after_a_norm() -> None:
    x = torch.randn(2, 6, WIDTH)
    x[..., 0] = x[..., 0].abs() + 1
    least = certified(post_norm(), torch.ones(WIDTH), x).layers[0].min_lambda_proved
    scales = torch.full((WIDTH,), 1.01 * least)
    scales[0] = 1e4
    certificate = certified(post_norm(), scales, x)
    assert certificate.layers[0].kept < 0.01
    assert certificate.layers[0].min_lambda_proved is None
    assert certificate.stacks[0].min_lambda_proved is None
    assert any("no single least |λ|" in note for note in certificate.notes)


def test_nearly_equal_channels_have_a_useful_bound() -> None:
    layer = certified(post_norm(), torch.linspace(9.0, 11.0, WIDTH), torch.randn(2, 5, WIDTH)).layers[0]
    assert 0.5 < layer.kept_lower_bound <= layer.kept


@pytest.mark.parametrize("scale", [2.0, -0.7])
def test_equal_channels_have_the_certificate_of_one_lambda(scale: float) -> None:
    model, x = post_norm(), torch.randn(2, 5, WIDTH)
    add_lambda_skip(model, init=scale, example=x)
    assert certified(post_norm(), torch.full((WIDTH,), scale), x) == certify_skip(model, x)
