"""SemiseparableMixing: the laws of every operator, groups of heads, and decays of every size."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixing_laws import (
    check_matrix,
    check_products,
    normal,
    odd_sizes,
    products,
    uniform,
)

from rankwise.operators.semiseparable import SemiseparableMixing

EXTREME = [0.0, -1e-30, -1e-9, -0.7, -40.0, -800.0, -1e30, -math.inf]


def by_hand(c, b, log_decay, step=None, absolute=False):
    """Row by row, a state for each column, as the recurrence has it; from |c|, |b|, |step| for the sizes."""
    c, b, a = c.double(), b.double(), log_decay.double().exp()
    step = torch.ones_like(a) if step is None else step.double()
    if absolute:
        c, b, step = c.abs(), b.abs(), step.abs()
    if c.ndim > 2:
        c, b = (x.repeat_interleave(a.shape[-2] // c.shape[-3], -3) for x in (c, b))
    tokens = a.shape[-1]
    matrix = torch.zeros(*a.shape, tokens, dtype=torch.float64)
    state = torch.zeros(*a.shape, b.shape[-1], dtype=torch.float64)
    for t in range(tokens):
        state = a[..., t, None, None] * state
        state[..., t, :] = b[..., t, :] * step[..., t, None]
        matrix[..., t, :] = (c[..., t, None, :] * state).sum(-1)
    return matrix


def terms(c):
    """Roundings behind one entry: N products and step, T values summed, a decay from a sum of T logs.

    The sum of logs L is off by T·u·|L|, its exponential by T·u·|L|·e^L, at most T·u: that is relative to
    products that have not decayed, so `magnitude` is taken without decay.
    """
    tokens, width = c.shape[-2:]
    return width + 2 * tokens + 2


def magnitude(c, b, log_decay, step):
    return by_hand(c, b, torch.zeros_like(log_decay), step, absolute=True)


def check(c, b, log_decay, step=None, dtype=torch.float64):
    op, exact = SemiseparableMixing(c, b, log_decay, step), by_hand(c, b, log_decay, step)
    size = magnitude(c, b, log_decay, step)
    rounding = 2 * terms(c) * torch.finfo(dtype).eps * size
    check_matrix(op, exact, rounding, torch.ones(exact.shape[-2:], dtype=torch.bool).tril())
    check_products(op, exact, products(size, terms(c), dtype))


def inputs(tokens, heads=(2, 4), groups=(2, 2), width=3, seed=0, dtype=torch.float64):
    c, b = (normal(*groups, tokens, width, seed=seed + i, dtype=dtype) for i in range(2))
    return (
        c,
        b,
        -normal(*heads, tokens, seed=seed + 2, dtype=dtype).abs(),
        uniform(*heads, tokens, seed=seed + 3, dtype=dtype),
    )


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", odd_sizes())
def test_it_is_the_matrix_formed_by_hand(tokens, dtype, stepped):
    *rest, step = inputs(tokens, dtype=dtype)
    check(*rest, step if stepped else None, dtype)


@pytest.mark.parametrize(
    ("heads", "groups"), [((), ()), ((3,), (1,)), ((4,), (4,)), ((2, 4), (2, 1)), ((2, 3, 4), (2, 3, 2))]
)
@settings(max_examples=25)
@given(tokens=st.integers(1, 9), width=st.integers(1, 4), seed=st.integers(0, 9))
def test_any_small_size_and_grouping(heads, groups, tokens, width, seed):
    check(*inputs(tokens, heads, groups, width, seed))


@settings(max_examples=25)
@given(tokens=st.integers(1, 12), seed=st.integers(0, 99))
def test_decays_of_every_size(tokens, seed):
    c, b, _, step = inputs(tokens, seed=seed)
    picks = torch.randint(len(EXTREME), (2, 4, tokens), generator=torch.Generator().manual_seed(seed))
    check(c, b, torch.tensor(EXTREME, dtype=torch.float64)[picks], step)


@pytest.mark.parametrize("a", EXTREME)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_decay_over_several_chunks(a, dtype):
    c, b, decay, step = inputs(200, (2,), (1,), dtype=dtype)
    check(c, b, torch.full_like(decay, a), step, dtype)


def test_a_of_one_is_linear_attention_and_a_of_zero_is_diagonal():
    c, b, decay, _ = inputs(90, (2,), (1,))
    products_of = c @ b.mT
    one = SemiseparableMixing(c, b, torch.zeros_like(decay)).dense()
    torch.testing.assert_close(one, products_of.tril().expand(2, -1, -1), rtol=1e-12, atol=1e-13)
    none = SemiseparableMixing(c, b, torch.full_like(decay, -math.inf)).dense()
    assert torch.equal(none != 0, torch.eye(90, dtype=torch.bool).expand(2, -1, -1))


def test_gradients_through_extreme_decays():
    given = [x.requires_grad_() for x in inputs(150)]
    with torch.no_grad():
        given[2][..., ::40] = -math.inf
        given[2][..., 1::40] = -1e30
        given[2][..., 2::40] = 0
    op, v, weight = SemiseparableMixing(*given), normal(2, 4, 150, 2), normal(2, 4, 150, 2, seed=1)
    for fast, slow in (
        (op @ v, op.dense() @ v),
        (op.apply_transposed(v), op.dense().mT @ v),
    ):
        ours = torch.autograd.grad((fast * weight).sum(), given, retain_graph=True)
        theirs = torch.autograd.grad((slow * weight).sum(), given, retain_graph=True)
        for one, other in zip(ours, theirs, strict=True):
            assert one.isfinite().all()
            # sums of some 150² terms of size 1 in another order: 1e4 roundings of 1e-16
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_groups_stay_grouped_while_all_heads_are_kept():
    op = SemiseparableMixing(*inputs(5))
    for index in (0, slice(0, 1), (slice(None),)):
        assert op[index].c.shape[-3] == 2
        assert op[index].c.untyped_storage().data_ptr() == op.c.untyped_storage().data_ptr()
    assert op[:, 1:3].c.shape[-3] == 2
    assert op[:, 0:4].heads_per_group == 1


def test_blocks_below_the_diagonal_have_rank_at_most_n():
    op = SemiseparableMixing(*inputs(40, (), (), width=2)[:3])
    sigma = torch.linalg.svdvals(op.dense()[20:, :20])
    assert sigma[2] < 1e-14 * max(1.0, sigma[0].item())
    assert torch.linalg.svdvals(op.dense())[10] > 1e-3
