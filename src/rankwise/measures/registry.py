"""Registry of measures for audits and for tests of properties; conversion of measure inputs to float64."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float64, Shaped
from torch import Tensor

from rankwise._internals.linalg import as_float64, float64_device
from rankwise.errors import ShapeError
from rankwise.operators import DenseMixing, MixingOperator
from rankwise.shapes import TokenMask

Mixing = MixingOperator | Shaped[Tensor, "*batch T S"]
"""Mixing matrices, as an operator or as a dense tensor."""
Rows = Float64[Tensor, "*batch R S"]
MeasureT = TypeVar("MeasureT", bound=Callable[..., Any])


@runtime_checkable
class RowStatistic(Protocol):
    """Statistic accumulated over blocks of rows of mixing matrices, such as a sum of row entropies."""

    def __init__(self, operator: MixingOperator) -> None: ...

    def add(self, start: int, rows: Rows) -> None:
        """Add a block of rows that begins at row ``start``."""


class Measure(NamedTuple):
    """A registered measure: a function, the kind of its input, and how its value scales with the input.

    Attributes:
        function: function that computes the measure.
        of: input of the function: "matrices" (..., T, S), each matrix measured alone; "heads" (..., H, T, S),
            all heads of a layer compared; "tokens" (B, T, D), token states.
        degree: k in f(c·M) = cᵏ·f(M) for c > 0; None if f does not scale this way, as with a fixed
            threshold δ.
        statistics: row statistics that the function reads; empty if it needs no pass over the rows.
    """

    function: Callable[..., Any]
    of: Literal["matrices", "heads", "tokens"]
    degree: int | None
    statistics: tuple[type[RowStatistic], ...] = ()


MEASURES: dict[str, Measure] = {}
"""All registered measures by the name of their function, such as "row_entropy"."""


def measure(
    of: Literal["matrices", "heads", "tokens"], *statistics: type[RowStatistic], degree: int | None
) -> Callable[[MeasureT], MeasureT]:
    """Return a decorator that registers a function in `MEASURES`; the arguments are the fields of `Measure`.

    Examples:
        >>> from rankwise import measures
        >>> MEASURES["row_entropy"].of, MEASURES["row_entropy"].degree
        ('matrices', 0)
    """

    def register(function: MeasureT) -> MeasureT:
        MEASURES[function.__name__] = Measure(function, of, degree, statistics)
        return function

    return register


def as_matrices(mixing: Mixing, subject: str) -> Float64[Tensor, "*batch T S"]:
    """Return mixing matrices as a dense float64 tensor, on the CPU if the device has no float64."""
    if isinstance(mixing, MixingOperator):
        mixing = as_operator(mixing, subject).dense(torch.float64)
    check_matrices(mixing, subject)
    return to_float64(mixing, subject)


def as_operator(mixing: Mixing, subject: str) -> MixingOperator:
    """Return mixing matrices as a float64 operator, without forming them; a `DenseMixing` keeps its dtype."""
    check_matrices(mixing, subject)
    if isinstance(mixing, Tensor):
        mixing = DenseMixing(mixing if mixing.is_floating_point() else to_float64(mixing, subject))
    home = float64_device(mixing.device)
    operator = mixing if mixing.device == home else mixing.to(home)
    # Dense matrices are cast block by block when they are read, to avoid a second copy in memory.
    return operator if isinstance(operator, DenseMixing) else operator.to(torch.float64)


def check_matrices(mixing: Mixing, subject: str) -> None:
    """Raise if the input is not an operator or tensor (..., T, S) with T, S ≥ 1."""
    has_shape = isinstance(mixing, MixingOperator | Tensor)
    if not has_shape or len(mixing.shape) < 2 or 0 in mixing.shape[-2:]:
        raise ShapeError(
            subject,
            expected="a MixingOperator or a tensor of shape (..., T, S) with T, S ≥ 1",
            got=str(tuple(mixing.shape)) if has_shape else type(mixing).__name__,
            fix="Wrap an array with torch.as_tensor. Leading axes may be empty.",
        )


def as_tokens(
    tokens: Shaped[Tensor, "B T D"], mask: TokenMask | None, subject: str
) -> tuple[Float64[Tensor, "B T D"], TokenMask, Bool[Tensor, " B"]]:
    """Return token states in float64 with padding set to 0, the mask, and a flag per sequence.

    The flag is True if the sequence has a real token and all its real tokens are finite. The states of other
    sequences are set to 0.
    """
    if tokens.ndim != 3 or 0 in tokens.shape[1:]:
        raise ShapeError(
            subject,
            expected="tokens of shape (B, T, D) with T, D ≥ 1",
            got=str(tuple(tokens.shape)),
            fix="Add the batch axis of a single sequence with tokens[None].",
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape[:2]):
        raise ShapeError(
            f"mask of {subject}",
            expected=f"torch.bool of shape {tuple(tokens.shape[:2])}, True where a token is real",
            got=f"{mask.dtype} of shape {tuple(mask.shape)}",
            fix="A tokenizer's attention_mask becomes one with .bool().",
        )
    states = to_float64(tokens, subject)
    valid = states.new_ones(states.shape[:2], dtype=torch.bool) if mask is None else mask.to(states.device)
    if mask is not None and not bool(valid.all()):
        states = states.masked_fill(~valid[..., None], 0)
    usable = all_finite(states) & valid.any(-1)
    if not bool(usable.all()):
        states = states.masked_fill(~usable[:, None, None], 0)
    return states, valid, usable


def to_float64(tensor: Tensor, subject: str) -> Tensor:
    """Return a tensor in float64, on the CPU if the device has no float64; raise if the tensor is complex."""
    if tensor.is_complex():
        raise ShapeError(
            subject,
            expected="real numbers",
            got=str(tensor.dtype),
            fix="Measure tensor.real, tensor.imag or tensor.abs().",
        )
    return as_float64(tensor)


def all_finite(matrices: Shaped[Tensor, "*batch T S"]) -> Bool[Tensor, "*batch"]:
    """Return True for each matrix that contains neither NaN nor infinity."""
    finite = matrices.sum((-2, -1)).isfinite()  # a sum keeps NaN and infinity, but may overflow
    return finite if bool(finite.all()) else matrices.isfinite().all(-1).all(-1)
