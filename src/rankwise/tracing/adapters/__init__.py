"""Adapters: read the operator (mixing matrix) of a layer from its weights and recorded submodule calls.

To add an adapter, write a subclass of `Adapter` in a file here, and add an instance to `ADAPTERS`.
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
"""All adapters, in order of precedence: the first adapter that reads a module is used."""


def adapter_of(module: nn.Module) -> Adapter | None:
    """Return the first adapter that reads a module; None if no adapter does."""
    return next((adapter for adapter in ADAPTERS if adapter.reads(module)), None)


__all__ = ["ADAPTERS", "Adapter", "NotExactError", "adapter_of"]
