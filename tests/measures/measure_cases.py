"""Cases for the tests of the measures: matrices, and tolerances from rounding errors."""

from types import FunctionType

import torch
from hypothesis import strategies as st
from torch import Tensor

import rankwise.measures as rm
from rankwise.measures import MEASURES

FUNCTIONS = {name: getattr(rm, name) for name in rm.__all__ if isinstance(getattr(rm, name), FunctionType)}
"""All that `rankwise.measures` exports."""
OF_MATRICES = [FUNCTIONS[name] for name, measure in MEASURES.items() if measure.of == "matrices"]
OF_TOKENS = [FUNCTIONS[name] for name, measure in MEASURES.items() if measure.of == "tokens"]
"""Measures, as they say it of themselves."""

U = torch.finfo(torch.float64).eps

KINDS = ("signed", "stochastic", "causal", "low rank", "sparse")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator(seed))


def make(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A batch of float64 matrices of one kind; every row of all but "sparse" has a non-zero entry."""
    x = normal(*shape, seed=seed)
    if kind == "stochastic":
        return (2 * x).softmax(-1)
    if kind == "causal":
        seen = torch.ones(shape[-2:], dtype=torch.bool).tril()
        return (2 * x).masked_fill(~seen, -torch.inf).softmax(-1)
    if kind == "low rank":
        return x[..., :, :1] @ x[..., :1, :]
    if kind == "sparse":
        return x * (x > 0.5)
    return x


@st.composite
def matrices(
    draw: st.DrawFn, batch: tuple[int, ...] = (), square: bool = False, kinds: tuple[str, ...] = KINDS
):
    tokens = draw(st.integers(1, 9))
    sources = tokens if square else draw(st.integers(1, 9))
    return make(draw(st.sampled_from(kinds)), (*batch, tokens, sources), draw(st.integers(0, 2**31)))


@st.composite
def token_batches(draw: st.DrawFn, min_tokens: int = 1, batch: int = 2):
    shape = (batch, draw(st.integers(min_tokens, 9)), draw(st.integers(1, 9)))
    return make(draw(st.sampled_from(("signed", "low rank", "sparse"))), shape, draw(st.integers(0, 2**31)))


def rotation(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(size, size, seed=seed)).Q


def sigma_tolerance(matrix: Tensor) -> float:
    """Backward error of a dense decomposition and of the products before it: c·n·u·σ_1, here c = 16."""
    return 16 * max(matrix.shape[-2:]) * U


def rank_tolerance(matrix: Tensor) -> float:
    """Relative error of exp(entropy): n shares move by q = c·n·u each, at a slope of at most −log q ≤ 40."""
    return 40 * min(matrix.shape[-2:]) * sigma_tolerance(matrix)


def sum_tolerance(terms: int) -> float:
    """A sum of n terms of one sign, each a few roundings long: c·n·u, here c = 8."""
    return 8 * max(terms, 1) * U


def close(got: Tensor | float, wanted: Tensor | float, rtol: float, atol: float = 0.0) -> None:
    got, wanted = torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol, equal_nan=True)
