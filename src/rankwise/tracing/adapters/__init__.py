"""Adapters: how to read the operators of layers whose operator follows from their weights and inputs.

To add one: an `Adapter` in a file, alone or beside its kin, and a line in `ADAPTERS`.
"""

from torch import nn

from rankwise.tracing.adapters.base import Adapter, CallInside, CallsInside, NotExactError, ProtocolAdapter
from rankwise.tracing.adapters.decayed_attention import LightningAdapter, RwkvAdapter
from rankwise.tracing.adapters.gated_delta import GatedDeltaAdapter
from rankwise.tracing.adapters.mamba import Mamba2Adapter, MambaAdapter, ZambaAdapter
from rankwise.tracing.adapters.no_operator import NoOperatorAdapter
from rankwise.tracing.adapters.rg_lru import RGLRUAdapter
from rankwise.tracing.adapters.short_conv import ShortConvAdapter
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
"""Asked in this order."""


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter that reads a module, if there is one."""
    return next((adapter for adapter in ADAPTERS if adapter.reads(module)), None)


__all__ = ["ADAPTERS", "Adapter", "CallInside", "CallsInside", "NotExactError", "adapter_of"]
