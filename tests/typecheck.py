"""Faster `jaxtyping.jaxtyped`: check functions whose signature has shapes; mypy checks the types of others.

jaxtyping binds the arguments of every call and checks them twice, which takes most of the time of its checks.
"""

import dataclasses
import functools
import inspect
import typing
from types import FunctionType
from typing import Any

import jaxtyping
from beartype import beartype

_jaxtyped = getattr(jaxtyping.jaxtyped, "replaced", jaxtyping.jaxtyped)  # doctests load this file again
SHAPES = _jaxtyped("context")
"""Context in which each axis name has one size."""


def parts(hint: Any) -> list[Any]:
    """Return an annotation and all its parts."""
    return [hint, *(inner for part in typing.get_args(hint) for inner in parts(part))]


def is_array(hint: Any) -> bool:
    """Return True if an annotation is a jaxtyping array."""
    return isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)


def looks_up(hint: Any) -> bool:
    """Return True if only jaxtyping can resolve a name in an annotation: of a type, or of an axis."""
    return isinstance(hint, str | typing.ForwardRef) or (is_array(hint) and "{" in hint.dim_str)


def jaxtyped(fn: Any = None, **options: Any) -> Any:
    """Replace `jaxtyping.jaxtyped`."""
    if fn is None:
        return functools.partial(jaxtyped, **options)
    if inspect.isclass(fn):
        if dataclasses.is_dataclass(fn) and "__init__" in vars(fn):
            fn.__init__ = jaxtyped(fn.__init__, **options)
        return fn
    hints = [part for hint in getattr(fn, "__annotations__", {}).values() for part in parts(hint)]
    if not any(map(is_array, hints)):
        return fn
    if not isinstance(fn, FunctionType) or any(map(looks_up, hints)) or inspect.isgeneratorfunction(fn):
        return _jaxtyped(fn, **options)
    checked = beartype(fn)

    @functools.wraps(fn)
    def either(*args: Any, **kwargs: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:
            return fn(*args, **kwargs)
        with SHAPES:
            return checked(*args, **kwargs)

    return either


jaxtyped.replaced = _jaxtyped  # type: ignore[attr-defined]
jaxtyping.jaxtyped = jaxtyped
