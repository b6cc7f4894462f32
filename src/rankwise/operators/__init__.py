"""Mixing operators: mixing matrices M (T×S) by which layers mix tokens, Y = M V; one file per kind."""

from rankwise.operators.base import MixingOperator
from rankwise.operators.channels import sample_channels
from rankwise.operators.compose import IndexedMixing, SumMixing
from rankwise.operators.dense import DenseMixing
from rankwise.operators.diagonal import DiagonalMixing
from rankwise.operators.gated_delta import GatedDeltaMixing
from rankwise.operators.linear_attention import LinearAttentionMixing
from rankwise.operators.selective import SelectiveMixing
from rankwise.operators.semiseparable import SemiseparableMixing
from rankwise.operators.softmax import SoftmaxMixing
from rankwise.operators.toeplitz import ToeplitzMixing

__all__ = [
    "DenseMixing",
    "DiagonalMixing",
    "GatedDeltaMixing",
    "IndexedMixing",
    "LinearAttentionMixing",
    "MixingOperator",
    "SelectiveMixing",
    "SemiseparableMixing",
    "SoftmaxMixing",
    "SumMixing",
    "ToeplitzMixing",
    "sample_channels",
]
