"""Faster `jaxtyping.jaxtyped`: check functions whose signature has shapes; mypy checks the types of others.

jaxtyping binds the arguments of every call and checks them twice, which takes most of the time of its checks.
Calls with dtypes and shapes that a function had before are not checked again.
"""

import dataclasses
import functools
import inspect
import typing
from types import FunctionType
from typing import Any

import jaxtyping
import torch
from beartype.door import die_if_unbearable

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


def form(value: Any) -> Any:
    """Return what decides if a value agrees with an annotation: dtypes, shapes, types and words."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.shape
    if isinstance(value, list | tuple):
        return type(value), *map(form, value)
    if isinstance(value, dict):
        return type(value), *((form(key), form(own)) for key, own in value.items())
    if isinstance(value, str):
        return value
    return type(value), getattr(value, "dtype", None), getattr(value, "shape", None)


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
    listed = isinstance(fn, FunctionType) and not any(
        parameter.kind is parameter.VAR_POSITIONAL or parameter.kind is parameter.VAR_KEYWORD
        for parameter in inspect.signature(fn).parameters.values()
    )
    if not listed or any(map(looks_up, hints)) or inspect.isgeneratorfunction(fn):
        return _jaxtyped(fn, **options)
    parameters, passed = list(inspect.signature(fn).parameters), set[Any]()

    def check(seen: Any, values: Any) -> None:
        """Check arguments and results of forms that were not checked before."""
        if seen not in passed:
            with SHAPES:
                for name, value in values:
                    if name in fn.__annotations__:
                        die_if_unbearable(value, fn.__annotations__[name])
            passed.add(seen)

    @functools.wraps(fn)
    def either(*args: Any, **kwargs: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:
            return fn(*args, **kwargs)
        given = [*zip(parameters, args, strict=False), *kwargs.items()]
        seen = form(given)
        check(seen, given)
        result = fn(*args, **kwargs)
        check((seen, form(result)), [*given, ("return", result)])
        return result

    return either


jaxtyped.replaced = _jaxtyped  # type: ignore[attr-defined]
jaxtyping.jaxtyped = jaxtyped
