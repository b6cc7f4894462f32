"""Queries and keys behind a softmax that a model writes out by hand: only the attention matrix is seen."""

from collections.abc import Iterator, Mapping
from itertools import permutations

import torch
from jaxtyping import Float
from torch import Tensor

from rankwise.tracing.projections import Projection, head_layouts

SMALLEST = 1e-12
"""Entries of attention below this are left out: their logarithms have lost digits, or are masked."""


def find_written(
    matrix: Float[Tensor, "B H T S"], outputs: Mapping[str, Float[Tensor, "B T O"]]
) -> tuple[Projection, Projection, float] | None:
    """The two projections, and the scale, whose inner products are the logits of a matrix.

    Masks and biases of positions are the same for two sequences. So between two of them the logarithms of
    attention differ, up to a number for each row, by what their scaled inner products differ by. That holds
    for no other pair of projections.

    Args:
        matrix: attention; two sequences or more, of which two are used.
        outputs: what each linear layer gave in the same call.

    Returns:
        Queries, keys and scale; None where no pair fits: logits hold more than inner products.
    """
    if matrix.shape[0] < 2 or matrix.shape[-2] != matrix.shape[-1]:
        return None
    pair = matrix[:2].double()
    seen = (pair > SMALLEST).all(0)
    target = _centred(pair.clamp(min=1e-300).log(), seen)
    size = float(target.norm())
    if size == 0:
        return None
    bound = torch.finfo(matrix.dtype).eps ** 0.5
    heads = matrix.shape[1]
    sides = list(_candidates(heads, matrix.shape[2], outputs))
    for (name_q, q, at_q), (name_k, k, at_k) in permutations(sides, 2):
        if q.shape != k.shape:
            continue
        found = _centred(q @ k.mT, seen)
        scale = float((found * target).sum()) / max(float((found * found).sum()), 1e-300)
        if scale != 0 and float((target - scale * found).norm()) <= bound * size:
            return Projection(name_q, at_q), Projection(name_k, at_k), scale
    return None


def _centred(logits: Float[Tensor, "2 H T S"], seen: Tensor) -> Float[Tensor, "H T S"]:
    """The difference of two sequences, less its mean over what a row sees."""
    change = torch.where(seen, logits[0] - logits[1], 0.0)
    mean = change.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(seen, change - mean, 0.0)


def _candidates(
    heads: int, tokens: int, outputs: Mapping[str, Tensor]
) -> Iterator[tuple[str, Float[Tensor, "2 H T K"], Tensor]]:
    """Every way to cut an output into the heads' channels: alone, or one of two or three side by side."""
    for name, output in outputs.items():
        if output.dim() != 3 or output.shape[1] != tokens or output.shape[0] < 2:
            continue
        for share in (1, 2, 3):
            width, rest = divmod(output.shape[-1], share * heads)
            if rest or not width:
                continue
            for channels in head_layouts(heads, width, output.shape[-1]):
                yield name, output[:2, :, channels].permute(0, 2, 1, 3).double(), channels
