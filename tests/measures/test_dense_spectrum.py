"""Ranks by the Gram matrix against the SVD, on thousands of matrices and on those made to break them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.measures.measure_cases import U, close, generator, make, normal, rotation

import rankwise.measures.dense_spectrum as dense_spectrum
from rankwise._internals.linalg import to_range
from rankwise.errors import RankwiseError
from rankwise.measures import (
    effective_rank,
    numerical_rank,
    rank_summary,
    singular_values,
    stable_rank,
)
from rankwise.measures.dense_spectrum import (
    EFFECTIVE_RTOL,
    SVD_SIZE,
    GramSpectrum,
    gram_or_svd,
    gram_spectrum,
    lower_gram,
    map_parts,
)
from rankwise.operators import DenseMixing

SHAPES = [(1, 1), (1, 7), (2, 2), (3, 3), (7, 4), (16, 16), (17, 40), (33, 33), (64, 20)]
SIZE = SVD_SIZE + 5
"""Large enough for the Gram matrix."""
DELTAS = (0.3, 1e-2, 1e-4)
INFINITIES = torch.tensor([math.inf, -math.inf], dtype=torch.float64)
svd = torch.linalg.svdvals


def entropy_rank(sigma):
    share = sigma / sigma.sum(-1, keepdim=True)
    return torch.where(sigma[..., 0] == 0, 0.0, torch.special.entr(share).sum(-1).exp())


def by_gram(spectrum: GramSpectrum) -> torch.Tensor:
    return spectrum.eigenvalues.sqrt() * spectrum.scale[:, None]


def orthogonal(count, size, seed):
    return torch.linalg.qr(normal(count, size, size, seed=seed)).Q


def with_spectrum(sigma, seed=0):
    """Matrices with the singular values of each row of ``sigma``."""
    count, size = sigma.shape
    left, right = orthogonal(count, size, seed), orthogonal(count, size, seed + 1)
    return left @ (sigma[..., None] * right)


def one_hot(winners, columns):
    return torch.nn.functional.one_hot(winners, columns).double()


def clusters(n, r, c, seed):
    sigma = (0.3 * torch.tensor([1, 1, 1, 2, 0.5], dtype=torch.float64)).repeat(max(r, c))[: max(r, c)]
    return (rotation(r, seed) @ sigma.diag()[:r, :c]).expand(n, -1, -1)


def sink(n, r, c, seed):
    logits = normal(n, r, c, seed=seed)
    logits[..., 0] += 12
    return logits.softmax(-1)


FAMILIES = {
    name: lambda n, r, c, seed, name=name: make(name, (n, r, c), seed)
    for name in ("signed", "stochastic", "causal", "low rank", "sparse")
} | {
    "hardmax": lambda n, r, c, seed: one_hot(normal(n, r, c, seed=seed).argmax(-1), c),
    "permutation": lambda n, r, c, seed: one_hot(
        torch.rand(n, max(r, c), generator=generator(seed)).argsort(-1)[:, :r] % c, c
    ),
    "identity": lambda n, r, c, seed: torch.eye(r, c, dtype=torch.float64).expand(n, r, c),
    "sink": sink,
    "zero rows and columns": lambda n, r, c, seed: (
        normal(n, r, c, seed=seed)
        * (normal(n, r, 1, seed=seed + 1) > 0)
        * (normal(n, 1, c, seed=seed + 2) > 0)
    ),
    "decaying": lambda n, r, c, seed: (
        normal(n, r, c, seed=seed) * 10.0 ** -torch.linspace(0, 14, c, dtype=torch.float64)
    ),
    "clusters": clusters,
    "rows of length δ": lambda n, r, c, seed: (
        0.3 * torch.nn.functional.normalize(normal(n, r, c, seed=seed), dim=-1)
    ),
    "large entries": lambda n, r, c, seed: normal(n, r, c, seed=seed) * 1e6,
}
"""Makers of n matrices of r rows and c columns."""


def family(kind, count, shape, seed):
    return FAMILIES[kind](count, *shape, seed)


every_kind = pytest.mark.parametrize("kind", FAMILIES)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def undecidable(sigma, delta):
    """Where the SVD itself cannot tell: a σ within 16·n·ε·σ_1 of δ."""
    width = 16 * sigma.shape[-1] * U * sigma[..., :1]
    return ((sigma - delta).abs() <= width).any(-1)


# --- thousands of matrices: 9 shapes × 14 kinds × 100 × 3 thresholds --------------------------------------


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@every_shape
@every_kind
def test_a_gram_matrix_is_as_near_the_svd_as_it_says(kind, shape, device):
    """Counts that it decides, eigenvalues within the slack and effective ranks within the bound."""
    m = family(kind, 100, shape, seed=sum(shape))
    spectrum, sigma = gram_spectrum(m.to(device)), svd(m)
    spectrum = GramSpectrum(*(numbers.cpu() for numbers in spectrum))
    for delta in DELTAS:
        wanted, decided = (sigma >= delta).sum(-1), spectrum.decides_count(delta)
        assert (by_gram(spectrum) >= delta).sum(-1)[decided].equal(wanted[decided])
        assert not (decided & undecidable(sigma, delta)).any()
    # Hoffman and Wielandt; the squares of the SVD's own errors, 2·16·n·ε·σ_1² of each, come on top.
    wanted = (sigma / spectrum.scale[:, None]).square()
    off = torch.linalg.vector_norm(spectrum.eigenvalues - wanted, dim=-1)
    assert (off <= spectrum.slack + 32 * len(sigma[0]) ** 1.5 * U * wanted[:, 0]).all()
    close(spectrum.slack, 2 * max(shape) * U * wanted.sum(-1), rtol=1e-9)
    got, wanted = entropy_rank(by_gram(spectrum)), entropy_rank(sigma)
    own = 40 * min(shape) * 16 * max(shape) * U  # rounding of the SVD and of the entropy, as rank_tolerance
    assert ((got - wanted).abs() <= (spectrum.effective_rank_error() + own) * wanted).all()
    assert (spectrum.effective_rank_error() < 1e-4).all()


@pytest.mark.parametrize("shape", [(SIZE, SIZE), (SIZE, SIZE + 20), (SIZE + 30, SIZE)], ids=str)
@every_kind
def test_public_ranks_equal_the_svd(kind, shape):
    m = family(kind, 4, shape, seed=1)
    sigma = svd(m)
    for delta in DELTAS:
        wanted = rank_summary(m, delta, exact=True)
        same = ~undecidable(sigma, delta)
        assert numerical_rank(m, delta)[same].equal(wanted.numerical_rank[same])
        summary = rank_summary(m, delta)
        assert summary.numerical_rank[same].equal(wanted.numerical_rank[same])
        # measured: below 2e-7 here; the promise is EFFECTIVE_RTOL
        close(summary.effective_rank, wanted.effective_rank, rtol=1e-5)
        close(summary.stable_rank, wanted.stable_rank, rtol=1e-10)
        close(summary.sigma_max, wanted.sigma_max, rtol=1e-10)
        close(stable_rank(m), wanted.stable_rank, rtol=1e-10)
        close(effective_rank(m), wanted.effective_rank, rtol=1e-5)


# --- too close to tell -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nudge", [0.0, 1e-15, -1e-15, 1e-13, -1e-13, 1e-8, -1e-8])
@pytest.mark.parametrize("copies", [1, 5])
def test_only_a_singular_value_at_delta_needs_the_svd(nudge, copies):
    delta = 0.2
    sigma = torch.rand(8, SIZE, dtype=torch.float64, generator=generator(3)) + 0.3
    sigma[:4, :copies] = delta * (1 + nudge)
    m = with_spectrum(sigma)
    near = (torch.arange(8) < 4) & (abs(nudge) < 1e-8)
    assert gram_spectrum(m).decides_count(delta).equal(~near)
    summary = rank_summary(m, delta)
    assert summary.used_svd.equal(near.double())
    exact = (sigma >= delta).sum(-1)
    assert summary.numerical_rank[~near].equal(exact[~near].double())
    assert ((summary.numerical_rank[near] >= SIZE - copies) & (summary.numerical_rank[near] <= SIZE)).all()
    assert summary.singular_values[near].equal(svd(m[near]))
    assert numerical_rank(m, delta).equal(summary.numerical_rank)


@given(
    share=st.floats(-0.9, 0.9),
    delta=st.sampled_from([0.05, 0.5]),
    seed=st.integers(0, 99),
    size=st.integers(2, 12),
)
def test_nothing_within_the_slack_is_trusted(share, delta, seed, size):
    """λ = δ² + share·slack, where slack = 2·k·ε·Σσ²."""
    sigma = torch.rand(1, size, dtype=torch.float64, generator=generator(seed)) + 0.6
    sigma[0, 0] = delta
    slack = 2 * size * U * sigma.square().sum()
    sigma[0, 0] = (delta**2 + share * slack).sqrt()
    m = torch.diag_embed(sigma)  # so that the singular values are exactly these
    assert not gram_spectrum(m).decides_count(delta).any()


def test_a_delta_below_the_resolution_of_a_gram_matrix_needs_the_svd():
    sigma = torch.ones(2, SIZE, dtype=torch.float64)
    sigma[:, 5:] = torch.tensor([[1e-9], [1e-11]])
    m = with_spectrum(sigma)
    assert numerical_rank(m, 1e-10).tolist() == [SIZE, 5]
    assert rank_summary(m, 1e-10).used_svd.tolist() == [1, 1]
    assert rank_summary(m, 1e-3).used_svd.tolist() == [0, 0]


@pytest.mark.parametrize("scale", [2.0**-1000, 1e-300, 1e-150, 1e-30, 1e30, 1e150, 1e300])
def test_scale_is_safe(scale):
    m = make("causal", (3, SIZE, SIZE), seed=4)
    m[1] = m[1].T.clone()
    wanted, got = rank_summary(m, 0.1), rank_summary(scale * m, scale * 0.1)
    assert got.numerical_rank.equal(wanted.numerical_rank)
    assert numerical_rank(scale * m, scale * 0.1).equal(wanted.numerical_rank)
    close(got.sigma_max, scale * wanted.sigma_max, rtol=1e-10)
    close(torch.stack(got[2:4]), torch.stack(wanted[2:4]), rtol=1e-6)
    assert not rank_summary(scale * m, delta=1e-308 if scale > 1 else 1e300).numerical_rank.isnan().any()


# --- the effective rank ----------------------------------------------------------------------------------


@given(
    tail=st.integers(0, 40),
    head=st.integers(1, 20),
    slack=st.floats(1e-14, 1e-6),
    seed=st.integers(0, 99),
    even=st.booleans(),
)
def test_no_perturbation_of_that_size_moves_the_effective_rank_further(tail, head, slack, seed, even):
    """Among them the worst of Hölder's inequality: the same error in every eigenvalue that is zero."""
    values = torch.cat([torch.rand(head, generator=generator(seed)) + 0.01, torch.zeros(tail)]).double()
    values = values.sort(descending=True).values
    noise = torch.zeros_like(values) if even and tail else normal(len(values), seed=seed)
    noise[head:] += 1
    noise = noise / noise.norm() * slack
    seen = (values + noise).clamp(min=0).sort(descending=True).values
    bound = GramSpectrum(seen[None], torch.tensor([slack], dtype=torch.float64), torch.ones(1).double())
    true, moved = (entropy_rank(v.sqrt()).item() for v in (values, seen))
    assert abs(moved - true) <= bound.effective_rank_error().item() * true * (1 + 1e-9)


def test_an_uncertain_effective_rank_needs_the_svd():
    m = torch.cat([make("low rank", (2, SIZE, SIZE), seed=6), make("signed", (2, SIZE, SIZE), seed=6)])
    error = gram_spectrum(m).effective_rank_error()
    between = (error[:2].min() * error[2:].max()).sqrt().item()
    assert error[2:].max() < between < error[:2].min()
    sigma, _, fallback = gram_or_svd(m, rtol=between)
    assert fallback.tolist() == [1, 1, 0, 0]
    assert sigma[:2].equal(svd(m[:2]))
    assert gram_or_svd(m, rtol=EFFECTIVE_RTOL)[2].tolist() == [0, 0, 0, 0]
    assert gram_or_svd(m, rtol=None)[2].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("times", [0.9, 1.1])
def test_a_summary_looks_at_that_doubt(times, monkeypatch):
    m = make("stochastic", (2, SIZE, SIZE), seed=6)
    monkeypatch.setattr(
        GramSpectrum, "effective_rank_error", lambda spectrum: torch.full_like(spectrum.slack, 0.01 * times)
    )
    assert rank_summary(m).used_svd.tolist() == [float(times > 1)] * 2
    assert rank_summary(m).singular_values.equal(svd(m)) == (times > 1)


# --- what else a measure owes ----------------------------------------------------------------------------


def test_an_exact_summary_is_the_svd():
    m = make("stochastic", (3, SIZE, SIZE), seed=7)
    exact, fast = rank_summary(m, exact=True), rank_summary(m)
    assert exact.singular_values.equal(singular_values(m))
    assert fast.effective_rank.equal(effective_rank(m))
    assert not exact.used_svd.any()
    assert not fast.singular_values.equal(exact.singular_values)
    close(fast.singular_values, exact.singular_values, rtol=0, atol=1e-7)


@pytest.mark.parametrize("measure", [rank_summary, stable_rank], ids=lambda f: f.__name__)
def test_gradients_equal_the_svd(measure):
    m = make("signed", (2, SIZE, SIZE), seed=9)
    given_, wanted = m.clone().requires_grad_(), m.clone().requires_grad_()
    got = measure(given_)
    (got.stable_rank if measure is rank_summary else got).sum().backward()
    sigma = svd(wanted)
    (sigma / sigma[:, :1]).square().sum().backward()
    close(given_.grad, wanted.grad, rtol=1e-12)
    assert not numerical_rank(given_).requires_grad


@pytest.mark.parametrize("call", [numerical_rank, stable_rank, rank_summary], ids=lambda f: f.__name__)
def test_only_a_matrix_that_is_not_finite_has_nan(call):
    m = make("stochastic", (2, 3, SIZE, SIZE), seed=11)
    clean = call(m)
    m[0, 1, 3, 4], m[0, 2, 1, 1], m[1, 2, 0, 0], m[1, 0, :2, 0] = math.nan, -math.inf, math.inf, INFINITIES
    bad = torch.tensor([[False, True, True], [True, False, True]])
    got = call(m)
    pairs = zip(got, clean, strict=True) if isinstance(got, tuple) else [(got, clean)]
    for one, other in pairs:
        assert one[bad].isnan().all()
        assert one[~bad].equal(other[~bad])


def test_a_singular_value_on_the_threshold_needs_the_svd():
    m = make("stochastic", (3, SIZE, SIZE), seed=1)
    sigma = svd(m)
    delta = sigma[0, 7].item()
    summary = rank_summary(m, delta)
    assert summary.used_svd.tolist() == [1, 0, 0]
    assert summary.numerical_rank.tolist() == (sigma >= delta).sum(-1).tolist()
    with pytest.raises(RankwiseError, match="`delta`"):
        rank_summary(m, 0.0)


# --- Gram matrices ---------------------------------------------------------------------------------------


def banded(rows, columns, reach):
    """Entries up to ``reach`` columns right of the diagonal, as masks leave them."""
    return normal(3, rows, columns, seed=1).tril(reach)


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (30, 30), (30, 41), (8, 9)], ids=str)
def test_the_lower_half_equals_the_product(shape):
    for reach in (-50, -3, 0, 4, 50):
        m = banded(*shape, reach)
        close(lower_gram(m).tril(), (m @ m.mT).tril(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("power", [-1022, -300, -90, 0, 90, 300, 1000])
def test_a_power_of_two_is_divided_out_if_squares_would_leave_the_range(power):
    m = normal(1, 4, 4) * 2.0**power
    wide, scale = to_range(m)
    assert (wide * scale[:, None, None]).equal(m)
    assert (scale == 1).item() == (abs(power) < 400)
    assert 2.0**-400 < wide.abs().max() < 2.0**400
    assert math.frexp(scale.item())[0] == 0.5


# --- batches in parts ------------------------------------------------------------------------------------


def test_an_operator_is_formed_a_few_sequences_at_a_time(monkeypatch):
    formed = []

    class Watched(DenseMixing):
        def rows(self, start, stop):
            formed.append(self.shape[0])
            return super().rows(start, stop)

        def __getitem__(self, index):
            return Watched(super().__getitem__(index).rows(0, self.shape[-2]))

    m = make("stochastic", (5, 2, 4, 4), seed=1)
    monkeypatch.setitem(dense_spectrum.PART_BYTES, "cpu", 2 * 2 * 8 * 16)
    (total,) = map_parts(Watched(m), "`m`", lambda part: (part.sum((-2, -1)),))
    assert max(formed) == 2
    close(total, m.sum((-2, -1)), rtol=1e-14)
