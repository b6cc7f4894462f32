"""SelectiveMixing: the laws of every operator, one matrix for each channel, and no large tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixing_laws import (
    check_matrix,
    check_products,
    largest_tensor,
    normal,
    odd_sizes,
    products,
    uniform,
)

from rankwise.operators.selective import SelectiveMixing, selective_scan
from rankwise.operators.semiseparable import SemiseparableMixing

RATES = [0.0, -1e-30, -1e-9, -0.7, -40.0, -800.0, -1e30]
STEPS = [0.0, 1e-30, 1e-9, 0.1, 3.0, 1e3]


def by_hand(c, b, rate, step, absolute=False):
    """Row by row, a state for each column, as the recurrence has it; from |c| and |b| for the sizes."""
    c, b, rate, step = (tensor.double() for tensor in (c, b, rate, step))
    if absolute:
        c, b, rate = c.abs(), b.abs(), torch.zeros_like(rate)
    tokens = step.shape[-1]
    matrix = torch.zeros(*step.shape, tokens, dtype=torch.float64)
    state = torch.zeros(*step.shape, b.shape[-1], dtype=torch.float64)
    for t in range(tokens):
        state = (rate * step[..., t, None]).exp()[..., None, :] * state
        state[..., t, :] = b[..., t, :] * step[..., t, None]
        matrix[..., t, :] = (c[..., t, None, :] * state).sum(-1)
    return matrix


def terms(c):
    """Roundings behind one entry: N products and step, T values summed, a decay from a sum of T steps.

    A sum of steps L is off by T·u·L, its exponential by T·u·|rate·L|·e^(rate·L), at most T·u: relative
    to products that have not decayed, so sizes are taken without decay. As a product of T factors it is off
    by 2T·u.
    """
    tokens, width = c.shape[-2:]
    return width + 4 * tokens + 4


def check(c, b, rate, step, dtype=torch.float64):
    op, exact = SelectiveMixing(c, b, rate, step), by_hand(c, b, rate, step)
    size = by_hand(c, b, rate, step, absolute=True)
    rounding = 2 * terms(c) * torch.finfo(dtype).eps * size
    check_matrix(op, exact, rounding, torch.ones(exact.shape[-2:], dtype=torch.bool).tril())
    check_products(op, exact, products(size, terms(c), dtype))


def inputs(tokens, channels=(2, 4), shared=True, width=3, seed=0, dtype=torch.float64):
    lead = (*channels[:-1], 1) if shared and channels else channels
    c, b = (normal(*lead, tokens, width, seed=seed + i, dtype=dtype) for i in range(2))
    rate = -normal(*channels[-1:], width, seed=seed + 2, dtype=dtype).abs()
    return c, b, rate, uniform(*channels, tokens, seed=seed + 3, dtype=dtype)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", odd_sizes())
def test_it_is_the_matrix_formed_by_hand(tokens, dtype, shared):
    check(*inputs(tokens, shared=shared, dtype=dtype), dtype)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("channels", [(), (3,), (2, 4), (2, 3, 2)], ids=str)
@settings(max_examples=10)
@given(tokens=st.integers(1, 9), width=st.integers(1, 4), seed=st.integers(0, 9))
def test_any_small_size(channels, shared, tokens, width, seed):
    check(*inputs(tokens, channels, shared, width, seed))


@settings(max_examples=20)
@given(tokens=st.integers(1, 12), seed=st.integers(0, 99))
def test_decays_of_every_size(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    c, b, rate, step = inputs(tokens, seed=seed)
    rate = torch.tensor(RATES, dtype=torch.float64)[
        torch.randint(len(RATES), rate.shape, generator=generator)
    ]
    step = torch.tensor(STEPS, dtype=torch.float64)[
        torch.randint(len(STEPS), step.shape, generator=generator)
    ]
    check(c, b, rate, step)


def test_a_rate_for_each_sequence():
    c, b, _, step = inputs(7)
    check(c, b, -normal(2, 4, 3, seed=9).abs(), step)


@pytest.mark.parametrize("tokens", [80, 1100])
def test_one_decay_for_all_features_is_a_semiseparable_matrix(tokens):
    """Mamba-2 is Mamba with a scalar for A; longer ones are formed in blocks of rows."""
    c, b, rate, step = inputs(tokens, (1, 2), width=2)
    rate = rate[:, :1].expand(-1, 2)
    ours = SelectiveMixing(c, b, rate, step)
    theirs = SemiseparableMixing(c, b, rate[:, 0, None] * step, step)
    # entries of size ≤ 30, each off by 2·(N + 4T + 4) roundings on either side
    torch.testing.assert_close(ours.dense(), theirs.dense(), rtol=0, atol=1e-11)
    torch.testing.assert_close(ours.rows(30, tokens), theirs.rows(30, tokens), rtol=0, atol=1e-11)
    v = normal(1, 2, tokens, 2)
    torch.testing.assert_close(ours @ v, theirs @ v, rtol=0, atol=1e-10)


def test_a_step_of_zero_leaves_no_trace_of_its_token():
    c, b, rate, step = inputs(9)
    step[..., 4] = 0
    dense = SelectiveMixing(c, b, rate, step).dense()
    assert bool((dense[..., 4] == 0).all())
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    without = SelectiveMixing(c[..., others, :], b[..., others, :], rate, step[..., others]).dense()
    torch.testing.assert_close(dense[..., others, :][..., others], without, rtol=1e-13, atol=1e-14)


def test_how_many_states_are_held_at_once_changes_nothing():
    c, b, rate, step = inputs(50)
    v = normal(2, 4, 50, 3, seed=7)
    whole = selective_scan(c, b, rate, step, v)
    for numbers in (1, 200, 1000):
        torch.testing.assert_close(
            selective_scan(c, b, rate, step, v, numbers), whole, rtol=1e-13, atol=1e-13
        )


def test_gradients_at_a_rate_and_a_step_of_zero():
    c, b, rate, step = inputs(4, (2,), width=2)
    rate[0, 0] = step[1, 2] = 0
    given = [x.requires_grad_() for x in (c, b, rate, step)]
    op, weight = SelectiveMixing(*given), normal(2, 4, 4)
    ours = torch.autograd.grad((op.dense() * weight).sum(), given)
    eye = torch.eye(4, dtype=torch.float64)
    theirs = torch.autograd.grad(((op @ eye) * weight).sum(), given)
    for one, other in zip(ours, theirs, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_c_and_b_stay_shared_by_channels_of_one_sequence():
    op = SelectiveMixing(*inputs(5, (2, 4)))
    for index in (
        0,
        slice(0, 1),
        (slice(None), slice(0, 2)),
        (0, torch.tensor([3, 1])),
        (..., torch.tensor([0, 2])),
    ):
        picked = op[torch.tensor(index) if isinstance(index, list) else _tensors(index)]
        assert picked.c.shape[-3] == 1
    assert op[torch.tensor([0, 1]), torch.tensor([2, 2])].c.shape == (2, 5, 3)
    assert op[1, 3].c.shape == (5, 3)
    assert op[:, :0].shape == (2, 0, 5, 5)


def _tensors(index):
    if not isinstance(index, tuple):
        return index
    return tuple(torch.tensor(pick) if isinstance(pick, list) else pick for pick in index)


def test_neither_matrix_nor_state_by_token_is_formed():
    tokens, channels, width = 1500, 64, 8
    op, v = SelectiveMixing(*inputs(tokens, (channels,), width=width)), normal(channels, tokens, 1)
    numbers = 1 << 14
    c, b, rate, step = op.c, op.b, op.rate, op.step
    assert largest_tensor(lambda: selective_scan(c, b, rate, step, v, numbers)) <= channels * tokens
    for work in (lambda: op @ v, lambda: op.mT @ v):
        assert largest_tensor(work) <= 1 << 20  # D·N·T is 768,000: below STATES
    assert largest_tensor(lambda: op[:2].dense()) >= 2 * tokens * tokens


def test_an_infinite_sum_never_shows():
    """Steps near the top of float32 overflow their sum: the decay is 0 then, as it should be."""
    c, b, rate, _ = inputs(6, dtype=torch.float32)
    op = SelectiveMixing(c, b, rate, torch.full((2, 4, 6), 1e38))
    assert bool(op.dense().isfinite().all())
    assert bool((op.dense().tril(-1) == 0).all())
