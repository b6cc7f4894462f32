"""Low-rank barrier: the expected rank of hardmax attention, in which each row has a single 1."""

import math
from collections.abc import Iterable
from typing import overload

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from rankwise._internals.linalg import float64_device
from rankwise.errors import ShapeError, one_of, whole_number

MASKS = ("full", "causal")
"""Names of the masks for which the expected rank has a closed formula."""


@overload
def rank_barrier(tokens: int, mask: str = ...) -> float: ...
@overload
def rank_barrier(tokens: int, mask: Tensor) -> Tensor: ...
def rank_barrier(tokens: int, mask: str | Tensor = "full") -> float | Float64[Tensor, "*batch"]:
    """Return the expected rank of a random hardmax matrix: a single 1 per row, in a random visible column.

    The column of each row is drawn uniformly from its visible columns, independently of the other rows. The
    rank is the number of different columns drawn. Formulas, where row i sees n_i columns:

    - any mask: Σ_j (1 − Π_{i sees j} (1 − 1/n_i)); a row that sees no column adds 0
    - full: T(1 − (1 − 1/T)^T), which tends to (1 − 1/e)·T ≈ 0.632 T
    - causal (row i sees columns 0 … i): (T + 1)/2

    Range: [1, min(T, S)] if any row sees a column. The value is an expectation, not a maximum: attention to
    the previous token, for example, has almost full rank.
    Cost: O(1) time; O(T S) for a boolean mask.
    Source: Theorem 1 of "On the Limitation and Redundancy of Transformers: A Rank Perspective" bounds the
    expectation without a mask by (1 − 1/e)·T + O(1). The formulas for masks are derived in this project.

    Args:
        mask: "full", "causal", or a boolean mask (..., T, S), True if row i sees column j. For a boolean
            mask, the result is a float64 tensor (...).

    Raises:
        ShapeError: if a mask tensor is not boolean, or does not have T rows.
        InputError: if the number of tokens is not positive, or the name of the mask is unknown.

    Examples:
        >>> import torch
        >>> round(rank_barrier(100), 2), rank_barrier(100, mask="causal")
        (63.4, 50.5)
        >>> round(rank_barrier(3, mask=torch.ones(3, 3, dtype=torch.bool).tril()).item(), 6)
        2.0
    """
    whole_number("`tokens`", tokens)
    if isinstance(mask, Tensor):
        fits = mask.ndim >= 2 and mask.shape[-2] == tokens and mask.shape[-1] > 0
        if mask.dtype != torch.bool or not fits:
            raise ShapeError(
                "`mask`",
                expected=f"torch.bool of shape (..., {tokens}, S)",
                got=f"{mask.dtype} of shape {tuple(mask.shape)}",
                fix="True if row i sees column j; an additive mask becomes boolean with mask == 0.",
            )
        return rank_barrier_of_rows([mask])
    one_of("`mask`", mask, MASKS)
    if mask == "causal" or tokens == 1:  # math.log1p(−1) raises an error
        return (tokens + 1) / 2
    return -tokens * math.expm1(tokens * math.log1p(-1 / tokens))


def rank_barrier_of_rows(rows: Iterable[Bool[Tensor, "*batch _ S"]]) -> Float64[Tensor, "*batch"]:
    """Return the expected rank, as `rank_barrier` does, for a boolean mask in blocks of rows, to save memory.

    Cost: O(T S) time, memory for one block.

    Args:
        rows: blocks of rows of the mask (True = visible); leading axes broadcast.

    Examples:
        >>> import torch
        >>> mask = torch.ones(3, 3, dtype=torch.bool).tril()
        >>> round(rank_barrier_of_rows([mask[:2], mask[2:]]).item(), 6)
        2.0
    """
    log_missed: Tensor | None = None
    for block in rows:
        block = block.to(float64_device(block.device))
        seen = block.sum(-1, keepdim=True, dtype=torch.float64).clamp(min=1)
        log_missed_by_block = torch.where(block, torch.log1p(-1 / seen), 0.0).sum(-2)
        log_missed = log_missed_by_block if log_missed is None else log_missed + log_missed_by_block
    if log_missed is None:
        raise ShapeError("`rows`", expected="at least one block", got="none", fix="Pass the rows of a mask.")
    return -torch.expm1(log_missed).sum(-1)
