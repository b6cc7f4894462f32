"""Readers: read the operator (mixing matrix) of a layer from its weights and recorded submodule calls.

To add a reader, write a subclass of `OperatorReader` in this folder, and add an instance to `READERS`.
"""

from torch import nn

from rankwise.tracing.readers.base import NoOperatorReader, NotExactError, OperatorReader, ProtocolReader
from rankwise.tracing.readers.mamba import Mamba2Reader, MambaReader, ShortConvReader, ZambaReader
from rankwise.tracing.readers.recurrent import GatedDeltaReader, LightningReader, RGLRUReader, RwkvReader
from rankwise.tracing.readers.sparse_attention import BigBirdReader, LongformerReader

READERS: tuple[OperatorReader, ...] = (
    ProtocolReader(),
    MambaReader(),
    Mamba2Reader(),
    RGLRUReader(),
    ShortConvReader(),
    GatedDeltaReader(),
    LightningReader(),
    LongformerReader(),
    BigBirdReader(),
    RwkvReader(),
    ZambaReader(),
    NoOperatorReader(),
)
"""All readers, in order of precedence: the first reader that reads a module is used."""


def reader_of(module: nn.Module) -> OperatorReader | None:
    """Return the first reader that reads a module. Return None if no reader reads the module."""
    return next((reader for reader in READERS if reader.reads(module)), None)


__all__ = ["READERS", "NotExactError", "OperatorReader", "reader_of"]
