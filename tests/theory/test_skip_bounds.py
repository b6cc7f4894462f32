"""Bounds of a λ-skip: never violated, by random states and chosen ones; `experiments` searches by ascent."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from rankwise._internals.linalg import mean_distance as mu
from rankwise.measures import absolute_spread, spread
from rankwise.theory import min_lambda_for_spread, min_lambda_paper, skip_bound

SLACK = 1e-9
"""Relative: sums of T·D float64 terms lose less than T·D·1e-16 < 1e-12; a hundredfold and more beside it."""


def normed(x: Tensor, norm: str, eps: float = 0.0) -> Tensor:
    """No norm, LayerNorm or RMSNorm without gain; a row of zeros stays."""
    if norm == "none":
        return x
    x = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    size = (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x / torch.where(size > 0, size, 1.0)


def states(seed: int, tokens: int, width: int, alike: float) -> Tensor:
    """Random states; ``alike`` is the share of one common row."""
    generator = torch.Generator().manual_seed(seed)
    own, common = torch.randn((2, tokens, width), generator=generator, dtype=torch.float64)
    return (1 - alike) * own + alike * common[:1]


@st.composite
def sums(draw: st.DrawFn) -> tuple[Tensor, Tensor, float]:
    """States, a branch turned in part against their deviations, and λ."""
    seed, tokens, width = draw(st.integers(0, 10**6)), draw(st.integers(1, 7)), draw(st.integers(2, 6))
    y = states(seed, tokens, width, draw(st.sampled_from([0.0, 0.5, 0.99, 1.0])))
    opposed = draw(st.sampled_from([0.0, 0.7, 1.0]))
    against = -(y - y.mean(-2, keepdim=True))
    branch = opposed * against + (1 - opposed) * states(seed + 1, tokens, width, alike=0.3)
    size = draw(st.sampled_from([0.0, 1e-3, 0.3, 1.0, 5.0]))
    return y, size * branch, draw(st.sampled_from([-3.0, -1.0, -0.2, 0.0, 0.5, 1.0, 2.0, 20.0]))


norms = pytest.mark.parametrize("norm", ["none", "layer", "rms"])
true_norms = pytest.mark.parametrize("norm", ["layer", "rms"])


@norms
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.1])
@settings(max_examples=25)
@given(case=sums())
def test_the_bound_holds(norm: str, eps: float, case: tuple) -> None:
    y, b, scale = case
    after = mu(normed(scale * y + b, norm, eps))
    # behind a norm, rows that cancel to rounding have any direction: there the bound must be careful itself
    unit = (1 + scale**2) * y.norm() if norm == "none" else math.sqrt(y.numel())
    assert skip_bound(y, b, scale, norm=norm, eps=eps) <= after + SLACK * unit


@settings(max_examples=25)
@given(case=sums())
def test_bounds_leave_padding_out(case: tuple) -> None:
    y, b, scale = case
    mask = torch.tensor([True] * len(y) + [False] * 3)
    longer, other = (F.pad(x, (0, 0, 0, 3), value=1e6) for x in (y, b))
    for norm in ("none", "layer", "rms"):
        bounds = skip_bound(longer, other, scale, mask, norm), skip_bound(y, b, scale, norm=norm)
        assert torch.allclose(*bounds, rtol=1e-9, atol=1e-9)
        least = (
            min_lambda_for_spread(longer, other, 0.5, mask, norm),
            min_lambda_for_spread(y, b, 0.5, norm=norm),
        )
        assert torch.allclose(*least, rtol=1e-6, atol=1e-9)


@settings(max_examples=25)
@given(case=sums())
def test_a_larger_scale_keeps_more(case: tuple) -> None:
    y, b, scale = case
    for norm in ("none", "layer", "rms"):
        bound = skip_bound(y, b, scale, norm=norm)
        assert skip_bound(y, b, 1.1 * scale, norm=norm) >= bound - SLACK * y.norm() * (1 + abs(scale))
        assert torch.equal(bound, skip_bound(y, b, -scale, norm=norm))


@settings(max_examples=25)
@given(case=sums())
def test_the_least_scale_keeps_its_share(case: tuple) -> None:
    y, b, _ = case
    keep = 0.55
    for relative in (False, True):
        least = min_lambda_for_spread(y, b, keep, relative=relative)
        if mu(y) < 1e-6 or not least.isfinite() or least == 0:  # 0 means any λ except 0
            continue
        for factor in (1, -1.7, 30):
            out = factor * least * y + b
            before = mu(y) / (y.norm() if relative else 1)
            after = mu(out) / (out.norm() if relative else 1)
            assert after >= keep * before * (1 - 1e-6)
    for norm in ("layer", "rms"):
        least = min_lambda_for_spread(y, b, keep, norm=norm)
        before = mu(normed(y, norm))
        if before < 1e-6 or not least.isfinite():
            continue
        for factor in (1, -1.7, 30):
            assert mu(normed(factor * least * y + b, norm)) >= keep * before * (1 - 1e-6)


def test_least_scales_are_infinite_if_nothing_can_be_kept() -> None:
    alike = torch.ones(4, 3, dtype=torch.float64)
    other = states(0, 4, 3, 0.0)
    assert min_lambda_for_spread(alike, other, 0.5) == math.inf
    assert (
        min_lambda_for_spread(torch.tensor([1.0, 2.0, 4.0]).expand(4, 3), other, 0.5, norm="layer")
        == math.inf
    )


# --- searched for violations -------------------------------------------------------------------------------


def test_rows_that_are_zero() -> None:
    """u_i = 0 there: the output of the mixer decides their direction, if it is not zero too."""
    y = states(0, 4, 3, 0.0)
    y[1:3] = 0
    b = torch.zeros(4, 3, dtype=torch.float64)
    before = mu(normed(y, "rms"))
    assert torch.allclose(skip_bound(y, b, 1.0, norm="rms"), before)
    b[1] = 1e-9  # turned into any direction, at full length
    assert skip_bound(y, b, 1.0, norm="rms") < before - 0.5
    for sign in (1, -1):
        moved = normed(y + sign * b, "rms")
        assert skip_bound(y, b, 1.0, norm="rms") <= mu(moved)


def test_a_row_of_equal_numbers_has_no_direction_once_it_is_centred() -> None:
    """0.7 is not a float: its mean over seven channels differs by rounding, which is not a direction."""
    y = (0.1 * torch.arange(1.0, 9.0, dtype=torch.float64))[:, None].expand(8, 7)
    assert skip_bound(y, 0 * y, 1.0, norm="layer") == 0
    assert min_lambda_for_spread(y, 0 * y, 0.5, norm="layer") == math.inf
    ones = torch.ones(2, 2)  # ∞ · 0 in the bound of the paper
    assert min_lambda_paper(ones, torch.eye(2), torch.eye(2), 0.5, norm="layer") == math.inf


@pytest.mark.parametrize("moved", [True, False])
def test_numbers_far_from_zero_promise_nothing_that_is_not_so(moved: bool) -> None:
    """A row 1e12 ± 1e-3 is not a row of equal numbers, though its mean takes most of its digits."""
    torch.manual_seed(0)
    width, far = 1000, 1e12
    y = 1e-3 * torch.randn(6, width, dtype=torch.float64)
    undone = 1e-3 * torch.randn(width, dtype=torch.float64) - y  # y + undone: all rows the same
    residual, branch = (y, undone + far) if moved else (y + far, undone)
    shifted = y + (branch - far) if moved else (residual - far) + undone  # LayerNorm takes `far` off
    assert skip_bound(residual, branch, 1.0, norm="layer") <= mu(normed(shifted, "layer")) + 1e-9


def test_a_row_of_unknown_direction_may_have_any() -> None:
    """It may point the same way as the other row: taken for zeros, it would make the bound 22."""
    torch.manual_seed(0)
    clear, far = torch.randn(1000, dtype=torch.float64), 1e12
    hidden = far + 1e-2 * clear
    true = mu(normed(torch.stack([clear, hidden - far]), "layer"))
    y = torch.stack([clear, hidden])
    assert skip_bound(y, 0 * y, 1.0, norm="layer") <= true < 0.1


def test_rows_whose_squares_leave_float64_promise_nothing_that_is_not_so() -> None:
    """Rows that differ by 1e-200, and a λ of 1e-200: all is kept, and the bound is a number."""
    row = torch.tensor([2.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    alike = torch.stack([row, row, 1e-200 * row])
    assert skip_bound(alike, 0 * alike, 1.0, norm="rms") <= 1e-9
    apart = torch.eye(3, dtype=torch.float64)
    kept = skip_bound(apart, 0 * apart, 1e-200, norm="rms")
    torch.testing.assert_close(kept, 3**0.5 * mu(apart))


def test_without_a_skip_nothing_is_sure() -> None:
    y = states(0, 4, 3, 0.0)
    for b in (0 * y, y):
        assert skip_bound(y, b, 0.0, norm="layer") == 0


# --- how tight they are ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, -0.3, 1e-3, 1e39])
def test_the_sum_bound_does_not_round_the_scale(scale: float) -> None:
    """A λ rounded to float32 would promise up to 6·10⁻⁸ too much, or infinity."""
    y = torch.randn(5, 3, dtype=torch.float64)
    bound, kept = skip_bound(y, 0 * y, scale), mu(scale * y)
    assert abs(bound - kept) <= 1e-14 * kept


def test_the_sum_bound_is_attained() -> None:
    y = states(3, 6, 4, 0.5)
    assert torch.allclose(skip_bound(y, -0.7 * y, 2.0), mu(2.0 * y - 0.7 * y))
    assert torch.allclose(
        min_lambda_for_spread(y, -0.7 * y, 0.5), torch.tensor(0.5 + 0.7, dtype=torch.float64)
    )


@pytest.mark.parametrize("angle", [0.05, 0.2])
def test_the_norm_bound_is_nearly_attained(angle: float) -> None:
    """Two tokens turned straight at each other: what chords and arcs differ by is left, θφ/2 of the whole."""
    turn = angle / 2
    y = math.sqrt(2) * torch.tensor(
        [[math.cos(angle), math.sin(angle)], [math.cos(angle), -math.sin(angle)]], dtype=torch.float64
    )
    turned = math.sqrt(2) * torch.tensor(
        [[math.cos(angle - turn), math.sin(angle - turn)], [math.cos(angle - turn), -math.sin(angle - turn)]],
        dtype=torch.float64,
    )
    b = math.cos(turn) * turned - y  # right-angled: the shortest way to turn a row by that much
    assert torch.allclose(normed(y + b, "rms"), turned)
    bound, truth = skip_bound(y, b, 1.0, norm="rms"), mu(turned)
    assert bound <= truth * (1 + SLACK)
    assert bound >= truth * (1 - angle * turn)


# --- the paper's theorem -----------------------------------------------------------------------------------


def condition(scale: float, strength: float, a: float) -> float:
    """Left side of Eq. 7, λ² − a(S·C_M + |λ|)² > 0."""
    return scale**2 - a * (strength + abs(scale)) ** 2


def floor(scale: float, strength: float, a: float, tokens: int, width: int) -> float:
    """The b of the theorem: it is about states with μ² ≥ b."""
    room = condition(scale, strength, a)
    return 2 * abs(scale) * tokens * width * strength / room if room > 0 else math.inf


def drawn(
    seed: int, norm: str, shape: tuple[int, int], lengths: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """States whose lengths leave √D by a factor of up to exp(``lengths``), and M and C of norm 1."""
    tokens, width = shape
    y = normed(states(seed, tokens, width, 0.2), norm)
    y = y * (lengths * torch.linspace(-1, 1, tokens, dtype=torch.float64)).exp()[:, None]
    m, c = states(seed + 1, tokens, tokens, 0.0), states(seed + 2, width, width, 0.0)
    return y, m / m.norm(), c / c.norm()


@given(
    strength=st.floats(1e-3, 100), keep=st.floats(0.1, 0.97), tokens=st.integers(2, 20),
    width=st.integers(2, 20), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=20)
def test_the_smallest_scale_meets_both_hypotheses_exactly(
    strength: float, keep: float, tokens: int, width: int, seed: int
) -> None:
    y, m, c = drawn(seed, "rms", (tokens, width))
    least = float(min_lambda_paper(y, strength * m, c, keep))
    assert least > 2 * strength  # whatever the share is
    assert condition(least, strength, keep**2) > 0
    assert floor(least, strength, keep**2, tokens, width) == pytest.approx(float(mu(y)) ** 2, rel=1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-4])
@pytest.mark.parametrize("lengths", [0.0, 0.2])
@true_norms
@settings(max_examples=20)
@given(
    strength=st.sampled_from([1e-12, 0.01, 1.0]), keep=st.sampled_from([0.3, 0.95]), seed=st.integers(0, 99)
)
def test_the_theorem_holds_for_states_of_any_length_and_any_eps(
    norm: str, lengths: float, eps: float, strength: float, keep: float, seed: int
) -> None:
    y, m, c = drawn(seed, norm, (5, 6), lengths)
    least = float(min_lambda_paper(y, strength * m, c, keep, norm=norm, eps=eps))
    before = mu(normed(y, norm))
    for factor in (1.0001, -1.5):
        assert mu(normed(factor * least * y + strength * m @ y @ c, norm, eps)) >= keep * before


def test_eps_requires_a_scale_of_its_own() -> None:
    """A λ of the order of √ε would shorten all rows, although the mixer adds almost nothing."""
    y, m, c = drawn(0, "layer", (5, 6))
    keep = math.sqrt(0.5)
    assert 0.01 * keep / (1 - keep) <= min_lambda_paper(y, 1e-12 * m, c, keep, norm="layer", eps=1e-4) < 1
    assert min_lambda_paper(y, 1e-12 * m, c, keep, norm="layer") < 1e-10


def test_a_bias_of_the_output_removes_nearly_all_spread() -> None:
    """The theorem says nothing about a bias: it turns all rows toward itself."""
    y, m, c = drawn(0, "layer", (5, 6))
    least = min_lambda_paper(y, 1e-3 * m, c, 0.5, norm="layer")
    bias = 1e3 * torch.linspace(-1, 1, 6, dtype=torch.float64)
    assert mu(normed(least * y + 1e-3 * m @ y @ c + bias, "layer")) < 0.01 * mu(y)


def test_without_a_norm_the_theorem_does_not_hold() -> None:
    """With λ = 0.1 and a weak mixer, μ falls to a tenth, although both hypotheses hold."""
    y, m, c = drawn(0, "rms", (5, 6))
    assert min_lambda_paper(y, 1e-3 * m, c, 0.5) < 0.1
    assert mu(0.1 * y + 1e-3 * m @ y @ c) < 0.11 * mu(y)


def test_the_condition_on_the_scale_alone_guarantees_nothing() -> None:
    """Eq. 7 holds, and one layer makes all tokens the same: its second half, μ² ≥ b, cannot be met here."""
    y = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)  # on the sphere of RMSNorm, radius √2
    c = torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    m = -torch.tensor([[0.5, -0.5], [-0.5, 0.5]], dtype=torch.float64)
    strength = float(m.norm() * c.norm())
    assert strength == pytest.approx(1)
    assert condition(1.0, strength, a=0.2) > 0
    after = normed(m @ y @ c + 1.0 * y, "rms")
    assert mu(after) < 1e-12
    assert floor(1.0, strength, 0.2, tokens=2, width=2) > 2 * 2  # b > T·D: no state has μ² ≥ b


def test_the_step_of_its_proof_that_is_false() -> None:
    """μ(DZ) ≥ min(D)·μ(Z) for a diagonal D ≥ 0: two parallel rows of different length become equal."""
    z = torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    d = torch.tensor([1.0, 0.5], dtype=torch.float64)
    assert mu(z) > 0.7
    assert mu(d[:, None] * z) == 0


@given(
    sigma=st.floats(1e-6, 2 / 9), turn=st.floats(0, 1), angle=st.floats(0, math.pi), length=st.floats(0, 1.0),
)  # fmt: skip
def test_the_line_of_the_proof_is_above_the_cost_of_a_row(
    sigma: float, turn: float, angle: float, length: float
) -> None:
    """d + 1 − ρ² ≤ σ/2 + σ²/2 + s/(2σ): the one inequality on which the proof of the theorem rests."""
    disturbance = 1.5 * turn * torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    unit = torch.tensor([1.0, 0.0], dtype=torch.float64)
    row, eps = unit + disturbance, 0.25 * length**4
    size = (row.square().sum() + eps).sqrt()
    z = row / size if size > 0 else row
    cost = (z - unit).norm() + 1 - z.square().sum()
    assert cost <= sigma / 2 + sigma**2 / 2 + (disturbance.square().sum() + eps) / (2 * sigma) + 1e-12


def test_the_rest_of_the_proof() -> None:
    """Both ends of the interval of ‖ū‖, on which the difference of the two sides is concave."""
    low, high = torch.linspace(0, 2 / 9, 10**5).double(), torch.linspace(2 / 9, 0.5, 10**5).double()
    for sigma, cost in ((low, low + low**2 / 2), (high, 11 / 81 + 9 / 4 * high**2)):
        assert (cost <= 1 - (1 - 2 * sigma).clamp(min=0).sqrt() + 1e-15).all()
        assert (cost <= (4 * sigma + sigma**2) / (1 + sigma) ** 2 + 1e-15).all()


# --- the examples of the paper -----------------------------------------------------------------------------


def test_without_a_skip_averaging_collapses_at_once() -> None:
    y = normed(states(0, 5, 4, 0.0), "layer")
    after = normed(torch.full((5, 5), 0.2, dtype=torch.float64) @ y, "layer")
    assert spread(after[None]).item() < 1e-12


def test_with_the_usual_skip_a_row_stochastic_mixer_can_collapse_at_once() -> None:
    """λ = 1, M = (I + 11ᵀ/T)/2, C = −2I: Y + MYC is the mean token, negated, in every row."""
    y = normed(states(1, 5, 4, 0.4), "layer")
    m = 0.5 * torch.eye(5, dtype=torch.float64) + 0.1
    after = y + m @ y @ (-2 * torch.eye(4, dtype=torch.float64))
    assert torch.allclose(m.sum(-1), torch.ones(5, dtype=torch.float64))
    assert mu(after) < 1e-12 < 0.1 < mu(y)
    assert skip_bound(y, m @ y @ (-2 * torch.eye(4, dtype=torch.float64)), 1.0) <= 1e-12


@pytest.mark.parametrize("strength", [0.1, 1.0, 30.0])
def test_the_paper_s_scale_is_needed_up_to_a_constant(strength: float) -> None:
    """T = 2, C of rank one, M = −η(I − 11ᵀ/T): S·C_M = η; |λ| = η loses all, Eq. 7 asks |λ| > η."""
    keep = 0.5
    y = math.sqrt(3) * torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]], dtype=torch.float64)
    c = torch.zeros(3, 3, dtype=torch.float64)
    c[0, 0] = 1
    m = -strength * torch.tensor([[0.5, -0.5], [-0.5, 0.5]], dtype=torch.float64)
    assert float(m.norm() * c.norm()) == pytest.approx(strength)
    assert condition(1.001 * strength, strength, keep**2) > 0 > condition(0.999 * strength, strength, keep**2)
    assert min_lambda_paper(y, m, c, keep) > strength
    assert mu(m @ y @ c + strength * y) < 1e-12 * strength
    # without a norm, a half of μ is kept from |λ| = ½ + η on, and no sooner: the bound of the sum
    least = min_lambda_for_spread(y, m @ y @ c, keep)
    assert least == pytest.approx(keep + strength)
    assert mu(m @ y @ c + least * y) == pytest.approx(keep * float(mu(y)))


# --- their inputs ------------------------------------------------------------------------------------------


def test_they_bound_the_spread_of_the_measures() -> None:
    rows = torch.randn(3, 5, 4, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [False] * 2 + [True] * 3])
    rows[1, 4] = torch.nan
    assert torch.equal(skip_bound(rows, 0 * rows, 1.0, mask), absolute_spread(rows, mask))


def test_a_state_without_spread_needs_an_infinite_scale() -> None:
    alike, eye = torch.ones(2, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    assert min_lambda_paper(alike, eye, eye, 0.5) == math.inf
    assert min_lambda_paper(alike, 0 * eye, eye, 0.5) == 0
    with_a_zero = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert min_lambda_paper(with_a_zero, eye, eye, 0.5) == math.inf
