"""Measures: operators and token states → numbers. They know no model.

Everything is computed in float64 whatever came in, over any leading axes at once. A matrix or sequence that
holds NaN or infinity answers NaN and leaves the others of its batch alone.
"""

from rankwise.measures.estimate import Estimate, SpectrumEstimate, estimate_spectrum
from rankwise.measures.inputs import as_matrices
from rankwise.measures.rank import (
    DELTA,
    RankSummary,
    check_delta,
    effective_rank,
    numerical_rank,
    rank_summary,
    singular_values,
    stable_rank,
    summarize_spectrum,
)
from rankwise.measures.rows import (
    RowSummary,
    head_distance,
    identity_distance,
    peak_mass,
    row_distance,
    row_entropy,
    row_summary,
    sink_mass,
)
from rankwise.measures.token_states import (
    coding_rate,
    mean_cosine,
    state_effective_rank,
    state_turn,
    token_collapse,
    token_norm,
    variational_rate,
)

__all__ = [
    "DELTA",
    "Estimate",
    "RankSummary",
    "RowSummary",
    "SpectrumEstimate",
    "as_matrices",
    "check_delta",
    "coding_rate",
    "effective_rank",
    "estimate_spectrum",
    "head_distance",
    "identity_distance",
    "mean_cosine",
    "numerical_rank",
    "peak_mass",
    "rank_summary",
    "row_distance",
    "row_entropy",
    "row_summary",
    "singular_values",
    "sink_mass",
    "stable_rank",
    "state_effective_rank",
    "state_turn",
    "summarize_spectrum",
    "token_collapse",
    "token_norm",
    "variational_rate",
]
