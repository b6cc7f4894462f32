"""What rows may see: the name of the mask and the rank of random winners under it, read block by block."""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from rankwise.operators import MixingOperator
from rankwise.theory import rank_barrier_of_rows

MaskName = Literal["full", "causal", "window", "other"]

BLOCK_ENTRIES = 2**22
"""Entries of a mask looked at together."""


class Pattern(NamedTuple):
    """What rows may see."""

    name: MaskName
    base: str = ""
    """Of a window: "full" or "causal"."""
    window: int | None = None


class Reach(NamedTuple):
    """The first and the last column each row may see, and how many it does."""

    first: Int64[Tensor, "*batch T"]
    last: Int64[Tensor, "*batch T"]
    seen: Int64[Tensor, "*batch T"]
    sources: int


def barrier_of(operator: MixingOperator) -> Float64[Tensor, "*batch"]:
    """`rank_barrier` under the mask of each matrix of an operator (..., H, T, S), never formed whole."""
    return rank_barrier_of_rows(_blocks(operator)).expand(operator.shape[:-2])


def patterns_of(operator: MixingOperator) -> list[list[Pattern]]:
    """The mask of each head of each sequence of an operator (B, H, T, S)."""
    sources, heads = operator.shape[-1], operator.shape[1]
    column = torch.arange(sources, device=operator.device)
    found = []
    for block in _blocks(operator):
        first = torch.where(block, column, sources).amin(-1)
        found.append((first, torch.where(block, column, -1).amax(-1), block.sum(-1)))
    most = max(runs[0].shape[1] for runs in found)
    first, last, count = (
        torch.cat([part.expand(-1, most, -1) for part in parts], -1).cpu()
        for parts in zip(*found, strict=True)
    )
    named = [
        [mask_pattern(Reach(first[b, h], last[b, h], count[b, h], sources)) for h in range(most)]
        for b in range(first.shape[0])
    ]
    return [columns * (heads // most) for columns in named]


def mask_pattern(reach: Reach) -> Pattern:
    """Name what the rows of one head may see: everything, all up to themselves, a band, or something else."""
    first, last, seen, sources = reach
    rows = torch.arange(len(seen))
    seeing = seen > 0
    if bool((seen == sources).all()):
        return Pattern("full")
    if not bool(seeing.any()):
        return Pattern("other")
    low, high = int((first - rows)[seeing].min()), int((last - rows)[seeing].max())
    if _is_band(reach, rows, -len(seen), sources - len(seen)):
        return Pattern("causal")
    if not _is_band(reach, rows, low, high):
        return Pattern("other")
    base = {0: "causal", -low: "full"}.get(high, "")
    return Pattern("window", base, 1 - low)


def _is_band(reach: Reach, rows: Tensor, low: int, high: int) -> bool:
    """Whether row t sees columns t + low … t + high, as far as there are such, and no other."""
    first, last = (rows + low).clamp(min=0), (rows + high).clamp(max=reach.sources - 1)
    count = (last - first + 1).clamp(min=0)
    same = (reach.first == first) & (reach.last == last)
    return bool(((reach.seen == count) & (same | (count == 0))).all())


def _blocks(operator: MixingOperator) -> Iterator[Bool[Tensor, "B H R S"]]:
    """Rows of the support; with one head where all heads see alike, as they mostly do."""
    *batch, tokens, sources = operator.shape
    step = max(1, BLOCK_ENTRIES // (math.prod(batch) * sources))
    for start in range(0, tokens, step):
        block = operator.support_rows(start, min(start + step, tokens))
        alike = block.stride(-3) == 0 or bool((block == block[..., :1, :, :]).all())
        yield block[..., :1, :, :] if alike else block
