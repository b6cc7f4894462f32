"""Spend the rank of a trained model: parts of its attention that carry little are taken out, measured."""

from rankwise.compression import auto_model  # noqa: F401  (lets `from_pretrained` load compressed models)
from rankwise.compression.parts import Job, PartResult
from rankwise.compression.records import (
    BudgetCurve,
    BudgetPoint,
    Compression,
    HeadWidth,
    Latency,
    LatentRank,
    LayerPrice,
)
from rankwise.compression.run import compress
from rankwise.compression.store import load_compressed, save_compressed

__all__ = [
    "BudgetCurve",
    "BudgetPoint",
    "Compression",
    "HeadWidth",
    "Job",
    "Latency",
    "LatentRank",
    "LayerPrice",
    "PartResult",
    "compress",
    "load_compressed",
    "save_compressed",
]
