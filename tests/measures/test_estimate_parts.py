"""The parts of the matrix-free spectrum: products, Krylov spaces, quadrature, each against dense algebra."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.measures.estimate_cases import KINDS, OnlyProducts, head
from tests.measures.measure_cases import U, close, generator, make, normal, rotation, sum_tolerance

from rankwise._internals.statistics import t_quantile
from rankwise.measures import krylov, quadrature
from rankwise.measures.krylov import Gram, block_lanczos
from rankwise.measures.quadrature import ROUNDING, TraceEstimator, rules
from rankwise.operators import DenseMixing

seeds = st.integers(0, 2**31)


def symmetric(values, seed=0):
    """A ≥ 0 with these eigenvalues, and its product."""
    basis = rotation(len(values), seed)
    matrix = basis @ torch.as_tensor(values, dtype=torch.float64).diag() @ basis.mT
    return matrix, lambda x: (matrix @ x, x.mT @ matrix @ x)


def signs(size, count, seed=0):
    return torch.randint(0, 2, (size, count), generator=generator(seed)).double() * 2 - 1


# --- products --------------------------------------------------------------------------------------------


def check_gram(gram, dense, rtol):
    x = normal(dense.shape[-1], 3, seed=5)
    product, inner = gram(x)
    a = dense.mT @ dense
    size = float(dense.norm() ** 2 * x.norm())
    close(product * gram.scale**2, a @ x, rtol=0, atol=rtol * size)
    close(inner * gram.scale**2, x.mT @ a @ x, rtol=0, atol=rtol * size * float(x.norm()))
    close(gram.energy * gram.scale**2, dense.norm() ** 2, rtol=rtol)


@pytest.mark.parametrize("kind", KINDS)
def test_gram_is_the_product_with_the_dense_gram_matrix(kind, monkeypatch):
    """Sums of T·T terms for any block size; the rows are from the float64 matrix."""
    operator = head(kind, 23)
    for entries in (1, 100, 10**6):
        monkeypatch.setitem(krylov.BLOCK_ENTRIES, "cpu", entries)
        check_gram(Gram(operator), operator.dense(torch.float64), sum_tolerance(23 * 23))


@given(
    tokens=st.integers(1, 7),
    sources=st.integers(1, 7),
    seed=seeds,
    kind=st.sampled_from(["signed", "sparse"]),
)
def test_gram_of_any_shape_either_way_and_by_products(tokens, sources, seed, kind):
    m = make(kind, (tokens, sources), seed)
    for gram in (Gram(DenseMixing(m)), Gram(DenseMixing(m).mT), Gram(OnlyProducts(m))):
        if m.any():
            check_gram(gram, m, sum_tolerance(49))
        assert (gram.rows, gram.columns) == (tokens, sources)


@pytest.mark.parametrize("exponent", [-900, -60, 0, 60, 900])
def test_gram_has_a_unit_of_its_own(exponent):
    m = make("signed", (6, 5), seed=1)
    plain, scaled = Gram(DenseMixing(m)), Gram(DenseMixing(m * 2.0**exponent))
    x = normal(5, 2)
    assert scaled.scale == plain.scale * 2.0**exponent
    assert scaled.energy == plain.energy
    assert scaled(x)[0].equal(plain(x)[0])
    assert plain.scale <= m.abs().max() < 2 * plain.scale


# --- Krylov spaces ---------------------------------------------------------------------------------------


@given(size=st.integers(6, 30), width=st.integers(1, 5), steps=st.integers(1, 6), seed=seeds)
def test_lanczos_compresses(size, width, steps, seed):
    """Qᵀ Q = 1, Qᵀ A Q and Qᵀ X are as given, and the residual of a Ritz vector is its tail's."""
    matrix, apply = symmetric(torch.linspace(0, 1, size).square(), seed % 97)
    x = signs(size, width, seed)
    space = block_lanczos(apply, x, steps, 1e-13, keep_basis=True)
    q = space.basis
    near = 1e3 * size * U  # a few hundred products of unit vectors, twice reorthogonalised
    close(q.mT @ q, torch.eye(q.shape[1]).double(), rtol=0, atol=near)
    close(q.mT @ matrix @ q, space.matrix, rtol=0, atol=near)
    close(q @ space.start, x, rtol=0, atol=1e-9 * float(x.norm()))  # directions of X below 1e-10 are left out
    values, vectors = torch.linalg.eigh(space.matrix)
    residuals = (matrix @ q @ vectors - q @ vectors * values).norm(dim=0)
    close((space.tail @ vectors).norm(dim=0), residuals, rtol=0, atol=near + 1e-12)


@given(width=st.integers(1, 3), steps=st.integers(1, 4), seed=seeds)
def test_moments_are_exact_up_to_twice_the_steps(width, steps, seed):
    matrix, apply = symmetric(torch.linspace(0.1, 1, 24), 3)
    x = signs(24, width, seed)
    space = block_lanczos(apply, x, steps, 1e-13)
    power, small = x, space.start
    for _ in range(2 * steps):
        close((space.start * small).sum(0), (x * power).sum(0), rtol=1e-9)
        power, small = matrix @ power, space.matrix @ small


@pytest.mark.parametrize(
    ("values", "dims"),
    [([1.0] * 20, 4), ([2.0] * 10 + [0.0] * 10, 8), ([3.0, 2.0, 1.0] + [0.0] * 17, 7), ([0.0] * 20, 4)],
)
def test_an_exhausted_space_is_invariant(values, dims):
    """Four vectors reach four dimensions of each eigenspace, or all of it; then nothing is left."""
    _, apply = symmetric(values, 1)
    space = block_lanczos(apply, signs(20, 4), 9, 1e-12)
    assert space.matrix.shape == (dims, dims)
    assert space.steps < 9
    assert not space.tail.any()


# --- quadrature ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_two_rules_enclose_the_square_root(kind):
    dense = head(kind, 80, seed=2).dense(torch.float64)
    x = signs(80, 4, 7)
    _, sigma, vectors = torch.linalg.svd(dense)
    truth = sigma @ (vectors @ x).square()
    gram = Gram(DenseMixing(dense))
    slack = 1e-6 * truth  # σ below 1e-8·‖M‖_F, squared, are rounding
    for steps in (2, 5):
        lower, upper, _ = rules(block_lanczos(gram, x, steps, ROUNDING * gram.energy), ROUNDING * gram.energy)
        low, high = (gram.scale * rule.values.sqrt() @ rule.weights for rule in (lower, upper))
        assert (low <= truth + slack).all()
        assert (truth <= high + slack).all()
        assert ((high - low) < truth).all()


def estimator(matrix, probes=8, steps=6, seed=0):
    gram = Gram(DenseMixing(matrix))
    space = block_lanczos(gram, signs(matrix.shape[1], probes, seed), steps, ROUNDING * gram.energy)
    return TraceEstimator(space, gram.energy, min(matrix.shape)), gram.scale


@pytest.mark.parametrize("kind", KINDS)
def test_traces_of_lines_are_exact(kind):
    """The trace of A is known: the error of each probe is regressed away."""
    found, _ = estimator(head(kind, 150).dense(torch.float64))
    bracket = found.by_probes(lambda x: 3 * x)
    assert bracket.value == pytest.approx(3 * found.energy, rel=1e-9)
    assert bracket.reach(2.5) < 1e-8 * found.energy


def test_the_contribution_of_strong_directions_is_exact():
    """Three singular values that the two halves of the probes agree on; one value that 30 vectors share."""
    sigma = torch.cat([torch.tensor([300.0, 200.0, 100.0]), torch.ones(30), torch.zeros(67)]).double()
    matrix = rotation(100, 1) * sigma @ rotation(100, 2)
    found, scale = estimator(matrix)
    for pairs in found.confirmed:
        close(pairs.values.sqrt() * scale, torch.tensor([100.0, 200.0, 300.0]).double(), rtol=1e-9)
    bracket = found.by_probes(torch.sqrt)
    # Hutchinson's error is √(2/8)·‖M‖_F = 187; without the three, √(2/8)·√30 = 2.7, times luck.
    assert 0 < bracket.stderr * scale < 6
    assert abs(bracket.value * scale - 630) <= bracket.reach(3.0) * scale


def test_probes_that_all_agree_are_not_extrapolated():
    """Where A is diagonal every ±1 probe has the same excess; no slope can be read off its rounding."""
    columns = torch.randint(0, 30, (90,), generator=generator(3))
    found, scale = estimator(torch.nn.functional.one_hot(columns, 90).double(), probes=16, steps=4)
    truth = float(columns.bincount().double().sqrt().sum())
    bracket = found.by_probes(torch.sqrt)
    assert bracket.value * scale == pytest.approx(truth, rel=1e-6)
    assert bracket.reach(2.5) * scale < 1e-6 * truth


@pytest.mark.parametrize("kind", KINDS)
def test_ritz_values_enclose_the_nuclear_norm_without_chance(kind):
    dense = head(kind, 60, seed=3).dense(torch.float64)
    truth = float(torch.linalg.svdvals(dense).sum())
    for seed in range(5):
        found, scale = estimator(dense, seed=seed)
        bracket = found.by_ritz(torch.sqrt)
        assert bracket.stderr == 0
        assert abs(bracket.value * scale - truth) <= bracket.half_width * scale * (1 + 1e-9)


def test_t_quantile_is_students():
    """Table values to three decimals."""
    table = {2: 4.303, 4: 2.776, 6: 2.447, 10: 2.228, 14: 2.145, 30: 2.042, 120: 1.980}
    for freedom, value in table.items():
        assert t_quantile(freedom) == pytest.approx(value, rel=1e-2 if freedom < 4 else 1.5e-3)


def test_the_intercept_is_least_squares_and_its_error_leaves_one_out():
    """HC3 by its definition: refit without each point, and take the change of the prediction at 0."""
    control, noise = normal(9, seed=1), normal(9, seed=2)
    values = 5 + 3 * control + noise
    mean, error = quadrature.intercept_at_zero(values, control)
    design = torch.stack([torch.ones(9).double(), control], 1)

    def fit(keep):
        return torch.linalg.lstsq(design[keep], values[keep, None]).solution[0, 0]

    everyone = torch.arange(9)
    assert mean == pytest.approx(float(fit(everyone)))
    changes = torch.stack([fit(everyone[everyone != i]) - fit(everyone) for i in everyone])
    assert error == pytest.approx(float(changes.norm()))
