"""Find the mask of each head, and compute reference ranks for it: one-hot, random and equal attention."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from rankwise.auditing.records import MaskName
from rankwise.operators import IndexedMixing, MixingOperator, SoftmaxMixing
from rankwise.theory import random_head_rank, rank_barrier_of_rows, uniform_rank

BLOCK_ENTRIES = 2**22
"""Number of mask entries in memory at once: 4 MiB as bool."""


class Mask(NamedTuple):
    """Columns to which the rows of a head may attend."""

    name: MaskName
    base: str = ""
    """Mask that the window restricts: "full" or "causal"; empty if the mask is not a window."""
    window: int | None = None


class Reach(NamedTuple):
    """First and last visible column and number of visible columns (``seen``) of each row of a mask.

    ``sources`` is the number of all columns.
    """

    first: Int64[Tensor, "T"]
    last: Int64[Tensor, "T"]
    seen: Int64[Tensor, "T"]
    sources: int


def reference_ranks(
    operator: MixingOperator, masks: list[list[Mask]], delta: float
) -> dict[str, Float64[Tensor, "B H"]]:
    """Return the reference ranks for matrices of this size and mask, by name of the field in records.

    An unknown rank is NaN.
    """
    tokens, sources = operator.shape[-2:]
    inner = operator.operator if isinstance(operator, IndexedMixing) else operator
    width, scale = (inner.query.shape[-1], inner.scale) if isinstance(inner, SoftmaxMixing) else (None, None)
    one_hot = one_hot_rank(operator) if delta <= 1 else torch.full(operator.shape[:2], torch.nan).double()
    by_mask = {
        mask: _random_and_uniform(tokens, sources, mask, width, scale, delta)
        for mask in {mask for heads in masks for mask in heads}
    }
    ranks = torch.tensor([[by_mask[mask] for mask in heads] for heads in masks], dtype=torch.float64)
    return {"one_hot_rank": one_hot, "random_rank": ranks[..., 0], "uniform_rank": ranks[..., 1]}


def one_hot_rank(operator: MixingOperator) -> Float64[Tensor, "*batch"]:
    """Return the expected rank of random one-hot rows under the mask of each matrix (..., H, T, S)."""
    return rank_barrier_of_rows(_blocks(operator)).expand(operator.shape[:-2])


def _random_and_uniform(
    tokens: int, sources: int, mask: Mask, width: int | None, scale: float | None, delta: float
) -> tuple[float, float]:
    """Return the rank for random queries and keys, and for equal weights. An unknown rank is NaN."""
    name = mask.base if mask.name == "window" else mask.name
    square = tokens == sources
    if name not in ("full", "causal") or not (square or (name == "full" and mask.window is None)):
        return math.nan, math.nan
    uniform = uniform_rank(tokens, name, mask.window, delta, sources)
    if width is None or scale is None or scale <= 0:
        return math.nan, uniform
    columns = None if square else sources
    random = random_head_rank(
        tokens, width, name, mask.window, 1 / scale, delta, sources=columns, interpolate=True
    )
    return random.mean, uniform


def masks_of(operator: MixingOperator) -> list[list[Mask]]:
    """Return the mask of each sequence and head of an operator (B, H, T, S)."""
    sources, heads = operator.shape[-1], operator.shape[1]
    column = torch.arange(sources, device=operator.device)
    blocks = []
    for block in _blocks(operator):
        first = torch.where(block, column, sources).amin(-1)
        blocks.append((first, torch.where(block, column, -1).amax(-1), block.sum(-1)))
    most = max(reach[0].shape[1] for reach in blocks)
    first, last, count = (
        torch.cat([columns.expand(-1, most, -1) for columns in rows], -1).cpu()
        for rows in zip(*blocks, strict=True)
    )
    reaches = [[*zip(*columns, strict=True)] for columns in zip(first, last, count, strict=True)]
    return [[mask_of(Reach(*reach, sources)) for reach in row] * (heads // most) for row in reaches]


def mask_of(reach: Reach) -> Mask:
    """Return the mask of one head: all columns, columns up to the row (causal), a diagonal band, or other."""
    first, last, seen, sources = reach
    rows = torch.arange(len(seen))
    seeing = seen > 0
    if bool((seen == sources).all()):
        return Mask("full")
    if not bool(seeing.any()):
        return Mask("other")
    low, high = int((first - rows)[seeing].min()), int((last - rows)[seeing].max())
    if _is_band(reach, rows, -len(seen), sources - len(seen)):
        return Mask("causal")
    if not _is_band(reach, rows, low, high):
        return Mask("other")
    base = {0: "causal", -low: "full"}.get(high, "")
    return Mask("window", base, 1 - low)


def _is_band(reach: Reach, rows: Tensor, low: int, high: int) -> bool:
    """Return True if row t may attend exactly to columns t + low … t + high, clipped to the matrix."""
    first, last = (rows + low).clamp(min=0), (rows + high).clamp(max=reach.sources - 1)
    count = (last - first + 1).clamp(min=0)
    same = (reach.first == first) & (reach.last == last)
    return bool(((reach.seen == count) & (same | (count == 0))).all())


def _blocks(operator: MixingOperator) -> Iterator[Bool[Tensor, "B H R S"]]:
    """Yield blocks of rows of the mask, with one head if all heads have the same mask, to save memory."""
    *batch, tokens, sources = operator.shape
    step = max(1, BLOCK_ENTRIES // (math.prod(batch) * sources))
    for start in range(0, tokens, step):
        block = operator.support_rows(start, min(start + step, tokens))
        alike = block.stride(-3) == 0 or bool((block == block[..., :1, :, :]).all())
        yield block[..., :1, :, :] if alike else block
