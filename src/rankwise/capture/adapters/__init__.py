"""Adapters: one small file for each family of layers whose operator follows from its weights and inputs.

To add one: a file with an `Adapter`, and a line in `rankwise.capture.adapters.families.ADAPTERS`.
"""

from rankwise.capture.adapters.base import Adapter, NotExactError, Step, Steps
from rankwise.capture.adapters.families import ADAPTERS, adapter_of
from rankwise.capture.adapters.reader import Reader

__all__ = ["ADAPTERS", "Adapter", "NotExactError", "Reader", "Step", "Steps", "adapter_of"]
