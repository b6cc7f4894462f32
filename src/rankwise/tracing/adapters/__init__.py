"""Adapters read the operators of layers from their weights and from calls of the modules inside them.

To add an adapter: an `Adapter` in a file, alone or next to similar ones, and a line in `ADAPTERS`.
"""

from torch import nn

from rankwise.tracing.adapters.base import Adapter, NoOperatorAdapter, NotExactError, ProtocolAdapter
from rankwise.tracing.adapters.mamba import Mamba2Adapter, MambaAdapter, ShortConvAdapter, ZambaAdapter
from rankwise.tracing.adapters.recurrent import GatedDeltaAdapter, LightningAdapter, RGLRUAdapter, RwkvAdapter
from rankwise.tracing.adapters.sparse_attention import BigBirdAdapter, LongformerAdapter

ADAPTERS: tuple[Adapter, ...] = (
    ProtocolAdapter(),
    MambaAdapter(),
    Mamba2Adapter(),
    RGLRUAdapter(),
    ShortConvAdapter(),
    GatedDeltaAdapter(),
    LightningAdapter(),
    LongformerAdapter(),
    BigBirdAdapter(),
    RwkvAdapter(),
    ZambaAdapter(),
    NoOperatorAdapter(),
)
"""The first one that reads a module is used."""


def adapter_of(module: nn.Module) -> Adapter | None:
    """Return the adapter that reads a module; None if there is none."""
    return next((adapter for adapter in ADAPTERS if adapter.reads(module)), None)


__all__ = ["ADAPTERS", "Adapter", "NotExactError", "adapter_of"]
