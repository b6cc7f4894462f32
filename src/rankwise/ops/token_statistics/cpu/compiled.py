"""How the loops of this folder are compiled and cached, and what the compiler may change in them."""

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

ALLOWED = {"reassoc", "contract", "arcp", "nsz"}
"""Sums over channels may be reordered, products fused into sums, x/y become x·(1/y), zeros lose their sign.

Not allowed: to take NaN or infinity for impossible (they must reach the output), or approximate functions.
"""

CHUNK = 64
"""Tokens summed in the dtype of the sums before they are added to a float64 total.

So a sum over T tokens is off by the rounding of 64 additions, not of T.
"""


class Loop:
    """A loop over arrays in order, compiled without the interpreter lock when dtypes are first met.

    numba's cache keeps all signatures of a function in one index, which two processes can overwrite for each
    other so that it names the machine code of the wrong one. Here each signature is a function with a name
    of its own, as is each version of this folder and of numba, and each processor: all that is ever written
    under a name is the same code.
    """

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def of(self, *given: Any) -> Callable[..., Any]:
        """The compiled function for arguments of these types."""
        key = tuple(x.dtype for x in given if isinstance(x, np.ndarray))
        if key not in self._compiled:
            self._compiled[key] = _compile(self.function, tuple(map(numba.typeof, given)))
        return self._compiled[key]

    def __call__(self, *given: Any) -> Any:
        """Run it."""
        return self.of(*given)(*given)


def _compile(function: FunctionType, signature: tuple[Any, ...]) -> Callable[..., Any]:
    own = FunctionType(function.__code__, function.__globals__, function.__name__)
    origin = _origin(Path(function.__code__.co_filename).parent)
    digest = sha256(f"{signature} {origin}".encode()).hexdigest()[:16]
    own.__module__, own.__qualname__ = function.__module__, f"{function.__name__}_{digest}"
    return numba.njit(signature, nogil=True, cache=True, fastmath=ALLOWED, error_model="numpy")(own)


@cache
def _origin(folder: Path) -> str:
    """All that the machine code of the loops in a folder depends on besides their signatures."""
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    versions = f"{numba.__version__} {llvmlite.__version__}"
    processor = f"{get_host_cpu_name()} {get_host_cpu_features().flatten()}"
    return f"{sha256(sources).hexdigest()} {versions} {processor}"


def inlined(function: FunctionType, allowed: set[str] = ALLOWED) -> Callable[..., Any]:
    """Compile what a loop does with a row as part of every loop that calls it: a call takes too long.

    What is ``allowed`` to the compiler is so here only, also where the loop around it allows more.
    """
    return numba.njit(nogil=True, fastmath=allowed, error_model="numpy", forceinline=True)(function)
