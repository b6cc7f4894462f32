"""Make trained models smaller in place: narrow queries and keys, remove heads, shrink the cache.

Names are imported on first use, so that records can be loaded without torch. The import of `load_compressed`
or `save_compressed` lets ``from_pretrained`` of transformers load compressed models.
"""

from typing import TYPE_CHECKING

from rankwise._internals.lazy import lazy_names

if TYPE_CHECKING:
    from rankwise.compression.record import (
        BudgetCurve,
        BudgetPoint,
        Compression,
        HeadWidth,
        Latency,
        LatentRank,
        LayerPrice,
    )
    from rankwise.compression.run import compress
    from rankwise.compression.save import load_compressed, save_compressed

__all__ = [
    "BudgetCurve",
    "BudgetPoint",
    "Compression",
    "HeadWidth",
    "Latency",
    "LatentRank",
    "LayerPrice",
    "compress",
    "load_compressed",
    "save_compressed",
]


PARTS = ("heads", "qk", "rotary", "kv")
"""Parts, in the order in which they are done; each has a module ``<part>_solve`` with a function `solve`."""
NARROWS = ("qk", "rotary")
"""Parts that narrow queries and keys: a layer is left out if each of these that was done skips it."""

__getattr__, __dir__ = lazy_names(__name__)
