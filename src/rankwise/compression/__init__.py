"""Make trained models smaller in place: narrow queries and keys, remove heads, shrink the cache.

Names are imported on first use, so that records can be loaded without torch. The import of `load_compressed`
or `save_compressed` lets ``from_pretrained`` of transformers load compressed models.
"""

from typing import TYPE_CHECKING, NamedTuple

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


class Part(NamedTuple):
    """Row of `PARTS`."""

    module: str
    """Its function `solve` takes a `Job`."""
    narrows: bool = False
    """True if it narrows queries and keys: a layer is left out if every such part skips it."""


PARTS = {
    "heads": Part("heads_solve"),
    "qk": Part("qk_solve", narrows=True),
    "rotary": Part("rotary_solve", narrows=True),
    "kv": Part("kv_solve"),
}
"""Parts, in the order in which they are done."""

__getattr__, __dir__ = lazy_names(__name__)
