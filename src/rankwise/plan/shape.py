"""Heads and widths of an attention layer: that of now, and others to compare it with."""

from dataclasses import dataclass

from rankwise.errors import ShapeError
from rankwise.plan.advice import FEWER, MORE
from rankwise.plan.records import HeadDimPlan


@dataclass(frozen=True)
class Shape:
    """Heads and widths of an attention layer."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


def present_shape(
    width: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    positions: str = "none",
) -> Shape:
    """The setting of now, with what is not given filled in as `with_prices` says.

    Args:
        width: D.
        heads: H.
        kv_heads: of keys and values.
        head_dim: K.
        value_dim: V.
        positions: of the plan.

    Raises:
        ShapeError: if a size is not positive, D has no room for so many heads, or kv_heads does not divide
            heads.
    """
    heads = max(1, width // (head_dim or 64)) if heads is None else heads
    kv_heads = heads if kv_heads is None else kv_heads
    sizes = {"width": width, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for name, size in {**sizes, "value_dim": value_dim}.items():
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ShapeError(
                f"`{name}`", expected="a whole number, at least 1", got=repr(size), fix="Mend it."
            )
    if heads % kv_heads:
        raise ShapeError(
            "`kv_heads`",
            expected=f"a divisor of {heads} heads",
            got=str(kv_heads),
            fix="Groups are of one size.",
        )
    if head_dim is None:
        least = 2 if positions == "rope" else 1
        head_dim = width // heads // least * least
        if head_dim < 1:
            raise ShapeError(
                "`heads`",
                expected=f"at most {width // least}: each of H heads has D // H channels, {least} or more"
                + (" with rotary positions" if least == 2 else ""),
                got=f"{heads} heads at D = {width}",
                fix="Give fewer heads, or in Python `head_dim` where D ≠ H·K.",
            )
    return Shape("now", heads, kv_heads, head_dim, head_dim if value_dim is None else value_dim)


def other_shapes(now: Shape, planned: int, plan: HeadDimPlan) -> list[Shape]:
    """Settings with the planned width: as many channels in another number of heads, and narrower heads.

    Args:
        now: the setting of now.
        planned: width to plan with.
        plan: the plan.
    """
    channels, group = now.heads * now.head_dim, now.heads // now.kv_heads
    count = channels // planned
    count -= count % group if count >= group else 0
    name = MORE if planned < now.head_dim and count > now.heads else ""
    name = FEWER if now.head_dim < plan.interval[0] and 1 <= count < now.heads else name
    shapes = []
    if name:
        values = planned if now.value_dim == now.head_dim else max(1, now.heads * now.value_dim // count)
        shapes.append(Shape(name, count, max(1, count // group), planned, values))
    if planned < now.head_dim:
        if now.value_dim > planned:
            shapes.append(Shape("narrow q, k, v", now.heads, now.kv_heads, planned, planned))
        shapes.append(Shape("narrow q, k", now.heads, now.kv_heads, planned, now.value_dim))
    return shapes
