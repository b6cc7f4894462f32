"""δ relative to σ_1: what a mixer with signs and a scale of its own is counted by."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.measures.measure_cases import matrices, normal

import rankwise as rw
from rankwise.auditing.measure import measure_heads, sampled
from rankwise.auditing.measure_table import HEAD_MEASURES
from rankwise.measures import estimate_spectrum, rank_summary
from rankwise.operators import DenseMixing, MixingOperator
from rankwise.report import document_text
from rankwise.report.audit_report import audit_document
from rankwise.tracing import MixerSite

RANK = next(one for one in HEAD_MEASURES if one.name == "numerical_rank")


@given(m=matrices(batch=(3,)), power=st.integers(-60, 60))
def test_it_is_the_numerical_rank_of_the_matrix_over_its_norm_at_any_scale(m, power):
    sigma = torch.linalg.svdvals(m)
    counted = (sigma >= 0.05 * sigma[:, :1]).sum(-1).double()
    near = ((sigma / sigma[:, :1] - 0.05).abs() < 1e-9).any(-1) | (sigma[:, 0] == 0)
    found = rank_summary(m * 2.0**power, 0.05, relative=True).relative_rank
    assert found[~near].equal(counted[~near])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 37.0])
def test_the_fast_way_counts_as_the_svd_does(scale):
    m = scale * normal(4, 130, 130) @ torch.diag(torch.logspace(0, -5, 130, dtype=torch.float64))
    sigma = torch.linalg.svdvals(m)
    for delta in (1e-2, 1e-4):
        wanted = (sigma >= delta * sigma[:, :1]).sum(-1).double()
        assert rank_summary(m, delta, relative=True).relative_rank.equal(wanted)


def test_a_value_at_the_threshold_is_left_to_the_svd():
    values = torch.ones(120, dtype=torch.float64)
    values[60:] = 0.01
    turn = torch.linalg.qr(normal(120, 120, seed=1))[0]
    m = (turn * values) @ torch.linalg.qr(normal(120, 120, seed=2))[0]
    summary = rank_summary(8 * m[None], 0.01, also_at=(0.5,), relative=True)
    assert summary.used_svd.item() == 1


def test_zero_and_nan():
    m = torch.zeros(2, 100, 100, dtype=torch.float64)
    m[1, 0, 0] = math.nan
    found = rank_summary(m, relative=True).relative_rank
    assert found[0] == 0
    assert found[1].isnan()


def test_an_estimate_holds_the_exact_count():
    m = 50 * normal(2, 90, 90) @ torch.diag(torch.logspace(0, -4, 90, dtype=torch.float64))
    exact = rank_summary(m, 0.01, relative=True).relative_rank
    found = estimate_spectrum(m, 8, 30).relative_count(0.01)
    assert ((found.low <= exact) & (exact <= found.high)).all()


def record(kind: str, operator: MixingOperator, method: str = "auto"):
    valid = torch.ones(operator.shape[0], operator.shape[-1], dtype=torch.bool)
    site = MixerSite("mixer", 0, kind, operator, valid, valid, sequences=operator.shape[0], stack="s")
    return measure_heads(*sampled(site), 0.01, method).to_records(0.01)[0]


@pytest.mark.parametrize("method", ["exact", "estimate"])
def test_a_signed_mixer_is_shown_at_any_scale_alike_and_a_softmax_by_its_absolute_rank(method):
    matrix = normal(1, 1, 40, 40) @ torch.diag(torch.logspace(0, -3, 40, dtype=torch.float64))
    small, large = (record("selective", DenseMixing(scale * matrix), method) for scale in (1e-4, 1e3))
    assert small.relative_rank == large.relative_rank > 0
    assert small.numerical_rank < large.numerical_rank
    assert RANK.value(small) == RANK.value(large) == small.relative_rank / 40
    softmax = record("softmax", DenseMixing(1e-4 * matrix), method)
    assert RANK.value(softmax) == softmax.numerical_rank / 40


def test_files_of_before_show_what_they_have():
    old = record("selective", DenseMixing(normal(1, 1, 20, 20))).model_copy(
        update={"relative_rank": math.nan}
    )
    assert RANK.value(old) == old.numerical_rank / 20


def test_the_console_says_that_delta_is_relative():
    from rankwise.auditing.records import Provenance
    from rankwise.auditing.result import Audit

    heads = [record("selective", DenseMixing(normal(1, 1, 20, 20)))]
    audit = Audit(provenance=Provenance(model="m", delta=0.01), heads=heads, layers=[], findings=[])
    assert "δ relative to σ₁" in document_text(audit_document(audit))
    audit = audit.model_copy(update={"heads": [record("softmax", DenseMixing(normal(1, 1, 20, 20)))]})
    assert "relative to" not in document_text(audit_document(audit))


def test_no_head_with_signs_is_above_or_below_its_fresh_weights_by_an_absolute_rank():
    from rankwise.auditing.findings import rank_code
    from rankwise.auditing.records import Baseline, BaselineAt

    at = BaselineAt(delta=0.01, rank_low=1, rank_high=1, seed_std=0.1, difference_low=9, difference_high=9,
                    margin=1, pairs=9)  # fmt: skip
    fresh = Baseline(seeds=3, mean={}, seed_std={}, std={}, band=[at])
    for kind, code in (("selective", None), ("softmax", "HIGH_RANK")):
        head = record(kind, DenseMixing(normal(1, 1, 20, 20))).model_copy(update={"baseline": fresh})
        assert rank_code(head) == code


def test_it_is_at_most_the_numerical_rank_where_the_largest_is_at_least_one():
    operator = rw.operators.SoftmaxMixing(normal(2, 3, 120, 8), normal(2, 3, 120, 8, seed=1))
    summary = rank_summary(operator, 0.01)
    assert (summary.relative_rank <= summary.numerical_rank).all()
