"""A line of channels as one value: loops load it, compute with it and store it.

LLVM vectorises loops over numbers by itself, but proves at run time, for every row of 64 channels, that no
two arrays overlap, and gives up where there are more than a few. With lines nothing is left to prove.

Rows are handed over as addresses, as an array handed to an inlined loop counts references to itself there.
"""

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

LINE = 64
"""Bytes of a line, of a cache line too."""


class Lanes(types.Type):
    """A line of float32 or of float64, or a part of one: as numbers in + - * / with lines and numbers."""

    def __init__(self, number: types.Float, count: int | None = None) -> None:
        self.number, self.count = number, count or 8 * LINE // number.bitwidth
        self.suffix = f"v{self.count}f{number.bitwidth}"  # as LLVM names operations
        self.value = ir.VectorType(ir.FloatType() if number.bitwidth == 32 else ir.DoubleType(), self.count)
        super().__init__(name=f"Lanes({number}, {self.count})")


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, kind.value)


def _line(context: Any, builder: Any, kind: Lanes, given: Any, value: Any) -> Any:
    """A line as it is; a number in every lane."""
    if isinstance(given, Lanes):
        return value
    return _filled(builder, kind.value, context.cast(builder, value, given, kind.number))


def _filled(builder: Any, vector: Any, number: Any) -> Any:
    index = ir.IntType(32)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(index, 0))
    zeros = ir.Constant(ir.VectorType(index, vector.count), None)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


_KINDS = (types.Integer, types.Float)


def _lane_by_lane(function: Any, name: str) -> None:
    """Teach numba an operator as part of the function that uses it: an overload has fastmath of its own."""

    @infer_global(function)
    class _Typed(AbstractTemplate):
        key = function

        def generic(self, given: Any, named: Any) -> Any:
            kinds = {one for one in given if isinstance(one, Lanes)}
            known = len(given) == 2 and all(isinstance(one, (Lanes, *_KINDS)) for one in given)
            return signature(*kinds, *given) if known and len(kinds) == 1 else None

    def lower(context: Any, builder: Any, typed: Any, given: Any) -> Any:
        both = [
            _line(context, builder, typed.return_type, *one) for one in zip(typed.args, given, strict=True)
        ]
        return getattr(builder, name)(*both)

    lower_builtin(function, Lanes, Lanes)(lower)
    for kind in _KINDS:
        lower_builtin(function, Lanes, kind)(lower)
        lower_builtin(function, kind, Lanes)(lower)


_lane_by_lane(operator.add, "fadd")
_lane_by_lane(operator.sub, "fsub")
_lane_by_lane(operator.mul, "fmul")
_lane_by_lane(operator.truediv, "fdiv")


@intrinsic
def at_least(typing: Any, line: Any, number: Any) -> Any:
    """The larger of each lane and a number; NaN stays."""

    def generate(context: Any, builder: Any, typed: Any, given: Any) -> Any:
        low = _line(context, builder, line, number, given[1])
        return builder.select(builder.fcmp_ordered("<", given[0], low), low, given[0])

    return line(line, number), generate


@intrinsic
def total(typing: Any, line: Any) -> Any:
    """The sum of a line, in any order."""

    def generate(context: Any, builder: Any, typed: Any, given: Any) -> Any:
        number = line.value.element
        add = _function(builder, f"llvm.vector.reduce.fadd.{line.suffix}", number, number, line.value)
        return builder.call(add, [ir.Constant(number, 0.0), given[0]], fastmath=("reassoc",))

    return line.number(line), generate


def _function(builder: Any, name: str, result: Any, *given: Any) -> Any:
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, given), name)


@intrinsic
def address(typing: Any, array: Any) -> Any:
    """Where the numbers of an array lie, for as long as it is there."""
    if array.layout != "C":
        raise TypingError(f"an address is of an array in order, not of {array}")

    def generate(context: Any, builder: Any, typed: Any, given: Any) -> Any:
        return context.make_array(array)(context, builder, given[0]).data

    return types.CPointer(array.dtype)(array), generate


@intrinsic
def zeros(typing: Any, at: Any) -> Any:
    """A line of zeros of the numbers there."""
    return _zeros(Lanes(at.dtype), at)


@intrinsic
def narrower(typing: Any, line: Any) -> Any:
    """Zeros, a quarter as many, one at least: rows of any width are lines, then quarters, then numbers.

    Not parts of lines under a mask: to store one takes some processors ten times as long as a whole line.
    """
    return _zeros(Lanes(line.number, max(1, line.count // 4)), line)


def _zeros(kind: Lanes, given: Any) -> Any:
    return kind(given), lambda context, builder, typed, values: ir.Constant(kind.value, None)


@intrinsic
def lanes(typing: Any, line: Any) -> Any:
    """How many numbers a line holds."""

    def generate(context: Any, builder: Any, typed: Any, given: Any) -> Any:
        return context.get_constant(types.intp, line.count)

    return types.intp(line), generate


def _place(builder: Any, kind: Lanes, at: Any, index: Any) -> Any:
    return builder.bitcast(builder.gep(at, [index]), kind.value.as_pointer())


@intrinsic
def load(typing: Any, at: Any, index: Any, like: Any) -> Any:
    """The line beginning with at[index], as many numbers as in another."""

    def generate(context: Any, builder: Any, typed: Any, given: Any) -> Any:
        return builder.load(_place(builder, like, *given[:2]), align=at.dtype.bitwidth // 8)

    return like(at, types.intp, like), generate


@intrinsic
def store(typing: Any, at: Any, index: Any, past: Any, line: Any) -> Any:
    """at[index:] = line; past the cache unless ``past`` is None.

    Past the cache it must be a whole line that begins where a cache line does.
    """

    def generate(context: Any, builder: Any, typed: Any, given: Any) -> Any:
        place = _place(builder, line, *given[:2])
        if past is types.none:
            builder.store(given[3], place, align=at.dtype.bitwidth // 8)
        else:
            done = builder.store(given[3], place, align=LINE)
            done.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(at, types.intp, past, line), generate


@intrinsic
def fetch(typing: Any, at: Any, index: Any) -> Any:
    """Ask for the line around at[index] without waiting for it; it may lie outside the array."""

    def generate(context: Any, builder: Any, typed: Any, given: Any) -> Any:
        number = ir.IntType(32)
        place = builder.bitcast(builder.gep(given[0], [given[1]]), ir.IntType(8).as_pointer())
        ask = _function(builder, "llvm.prefetch.p0", ir.VoidType(), place.type, number, number, number)
        read, farther, data = (ir.Constant(number, x) for x in (0, 2, 1))
        builder.call(ask, [place, read, farther, data])
        return context.get_dummy_value()

    return types.void(at, types.intp), generate
