"""The width that a head needs: known subspaces, invariances, the dense error and the KL divergence."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measures.measure_cases import normal
from tests.support.records import HEAD_MEASURES

from rankwise.errors import InputError
from rankwise.measures import WIDTH_TOLERANCE, logit_moments, required_head_dim
from rankwise.measures.required_width import logit_bases, logit_energy
from rankwise.operators import SoftmaxMixing

T, K = 24, 6


def head(seed: int = 0, size: float = 1.0, heads: int = 2) -> SoftmaxMixing:
    query, key = normal(2, 3, heads, T, K, seed=seed) * math.sqrt(size)
    return SoftmaxMixing(query, key)


def at_widths(op: SoftmaxMixing) -> torch.Tensor:
    """The width at tolerances from the energy of the tail of each rank: a fingerprint of all of them."""
    tolerances = [2.0**power for power in range(-12, 4)]
    return torch.stack([required_head_dim(op, tolerance) for tolerance in tolerances])


@settings(max_examples=10)
@given(rank=st.integers(1, K), seed=st.integers(0, 9))
def test_the_rank_of_queries_or_of_centred_keys_is_the_most(rank: int, seed: int) -> None:
    op = head(seed)
    basis = torch.linalg.qr(normal(K, K, seed=seed + 100)).Q[:, :rank]
    narrow = op.query @ basis @ basis.mT
    assert (required_head_dim(SoftmaxMixing(narrow, op.key)) <= rank).all()
    around = normal(3, 2, 1, K, seed=seed + 200)  # keys in a flat that does not hold 0
    flat = op.key @ basis @ basis.mT + around
    assert (required_head_dim(SoftmaxMixing(op.query, flat)) <= rank).all()


def test_shifts_that_softmax_ignores_change_nothing() -> None:
    op = head(1)
    wanted = at_widths(op)
    assert len(wanted.unique()) > 2
    turn = torch.linalg.qr(normal(K, K, seed=3)).Q
    shear = normal(K, K, seed=4) + 3 * torch.eye(K)
    others = [
        SoftmaxMixing(op.query @ turn, op.key @ turn),
        SoftmaxMixing(op.query * 5, op.key / 5),
        SoftmaxMixing(op.query @ shear, op.key @ torch.linalg.inv(shear).mT),
        SoftmaxMixing(op.query, op.key + 7 * normal(3, 2, 1, K, seed=5)),
        SoftmaxMixing(op.query.flip(-2), op.key.roll(3, -2)),
        SoftmaxMixing(op.query * 2, op.key, scale=op.scale / 2),
    ]
    for other in others:
        assert at_widths(other).equal(wanted)
    assert (at_widths(SoftmaxMixing(op.query * 3, op.key)) >= wanted).all()
    assert not at_widths(SoftmaxMixing(op.query * 3, op.key)).equal(wanted)


def test_the_tail_is_half_the_variance_that_the_best_logits_miss() -> None:
    """Dense oracle: singular values of the logits themselves, each row less its mean."""
    op = head(2)[0, 0]
    logits = op.scale * op.query.double() @ op.key.double().mT
    sigma = torch.linalg.svdvals(logits - logits.mean(-1, keepdim=True))[:K]
    tails = sigma.square().flip(0).cumsum(0).flip(0) / (2 * T * T)
    for rank, (above, below) in enumerate(pairwise(tails), 1):
        assert required_head_dim(op, float((above + below) / 2)) == rank


def test_it_is_the_divergence_of_small_logits() -> None:
    """KL(M‖M_r) → ½ mean variance: with logits of size ε, terms of order ε are left."""
    size = 1e-3
    op = head(3, size, heads=1)[:1]
    moments = logit_moments(op).sum_sequences()
    centred = op.key.double() - op.key.double().mean(-2, keepdim=True)
    bases = logit_bases(moments.query[0], moments.key[0])
    energy = logit_energy(moments.query[0], moments.key[0]) / (T * T)
    whole = SoftmaxMixing(op.query.double(), centred, scale=op.scale).dense()
    for rank in range(1, K):
        change = bases.query[:, :rank] @ bases.key[:, :rank].mT
        narrow = SoftmaxMixing(op.query.double() @ change, centred, scale=op.scale).dense()
        divergence = (whole * (whole / narrow).log()).sum(-1).mean()
        assert float(divergence) == pytest.approx(float(energy[rank:].sum() / 2), rel=30 * size)


def test_sequences_are_added_without_padding_and_heads_that_are_not_finite() -> None:
    op = head(4)
    rows = torch.ones(3, T, dtype=torch.bool)
    rows[0, 15:] = False
    query, key = op.query.clone(), op.key.clone()
    query[0, :, 15:], key[0, :, 15:], key[1, 0, 3] = math.inf, math.nan, math.nan
    seen = logit_moments(SoftmaxMixing(query, key), rows, rows).sum_sequences()
    first = logit_moments(SoftmaxMixing(op.query[:1, :, :15], op.key[:1, :, :15])).sum_sequences()
    second, third = (logit_moments(op[at : at + 1]).sum_sequences() for at in (1, 2))
    both = first + second + third
    for name in ("query", "key", "rows", "columns"):
        assert torch.allclose(getattr(seen, name)[1], getattr(both, name)[1], rtol=1e-12)
        assert torch.allclose(getattr(seen, name)[0], getattr(first + third, name)[0], rtol=1e-12)
    assert required_head_dim(logit_moments(SoftmaxMixing(query, key))).isnan().any()


def test_grouped_heads_read_the_keys_of_their_group_in_any_precision() -> None:
    op = head(5, heads=4)
    keys = op.key[:, :2]
    grouped, repeated = SoftmaxMixing(op.query, keys), SoftmaxMixing(op.query, keys.repeat_interleave(2, 1))
    assert at_widths(grouped).equal(at_widths(repeated))
    half = SoftmaxMixing(op.query.bfloat16(), keys.bfloat16())
    assert required_head_dim(half).equal(
        required_head_dim(SoftmaxMixing(half.query.double(), half.key.double()))
    )


def test_parts_of_long_sequences_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    op = head(6)
    whole = logit_moments(op)
    monkeypatch.setattr("rankwise.measures.row_moments.STEP", 7)
    parts = logit_moments(op)
    assert torch.allclose(parts.query, whole.query, rtol=1e-12)
    assert torch.allclose(parts.key, whole.key, rtol=1e-12)


def test_a_head_without_logits_needs_no_channel_and_one_without_tokens_none() -> None:
    zeros = torch.zeros(1, 1, T, K)
    assert required_head_dim(SoftmaxMixing(zeros, zeros)) == 0
    none = torch.zeros(1, T, dtype=torch.bool)
    assert required_head_dim(logit_moments(SoftmaxMixing(zeros, zeros), none, none)).isnan().all()


@pytest.mark.parametrize("tolerance", [0, -1.0, math.nan, math.inf])
def test_a_tolerance_is_above_0(tolerance: float) -> None:
    with pytest.raises(InputError, match="`tolerance`: expected a number in \\(0, ∞\\)"):
        required_head_dim(head(), tolerance)


def test_the_table_names_the_tolerance() -> None:
    (row,) = (one for one in HEAD_MEASURES if one.name == "required_head_dim")
    assert f"≤ {WIDTH_TOLERANCE:g}" in row.formula
    assert f"{WIDTH_TOLERANCE:g} nats" in row.meaning
