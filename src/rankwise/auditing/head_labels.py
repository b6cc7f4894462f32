"""Label heads that people look for (previous token, induction, positional) by their attention maps."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rankwise._internals.statistics import Floats
from rankwise.auditing.records import PEAK_MASS, HeadRecord
from rankwise.errors import InputError

LABELS = ("induction", "previous_token", "positional")
"""Scores by which a head is labeled; the first that is at least `PEAK_MASS` decides."""


def head_labels(heads: Sequence[HeadRecord], texts: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Any]]:
    """Yield a row per head that has a whole attention map; `Audit.head_labels` defines the columns."""
    whole = [head for head in heads if head.attention_map and _is_whole(head)]
    if not whole:
        raise InputError(
            "`Audit.head_labels`",
            expected="attention maps of sequences of at most 128 tokens, as many rows as columns",
            got="none",
            fix="Audit such sequences with `attention_maps='all'`.",
        )
    for head in whole:
        attention = head.attention_map
        assert attention is not None
        weights, tokens = attention.matrix().astype(np.float64), texts.get(attention.row_tokens, ())
        named = attention.row_tokens == attention.column_tokens and len(tokens) == len(weights)
        scores = {
            "induction": _induction(weights, tokens) if named else math.nan,
            "previous_token": float(np.diagonal(weights, -1).mean()),
            "positional": _positional(weights),
        }
        label = next((name for name in LABELS if scores[name] >= PEAK_MASS), "")
        place = {"stack": head.stack, "layer": head.layer, "head": head.head}
        names = {"transformer_lens": head.transformer_lens, "nnsight": head.nnsight}
        yield place | names | scores | {"label": label}


def _is_whole(head: HeadRecord) -> bool:
    kept = head.attention_map
    return kept is not None and 1 < kept.rows == kept.columns == kept.tokens == kept.sources


def _induction(weights: Floats, tokens: Sequence[str]) -> float:
    """Return the mean mass, above uniform weights, on tokens after an earlier copy of the row's token."""
    gains = []
    for row in range(2, len(tokens)):
        after = [place + 1 for place in range(row - 1) if tokens[place] == tokens[row]]
        if after:
            gains.append(weights[row, after].sum() - len(after) / (row + 1))
    return float(np.mean(gains)) if gains else math.nan


def _positional(weights: Floats) -> float:
    """Return the share of the variance of the weights that their offset explains; 0 without variance."""
    rows, columns = (
        np.tril_indices(len(weights)) if not np.triu(weights, 1).any() else np.indices(weights.shape)
    )
    values, offsets = weights[rows, columns].ravel(), (rows - columns).ravel() + len(weights)
    means = np.bincount(offsets, values) / np.maximum(np.bincount(offsets), 1)
    total = np.square(values - values.mean()).sum()
    return float(1 - np.square(values - means[offsets]).sum() / total) if total > 0 else 0.0
