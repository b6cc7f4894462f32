"""Measure, keep and spend the rank of sequence models.

*Measure*: `capture`, `audit`, `compare`, and the measures they use. Everything here works on any PyTorch
module; transformers, pandas and plotly are loaded only by what needs them.
"""

from rankwise.audit import Audit, audit, compare
from rankwise.capture import MixerSite, StateSite, Trace, capture
from rankwise.errors import RankwiseError
from rankwise.measures import (
    coding_rate,
    effective_rank,
    estimate_spectrum,
    numerical_rank,
    singular_values,
    stable_rank,
    token_collapse,
)
from rankwise.operators import DenseMixing, MixingOperator, SoftmaxMixing
from rankwise.theory import rank_barrier

__version__ = "0.1.0.dev0"
__all__ = [
    "Audit",
    "DenseMixing",
    "MixerSite",
    "MixingOperator",
    "RankwiseError",
    "SoftmaxMixing",
    "StateSite",
    "Trace",
    "audit",
    "capture",
    "coding_rate",
    "compare",
    "effective_rank",
    "estimate_spectrum",
    "numerical_rank",
    "rank_barrier",
    "singular_values",
    "stable_rank",
    "token_collapse",
]
