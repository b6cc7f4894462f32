"""A batch measured a few matrices at a time, so that what is formed on the way stays small."""

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise.measures._inputs import Mixing, as_matrices
from rankwise.operators import MixingOperator

PART_BYTES = {"cpu": 2**23}
"""Float64 matrices measured at once: few enough for a CPU's cache."""
DEVICE_PART_BYTES = 2**29
"""The same on an accelerator, which wants many."""

PartMeasure = Callable[[Tensor], tuple[Tensor, ...]]
"""A function of finite float64 matrices (N, T, S) that answers with tensors (N, ...)."""


def measured_in_parts(mixing: Mixing, subject: str, measure: PartMeasure) -> tuple[Tensor, ...]:
    """Apply a measure part by part; a matrix that is not finite answers NaN and leaves the others alone.

    Memory: one part at a time, or the heads of one sequence where those are more.
    """
    answers = [_measure_part(part, measure) for part in _parts(mixing, subject)]
    lead = mixing.shape[:-2]
    joined = (torch.cat(numbers) for numbers in zip(*answers, strict=True))
    return tuple(numbers.reshape(lead + numbers.shape[1:]) for numbers in joined)


def _measure_part(part: Float64[Tensor, "N T S"], measure: PartMeasure) -> list[Tensor]:
    finite = part.amax((-2, -1)).isfinite() & part.amin((-2, -1)).isfinite()
    if not bool(finite.all()):
        part = part.masked_fill(~finite[:, None, None], 0)
    numbers = measure(part)
    return [one.masked_fill(~finite.view(-1, *[1] * (one.ndim - 1)), math.nan) for one in numbers]


def _parts(mixing: Mixing, subject: str) -> Iterator[Float64[Tensor, "N T S"]]:
    """The matrices, at least one part even where there are none."""
    whole = not isinstance(mixing, MixingOperator | Tensor) or len(mixing.shape) < 3 or 0 in mixing.shape
    if whole:
        matrices = as_matrices(mixing, subject)
        yield from _split(matrices.reshape(math.prod(matrices.shape[:-2]), *matrices.shape[-2:]))
        return
    at_once = _at_once(mixing.shape[1:], mixing.device)
    for start in range(0, mixing.shape[0], at_once):
        index = slice(start, min(start + at_once, mixing.shape[0]))
        yield from _split(as_matrices(mixing[index], subject).flatten(0, -3))


def _split(matrices: Float64[Tensor, "N T S"]) -> tuple[Tensor, ...]:
    return matrices.split(_at_once(matrices.shape[1:], matrices.device))


def _at_once(shape: torch.Size, device: torch.device) -> int:
    limit = PART_BYTES.get(device.type, DEVICE_PART_BYTES)
    return max(1, limit // (8 * math.prod(shape)))
