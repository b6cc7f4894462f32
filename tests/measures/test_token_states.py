"""Measures of token states: spread, cosine, effective rank, update, coding rate, variational rate."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.measures.measure_cases import (
    close,
    normal,
    rotation,
    sum_tolerance,
    token_batches,
)
from tests.unchecked import unchecked

import rankwise.measures.dense_spectrum as dense_spectrum
from rankwise.errors import ShapeError
from rankwise.measures import (
    absolute_spread,
    direction_spread,
    effective_rank,
    effective_rank_without_massive,
    largest_norm_ratio,
    largest_norm_share,
    massive_tokens,
    mean_cosine,
    relative_update,
    spread,
    state_effective_rank,
    variational_rate,
)
from rankwise.measures.dense_spectrum import scaled_svd
from rankwise.measures.token_states import STATE_RTOL

finite = st.floats(-100, 100)


def mu(tokens, mask=None):
    return absolute_spread(tokens, mask)


def tolerance(x):
    return sum_tolerance(x.shape[1] * x.shape[2])


# --- spread and norm -------------------------------------------------------------------------------------


@given(token=st.lists(finite, min_size=1, max_size=5), count=st.integers(1, 9))
def test_mu_of_equal_tokens_is_exactly_zero(token, count):
    x = torch.tensor([[token] * count], dtype=torch.float64)
    assert mu(x) == 0
    assert spread(x) == 0


@pytest.mark.parametrize("outlier", [0.0, 1e8])
def test_nearly_equal_tokens_keep_their_digits(outlier):
    """Also where the first token, with which the others are compared, is far from them."""
    x = normal(1, 1, 3, seed=2) + 1e-12 * normal(1, 7, 3, seed=1)
    x[0, 0] += outlier
    exact = [[Fraction(v) for v in token] for token in x[0].tolist()]
    mean = [sum(feature) / 7 for feature in zip(*exact, strict=True)]
    wanted = math.sqrt(sum((v - m) ** 2 for token in exact for v, m in zip(token, mean, strict=True)))
    close(mu(x), [wanted], rtol=tolerance(x))


def test_equal_tokens_are_exactly_collapsed_behind_padding_too():
    x = torch.tensor([[[0.0], [0.1], [0.1], [0.1]]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True, True]])
    assert mu(x, mask) == 0


def test_shares_and_cosines_do_not_round_over_their_bounds():
    """Both are 1 here, the one without a mean, the other for parallel tokens: rounding exceeds it in many."""
    x = normal(200, 2, 4, seed=6)
    share = spread(torch.cat([x, -x], dim=1))
    assert (share <= 1).all()
    close(share, torch.ones(200), rtol=sum_tolerance(16))
    cosine = mean_cosine(x[:, :1].expand(-1, 3, -1))
    assert (cosine <= 1).all()
    close(cosine, torch.ones(200), rtol=sum_tolerance(12))


def test_the_mean_is_over_real_tokens_for_any_padding():
    x = torch.tensor([[[9.0], [1.0], [9.0], [-1.0]]])
    mask = torch.tensor([[False, True, False, True]])
    close(mu(x, mask), [math.sqrt(2)], rtol=1e-15)
    assert spread(x, mask) == 1


# --- direction spread --------------------------------------------------------------------------------------


def sine_to(x, center):
    cosine = x @ center / (x.norm(dim=-1) * center.norm())
    return (1 - cosine.clamp(min=0) ** 2).sqrt()


@given(x=token_batches())
def test_the_direction_spread_is_the_middle_sine_to_the_direction_of_most_tokens(x):
    for states, value in zip(x, direction_spread(x), strict=True):
        units = states[states.norm(dim=-1) > 0]
        units = units / units.norm(dim=-1, keepdim=True)
        count = (len(units) - 1) // 2
        if not len(units):
            assert value == 0
            continue
        cosines = units @ units.mean(0)
        gaps = (cosines - cosines.sort().values[count]).abs()
        near = units[cosines >= cosines.sort().values[count]]
        if ((gaps > 0) & (gaps < 1e-9)).any() or near.sum(0).norm() < 1e-6:
            continue  # rounding decides which tokens are near, or the direction
        close(value, sine_to(units, near.sum(0)).sort().values[count], rtol=0, atol=3e-8)


@given(x=token_batches(), seed=st.integers(0, 99))
def test_norms_of_tokens_and_turns_do_not_change_the_direction_spread(x, seed):
    wanted = direction_spread(x)
    assert ((wanted >= 0) & (wanted <= 1)).all()
    sizes = 2.0 ** torch.randint(-60, 60, x.shape[:2], generator=torch.Generator().manual_seed(seed))
    close(direction_spread(x * sizes[..., None].double()), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3, 0.45])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_a_minority_of_tokens_cannot_hide_that_the_others_are_equal(share, size):
    """μ/‖Y‖ rises to 1 with their norm, and the spread of unit tokens is near √(2 · share)."""
    x = normal(2, 1, 64, seed=1).expand(-1, 200, -1).clone()
    odd = round(200 * share)
    x[:, :odd] = size * normal(2, odd, 64, seed=2)
    assert (direction_spread(x) < 1e-12).all()
    assert (spread(x) > 0.9).all() or size < 1e3


def test_the_direction_spread_of_random_directions_is_near_one():
    for tokens in (8, 64, 512):
        value = direction_spread(normal(4, tokens, 4096, seed=tokens))
        close(value, torch.full((4,), math.sqrt(1 - 2 / tokens), dtype=torch.float64), rtol=0, atol=0.04)


def test_tokens_at_equal_angles_to_their_mean_have_one_spread_by_both_measures():
    x = torch.cat([torch.full((64, 1), 3.0), torch.linalg.qr(normal(64, 64, seed=3)).Q], 1)[None]
    x = torch.cat([x, x * torch.tensor([1.0] + [-1.0] * 64)], 1)
    close(direction_spread(x), spread(x), rtol=1e-12)


def test_tokens_without_a_direction_are_left_out():
    x = normal(1, 5, 4, seed=4)
    assert direction_spread(torch.cat([x, torch.zeros(1, 9, 4, dtype=x.dtype)], 1)) == direction_spread(x)
    assert direction_spread(torch.zeros(1, 3, 4)) == 0
    assert direction_spread(torch.ones(1, 1, 4)) < 1e-15
    assert direction_spread(torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])) <= 1
    assert direction_spread(torch.full((1, 2, 3), math.nan)).isnan()
    mask = torch.tensor([[True] * 5 + [False] * 2])
    close(direction_spread(torch.cat([x, normal(1, 2, 4, seed=5)], 1), mask), direction_spread(x), rtol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_tokens_have_the_direction_spread_of_the_rounded_values(dtype):
    x = (normal(1, 1, 64, seed=6) + 0.1 * normal(3, 40, 64, seed=7)).to(dtype)
    assert direction_spread(x).equal(direction_spread(x.double()))


# --- mean cosine -----------------------------------------------------------------------------------------


def test_fewer_than_two_directions_have_no_cosine():
    assert mean_cosine(torch.ones(1, 1, 3)).isnan()
    assert mean_cosine(torch.tensor([[[1.0, 2.0], [0.0, 0.0]]])).isnan()
    assert mean_cosine(torch.zeros(1, 4, 2)).isnan()
    assert mean_cosine(torch.nn.functional.pad(normal(99, 1, 50), (0, 0, 0, 2))).isnan().all()


# --- effective rank of states ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(120, 200), (200, 120)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "massive", "nearly collapsed", "collapsed", "low rank"])
def test_the_effective_rank_of_states_equals_the_svd(kind, shape, monkeypatch):
    """A Gram matrix is used if it is precise enough; tokens that are equal within 1e-9 need the SVD."""
    svds = []
    monkeypatch.setattr(dense_spectrum, "scaled_svd", lambda x, svd=scaled_svd: svds.append(len(x)) or svd(x))
    x = normal(2, *shape, seed=1)
    if kind == "massive":
        x[:, 0] *= 100
    elif kind == "low rank":
        x[:, :, 5:] = 0
    elif "collapsed" in kind:
        x = x[:, :1] + (1e-9 if kind == "collapsed" else 1e-2) * x
    got = state_effective_rank(x.float())
    sigma = torch.linalg.svdvals(x.float().double())
    wanted = torch.special.entr(sigma / sigma.sum(-1, keepdim=True)).sum(-1).exp()
    close(got, wanted, rtol=STATE_RTOL)
    assert bool(svds) == (kind in ("collapsed", "low rank"))


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


# --- relative update ------------------------------------------------------------------------------------


def test_the_update_is_the_sine_between_the_states():
    y, z = normal(3, 5, 4, seed=1), normal(3, 5, 4, seed=2)
    cosine = (y * z).sum((1, 2)) / (y.norm(dim=(1, 2)) * z.norm(dim=(1, 2)))
    close(relative_update(y, z), (1 - cosine**2).sqrt(), rtol=1e-12)


@pytest.mark.parametrize("scale", [1.0, -3.0, 1e-200, 1e200])
def test_scale_and_sign_of_the_states_do_not_matter(scale):
    y, z = normal(2, 5, 4, seed=1), normal(2, 5, 4, seed=2)
    close(relative_update(y, scale * z), relative_update(y, z), rtol=1e-12)
    assert (relative_update(y, scale * y) < 1e-14).all()


def test_a_small_update_keeps_its_digits():
    y, b = normal(1, 5, 4, seed=1), normal(1, 5, 4, seed=2)
    b = b - (b * y).sum() / y.square().sum() * y
    # Y is as exact as its own rounding, 1e-16 of it: of an update of 1e-10 that leaves six digits
    assert relative_update(y, y + 1e-10 * b).item() == pytest.approx(
        1e-10 * b.norm().item() / y.norm().item(), rel=1e-5
    )


def test_an_update_leaves_padding_out():
    y, z = normal(2, 5, 4, seed=1), normal(2, 5, 4, seed=2)
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    wanted = [relative_update(y[:1, :3], z[:1, :3]).item(), relative_update(y[1:], z[1:]).item()]
    y[0, 3:] = math.nan
    assert relative_update(y, z, keep).tolist() == pytest.approx(wanted, rel=1e-12)
    z[1, 0, 0] = math.inf
    assert relative_update(y, z, keep).isnan().tolist() == [False, True]
    assert relative_update(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)).item() == 0


def test_states_of_two_shapes_are_refused():
    with unchecked(), pytest.raises(ShapeError, match=r"one shape before and after, got \(1, 2, 3\)"):
        relative_update(torch.ones(1, 2, 3), torch.ones(1, 2, 4))


# --- variational rate -----------------------------------------------------------------------------------


def grouped(B=2, H=3, T=7, K=4, seed=0):
    return normal(B, H, T, K, seed=seed), normal(B, H, T, seed=seed + 1).softmax(1)


def test_the_variational_rate_is_its_formula():
    w, pi = grouped()
    for b in range(2):
        for h in range(3):
            size = pi[b, h].sum()
            wanted = 0.0
            for k in range(4):
                wanted += math.log(1 + float((pi[b, h] * w[b, h, :, k] ** 2).sum() / size))
            got = variational_rate(w, pi)[b, h].item()
            assert got == pytest.approx(0.5 * float(size) / 7 * wanted, rel=1e-12)


def test_order_sign_and_padding_do_not_change_the_variational_rate():
    w, pi = grouped()
    rate, order = variational_rate(w, pi), torch.randperm(7)
    torch.testing.assert_close(variational_rate(w[:, :, order], pi[:, :, order]), rate, rtol=1e-12, atol=0)
    assert torch.equal(variational_rate(-w, pi), rate)
    keep = torch.tensor([1, 1, 1, 1, 1, 0, 0]).bool().expand(2, 7)
    w[:, :, 5:] = math.nan
    torch.testing.assert_close(
        variational_rate(w, pi, keep), variational_rate(w[:, :, :5], pi[:, :, :5]), rtol=1e-12, atol=0
    )


def test_a_step_of_tssa_is_down_its_gradient():
    """With memberships held, ∂R/∂w = Π w/(n (1 + m)): −n times it is the output of TSSA."""
    w, pi = grouped(B=1)
    w.requires_grad_()
    (gradient,) = torch.autograd.grad(variational_rate(w, pi).sum(), w)
    m = (pi[..., None] * w**2).sum(2, keepdim=True) / pi.sum(2)[..., None, None]
    torch.testing.assert_close(7 * gradient, pi[..., None] * w / (1 + m), rtol=1e-12, atol=1e-15)


def test_a_head_without_tokens_has_rate_0_and_nan_stays_in_its_head():
    w, pi = grouped()
    pi[:, 0] = 0
    assert variational_rate(w, pi)[:, 0].eq(0).all()
    w[1, 2, 3, 0] = math.nan
    rate = variational_rate(w, pi)
    assert rate[1, 2].isnan()
    assert rate[0].isfinite().all()
    assert variational_rate(w, pi, torch.zeros(2, 7).bool()).isnan().all()


def test_groups_that_do_not_fit_are_refused():
    with unchecked(), pytest.raises(ShapeError, match=r"membership \(B, H, T\), got"):
        variational_rate(torch.ones(1, 2, 3, 4), torch.ones(1, 3, 2))


# --- massive tokens ----------------------------------------------------------------------------------------


@given(x=token_batches())
def test_massive_tokens_are_counted_by_their_norms(x):
    for index, states in enumerate(x):
        norms = sorted(size for size in states.norm(dim=-1).tolist() if size > 0)
        median = norms[(len(norms) - 1) // 2] if norms else 1.0
        count = sum(size > 10 * median for size in norms)
        assert massive_tokens(x)[index] == count <= len(norms) / 2
        close(largest_norm_ratio(x)[index].item(), norms[-1] / median if norms else 1.0, rtol=1e-12)
        share = norms[-1] ** 2 / sum(size**2 for size in norms) if norms else 0.0
        close(largest_norm_share(x)[index].item(), share, rtol=1e-12)


def test_the_effective_rank_without_massive_tokens_equals_the_rank_of_the_others():
    x = normal(3, 24, 8, seed=7)
    mask = torch.ones(3, 24, dtype=torch.bool)
    mask[2, 20:] = False
    x[0, 5] *= 500
    x[1, 3:6] *= 500
    x[2, 21] *= 500  # padding
    value, whole = effective_rank_without_massive(x, mask), state_effective_rank(x, mask)
    others = [x[0, [*range(5), *range(6, 24)]], x[1, [*range(3), *range(6, 24)]], x[2, :20]]
    close(value, torch.cat([state_effective_rank(states[None]) for states in others]), rtol=1e-12)
    assert value[2] == whole[2]
    assert (value[:2] > 2 * whole[:2]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_near_the_largest_number_of_a_dtype_do_not_overflow(dtype):
    x = torch.full((1, 9, 4), torch.finfo(dtype).max / 64, dtype=dtype)
    x[0, 4] *= 32
    assert massive_tokens(x) == 1
    close(largest_norm_ratio(x).item(), 32.0, rtol=torch.finfo(dtype).eps)
    assert massive_tokens(torch.full_like(x, torch.finfo(dtype).max)) == 0  # all are as large as the median


def test_one_token_and_no_token_are_not_massive():
    assert [measure(torch.ones(1, 1, 4)).item() for measure in (massive_tokens, largest_norm_ratio)] == [0, 1]
    nothing = torch.zeros(1, 3, 4)
    measures = massive_tokens, largest_norm_ratio, largest_norm_share, effective_rank_without_massive
    assert [measure(nothing).item() for measure in measures] == [0, 1, 0, 0]
    padding = torch.zeros(1, 3, dtype=torch.bool)
    assert all(measure(nothing, padding).isnan() for measure in measures)
