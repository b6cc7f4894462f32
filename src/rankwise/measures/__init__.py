"""Measures: functions that map mixing matrices (operators) or token states to numbers, without a model.

A measure of matrices takes ``op``: a mixing operator, or a tensor (..., T, S) with a row per token and a
column per source, T, S ≥ 1. A measure of heads takes the matrices of all H heads of a layer, (..., H, T, S).
A measure of token states takes ``tokens`` (B, T, D) and a bool ``mask`` (B, T), True for real tokens; by
default all tokens are real. Other shapes or dtypes raise `rankwise.errors.ShapeError`.

All computations run in float64 and are batched over leading axes. A matrix or sequence with NaN or infinity
has the result NaN, and does not affect the rest of the batch.

`EffectiveRank` is a metric of torchmetrics for all embeddings of a data set; it is imported on first use.
"""

from typing import Any

from rankwise.errors import need_package
from rankwise.measures import estimate, logits, rank, required_width, row_walk, rows, token_states
from rankwise.measures.estimate import *
from rankwise.measures.logits import *
from rankwise.measures.rank import *
from rankwise.measures.registry import MEASURES
from rankwise.measures.required_width import *
from rankwise.measures.row_walk import *
from rankwise.measures.rows import *
from rankwise.measures.token_states import *

__all__ = ["MEASURES"]
__all__ += rank.__all__
__all__ += estimate.__all__
__all__ += row_walk.__all__
__all__ += rows.__all__
__all__ += logits.__all__
__all__ += required_width.__all__
__all__ += token_states.__all__


def __getattr__(name: str) -> Any:
    """Import `EffectiveRank` on first use, because torchmetrics is an optional package."""
    if name != "EffectiveRank":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    need_package("torchmetrics", "`EffectiveRank`", "metrics")
    from rankwise.measures.embedding_rank import EffectiveRank

    return EffectiveRank
