"""ToeplitzMixing: the laws of every operator, with the error the Fourier transform makes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixing_laws import (
    check_gradients,
    check_indexing,
    check_matrix,
    check_products,
    largest_tensor,
    near,
    normal,
    odd_sizes,
)
from tests.unchecked import unchecked

from rankwise.errors import ShapeError
from rankwise.operators.toeplitz import ToeplitzMixing


def kernel_of(tokens, is_causal, *lead, seed=0, dtype=torch.float64):
    return normal(*lead, tokens if is_causal else 2 * tokens - 1, seed=seed, dtype=dtype)


def by_hand(kernel, is_causal):
    *lead, lags = kernel.shape
    tokens = lags if is_causal else (lags + 1) // 2
    matrix = torch.zeros(*lead, tokens, tokens, dtype=torch.float64)
    for t in range(tokens):
        for s in range(tokens):
            at = t - s if is_causal else t - s + tokens - 1
            if at >= 0:
                matrix[..., t, s] = kernel[..., at]
    return matrix


def slack_of(kernel, dtype):
    """Each of three transforms is off by log2(n)·u·‖x‖ (Higham, theorem 24.2, with a constant of about 4).

    A circular product is then off by 3·4·log2(n)·u·‖k‖₂‖v‖₂ in every entry, one unit more for the product;
    the sum of T products on the other side by T·u·‖k‖₂‖v‖₂ at most.
    """
    tokens = kernel.shape[-1]
    factor = (12 * math.log2(4 * tokens) + 1 + tokens) * torch.finfo(dtype).eps
    size = factor * kernel.double().norm(dim=-1)[..., None, None]

    def slack(values):
        return size * values.double().norm(dim=-2, keepdim=True) * torch.ones(values.shape[-2], 1).double()

    return slack, slack


def support(tokens, is_causal):
    seen = torch.ones(tokens, tokens, dtype=torch.bool)
    return seen.tril() if is_causal else seen


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", odd_sizes())
def test_it_is_the_matrix_formed_by_hand(tokens, dtype, is_causal):
    kernel = kernel_of(tokens, is_causal, 2, dtype=dtype)
    op, exact = ToeplitzMixing(kernel, is_causal), by_hand(kernel, is_causal)
    check_matrix(op, exact, torch.zeros_like(exact), support(tokens, is_causal))
    check_products(op, exact, slack_of(kernel, dtype))


@settings(max_examples=25)
@given(tokens=st.integers(1, 12), is_causal=st.booleans(), lead=st.sampled_from([(), (3,), (2, 3)]))
def test_any_small_size(tokens, is_causal, lead):
    kernel = kernel_of(tokens, is_causal, *lead, seed=tokens)
    op, exact = ToeplitzMixing(kernel, is_causal), by_hand(kernel, is_causal)
    check_matrix(op, exact, torch.zeros_like(exact), support(tokens, is_causal))
    check_products(op, exact, slack_of(kernel, torch.float64))


@pytest.mark.parametrize("is_causal", [True, False])
def test_indexing(is_causal):
    check_indexing(ToeplitzMixing(kernel_of(5, is_causal, 2, 4), is_causal))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("tokens", [1, 5])
def test_gradients(tokens, is_causal):
    check_gradients(lambda kernel: ToeplitzMixing(kernel, is_causal), kernel_of(tokens, is_causal, 2))


@pytest.mark.parametrize("is_causal", [True, False])
def test_no_matrix_is_formed(is_causal):
    tokens, width = 2000, 3
    op, v = ToeplitzMixing(kernel_of(tokens, is_causal, 2), is_causal), normal(2, tokens, width)
    # 4,096 padded tokens, or 2,049 complex frequencies
    assert largest_tensor(lambda: op @ v) <= 2 * 2 * 2049 * width
    assert largest_tensor(lambda: op.mT @ v) <= 2 * 2 * 2049 * width
    assert largest_tensor(op.dense) >= 2 * tokens * tokens


def test_lags_do_not_wrap_round():
    """The last token reaches the first through the last lag alone; at T = 2^n any shorter transform wraps."""
    for tokens in (2, 3, 4, 8, 9):
        kernel = torch.zeros(tokens).double()
        kernel[-1] = 1
        pulse = torch.eye(tokens, dtype=torch.float64)
        near(ToeplitzMixing(kernel) @ pulse, by_hand(kernel, True), torch.tensor(1e-14))
        both = torch.zeros(2 * tokens - 1).double()
        both[0], both[-1] = 1, 2
        near(ToeplitzMixing(both, is_causal=False) @ pulse, by_hand(both, False), torch.tensor(1e-14))


def test_a_causal_kernel_is_a_general_one_with_zeros():
    kernel = normal(2, 9)
    padded = torch.nn.functional.pad(kernel, (8, 0))
    assert torch.equal(ToeplitzMixing(kernel).dense(), ToeplitzMixing(padded, is_causal=False).dense())


def test_kernels_that_decay_or_grow():
    """The documented error: it follows the norms, not the entry."""
    kernel = torch.cat([torch.tensor([1e6]), torch.full((99,), 1e-9)]).double()
    check_products(ToeplitzMixing(kernel), by_hand(kernel, True), slack_of(kernel, torch.float64))


def test_half_precision_is_convolved_in_float32():
    kernel, v = kernel_of(50, True, dtype=torch.bfloat16), normal(50, 3, dtype=torch.bfloat16)
    got = ToeplitzMixing(kernel) @ v
    assert got.dtype == torch.bfloat16
    exact = by_hand(kernel, True) @ v.double()
    # one rounding to bfloat16, of half its eps, on top of the float32 error
    near(got, exact, slack_of(kernel, torch.float32)[0](v) * 2 + exact.abs() * 2**-8)


def test_kind_type_and_place():
    op = ToeplitzMixing(normal(3, dtype=torch.float16))
    assert (op.kind, op.dtype, op.device.type) == ("toeplitz", torch.float16, "cpu")
    assert op.to(torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    ("shape", "is_causal"), [((), True), ((2, 0), True), ((2, 0), False), ((2, 4), False)]
)
def test_a_kernel_of_the_wrong_length_is_refused(shape, is_causal):
    with pytest.raises(ShapeError, match=r"`ToeplitzMixing` kernel: expected \(\.\.\., 2?T"):
        ToeplitzMixing(torch.zeros(shape), is_causal)


def test_a_complex_kernel_is_refused():
    with (
        unchecked(),
        pytest.raises(
            ShapeError, match=r"`ToeplitzMixing` kernel: expected real numbers, got torch\.complex64"
        ),
    ):
        ToeplitzMixing(torch.zeros(3, dtype=torch.complex64))


def test_values_of_other_tokens_are_refused():
    op = ToeplitzMixing(normal(2, 3))
    with (
        unchecked(),
        pytest.raises(ShapeError, match=r"`M @ values`: expected values of shape \(\.\.\., 3, V\)"),
    ):
        op @ normal(2, 4, 5)
    with unchecked(), pytest.raises(ShapeError, match=r"`M.mT @ values`: expected .*\(\.\.\., 3, V\)"):
        op.apply_transposed(normal(2, 4, 5))
