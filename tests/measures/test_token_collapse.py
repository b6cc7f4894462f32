"""How alike tokens are: μ, its share, mean cosine, effective rank of states."""

import math
from fractions import Fraction
from itertools import permutations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.measures.measure_cases import close, normal, rotation, sum_tolerance, token_batches

from rankwise.measures import effective_rank, mean_cosine, state_effective_rank, token_norm, token_spread

seeds = st.integers(0, 2**31)
finite = st.floats(-100, 100)


def mu(tokens, mask=None):
    return token_spread(tokens, mask, normalized=False)


def tolerance(x):
    return sum_tolerance(x.shape[1] * x.shape[2])


def shuffled(x, seed):
    return x[:, torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))]


# --- μ ---------------------------------------------------------------------------------------------------


@given(x=token_batches())
def test_mu_against_its_definition(x):
    wanted = (x - x.mean(1, keepdim=True)).norm(dim=(1, 2))
    size = x.norm(dim=(1, 2))
    close(token_norm(x), size, rtol=tolerance(x))
    close(mu(x), wanted, rtol=0, atol=tolerance(x) * size.max().item())
    share = torch.where(size > 0, wanted / size, 0)
    close(token_spread(x), share, rtol=0, atol=tolerance(x))


@given(x=token_batches(), seed=seeds)
def test_order_and_rotation_do_not_matter(x, seed):
    turned = shuffled(x, seed) @ rotation(x.shape[2], seed)
    atol = tolerance(x) * (1 + x.norm().item())
    close(mu(turned), mu(x), rtol=0, atol=atol)
    close(token_spread(turned), token_spread(x), rtol=0, atol=tolerance(x))


@given(x=token_batches(), shift=st.lists(finite, min_size=9, max_size=9))
def test_mu_does_not_see_a_shift_of_all_tokens(x, shift):
    shift = torch.tensor(shift[: x.shape[2]], dtype=torch.float64)
    # the sum itself rounds every entry to its own size
    close(mu(x + shift), mu(x), rtol=0, atol=tolerance(x) * (x.norm() + shift.norm()).item())


@given(x=token_batches(), factor=st.floats(1e-3, 1e3), sign=st.sampled_from([-1, 1]))
def test_mu_grows_with_the_scale_and_its_share_does_not(x, factor, sign):
    size = token_norm(x)  # the product itself rounds every entry to its own size
    close(mu(sign * factor * x), factor * mu(x), rtol=0, atol=tolerance(x) * factor * size.max().item())
    close(token_spread(sign * factor * x), token_spread(x), rtol=0, atol=tolerance(x))
    close(token_norm(sign * factor * x), factor * size, rtol=tolerance(x))


@given(x=token_batches(), seed=seeds)
def test_mu_obeys_the_triangle(x, seed):
    y = normal(*x.shape, seed=seed)
    assert (mu(x + y) <= (mu(x) + mu(y)) * (1 + tolerance(x)) + tolerance(x)).all()


@given(token=st.lists(finite, min_size=1, max_size=5), count=st.integers(1, 9))
def test_mu_of_equal_tokens_is_exactly_zero(token, count):
    x = torch.tensor([[token] * count], dtype=torch.float64)
    assert mu(x) == 0
    assert token_spread(x) == 0


@given(x=token_batches(min_tokens=2), at=st.data())
def test_mu_is_positive_once_a_token_differs(x, at):
    x = x[:, :1].expand(-1, x.shape[1], -1).clone()
    x[0, at.draw(st.integers(0, x.shape[1] - 1)), 0] += 1e-3
    assert mu(x)[0] > 0
    assert mu(x)[1] == 0


@given(x=token_batches())
def test_the_share_is_a_share(x):
    share = token_spread(x)
    assert ((share >= 0) & (share <= 1)).all()


@pytest.mark.parametrize("outlier", [0.0, 1e8])
def test_nearly_equal_tokens_keep_their_digits(outlier):
    """Also where the first token, with which the others are compared, is far from them."""
    x = normal(1, 1, 3, seed=2) + 1e-12 * normal(1, 7, 3, seed=1)
    x[0, 0] += outlier
    exact = [[Fraction(v) for v in token] for token in x[0].tolist()]
    mean = [sum(feature) / 7 for feature in zip(*exact, strict=True)]
    wanted = math.sqrt(sum((v - m) ** 2 for token in exact for v, m in zip(token, mean, strict=True)))
    close(mu(x), [wanted], rtol=tolerance(x))


@pytest.mark.parametrize("scale", [1e-300, 1e200])
def test_squares_neither_overflow_nor_vanish(scale):
    x = normal(1, 4, 3, seed=2)
    close(mu(scale * x), scale * mu(x), rtol=tolerance(x))
    close(token_norm(scale * x), scale * token_norm(x), rtol=tolerance(x))
    close(token_spread(scale * x), token_spread(x), rtol=tolerance(x))
    close(mean_cosine(scale * x), mean_cosine(x), rtol=0, atol=tolerance(x))


def test_zero_tokens_and_single_tokens_are_collapsed():
    assert token_spread(torch.zeros(1, 3, 2)) == 0
    assert token_spread(torch.ones(1, 1, 2)) == 0
    assert mu(torch.ones(1, 1, 2)) == 0


def test_equal_tokens_are_exactly_collapsed_behind_padding_too():
    x = torch.tensor([[[0.0], [0.1], [0.1], [0.1]]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True, True]])
    assert mu(x, mask) == 0


def test_shares_and_cosines_do_not_round_over_their_bounds():
    """Both are 1 here, the one without a mean, the other for parallel tokens: rounding exceeds it in many."""
    x = normal(200, 2, 4, seed=6)
    share = token_spread(torch.cat([x, -x], dim=1))
    assert (share <= 1).all()
    close(share, torch.ones(200), rtol=sum_tolerance(16))
    cosine = mean_cosine(x[:, :1].expand(-1, 3, -1))
    assert (cosine <= 1).all()
    close(cosine, torch.ones(200), rtol=sum_tolerance(12))


def test_the_mean_is_over_real_tokens_wherever_padding_lies():
    x = torch.tensor([[[9.0], [1.0], [9.0], [-1.0]]])
    mask = torch.tensor([[False, True, False, True]])
    close(mu(x, mask), [math.sqrt(2)], rtol=1e-15)
    assert token_spread(x, mask) == 1


# --- mean cosine -----------------------------------------------------------------------------------------


@given(x=token_batches(min_tokens=2))
def test_mean_cosine_is_the_double_loop(x):
    got = mean_cosine(x)
    for b in range(2):
        tokens = [t for t in x[b] if t.norm() > 0]
        pairs = [(s @ t / (s.norm() * t.norm())).item() for s, t in permutations(tokens, 2)]
        wanted = math.fsum(pairs) / len(pairs) if pairs else math.nan
        close(got[b], wanted, rtol=0, atol=tolerance(x))


@given(
    x=token_batches(min_tokens=2), seed=seeds, factors=st.lists(st.floats(1e-3, 1e3), min_size=9, max_size=9)
)
def test_cosines_do_not_see_order_rotation_or_length(x, seed, factors):
    assume((x.norm(dim=-1) > 1e-3).all())  # a rotation would move a rounded zero off zero
    longer = x * torch.tensor(factors[: x.shape[1]], dtype=torch.float64)[:, None]
    turned = shuffled(longer, seed) @ rotation(x.shape[2], seed)
    close(mean_cosine(turned), mean_cosine(x), rtol=0, atol=tolerance(x))


@pytest.mark.parametrize("n", [2, 3, 8])
def test_mean_cosine_of_known_tokens(n):
    orthogonal = torch.eye(n)[None]
    close(mean_cosine(orthogonal), [0.0], rtol=0, atol=sum_tolerance(n))
    simplex = orthogonal - 1 / n  # n vectors as far apart as can be
    close(mean_cosine(simplex.double()), [-1 / (n - 1)], rtol=0, atol=4 * n * torch.finfo(torch.float32).eps)
    parallel = torch.arange(1.0, n + 1)[None, :, None] * torch.tensor([3.0, 4.0])
    assert mean_cosine(parallel) <= 1
    close(mean_cosine(parallel), [1.0], rtol=sum_tolerance(n))


def test_fewer_than_two_directions_have_no_cosine():
    assert mean_cosine(torch.ones(1, 1, 3)).isnan()
    assert mean_cosine(torch.tensor([[[1.0, 2.0], [0.0, 0.0]]])).isnan()
    assert mean_cosine(torch.zeros(1, 4, 2)).isnan()
    assert mean_cosine(torch.nn.functional.pad(normal(99, 1, 50), (0, 0, 0, 2))).isnan().all()


# --- effective rank of states ----------------------------------------------------------------------------


def test_states_are_matrices():
    x = normal(3, 5, 4, seed=3)
    assert state_effective_rank(x).equal(effective_rank(x))
    assert state_effective_rank(torch.zeros(1, 3, 4)) == 0


def test_small_directions_of_the_states_are_not_lost():
    """Through the Gram matrix σ = 1e-9 would come back as rounding noise of up to 1e-8."""
    sigma = torch.tensor([1.0] + [1e-9] * 5, dtype=torch.float64)
    x = normal(40, 6, seed=4)
    x = torch.linalg.qr(x).Q @ sigma.diag() @ rotation(6, seed=5)
    p = sigma / sigma.sum()
    wanted = torch.special.entr(p).sum().exp()
    close(state_effective_rank(x[None]), wanted[None], rtol=1e-12)
