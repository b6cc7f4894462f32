"""SemiseparableMixing: decays of every size, groups of heads, and its rank."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.linear_time_cases import semiseparable_by_hand
from tests.operators.mixing_laws import check, normal, uniform

from rankwise.operators.semiseparable import SemiseparableMixing

EXTREME = [0.0, -1e-30, -1e-9, -0.7, -40.0, -800.0, -1e30, -math.inf]


def inputs(tokens, heads=(2, 4), groups=(2, 2), width=3, seed=0):
    c, b = (normal(*groups, tokens, width, seed=seed + i) for i in range(2))
    return c, b, -normal(*heads, tokens, seed=seed + 2).abs(), uniform(*heads, tokens, seed=seed + 3)


@settings(max_examples=25)
@given(tokens=st.integers(1, 12), seed=st.integers(0, 99))
def test_decays_of_every_size(tokens, seed):
    c, b, _, step = inputs(tokens, seed=seed)
    picks = torch.randint(len(EXTREME), (2, 4, tokens), generator=torch.Generator().manual_seed(seed))
    decay = torch.tensor(EXTREME, dtype=torch.float64)[picks]
    check(SemiseparableMixing(c, b, decay, step), semiseparable_by_hand)


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
