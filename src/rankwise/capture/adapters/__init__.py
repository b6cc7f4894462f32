"""Adapters: one small file for each family of layers whose operator follows from its weights and inputs.

To add one: a file with an `Adapter`, and a line in `ADAPTERS`.
"""

from torch import nn

from rankwise.capture.adapters.base import Adapter, CallInside, CallsInside, NotExactError
from rankwise.capture.adapters.big_bird import BigBirdAdapter
from rankwise.capture.adapters.gated_delta import GatedDeltaAdapter
from rankwise.capture.adapters.lightning import LightningAdapter
from rankwise.capture.adapters.longformer import LongformerAdapter
from rankwise.capture.adapters.mamba import MambaAdapter
from rankwise.capture.adapters.mamba2 import Mamba2Adapter
from rankwise.capture.adapters.no_operator import NoOperatorAdapter
from rankwise.capture.adapters.protocol import ProtocolAdapter
from rankwise.capture.adapters.rg_lru import RGLRUAdapter
from rankwise.capture.adapters.rwkv import RwkvAdapter
from rankwise.capture.adapters.short_conv import ShortConvAdapter
from rankwise.capture.adapters.zamba import ZambaAdapter

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
