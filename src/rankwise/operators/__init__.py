"""Mixing operators: the T×S matrices by which layers mix tokens, one file a kind."""

from rankwise.operators.base import MixingOperator
from rankwise.operators.dense import DenseMixing
from rankwise.operators.softmax import SoftmaxMixing

__all__ = ["DenseMixing", "MixingOperator", "SoftmaxMixing"]
