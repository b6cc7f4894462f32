"""Which head gets how much width under one budget, from curves of attention KL against width."""

import math
from dataclasses import dataclass
from itertools import pairwise

from rankwise.errors import CompressionError

CURVE_POINTS = 32
"""Steps of a curve from 1 to K; wide heads get the narrowest widths beside them."""


def curve_widths(width: int) -> list[int]:
    """Widths at which to measure, 1 to K: all of them up to 32, else the small ones and steps.

    Args:
        width: K.

    Examples:
        >>> curve_widths(4), len(curve_widths(128)), curve_widths(128)[:6]
        ([1, 2, 3, 4], 35, [1, 2, 3, 4, 8, 12])
    """
    step = -(-width // CURVE_POINTS)
    small = range(1, step) if step > 1 else ()
    return sorted({*small, *range(step, width + 1, step), width})


@dataclass(frozen=True)
class Segment:
    """A stretch of the lower hull of a curve: from one width to a wider one."""

    head: int
    narrow: int
    wide: int
    gain: float
    """Nats of attention KL saved for each unit of width."""


def hull(head: int, widths: list[int], losses: list[float]) -> list[Segment]:
    """The lower convex hull of a curve: wider is better, and each stretch saves less than the one before.

    Args:
        head: a number to know it by.
        widths: ascending.
        losses: attention KL at each.
    """
    corners = [0]
    at = 0
    while at < len(widths) - 1:
        slopes = [
            ((losses[at] - losses[to]) / (widths[to] - widths[at]), to) for to in range(at + 1, len(widths))
        ]
        gain, at = max(slopes)
        if gain <= 0:
            break
        corners.append(at)
    return [
        Segment(head, widths[a], widths[b], (losses[a] - losses[b]) / (widths[b] - widths[a]))
        for a, b in pairwise(corners)
    ]


def widths_under_budget(curves: list[tuple[list[int], list[float]]], budget: int) -> list[int]:
    """Widths of all heads that add up to a budget, with the least sum of attention KL on the hulls.

    A stretch of a hull is taken where it saves most for each unit; the last one in part. Greedy on hulls is
    optimal but for that part.

    Args:
        curves: (widths, attention KL) of each head; each head gets at least its first width.
        budget: sum of all widths.

    Raises:
        CompressionError: if the budget does not reach the least widths.

    Examples:
        >>> widths_under_budget([([1, 2, 4], [1.0, 0.1, 0.0]), ([1, 2, 4], [0.3, 0.2, 0.15])], 4)
        [2, 2]
    """
    taken = [widths[0] for widths, _ in curves]
    room = budget - sum(taken)
    if room < 0:
        raise CompressionError(
            "budget",
            expected=f"a width of at least {math.ceil(sum(taken) / len(taken))} on average",
            got=f"{budget / max(len(taken), 1):.2f}",
            fix="Keep more.",
        )
    for segment in _ordered(curves):
        more = min(segment.wide - segment.narrow, room)
        taken[segment.head] += more
        room -= more
        if not room:
            break
    return taken


def widths_for_tolerance(curves: list[tuple[list[int], list[float]]], tolerance: float) -> list[int]:
    """Least widths, in the order of `widths_under_budget`, whose mean attention KL is within a tolerance.

    Args:
        curves: (widths, attention KL) of each head.
        tolerance: nats, mean over heads.

    Examples:
        >>> widths_for_tolerance([([1, 2, 4], [1.0, 0.1, 0.0]), ([1, 2, 4], [0.3, 0.2, 0.15])], 0.2)
        [2, 1]
    """
    taken = [widths[0] for widths, _ in curves]
    loss = sum(losses[0] for _, losses in curves)
    for segment in _ordered(curves):
        excess = loss - tolerance * len(curves)
        if excess <= 0:
            break
        steps = min(segment.wide - segment.narrow, math.ceil(excess / segment.gain - 1e-9))
        taken[segment.head] += steps
        loss -= steps * segment.gain
    return taken


def _ordered(curves: list[tuple[list[int], list[float]]]) -> list[Segment]:
    segments = [
        segment for head, (widths, losses) in enumerate(curves) for segment in hull(head, widths, losses)
    ]
    return sorted(segments, key=lambda segment: (-segment.gain, segment.head, segment.narrow))
