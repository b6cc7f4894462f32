"""How the loops of this folder are compiled, and what the compiler may change in them."""

from collections.abc import Callable
from typing import Any

from numba import njit

Loop = Callable[..., Any]

ALLOWED = {"reassoc", "contract", "arcp", "nsz"}
"""Sums over channels may be reordered, products fused into sums, x/y become x·(1/y), zeros lose their sign.

Not allowed: to take NaN or infinity for impossible (they must reach the output), or approximate functions.
"""

CHUNK = 64
"""Tokens summed in the dtype of the sums before they are added to a float64 total.

So a sum over T tokens is off by the rounding of 64 additions, not of T.
"""


def compiled(function: Loop, allowed: set[str] = ALLOWED) -> Loop:
    """Compile a loop on its first call for each dtype, without the interpreter lock, cached on disk.

    Where the package's folder cannot be written numba caches in the user's folder; NUMBA_CACHE_DIR moves it.

    Args:
        function: of numpy arrays and numbers.
        allowed: what the compiler may change.

    Returns:
        The compiled function.
    """
    return njit(nogil=True, cache=True, fastmath=allowed, error_model="numpy")(function)


def place(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """Where a number of an array lies, for what numba has no words for and LLVM does.

    Args:
        context: of the compilation, as numba hands it to an intrinsic.
        builder: likewise.
        kind: the array's type.
        array: the array.
        index: into its numbers in the order of memory.

    Returns:
        A pointer.
    """
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def inlined(function: Loop, allowed: set[str] = ALLOWED) -> Loop:
    """Compile what a loop does with one row, as a part of every loop that calls it.

    A call that is not inlined counts references to each row it is handed, in places all threads share: that
    took more time than 64 channels did.

    Args:
        function: of numpy arrays and numbers.
        allowed: what the compiler may change; its own, also where the loop around it allows more.

    Returns:
        The compiled function.
    """
    options = {"nogil": True, "cache": True, "fastmath": allowed, "error_model": "numpy"}
    return njit(**options, forceinline=True)(function)
