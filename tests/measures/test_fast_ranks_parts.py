"""The pieces of the fast ranks: Gram matrices, what is known of a factorisation, batches in parts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.measures.measure_cases import close, make, matrices, normal

import rankwise.measures.dense_spectrum as parts
from rankwise.measures import numerical_rank, rank_summary, singular_values
from rankwise.measures.dense_spectrum import (
    _growth,
    _inverse_norm,
    gram_spectrum,
    in_range,
    inertia_count,
    lower_gram,
    measured_in_parts,
)
from rankwise.operators import DenseMixing, SoftmaxMixing

# --- Gram matrices ---------------------------------------------------------------------------------------


def banded(rows, columns, reach):
    """Entries up to ``reach`` columns right of the diagonal, as masks leave them."""
    return normal(3, rows, columns, seed=1).tril(reach)


@pytest.mark.parametrize("reach", [-50, -3, 0, 4, 50])
@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (30, 30), (30, 41), (8, 9)], ids=str)
def test_the_lower_half_is_that_of_the_product(shape, reach):
    m = banded(*shape, reach)
    close(lower_gram(m).tril(), (m @ m.mT).tril(), rtol=0, atol=1e-13)


def test_a_matrix_that_reaches_further_than_the_others_of_its_batch():
    m = banded(20, 20, 0)
    m[2, 0, 19] = 5
    close(lower_gram(m).tril(), (m @ m.mT).tril(), rtol=0, atol=1e-13)


def test_a_negative_entry_reaches_as_far_as_a_positive():
    m = torch.zeros(1, 20, 20, dtype=torch.float64)
    m[0, 0, 19] = -1
    assert lower_gram(m)[0, 0, 0] == 1


def test_what_is_above_the_diagonal_is_not_read(monkeypatch):
    m = normal(2, 20, 20)
    gram = lower_gram(m)
    poison = torch.full_like(gram, math.nan).triu(1) + gram.tril()
    poison = poison.mT.contiguous().mT
    count, certain = inertia_count(m, 1.0)
    spectrum = gram_spectrum(m)
    monkeypatch.setattr("rankwise.measures.dense_spectrum.lower_gram", lambda wide: poison)
    for part, clean in zip(gram_spectrum(m), spectrum, strict=True):
        close(part, clean, rtol=0, atol=0)
    again, still = inertia_count(m, 1.0)
    assert again.equal(count)
    assert still.equal(certain)
    assert certain.all()


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5)], ids=str)
def test_the_shorter_side_comes_first(shape):
    assert lower_gram(normal(2, *shape)).shape == (2, min(shape), min(shape))
    assert gram_spectrum(normal(2, *shape)).eigenvalues.shape == (2, min(shape))


def test_a_large_entry_below_zero_is_scaled_too():
    wide, scale = in_range(-(2.0**600) * torch.rand(1, 4, 4, dtype=torch.float64))
    assert scale > 2.0**590
    assert wide.abs().max() < 2


@pytest.mark.parametrize("power", [-1022, -300, -90, 0, 90, 300, 1000])
def test_a_power_of_two_is_taken_out_where_squares_would_leave_the_range(power):
    m = normal(1, 4, 4) * 2.0**power
    wide, scale = in_range(m)
    assert (wide * scale[:, None, None]).equal(m)
    assert (scale == 1).item() == (abs(power) < 100)
    assert 2.0**-100 < wide.abs().max() < 2.0**101
    assert math.frexp(scale.item())[0] == 0.5


# --- factorisations --------------------------------------------------------------------------------------


def indefinite(seed, size):
    """Symmetric, with zeros on the diagonal, so that both sizes of pivots come up."""
    m = normal(2, size, size, seed=seed)
    m = m + m.mT
    m[:, ::2] *= 1e-3
    m[:, :, ::2] *= 1e-3
    m.diagonal(dim1=-2, dim2=-1)[:, : size // 2] = 0
    return m


def slow_growth(factor, pivots):
    """Σ_ij |d_ij|‖l_i‖‖l_j‖ block by block."""
    size, total, at = len(factor), 0.0, 0
    while at < size:
        width = 2 if pivots[at] < 0 else 1
        lengths = [math.sqrt(1 + factor[at + width :, at + j].square().sum()) for j in range(width)]
        for i in range(width):
            for j in range(width):
                entry = factor[at + max(i, j), at + min(i, j)].abs().item()
                total += entry * lengths[i] * lengths[j]
        at += width
    return total


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [2, 3, 10, 31])
def test_growth_is_summed_over_blocks(size, seed):
    factor, pivots, _ = torch.linalg.ldl_factor_ex(indefinite(seed, size))
    assert size < 10 or 0 < (pivots < 0).sum() < pivots.numel()
    wanted = [slow_growth(f, p) for f, p in zip(factor, pivots, strict=True)]
    got = _growth(factor.clone(), pivots < 0)
    close(got, wanted, rtol=1e-12)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("size", [1, 2, 10, 40])
def test_the_inverse_is_never_underrated(size, seed):
    m = indefinite(seed, size) if size > 1 else normal(2, 1, 1, seed=seed)
    factor, pivots, _ = torch.linalg.ldl_factor_ex(m)
    true = 1 / torch.linalg.eigvalsh(m).abs().amin(-1)
    got = _inverse_norm(factor, pivots)
    # the largest of 16 normal vectors of n numbers is shorter than 4 + √n but for 1e-6
    assert (got >= true * (1 - 1e-6)).all()
    assert (got <= 8 * (4 + math.sqrt(size)) * true).all()


@given(m=matrices(batch=(4,)), delta=st.floats(1e-3, 3))
def test_pivots_of_both_sizes_are_counted(m, delta):
    """Rows of length δ leave zeros on the diagonal of M Mᵀ − δ²I."""
    m = delta * torch.nn.functional.normalize(m, dim=-1)
    count, certain = inertia_count(m, delta)
    wanted = (torch.linalg.svdvals(m) >= delta).sum(-1).double()
    assert count[certain].equal(wanted[certain])


def test_zeros_on_the_diagonal_do_not_make_a_count_unsure():
    m = torch.nn.functional.normalize(normal(20, 30, 30, seed=3), dim=-1)
    count, certain = inertia_count(m, 1.0)
    assert certain.all()
    assert count.equal((torch.linalg.svdvals(m) >= 1).sum(-1).double())


def test_a_delta_far_beyond_the_matrix_is_decided():
    for scale, delta in ((1e-300, 1e300), (1.0, 1e200), (1e-3, 1e3)):
        count, certain = inertia_count(scale * normal(3, 10, 10), delta)
        assert certain.all()
        assert count.tolist() == [0, 0, 0]


def test_a_factor_that_grows_makes_a_count_unsure(monkeypatch):
    m = normal(3, 10, 10)
    assert inertia_count(m, 1.0)[1].all()
    monkeypatch.setattr(
        "rankwise.measures.dense_spectrum._growth", lambda factor, paired: factor[:, 0, 0].abs() + 1e14
    )
    assert not inertia_count(m, 1.0)[1].any()


# --- batches in parts ------------------------------------------------------------------------------------


def seen_by(mixing):
    """How many matrices a measure is given at a time."""
    sizes = []

    def measure(matrices):
        sizes.append(len(matrices))
        return matrices.sum((-2, -1)), matrices[:, 0]

    total, row = measured_in_parts(mixing, "`seen`", measure)
    return sizes, total, row


@pytest.mark.parametrize("batch", [(), (7,), (2, 3), (3, 1, 2), (0,), (0, 4), (4, 0)], ids=str)
def test_parts_are_joined_in_order(batch, monkeypatch):
    m = normal(*batch, 3, 5)
    wanted = m.sum((-2, -1)), m[..., 0, :]
    for matrices_at_once in (1, 2, 100):
        monkeypatch.setitem(parts.PART_BYTES, "cpu", matrices_at_once * 8 * 15)
        sizes, total, row = seen_by(m)
        assert max(sizes) <= matrices_at_once
        close(total, wanted[0], rtol=0, atol=1e-14)
        assert row.equal(wanted[1])
        assert row.shape == (*batch, 5)


def test_an_operator_is_formed_a_few_sequences_at_a_time(monkeypatch):
    formed = []

    class Watched(DenseMixing):
        def rows(self, start, stop):
            formed.append(self.shape[0])
            return super().rows(start, stop)

        def __getitem__(self, index):
            return Watched(super().__getitem__(index).rows(0, self.shape[-2]))

    m = make("stochastic", (5, 2, 4, 4), seed=1)
    monkeypatch.setitem(parts.PART_BYTES, "cpu", 2 * 2 * 8 * 16)
    sizes, total, _ = seen_by(Watched(m))
    assert max(formed) == 2
    assert sizes == [4, 4, 2]
    close(total, m.sum((-2, -1)), rtol=1e-14)


def test_parts_do_not_change_an_answer(monkeypatch):
    q, k = normal(3, 4, 110, 8, seed=5), normal(3, 2, 110, 8, seed=6)
    op = SoftmaxMixing(3 * q, k, is_causal=True)
    whole = [singular_values(op), numerical_rank(op), *rank_summary(op)]
    monkeypatch.setitem(parts.PART_BYTES, "cpu", 1)
    for one, other in zip([singular_values(op), numerical_rank(op), *rank_summary(op)], whole, strict=True):
        close(one, other, rtol=1e-9, atol=1e-9)


def test_an_input_that_is_not_finite_is_left_as_it_was():
    m = normal(3, 4, 4)
    m[1, 2, 3] = math.nan
    before = m.clone()
    _, total, row = seen_by(m)
    torch.testing.assert_close(m, before, rtol=0, atol=0, equal_nan=True)
    assert total.isnan().tolist() == [False, True, False]
    assert row.isnan().all(-1).tolist() == [False, True, False]
