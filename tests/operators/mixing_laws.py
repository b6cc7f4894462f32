"""Laws that every mixing operator keeps, checked against a matrix formed by hand."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tests.support.torch_names import Operations, tree_leaves
from torch import Tensor

from rankwise.operators import MixingOperator

Slack = Callable[[Tensor], Tensor]
"""From |values| to how far rounding may carry each entry of a product."""


class Expected(NamedTuple):
    """A matrix formed by hand, and how far rounding may carry an operator from it."""

    matrix: Tensor
    slack: Tensor
    """Of each entry."""
    products: tuple[Slack, Slack]
    """Of M V and Mᵀ U."""
    support: Tensor


def expected(op: MixingOperator, matrix: Tensor, size: Tensor, terms: int, support: Tensor) -> Expected:
    """Return the expected matrix if an entry is a sum of ``terms`` roundings relative to its ``size``."""
    dtype = torch.float64 if op.dtype == torch.float64 else torch.float32
    slack = 2 * terms * torch.finfo(dtype).eps * size
    return Expected(matrix, slack, products(size, terms, dtype), support)


def check(op: MixingOperator, by_hand: Callable[[Any], Expected]) -> None:
    """An operator and its products equal the matrix formed by hand."""
    exact = by_hand(op)
    check_matrix(op, exact.matrix, exact.slack, exact.support)
    check_products(op, exact.matrix, exact.products)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def uniform(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, dtype=torch.float64, generator=generator).to(dtype)


def products(magnitude: Tensor, terms: int, dtype: torch.dtype) -> tuple[Slack, Slack]:
    """Slack of M V and Mᵀ U for sums of ``terms`` roundings, each relative to the sizes of the terms.

    γ_n = n·u/(1 − n·u) of Higham's "Accuracy and Stability of Numerical Algorithms", lemma 3.1, doubled
    because both sides round.
    """
    factor = 2 * terms * torch.finfo(dtype).eps
    return (
        lambda v: factor * magnitude @ v.abs().double(),
        lambda u: factor * magnitude.mT @ u.abs().double(),
    )


def near(got: Tensor, wanted: Tensor, slack: Tensor) -> None:
    assert got.shape == wanted.shape
    excess = (got.double() - wanted).abs() - slack
    assert bool((excess <= 0).all()), f"off by {excess.max():.3g} more than rounding explains"


def check_matrix(op: MixingOperator, exact: Tensor, slack: Tensor, support: Tensor) -> None:
    """Dense, rows, transpose and support equal the matrix formed by hand."""
    dense = op.dense()
    assert dense.dtype == (torch.float64 if op.dtype == torch.float64 else torch.float32)
    assert op.shape == exact.shape
    near(dense, exact, slack)
    near(op.mT.dense(), exact.mT, slack.mT)
    assert op.mT.shape == exact.mT.shape
    tokens = exact.shape[-2]
    for start, stop in {(0, 1), (tokens // 2, tokens), (tokens // 3, tokens // 3 + 1), (tokens - 1, tokens)}:
        near(op.rows(start, stop), exact[..., start:stop, :], slack[..., start:stop, :])
    assert torch.equal(op.support(), support.expand(op.shape))
    assert bool((dense[~op.support()] == 0).all())


def check_products(op: MixingOperator, exact: Tensor, slacks: tuple[Slack, Slack], width: int = 3) -> None:
    """M V, Mᵀ U, both through ``.mT`` too, and (Mᵀ U)·V = U·(M V)."""
    *batch, tokens, sources = exact.shape
    dtype = torch.float64 if op.dtype == torch.float64 else torch.float32
    v, u = (normal(*batch, n, width, seed=n, dtype=dtype) for n in (sources, tokens))
    forward, backward = slacks[0](v), slacks[1](u)
    for got in (op @ v, op.mT.apply_transposed(v)):
        assert got.dtype == v.dtype
        near(got, exact @ v.double(), forward)
    for got in (op.apply_transposed(u), op.mT @ u):
        assert got.dtype == u.dtype
        near(got, exact.mT @ u.double(), backward)
    left = (op.apply_transposed(u).double() * v.double()).sum()
    right = (u.double() * (op @ v).double()).sum()
    # each entry may be off by its slack; the sums here are in float64 and add almost nothing
    assert abs(left - right) <= (backward * v.abs()).sum() + (forward * u.abs()).sum()
    if batch:  # values without the leading axes serve every sequence and head
        alone = v[(0,) * len(batch)]
        near(op @ alone, exact @ alone.double(), slacks[0](alone.expand_as(v)))
        alone = u[(0,) * len(batch)]
        near(op.apply_transposed(alone), exact.mT @ alone.double(), slacks[1](alone.expand_as(u)))


def largest_tensor(work: Callable[[], object]) -> int:
    """Return the size, in elements, of the largest tensor that an operation makes."""
    sizes = [0]

    def measure(function: Any, args: Any, output: Any) -> None:
        for made in tree_leaves(output):
            if isinstance(made, Tensor):  # a view made by expand is as large as its storage, not as its shape
                sizes.append(made.untyped_storage().nbytes() // made.element_size())

    with Operations(measure), torch.no_grad():
        work()
    return max(sizes)
