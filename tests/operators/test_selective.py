"""SelectiveMixing: rates and steps of every size, shared channels, and the memory of its scan."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.linear_time_cases import selective_by_hand
from tests.operators.mixing_laws import check, largest_tensor, normal, uniform

from rankwise.operators import SemiseparableMixing
from rankwise.operators.selective import SelectiveMixing, selective_scan

RATES = [0.0, -1e-30, -1e-9, -0.7, -40.0, -800.0, -1e30]
STEPS = [0.0, 1e-30, 1e-9, 0.1, 3.0, 1e3]


def inputs(tokens, channels=(2, 4), width=3, seed=0, dtype=torch.float64):
    lead = (*channels[:-1], 1)
    c, b = (normal(*lead, tokens, width, seed=seed + i, dtype=dtype) for i in range(2))
    rate = -normal(*channels[-1:], width, seed=seed + 2, dtype=dtype).abs()
    return c, b, rate, uniform(*channels, tokens, seed=seed + 3, dtype=dtype)


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
    check(SelectiveMixing(c, b, rate, step), selective_by_hand)


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
        assert op[index].c.shape[-3] == 1
    assert op[torch.tensor([0, 1]), torch.tensor([2, 2])].c.shape == (2, 5, 3)
    assert op[1, 3].c.shape == (5, 3)
    assert op[:, :0].shape == (2, 0, 5, 5)


def test_a_scan_holds_no_more_states_than_allowed():
    tokens, channels, width = 1500, 64, 8
    op, v = SelectiveMixing(*inputs(tokens, (channels,), width=width)), normal(channels, tokens, 1)
    numbers = 1 << 14
    c, b, rate, step = op.c, op.b, op.rate, op.step
    assert largest_tensor(lambda: selective_scan(c, b, rate, step, v, numbers)) <= channels * tokens
