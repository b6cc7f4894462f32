"""Laws that every mixing operator keeps, checked against a matrix formed by hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rankwise.operators import MixingOperator

Slack = Callable[[Tensor], Tensor]
"""From |values| to how far rounding may carry each entry of a product."""


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def uniform(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, dtype=torch.float64, generator=generator).to(dtype)


def products(magnitude: Tensor, terms: int, dtype: torch.dtype) -> tuple[Slack, Slack]:
    """Slack of M V and Mᵀ U for sums of ``terms`` roundings, each relative to the sizes of what is summed.

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
    """Dense, rows, transpose and support are those of the matrix formed by hand."""
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
    # each entry may be off by its slack; the sums here are in float64 and add next to nothing
    assert abs(left - right) <= (backward * v.abs()).sum() + (forward * u.abs()).sum()
    if batch:  # values without the leading axes serve every sequence and head
        alone = v[(0,) * len(batch)]
        near(op @ alone, exact @ alone.double(), slacks[0](alone.expand_as(v)))
        alone = u[(0,) * len(batch)]
        near(op.apply_transposed(alone), exact.mT @ alone.double(), slacks[1](alone.expand_as(u)))


INDICES: list[Any] = [
    0,
    slice(1, None),
    (0, 1),
    (slice(None), 1),
    (slice(None), slice(0, 3, 2)),
    (..., 2),
    (1, ...),
    None,
    torch.tensor([1, 0, 1]),
    (slice(None), torch.tensor([3, 1])),
]


def check_indexing(op: MixingOperator) -> None:
    """An operator with two leading axes, of at least 2 and 4, is picked from as its dense matrix is."""
    dense, v = op.dense(), normal(*op.shape[:-2], op.shape[-1], 2, seed=5)
    applied = op @ v
    for index in INDICES:
        picked, wanted = op[index], _leading(dense, index)
        assert type(picked) is type(op)
        assert picked.shape == wanted.shape
        # a matrix product may sum in another order in a batch of another size
        torch.testing.assert_close(picked.dense(), wanted, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(
            picked @ _leading(v, index), _leading(applied, index), rtol=1e-12, atol=1e-12
        )
        assert torch.equal(picked.support(), _leading(op.support(), index))
    torch.testing.assert_close(op[0][1].dense(), op[0, 1].dense(), rtol=0, atol=0)


def _leading(tensor: Tensor, index: Any) -> Tensor:
    """The index applied to the two leading axes, spelled out."""
    picks = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [pick for pick in picks if not isinstance(pick, Tensor)]:
        at = picks.index(Ellipsis)
        fill = (slice(None),) * (2 - (len(picks) - 1))
        picks = (*picks[:at], *fill, *picks[at + 1 :])
    return tensor[picks]


def check_gradients(make: Callable[..., MixingOperator], *inputs: Tensor) -> None:
    """Gradients of both products and of the rows, against differences, for every float64 input."""
    inputs = tuple(tensor.clone().requires_grad_() for tensor in inputs)
    op = make(*inputs)
    v, u = normal(*op.shape[:-2], op.shape[-1], 2, seed=1), normal(*op.shape[:-1], 2, seed=2)
    v, u = v.requires_grad_(), u.requires_grad_()
    assert torch.autograd.gradcheck(lambda v, *x: make(*x) @ v, (v, *inputs))
    assert torch.autograd.gradcheck(lambda u, *x: make(*x).apply_transposed(u), (u, *inputs))
    assert torch.autograd.gradcheck(lambda *x: make(*x).dense(), inputs)


class LargestTensor(TorchDispatchMode):
    """Keeps the size, in elements, of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                # a view made by expand is as large as what it shows, not as its shape says
                stored = made.untyped_storage().nbytes() // made.element_size()
                self.elements = max(self.elements, stored)
        return result


def largest_tensor(work: Callable[[], object]) -> int:
    with LargestTensor() as seen, torch.no_grad():
        work()
    return seen.elements


def odd_sizes() -> list[int]:
    """One token, both sides of a chunk, and a few chunks with a rest."""
    return [1, 2, 63, 64, 65, 131]
