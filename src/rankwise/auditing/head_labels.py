"""Label heads that people look for (previous token, induction, positional) by their attention maps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankwise._internals.statistics import Floats
from rankwise.auditing.records import PEAK_MASS, HeadRecord
from rankwise.errors import InputError

LABELS = ("induction", "previous_token", "positional")
"""Scores that label a head, in this order, if they are at least `PEAK_MASS`."""


def head_labels(heads: Sequence[HeadRecord], texts: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return a row per head that has a whole attention map; `Audit.head_labels` defines the columns."""
    rows = []
    for head in heads:
        kept = head.attention_map
        if kept is None or not 1 < kept.rows == kept.columns == kept.tokens == kept.sources:
            continue
        weights, tokens = kept.matrix().astype(np.float64), texts.get(kept.row_tokens, ())
        named = kept.row_tokens == kept.column_tokens and len(tokens) == len(weights)
        scores = {
            "induction": _induction(weights, tokens) if named else math.nan,
            "previous_token": float(np.diagonal(weights, -1).mean()),
            "positional": _positional(weights),
        }
        names = ("stack", "layer", "head", "transformer_lens", "nnsight")
        label = next((name for name in LABELS if scores[name] >= PEAK_MASS), "")
        rows.append({name: getattr(head, name) for name in names} | scores | {"label": label})
    if not rows:
        expected, fix = "square attention maps of at most 128 tokens", "`attention_maps='all'` keeps them."
        raise InputError("`Audit.head_labels`", expected=expected, got="none", fix=fix)
    return rows


def _induction(weights: Floats, tokens: Sequence[str]) -> float:
    """Return the mean weight, above uniform rows, on tokens after an earlier copy of the row's token."""
    gains = []
    for row in range(2, len(tokens)):
        after = [place + 1 for place in range(row - 1) if tokens[place] == tokens[row]]
        if after:
            gains.append(weights[row, after].sum() - len(after) / (row + 1))
    return float(np.mean(gains)) if gains else math.nan


def _positional(weights: Floats) -> float:
    """Return the share of the variance of the weights that their offset explains; 0 without variance."""
    causal = not np.triu(weights, 1).any()
    rows, columns = np.tril_indices(len(weights)) if causal else np.indices(weights.shape).reshape(2, -1)
    values, offsets = weights[rows, columns], rows - columns + len(weights)
    means = np.bincount(offsets, values) / np.maximum(np.bincount(offsets), 1)
    total = np.square(values - values.mean()).sum()
    return float(1 - np.square(values - means[offsets]).sum() / total) if total > 0 else 0.0
