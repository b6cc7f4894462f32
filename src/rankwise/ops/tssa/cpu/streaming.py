"""When to store past the cache: for results so large that they would push out what is still to be read.

A plain store first reads the line that it will overwrite: of all that a causal forward pass moves that is a
third, of a bidirectional one a fifth.
"""

from typing import Any, no_type_check

from numba import types
from numba.extending import intrinsic

from rankwise.ops.tssa.cpu.compiled import inlined
from rankwise.ops.tssa.cpu.lanes import LINE

LARGE = 1 << 23
"""Bytes of a result that goes past the cache: more than a core has of its own."""


@intrinsic
def settle(typing: Any) -> Any:
    """Let all threads see what went past the cache before they see what is written next."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@inlined
@no_type_check
def streams(out):
    """Whether the rows of a result, (M, H, K), should go past the cache: it is large, and they fill lines."""
    return out.nbytes >= LARGE and out.shape[2] * out.itemsize % LINE == 0 and out.ctypes.data % LINE == 0
