"""Differences of two audits beyond the rounding of sums over sequences."""

import math
from typing import Any

import rankwise as rw

OF_THE_FIRST = {"attention_map", "spectrum", "membership_map"}
"""Fields of the first sequence alone."""
DATA_RANKS = {
    *("key_effective_rank", "value_effective_rank"),
    *("pooled_effective_rank", "pooled_effective_rank_without_massive"),
}
OF_ALL = {"required_head_dim", *DATA_RANKS}
"""Fields that need all sequences at once, or moments that files do not contain."""
TOLD = {"created", "seconds", "command", "arguments", "notes", "batches", "data_digests", "moments", "pooled"}
"""Fields about the making of an audit."""


def differences(first: Any, other: Any, at: str = "", without: frozenset[str] = frozenset()) -> list[str]:
    """Return the fields in which two records differ by more than the rounding of a sum over sequences.

    Standard deviations are square roots of sums of squares: their error is √ε of the values that vary.
    """
    if isinstance(first, dict) and isinstance(other, dict):
        keys = [key for key in {**first, **other} if key not in without]
        missing = object()
        pairs = [(f"{at}.{key}", first.get(key, missing), other.get(key, missing)) for key in keys]
        return [said for name, *pair in pairs for said in differences(*pair, name, without)]
    if isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        pairs = [(f"{at}[{n}]", *pair) for n, pair in enumerate(zip(first, other, strict=True))]
        return [said for name, *pair in pairs for said in differences(*pair, name, without)]
    if isinstance(first, float) and isinstance(other, float):
        near = 1e-12 * max(1.0, abs(first), abs(other))
        near = max(near, 1e-7) if ".std." in at else near
        same = (math.isnan(first) and math.isnan(other)) or abs(first - other) <= near
        return [] if same else [f"{at}: {first!r} and {other!r}"]
    return [] if first == other else [f"{at}: {first!r} and {other!r}"]


def compared(
    first: rw.Audit, other: rw.Audit, without: set[str] = frozenset(), of_all: set[str] = OF_ALL
) -> list[str]:
    """Return differences of two audits, except fields of the first sequence and about their making."""
    left_out = frozenset(OF_THE_FIRST | of_all | TOLD | without)
    return differences(first.model_dump(), other.model_dump(), without=left_out)
