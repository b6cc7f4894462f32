"""Make trained models smaller in place: remove blocks and heads, narrow queries and keys, shrink the cache.

Names are imported on first use, so that records can be loaded without torch. The import of `load_compressed`
or `save_compressed` lets ``from_pretrained`` of transformers load compressed models.
"""

from typing import TYPE_CHECKING

from rankwise._internals import lazy_names

if TYPE_CHECKING:
    from rankwise.compression.records import (
        BlockRemoval,
        CacheSize,
        Compression,
        HeadWidth,
        LatentRank,
        LayerCost,
        MergedKeys,
        Preview,
        PreviewRow,
        WindowCost,
    )
    from rankwise.compression.run import compress
    from rankwise.compression.save import load_compressed, save_compressed
    from rankwise.compression.ways import preview

__all__ = [
    "BlockRemoval",
    "CacheSize",
    "Compression",
    "HeadWidth",
    "LatentRank",
    "LayerCost",
    "MergedKeys",
    "Preview",
    "PreviewRow",
    "WindowCost",
    "compress",
    "load_compressed",
    "preview",
    "save_compressed",
]


PARTS = ("blocks", "heads", "key-heads", "width", "kv")
"""Parts in the order of `compress`. Each part has the modules ``<part>_find`` and ``<part>_solve``."""
DEFAULT_PARTS = ("width", "kv")
"""Parts that `compress` applies by default, if the model allows them. Removal of heads costs more."""

__getattr__, __dir__ = lazy_names(__name__)
