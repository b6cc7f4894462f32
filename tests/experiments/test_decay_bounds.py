"""Decay without a skip: the bounds of docs/explanation/skip-bound.md, section 4, against simulated layers."""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankwise._internals.linalg import mean_distance as mu

LAYERS = 5
SLACK = 1 + 1e-9
"""Relative: rounding of a few products in float64."""


def diameter_of(spread: float) -> float:
    """Return the largest possible distance of two tokens for a given μ."""
    return math.sqrt(2) * spread


def spread_of(diameter: float, tokens: int) -> float:
    """Return the largest possible μ for a given largest distance."""
    return diameter * math.sqrt((tokens - 1) / 2)


def attention_decay(diameter: float, scores: Sequence[float], values: Sequence[float]) -> list[float]:
    """Bound the largest distance d of two tokens: d ← ‖C‖₂·tanh(‖A‖₂d²/4)·d."""
    pairs = zip(scores, values, strict=True)
    return [*accumulate(pairs, lambda d, one: one[1] * math.tanh(one[0] * d * d / 4) * d, initial=diameter)]


def linear_decay(norm: float, operators: Sequence[float], values: Sequence[float]) -> list[float]:
    """Bound μ through time-invariant layers: ‖Y‖_F ← ‖M‖₂·‖C‖₂·‖Y‖_F."""
    pairs = zip(operators, values, strict=True)
    return [*accumulate(pairs, lambda size, one: one[0] * one[1] * size, initial=norm)]


def selective_decay(
    norm: float, gates: Sequence[float], values: Sequence[float], step: float = 1.0
) -> list[float]:
    """Bound μ through selective layers: ‖Y‖_F ← Δ·‖W_C‖₂‖W_B‖₂·‖C‖₂·‖Y‖_F³."""
    pairs = zip(gates, values, strict=True)
    return [*accumulate(pairs, lambda size, one: step * one[0] * one[1] * size * size * size, initial=norm)]


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def diameter(y: Tensor) -> float:
    return float(torch.cdist(y, y, compute_mode="donot_use_mm_for_euclid_dist").max())


@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 9), width=st.integers(1, 5))
def test_diameter_and_collapse_bound_each_other(seed: int, tokens: int, width: int) -> None:
    (y,) = drawn(seed, (tokens, width))
    assert diameter(y) <= diameter_of(float(mu(y))) * SLACK + 1e-12
    assert float(mu(y)) <= spread_of(diameter(y), tokens) * SLACK + 1e-12


def norms(matrices: Tensor) -> list[float]:
    return torch.linalg.matrix_norm(matrices, 2).tolist()


SIZES = {"seed": st.integers(0, 10**6), "tokens": st.integers(1, 8), "width": st.integers(1, 5)}


@settings(max_examples=20)
@given(**SIZES, scores=st.sampled_from([0.1, 1.0, 10.0]), values=st.sampled_from([0.3, 1.0, 3.0]))
def test_attention_decays_as_fast_as_promised(
    seed: int, tokens: int, width: int, scores: float, values: float
) -> None:
    y, a, c = drawn(seed, (tokens, width), (LAYERS, width, width), (LAYERS, width, width))
    a, c = a * scores / math.sqrt(width), c * values / math.sqrt(width)
    bound = attention_decay(diameter(y), norms(a), norms(c))
    for layer in range(LAYERS):
        y = (y @ a[layer] @ y.mT).softmax(-1) @ y @ c[layer]
        assert diameter(y) <= bound[layer + 1] * SLACK + 1e-14  # tokens that differ by rounding alone
        assert float(mu(y)) <= spread_of(bound[layer + 1], tokens) * SLACK + 1e-14


def test_heads_side_by_side_add_up() -> None:
    y, a, c = drawn(3, (6, 4), (3, 4, 4), (3, 4, 4))
    out = sum((y @ a[h] @ y.mT).softmax(-1) @ y @ c[h] for h in range(3))
    a_norm = float(torch.linalg.matrix_norm(a, 2).max())
    c_norm = float(torch.linalg.matrix_norm(c, 2).sum())
    assert diameter(out) <= attention_decay(diameter(y), [a_norm], [c_norm])[-1]


def test_a_causal_mask_breaks_the_attention_bound() -> None:
    """The first token sees itself alone, whatever the scores: why the bound says "without mask"."""
    y = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    m = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)  # scores 0
    assert diameter(m @ y) > attention_decay(diameter(y), [0.0], [1.0])[-1]


@settings(max_examples=20)
@given(**SIZES, size=st.sampled_from([0.3, 1.0, 3.0]))
def test_linear_layers_decay_as_fast_as_promised(seed: int, tokens: int, width: int, size: float) -> None:
    y, kernels, c = drawn(seed, (tokens, width), (LAYERS, tokens), (LAYERS, width, width))
    eye = torch.eye(tokens, dtype=torch.float64)
    shifts = torch.stack([eye.roll(at, 0).tril() for at in range(tokens)])
    ms = torch.einsum("lt,tij->lij", size * kernels, shifts)
    bound = linear_decay(float(y.norm()), norms(ms), norms(c))
    for layer in range(LAYERS):
        y = ms[layer] @ y @ c[layer]
        assert float(mu(y)) <= bound[layer + 1] * SLACK


@settings(max_examples=20)
@given(**SIZES, size=st.sampled_from([0.01, 0.3, 1.0]), step=st.sampled_from([0.1, 1.0, 2.0]))
def test_selective_layers_decay_as_fast_as_promised(
    seed: int, tokens: int, width: int, size: float, step: float
) -> None:
    maps = (LAYERS, width, 3), (LAYERS, width, 3), (LAYERS, width, width)
    y, w_b, w_c, c, rates = drawn(seed, (tokens, width), *maps, (LAYERS, tokens))
    y = size * y
    gates = [b * gate for b, gate in zip(norms(w_b), norms(w_c), strict=True)]
    bound = selective_decay(float(y.norm()), gates, norms(c), step)
    for layer in range(LAYERS):
        delta = step * torch.sigmoid(rates[layer])
        log_decay = -delta.cumsum(0)
        decay = (log_decay[:, None] - log_decay[None]).exp().tril()
        m = (y @ w_c[layer]) @ (y @ w_b[layer]).mT * decay * delta
        y = m @ y @ c[layer]
        assert float(mu(y)) <= bound[layer + 1] * SLACK
