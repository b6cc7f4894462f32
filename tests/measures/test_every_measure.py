"""General laws of all measures: dtypes, batches, NaN, empty and tiny inputs, operators, errors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measures.measure_cases import (
    FUNCTIONS,
    OF_MATRICES,
    OF_TOKENS,
    close,
    make,
    matrices,
    normal,
    rank_tolerance,
)
from tests.unchecked import unchecked

import rankwise.measures as rm
from rankwise.errors import ShapeError
from rankwise.measures import MEASURES
from rankwise.measures.registry import as_matrices, as_operator
from rankwise.operators import DenseMixing, SoftmaxMixing

BAD = [math.nan, math.inf, -math.inf]

every_matrix_measure = pytest.mark.parametrize("measure", OF_MATRICES, ids=lambda f: f.__name__)
every_token_measure = pytest.mark.parametrize("measure", OF_TOKENS, ids=lambda f: f.__name__)
every_measure = pytest.mark.parametrize("measure", [*OF_MATRICES, *OF_TOKENS], ids=lambda f: f.__name__)


def batch(measure, seed=3):
    """Six matrices, or three sequences of token states."""
    if measure in OF_MATRICES:
        return make("stochastic", (2, 3, 5, 5), seed)
    return normal(3, 5, 4, seed=seed)


def test_every_function_is_a_measure_or_known_to_be_none():
    others = {"compute_measures", "rank_summary"}
    others |= {"relative_update", "variational_rate", "estimate_spectrum"}
    others |= {"logit_moments", "required_head_dim"}  # of queries and keys: test_required_width.py
    others |= {"mean_norm"}  # of queries or keys: test_logits.py
    lost = set(FUNCTIONS) - set(MEASURES) - others
    assert not lost, f"{sorted(lost)}: mark measures by `@measure`; what the laws cannot take is in `others`"
    assert others <= set(FUNCTIONS) - set(MEASURES)
    assert len(OF_MATRICES) >= 9
    assert len(OF_TOKENS) >= 5


@every_measure
def test_any_dtype_is_measured_as_its_values_in_float64(measure):
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8):
        x = (4 * normal(3, 6, 6, seed=1)).to(dtype)
        got = measure(x)
        assert got.dtype == torch.float64
        assert got.equal(measure(x.to(torch.float64)))


@every_matrix_measure
@settings(max_examples=8)
@given(x=matrices(batch=(2, 3)))
def test_matrices_of_a_batch_are_measured_alone(measure, x):
    together = measure(x)
    alone = torch.stack([torch.stack([measure(m) for m in row]) for row in x])
    assert together.shape[:2] == (2, 3)
    close(together, alone, rtol=rank_tolerance(x), atol=rank_tolerance(x))


@every_token_measure
def test_sequences_of_a_batch_are_measured_alone(measure):
    x = batch(measure)
    close(measure(x), torch.cat([measure(y[None]) for y in x]), rtol=rank_tolerance(x))


@every_measure
def test_an_input_that_is_not_finite_has_nan_and_the_others_do_not_change(measure):
    x = batch(measure)
    clean, at = measure(x), (1, 0) if measure in OF_MATRICES else (1,)
    for bad in BAD:
        x[at][2, 3] = bad
        got = measure(x)
        assert got[at].isnan().all(), bad
        got[at] = clean[at]
        assert got.equal(clean), bad


@every_measure
def test_an_empty_batch_has_an_empty_result(measure):
    x = batch(measure)[:0]
    assert measure(x).shape[: x.ndim - 2] == x.shape[:-2]


@every_token_measure
@given(x=st.data())
def test_padding_may_hold_anything(measure, x):
    tokens = normal(2, 6, 3, seed=x.draw(st.integers(0, 99)))
    mask = torch.tensor(x.draw(st.lists(st.booleans(), min_size=6, max_size=6).filter(lambda m: sum(m) > 1)))
    garbage = x.draw(st.sampled_from([*BAD, 0.0, 1e300]))
    padded = tokens.masked_fill(~mask[:, None], garbage)
    got = measure(padded, mask=mask.expand(2, 6))
    close(got, measure(tokens[:, mask]), rtol=rank_tolerance(tokens), atol=rank_tolerance(tokens))


@every_token_measure
def test_a_sequence_without_real_tokens_has_nan(measure):
    mask = torch.tensor([[False] * 4, [True] * 4])
    assert measure(normal(2, 4, 3), mask=mask).isnan().tolist() == [True, False]


@every_measure
def test_the_input_is_unchanged(measure):
    x = normal(2, 4, 4)
    x[0, 3] = math.nan
    before = x.clone()
    measure(x)
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


@every_matrix_measure
def test_an_operator_is_its_matrix(measure):
    q, k = normal(2, 4, 6, 3, seed=5), normal(2, 2, 6, 3, seed=6)
    softmax = SoftmaxMixing(q, k, is_causal=True)
    assert measure(softmax).equal(measure(softmax.dense(torch.float64)))
    half = make("stochastic", (2, 5, 5), seed=7).to(torch.bfloat16)
    assert measure(DenseMixing(half)).equal(measure(half))


def test_an_operator_made_in_low_precision_is_formed_in_float64():
    q = normal(1, 6, 3, seed=5).to(torch.float32)
    got = as_matrices(SoftmaxMixing(q, q), "`matrix`")
    wanted = torch.softmax(q.double() @ q.double().mT / math.sqrt(3), -1)
    close(got, wanted, rtol=64 * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize("wrap", [DenseMixing, lambda matrix: matrix], ids=["operator", "tensor"])
def test_dense_matrices_are_cast_per_block_and_not_copied(wrap):
    matrix = torch.ones(2, 3, 3, dtype=torch.float32)
    operator = as_operator(wrap(matrix), "`matrix`")
    assert operator.dtype == torch.float32
    assert operator.rows(0, 3).data_ptr() == matrix.data_ptr()


def test_heads_are_measured_through_an_operator_too():
    heads = make("stochastic", (2, 3, 4, 4), seed=8)
    assert rm.head_distance(DenseMixing(heads)).equal(rm.head_distance(heads))


REFUSED = {
    "matrices": [
        *(
            (torch.ones(shape), r"expected .*shape \(\.\.\., T, S\)")
            for shape in [(3,), (), (2, 0, 3), (2, 3, 0)]
        ),
        ([[1.0, 0.0], [0.0, 1.0]], r"got list\. Wrap an array with torch\.as_tensor"),
    ],
    "tokens": [
        (torch.ones(shape), r"expected tokens of shape \(B, T, D\)")
        for shape in [(3, 4), (2, 2, 3, 4), (2, 0, 4), (2, 3, 0)]
    ],
}


@every_measure
def test_inputs_of_another_shape_or_kind_are_refused(measure):
    complex_numbers = torch.ones(2, 3, 3, dtype=torch.complex64), "expected real numbers, got torch.complex64"
    for wrong, match in [*REFUSED[MEASURES[measure.__name__].of], complex_numbers]:
        with unchecked(), pytest.raises(ShapeError, match=f"`{measure.__name__}`.*{match}"):
            measure(wrong)


@every_token_measure
def test_a_mask_of_another_kind_is_refused(measure):
    expected = r"mask of .*: expected torch\.bool of shape \(2, 3\)"
    for mask in (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 4).bool()):
        with unchecked(), pytest.raises(ShapeError, match=expected):
            measure(torch.ones(2, 3, 4), mask=mask)
