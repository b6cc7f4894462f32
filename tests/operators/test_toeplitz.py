"""ToeplitzMixing: lags, the error of the Fourier transform, and kernels of state spaces."""

import pytest
import torch
from tests.operators.linear_time_cases import toeplitz_by_hand
from tests.operators.mixing_laws import check, normal, uniform

from rankwise.operators.toeplitz import ToeplitzMixing


def test_kernels_that_decay_or_grow():
    """The documented error: it follows the norms, not the entry."""
    kernel = torch.cat([torch.tensor([1e6]), torch.full((99,), 1e-9)]).double()
    check(ToeplitzMixing(kernel), toeplitz_by_hand)


# --- from a state space ---


def system(heads=3, states=4, seed=0):
    a = torch.complex(-uniform(heads, states, seed=seed) - 0.1, normal(heads, states, seed=seed + 1))
    b, c = (
        torch.complex(normal(heads, states, seed=seed + i), normal(heads, states, seed=seed + i + 1))
        for i in (2, 4)
    )
    return a, b, c, uniform(heads, seed=seed + 6) + 0.01


def recurrence(a, b, c, step, inputs):
    """x' = a x + b u with u held between tokens, solved exactly from token to token."""
    decay = (a * step[:, None]).exp()
    state, outputs = torch.zeros_like(a), []
    for u in inputs.unbind(-1):
        state = decay * state + (decay - 1) / a * b * u[:, None]
        outputs.append((c * state).sum(-1).real)
    return torch.stack(outputs, dim=-1)


@pytest.mark.parametrize("conjugates", [False, True])
def test_a_state_space_is_its_recurrence(conjugates):
    a, b, c, step = system()
    inputs = normal(3, 30, seed=9)
    wanted = recurrence(a, b, c, step, inputs) * (2 if conjugates else 1)
    operator = ToeplitzMixing.from_ssm(a, b, c, step, 30, conjugates)
    # 30 · 4 terms of size ≤ 10, each a few roundings; exp(l·a) is off by l roundings of its exponent
    torch.testing.assert_close((operator @ inputs[..., None])[..., 0], wanted, rtol=0, atol=1e-11)


def test_a_state_that_does_not_decay_is_a_running_sum():
    one = torch.ones(2, 1, dtype=torch.float64)
    step = torch.tensor([0.5, 2.0], dtype=torch.float64)
    operator = ToeplitzMixing.from_ssm(torch.zeros_like(one), one, one, step, 4)
    assert torch.equal(operator.dense(), step[:, None, None] * torch.ones(4, 4, dtype=torch.float64).tril())
