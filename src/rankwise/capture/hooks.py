"""Hooks that stay with the module they were put on."""

from collections.abc import Callable
from typing import Any, no_type_check

import torch


class Hook:
    """A module hook; a copied or pickled module gets one that does nothing in its place.

    Copying a module copies its hooks. A copied listener would go on reporting to a copy of the capture that
    nobody can end.

    Args:
        call: what to call.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    @no_type_check  # a function compiled inside the model traces through it, and cannot through checks
    def __call__(self, *given: Any) -> None:
        """Pass the call on."""
        if not torch.compiler.is_dynamo_compiling():
            self._call(*given)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        """What copy and pickle put in its place."""
        return _nothing, ()


def _nothing() -> Callable[..., None]:
    return _ignore


def _ignore(*given: Any) -> None:
    """Do nothing."""
