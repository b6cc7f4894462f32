"""Matrix-free ranks: against dense ranks, coverage of the intervals, products and memory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measures.estimate_cases import FEW_KINDS, KINDS, OnlyProducts, head
from tests.measures.measure_cases import generator, make, normal, rotation
from tests.operators.linear_time_cases import LINEAR_TIME
from tests.operators.mixing_laws import largest_tensor
from tests.unchecked import unchecked

from rankwise.errors import RankwiseError
from rankwise.measures import krylov, rank_summary, singular_values
from rankwise.measures.estimate import SpectrumEstimate, estimate_spectrum
from rankwise.measures.quadrature import SHARP, EigenvalueCounter
from rankwise.operators import (
    DenseMixing,
    SoftmaxMixing,
)

RANKS = ("effective_rank", "stable_rank", "sigma_max")
every_kind = pytest.mark.parametrize("kind", KINDS)


def held(estimate, truth):
    slack = 1e-9 * abs(truth)  # the truth is rounded too
    return bool(estimate.low - slack <= truth <= estimate.high + slack)


def same(one: SpectrumEstimate, other: SpectrumEstimate) -> bool:
    """Bit for bit."""
    return all(
        torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
        for name in RANKS
        for a, b in zip(getattr(one, name), getattr(other, name), strict=True)
    )


# --- against dense ---------------------------------------------------------------------------------------


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kind=st.sampled_from(["signed", "stochastic", "low rank", "sparse"]),
    seed=st.integers(0, 2**31),
)
def test_where_the_vectors_span_the_space_the_answer_is_exact(shape, kind, seed):
    """MᵀM hides σ below ε^½·8·‖M‖_F: nine of them change H by at most 9·1e-7·(1 + log 1e7)."""
    m = make(kind, shape, seed)
    exact, spectrum = rank_summary(m), estimate_spectrum(m, probes=8, steps=4)
    assert spectrum.effective_rank.value == pytest.approx(float(exact.effective_rank), rel=2e-5)
    assert spectrum.stable_rank.value == pytest.approx(float(exact.stable_rank), rel=1e-11)
    assert spectrum.sigma_max.value == pytest.approx(float(exact.sigma_max), rel=1e-11)
    for name in RANKS:
        assert held(getattr(spectrum, name), float(getattr(exact, name)))
        assert (getattr(spectrum, name).stderr <= 2e-5 * getattr(exact, name)).all()


@given(
    rank=st.integers(1, 12), tokens=st.integers(40, 90), sources=st.integers(40, 90), seed=st.integers(0, 99)
)
def test_an_exhausted_low_rank_is_exact(rank, tokens, sources, seed):
    """Fewer products than dimensions, more than the rank: the rest is rounding, √(64 ε·90) of ‖M‖_F."""
    m = normal(tokens, rank, seed=seed) @ normal(rank, sources, seed=seed + 1)
    exact, spectrum = rank_summary(m), estimate_spectrum(m, probes=8, steps=5)
    assert spectrum.effective_rank.value == pytest.approx(float(exact.effective_rank), rel=1e-4)
    assert held(spectrum.effective_rank, float(exact.effective_rank))
    assert spectrum.effective_rank.stderr < 1e-4 * exact.effective_rank
    assert spectrum.stable_rank.value == pytest.approx(float(exact.stable_rank), rel=1e-9)


@every_kind
def test_many_kinds_of_heads_at_400(kind):
    """Within 2 % and within their intervals, with products for less than all columns."""
    operator = head(kind, 400)
    exact, spectrum = rank_summary(operator), estimate_spectrum(operator, probes=16, steps=24)
    for name in RANKS:
        truth = float(getattr(exact, name))
        assert float(getattr(spectrum, name).value) == pytest.approx(truth, rel=0.02)
        assert held(getattr(spectrum, name), truth)


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_intervals_keep_their_rate(kind):
    """95 % nominal: of 16 seeds at most 4 may miss, which chance exceeds in 0.1 % of kinds.

    Nor are they empty caution: the mean error is at least a twentieth of the mean half-width.
    """
    operator = head(kind, 130)
    exact = rank_summary(operator)
    runs = [estimate_spectrum(operator, probes=8, steps=8, seed=seed) for seed in range(16)]
    for name in RANKS:
        truth = float(getattr(exact, name))
        assert sum(not held(getattr(run, name), truth) for run in runs) <= 4
    truth = float(exact.effective_rank)
    errors = [abs(float(run.effective_rank.value) - truth) for run in runs]
    widths = [float(run.effective_rank.high - run.effective_rank.low) / 2 for run in runs]
    assert sum(errors) >= 0.05 * sum(widths)


@pytest.mark.parametrize(("probes", "steps"), [(8, 4), (16, 4), (8, 8)])
def test_few_steps_do_not_make_the_largest_singular_value_sure(probes, steps):
    """A bulk without a gap: the largest Ritz value is far below σ_1, and nothing shows it."""
    matrices = [torch.randn(300, 300, dtype=torch.float64, generator=generator(seed)) for seed in range(6)]
    matrices += [torch.linspace(0, 1, 200, dtype=torch.float64).diag()]
    for m in matrices:
        exact, found = rank_summary(m, exact=True), estimate_spectrum(m, probes, steps)
        assert found.sigma_max.low <= exact.sigma_max <= found.sigma_max.high
        assert found.stable_rank.low <= exact.stable_rank <= found.stable_rank.high


# --- laws ------------------------------------------------------------------------------------------------


def test_only_the_gram_matrix_matters():
    """A permutation or rotation of the rows does not change MᵀM; a transpose is measured as its original."""
    m = head("plain", 150).dense(torch.float64)
    first = estimate_spectrum(m, probes=8, steps=6)
    assert same(first, estimate_spectrum(DenseMixing(m).mT, probes=8, steps=6))
    for other in (m.flip(0), rotation(150, 3) @ m):
        again = estimate_spectrum(other, probes=8, steps=6)
        for name in RANKS:
            for one, two in zip(getattr(first, name), getattr(again, name), strict=True):
                assert float(one) == pytest.approx(float(two), rel=1e-6, abs=1e-9)


@settings(max_examples=20)
@given(exponent=st.integers(-900, 900))
def test_a_power_of_two_changes_nothing_but_sigma(exponent):
    m = make("signed", (40, 30), seed=2)
    plain, scaled = (estimate_spectrum(x, probes=8, steps=4) for x in (m, m * 2.0**exponent))
    assert all(a.equal(b) for a, b in zip(plain.effective_rank, scaled.effective_rank, strict=True))
    assert all(a.equal(b) for a, b in zip(plain.stable_rank, scaled.stable_rank, strict=True))
    assert (plain.sigma_max.value * 2.0**exponent).equal(scaled.sigma_max.value)


def test_a_head_has_one_answer_alone_and_in_any_batch():
    q, k = torch.randn(2, 4, 60, 8, generator=generator(1)), torch.randn(2, 2, 60, 8, generator=generator(2))
    mask = torch.rand(2, 1, 60, 60, generator=generator(3)) > 0.2
    operator = SoftmaxMixing(q, k, mask=mask)
    together = estimate_spectrum(operator, probes=8, steps=6)
    assert together.effective_rank.value.shape == together.products.shape == (2, 4)
    for sequence in range(2):
        for index in range(4):
            alone = estimate_spectrum(operator[sequence, index], probes=8, steps=6)
            for name in RANKS:
                for one, other in zip(getattr(together, name), getattr(alone, name), strict=True):
                    assert one[sequence, index] == other


def test_the_seed_decides_and_torch_is_left_alone():
    operator = head("plain", 120)
    state = torch.get_rng_state()
    first = estimate_spectrum(operator, probes=8, steps=4, seed=7)
    assert torch.get_rng_state().equal(state)
    torch.manual_seed(123)
    assert same(first, estimate_spectrum(operator, probes=8, steps=4, seed=7))
    assert not same(first, estimate_spectrum(operator, probes=8, steps=4, seed=8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_queries_of_any_precision_are_not_rounded(dtype):
    q, k = normal(2, 90, 8).to(dtype)
    assert same(
        estimate_spectrum(SoftmaxMixing(q, k), probes=8, steps=4),
        estimate_spectrum(SoftmaxMixing(q.double(), k.double()), probes=8, steps=4),
    )


# --- products and memory ---------------------------------------------------------------------------------


def test_no_tensor_is_as_large_as_the_matrix(monkeypatch):
    """Nothing is larger than the Krylov basis, 1,500·64 numbers; the matrix has 2,250,000."""
    monkeypatch.setitem(krylov.BLOCK_ENTRIES, "cpu", 30_000)
    operator = head("plain", 1500)
    assert 0 < largest_tensor(lambda: estimate_spectrum(operator, probes=8, steps=8).count(0.1)) <= 1500 * 64
    assert largest_tensor(operator.dense) == 1500 * 1500  # the watch itself works


class CountedRows(SoftmaxMixing):
    """Softmax attention that counts the rows it computes."""

    computed = 0

    def rows(self, start, stop):
        CountedRows.computed += stop - start
        return super().rows(start, stop)


@pytest.mark.parametrize(("kept", "passes"), [(2**31, 1), (0, 7)])
def test_kept_rows_change_the_spectrum_by_their_rounding_alone(kept, passes, monkeypatch):
    """Float32 rows equal rows of M + E, ‖E‖_F ≤ 2⁻²⁴ ‖M‖_F; without room, each step computes rows again."""
    monkeypatch.setattr(krylov, "KEPT_BYTES", kept)
    q, k = 2 * normal(2, 90, 8, seed=1)
    CountedRows.computed = 0
    spectrum = estimate_spectrum(CountedRows(q, k, is_causal=True), probes=8, steps=6)
    assert CountedRows.computed == passes * 90
    matrix = SoftmaxMixing(q, k, is_causal=True).dense(torch.float64)
    plain, bound = estimate_spectrum(matrix, probes=8, steps=6), 2**-24 * float(matrix.norm())
    assert abs(spectrum.sigma_max.value - plain.sigma_max.value) <= bound * (passes == 1) + 1e-12
    for name in RANKS:
        rounded, exact = getattr(spectrum, name), getattr(plain, name)
        assert rounded.low <= exact.value <= rounded.high


@pytest.mark.parametrize("side", [-1, 1])
def test_the_rounding_of_kept_rows_is_in_the_interval_of_a_count(side):
    """Means of 3 tokens have σ = 1, a hundred times; 1/3 in float32 makes it 1 + 3e-8."""
    document = torch.arange(300) // 3
    operator = SoftmaxMixing(torch.zeros(300, 4), torch.zeros(300, 4), document[:, None] == document)
    count = estimate_spectrum(operator, probes=8, steps=4).count(1 + side * 1e-8)
    assert count.low <= (0 if side == 1 else 100) <= count.high


def test_other_kinds_are_applied_by_their_own_products():
    matrix = head("decay", 130).dense()
    operator = OnlyProducts(matrix)
    spectrum = estimate_spectrum(operator, probes=8, steps=6)
    assert operator.rows_read == 130
    assert operator.columns_applied == int(spectrum.products) == 2 * 8 * 6
    dense = estimate_spectrum(matrix, probes=8, steps=6)
    for name in RANKS:
        assert float(getattr(spectrum, name).value) == pytest.approx(
            float(getattr(dense, name).value), rel=1e-9
        )


@pytest.mark.parametrize(
    "kind", ["diagonal", "toeplitz, causal", "linear, causal, normalized", "semiseparable"]
)
def test_linear_time_operators_are_measured_as_their_matrices(kind):
    """In float64 both ways, of float32 parts; 48 products of a few hundred roundings each."""
    operator = LINEAR_TIME[kind].make(1, 1, 90, 90, 5)[0, 0].to(torch.float32)
    spectrum = estimate_spectrum(operator, probes=8, steps=6)
    dense = estimate_spectrum(operator.dense(torch.float64), probes=8, steps=6)
    for name in RANKS:
        for one, other in zip(getattr(spectrum, name), getattr(dense, name), strict=True):
            assert float(one) == pytest.approx(float(other), rel=1e-6, abs=1e-9)


def test_products_are_never_more_than_promised_and_fewer_for_low_rank():
    assert int(estimate_spectrum(head("plain", 100), probes=8, steps=6).products) == 96
    assert int(estimate_spectrum(torch.ones(100, 100), probes=8, steps=6).products) < 96
    assert int(estimate_spectrum(torch.eye(10), probes=8, steps=6).products) == 20


def test_no_graph_is_built():
    matrix = torch.rand(60, 60, requires_grad=True)
    assert not estimate_spectrum(matrix, probes=8, steps=4).effective_rank.value.requires_grad


# --- counts ----------------------------------------------------------------------------------------------

DELTAS = (0.5, 0.1, 0.03, 0.01, 0.001)


def true_count(operator, delta):
    return int((singular_values(operator) >= delta).sum())


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kind=st.sampled_from(["signed", "stochastic", "causal", "low rank", "sparse"]),
    seed=st.integers(0, 2**31),
    delta=st.floats(1e-3, 3),
)
def test_where_the_space_is_whole_the_count_is_exact(shape, kind, seed, delta):
    if kind == "causal":
        shape = (max(shape),) * 2
    m = make(kind, shape, seed)
    sigma = singular_values(m)
    count = estimate_spectrum(m, probes=8, steps=8).count(delta)
    # MᵀM in float64 tells σ² from δ² down to 64 ε ‖M‖_F².
    unsure = ((sigma**2 - delta**2).abs() <= 1e-13 * m.square().sum()).sum()
    truth = (sigma >= delta).sum()
    assert count.low <= truth <= count.high
    assert count.high - count.low <= unsure
    assert abs(count.value - truth) <= unsure


@pytest.mark.parametrize("kind", KINDS)
def test_energy_bounds_the_count_for_certain(kind):
    operator = head(kind, 120)
    sigma = singular_values(operator)
    for seed in range(4):
        known = estimate_spectrum(operator, probes=8, steps=5, seed=seed)._matrices[0]
        counter = EigenvalueCounter(known.estimator, known.steps)
        for delta in DELTAS:
            fewest, most = counter.by_energy((delta / known.scale) ** 2)
            assert fewest <= int((sigma >= delta).sum()) <= most


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_intervals_hold_the_count(kind):
    """95 % nominal: of 12 seeds at most 3 may miss, which chance exceeds in 0.2 % of kinds."""
    operator = head(kind, 150)
    sigma = singular_values(operator)
    runs = [estimate_spectrum(operator, probes=8, steps=10, seed=seed) for seed in range(12)]
    for delta in DELTAS:
        truth = int((sigma >= delta).sum())
        counts = [run.count(delta) for run in runs]
        assert sum(not bool(c.low <= truth <= c.high) for c in counts) <= 3
        assert all(0 <= c.low <= c.high <= 150 for c in counts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_count_is_a_number_if_and_only_if_quadrature_leaves_little_open(kind):
    """At 16 probes chance is at most √(2/16)·√200 per count: 5 + 3·2.15 around the truth covers both."""
    operator = head(kind, 200)
    spectrum = estimate_spectrum(operator, probes=16, steps=8)
    for delta in DELTAS:
        count, truth = spectrum.count(delta), true_count(operator, delta)
        assert bool(count.value.isnan()) == bool(count.stderr.isnan())
        if count.value.isnan():
            assert count.high - count.low > 2 * SHARP * count.low
        else:
            assert count.low <= count.value <= count.high
            assert abs(count.value - truth) <= 2 * SHARP * truth + 15


def test_strong_directions_are_counted_exactly():
    matrix = normal(300, 20, seed=1) @ normal(20, 300, seed=2) / 300 + 1e-7 * normal(300, 300, seed=3)
    count = estimate_spectrum(matrix, probes=8, steps=12).count(1e-3)
    assert count.value == count.low == count.high == 20


@pytest.mark.parametrize(("delta", "low", "high"), [(1e200, 0, 0), (1e3, 0, 0), (1e-200, 100, 100)])
def test_far_from_the_spectrum(delta, low, high):
    """A full-rank matrix of σ in [1/2, 2], all of it in the space."""
    matrix = torch.linspace(0.5, 2, 100).double().diag()[torch.randperm(100, generator=generator(1))]
    count = estimate_spectrum(matrix).count(delta)
    assert (count.low, count.value, count.high) == (low, (low + high) / 2, high)


# --- edges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_matrix_that_is_not_finite_has_nan_and_the_others_do_not_change(bad):
    matrices = make("stochastic", (2, 2, 30, 30), seed=5)
    clean = estimate_spectrum(matrices, probes=8, steps=4)
    matrices[1, 0, 3, 4] = bad
    spoilt = estimate_spectrum(matrices, probes=8, steps=4)
    for name in RANKS:
        for one, other in zip(getattr(clean, name), getattr(spoilt, name), strict=True):
            assert other[1, 0].isnan()
            assert one[0].equal(other[0])
            assert one[1, 1].equal(other[1, 1])
    assert spoilt.products[1, 0] == 0


@pytest.mark.parametrize("shape", [(3, 3), (50, 50), (1, 40), (40, 1)])
def test_zero_has_rank_zero(shape):
    spectrum = estimate_spectrum(torch.zeros(shape), probes=8, steps=4)
    for name in RANKS:
        assert [float(x) for x in getattr(spectrum, name)] == [0, 0, 0, 0]


@pytest.mark.parametrize("shape", [(1, 1), (1, 60), (60, 1), (3, 200), (200, 3)])
def test_thin_matrices_are_exact(shape):
    m = normal(*shape, seed=3)
    exact, spectrum = rank_summary(m), estimate_spectrum(m, probes=8, steps=4)
    assert float(spectrum.effective_rank.value) == pytest.approx(float(exact.effective_rank), rel=1e-4)
    assert float(spectrum.stable_rank.value) == pytest.approx(float(exact.stable_rank), rel=1e-9)


@pytest.mark.parametrize("batch", [(0,), (2, 0), (0, 3)])
def test_a_batch_may_be_empty(batch):
    spectrum = estimate_spectrum(torch.zeros(*batch, 4, 5))
    assert spectrum.effective_rank.value.shape == spectrum.count(0.1).low.shape == batch


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        *(
            ({"probes": probes}, "`probes`: expected a whole number of at least 8")
            for probes in (-2, 0, 2, 6)
        ),
        ({"probes": 9}, "`probes`: expected an even number, got 9"),
        *(({"steps": few}, "`steps`: expected a whole number of at least 4") for few in (-1, 0, 1, 3)),
        ({"op": torch.ones(3)}, r"`estimate_spectrum`: expected .*\(\.\.\., T, S\).* got \(3,\)"),
        ({"op": torch.ones(2, 0, 3)}, r"`estimate_spectrum`: expected .* got \(2, 0, 3\)"),
        ({"op": [[1.0]]}, "`estimate_spectrum`: expected .* got list"),
        ({"op": 1.0}, "`estimate_spectrum`: expected .* got float"),
        ({"op": torch.ones(2, 2, dtype=torch.complex64)}, "expected real numbers, got torch.complex64"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(wrong, match):
    with unchecked(), pytest.raises(RankwiseError, match=match):
        estimate_spectrum(**({"op": torch.eye(3)} | wrong))


@pytest.mark.parametrize("delta", [0.0, -1.0, math.nan, math.inf])
def test_a_threshold_must_be_positive(delta):
    with pytest.raises(RankwiseError, match=r"`delta`: expected a number in \(0, ∞\)"):
        estimate_spectrum(torch.eye(3)).count(delta)
