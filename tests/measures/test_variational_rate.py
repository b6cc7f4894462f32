"""R_c^var: invariances, padding, the objective it is, and its gradient, which is the TSSA step."""

import math

import pytest
import torch
from tests.measures.measure_cases import normal
from tests.unchecked import unchecked

import rankwise.measures as rm
from rankwise.errors import ShapeError


def case(B=2, H=3, T=7, K=4, seed=0):
    return normal(B, H, T, K, seed=seed), normal(B, H, T, seed=seed + 1).softmax(1)


def test_it_is_the_formula_spelled_out():
    w, pi = case()
    for b in range(2):
        for h in range(3):
            size = pi[b, h].sum()
            wanted = 0.0
            for k in range(4):
                wanted += math.log(1 + float((pi[b, h] * w[b, h, :, k] ** 2).sum() / size))
            got = rm.variational_rate(w, pi)[b, h].item()
            assert got == pytest.approx(0.5 * float(size) / 7 * wanted, rel=1e-12)


def test_order_sign_and_padding_of_tokens_do_not_matter():
    w, pi = case()
    rate, order = rm.variational_rate(w, pi), torch.randperm(7)
    torch.testing.assert_close(rm.variational_rate(w[:, :, order], pi[:, :, order]), rate, rtol=1e-12, atol=0)
    assert torch.equal(rm.variational_rate(-w, pi), rate)
    keep = torch.tensor([1, 1, 1, 1, 1, 0, 0]).bool().expand(2, 7)
    w[:, :, 5:] = math.nan
    torch.testing.assert_close(
        rm.variational_rate(w, pi, keep), rm.variational_rate(w[:, :, :5], pi[:, :, :5]), rtol=1e-12, atol=0
    )


def test_it_grows_with_the_scale_and_is_zero_at_zero():
    w, pi = case()
    assert (rm.variational_rate(2 * w, pi) > rm.variational_rate(w, pi)).all()
    assert rm.variational_rate(0 * w, pi).abs().max() == 0


def test_a_step_of_tssa_is_down_its_gradient():
    """With memberships held, ∂R/∂w = Π w/(n (1 + m)): −n times it is the output of TSSA."""
    w, pi = case(B=1)
    w.requires_grad_()
    (gradient,) = torch.autograd.grad(rm.variational_rate(w, pi).sum(), w)
    m = (pi[..., None] * w**2).sum(2, keepdim=True) / pi.sum(2)[..., None, None]
    torch.testing.assert_close(7 * gradient, pi[..., None] * w / (1 + m), rtol=1e-12, atol=1e-15)


def test_a_head_without_tokens_costs_nothing_and_nan_is_told():
    w, pi = case()
    pi[:, 0] = 0
    assert rm.variational_rate(w, pi)[:, 0].eq(0).all()
    w[1, 2, 3, 0] = math.nan
    rate = rm.variational_rate(w, pi)
    assert rate[1, 2].isnan()
    assert rate[0].isfinite().all()
    assert rm.variational_rate(w, pi, torch.zeros(2, 7).bool()).isnan().all()


def test_shapes_that_do_not_fit_are_refused():
    with unchecked(), pytest.raises(ShapeError, match=r"membership \(B, H, T\), got"):
        rm.variational_rate(torch.ones(1, 2, 3, 4), torch.ones(1, 3, 2))
