"""Stores past the cache, for results so large that they would push out what is still to be read.

A plain store first reads the line that it will overwrite: of all that a causal forward pass moves that is a
third, of a bidirectional one a fifth.
"""

from typing import Any, no_type_check

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rankwise.ops.tssa.cpu.compiled import inlined, place

LINE = 64
"""Bytes of a cache line. A store past the cache that covers a part of one is slower than any other."""
LARGE = 1 << 23
"""Bytes of a result that goes past the cache: more than a core has of its own."""


@intrinsic
def _store_line(typing: Any, to: Any, index: Any, source: Any, start: Any) -> Any:
    """to.flat[index:][:LINE bytes] = source.flat[start:][:LINE bytes], past the cache."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        def line(kind: Any, array: Any, at: Any) -> Any:
            number = place(context, builder, kind, array, at)
            return builder.bitcast(number, ir.VectorType(ir.IntType(8), LINE).as_pointer())

        numbers = builder.load(line(signature.args[2], *given[2:]), align=source.dtype.bitwidth // 8)
        store = builder.store(numbers, line(signature.args[0], *given[:2]), align=LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(to, types.intp, source, types.intp), generate


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
    row = out.shape[1] * out.shape[2] * out.itemsize
    return out.nbytes >= LARGE and row % LINE == 0 and out.ctypes.data % LINE == 0


@inlined
@no_type_check
def stream(row, out, t):
    """out[t] = row, (H, K), where `streams`."""
    for at in range(0, row.size, LINE // row.itemsize):
        _store_line(out, t * row.size + at, row, at)
