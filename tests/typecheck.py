"""Shapes are checked where a signature names some, plain types elsewhere: a tenth of the time a call."""

import functools
import typing
from types import FunctionType
from typing import Any

import jaxtyping
from beartype import beartype

_jaxtyped = jaxtyping.jaxtyped


def names_arrays(hint: Any) -> bool:
    """Whether an annotation has an array in it, or a name that only jaxtyping can look up."""
    if isinstance(hint, str | typing.ForwardRef):
        return True
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(names_arrays(part) for part in typing.get_args(hint))


def jaxtyped(fn: Any = None, **options: Any) -> Any:
    """In place of `jaxtyping.jaxtyped`, which binds the arguments of every call, arrays or not."""
    if fn is None:
        return functools.partial(jaxtyped, **options)
    if not isinstance(fn, FunctionType) or any(map(names_arrays, fn.__annotations__.values())):
        return _jaxtyped(fn, **options)
    if not fn.__annotations__:
        return fn
    checked = beartype(fn)

    @functools.wraps(fn)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (fn if jaxtyping.config.jaxtyping_disable else checked)(*args, **kwargs)

    return either


jaxtyping.jaxtyped = jaxtyped
