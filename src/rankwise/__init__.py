"""Measure, keep and spend the rank of sequence models."""

from rankwise.capture import MixerSite, StateSite, Trace, capture
from rankwise.errors import RankwiseError
from rankwise.operators import DenseMixing, MixingOperator, SoftmaxMixing

__version__ = "0.1.0.dev0"
__all__ = [
    "DenseMixing",
    "MixerSite",
    "MixingOperator",
    "RankwiseError",
    "SoftmaxMixing",
    "StateSite",
    "Trace",
    "capture",
]
