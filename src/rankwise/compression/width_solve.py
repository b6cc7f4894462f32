"""The part ``width``: factors for queries and keys, one budget of widths over all heads, and calibration.

A layer without rotary positions gets factors in closed form, whose last columns are removed. A layer with
rotary positions loses the pairs of channels that cost least.
"""

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import chain

from rankwise.compression.records import HeadWidth
from rankwise.compression.trials import Job, Solution
from rankwise.compression.width_factors import (
    Curve,
    Order,
    calibrate,
    greedy_orders,
    head_curves,
    kept_factors,
    layer_divergence,
    whole_factors,
)
from rankwise.compression.width_find import QueryKeyStatistics, check_statistics, collect_statistics
from rankwise.compression.width_modules import Factors, narrow_layers
from rankwise.errors import CompressionError


@dataclass
class Candidate:
    """Layer to narrow, factors that change no logit, and the removal order of each key head."""

    statistics: QueryKeyStatistics
    whole: Factors
    orders: list[Order]

    def factors(self, widths: list[int]) -> Factors:
        """Return uncalibrated factors for the widths of the key heads."""
        return kept_factors(self.statistics, self.whole, self.orders, widths)


def solve(job: Job) -> Solution:
    """Return the change to narrow queries and keys: choose widths, then calibrate and measure the factors.

    A curve is the attention KL of a key head by width, measured on the first sequences. With a tolerance, it
    is measured on all calibration data.
    """
    found, skipped = job.found
    if "layers" not in job.reused:
        collected = collect_statistics(job.model, found, job.batches, job.on_progress)
        check_statistics(collected)
        candidates: list[Candidate] = []
        for statistics in collected:
            name, done = statistics.projections.name, len(candidates) / len(collected)
            job.on_progress(f"measuring widths of {name}", done)
            full = whole_factors(statistics)
            if len(statistics.projections.pairs):
                orders = greedy_orders(statistics, full, job.seed)
            else:  # columns of the closed form are in descending order
                last_first = [*range(statistics.projections.width)][::-1]
                orders = [Order(last_first, *curve) for curve in head_curves(statistics)]
            candidates.append(Candidate(statistics, full, orders))
        job.reused["layers"] = candidates
    layers: list[Candidate] = job.reused["layers"]
    widths = allocate_widths([_curves(layer, job) for layer in layers], job.keep, job.tolerance)
    starts = [layer.factors(chosen) for layer, chosen in zip(layers, widths, strict=True)]
    collected = [layer.statistics for layer in layers]
    whole = all(len(kept) == len(factors.key[0]) for factors in starts for kept in factors.kept)
    if whole:  # the model keeps its projections, so its costs are exactly 0, without rounding errors
        costs = [[0.0] * len(chosen) for chosen in widths]
    else:
        costs = [_by_key(layer, factors) for layer, factors in zip(collected, starts, strict=True)]
    heads: list[HeadWidth] = []
    plan: dict[str, Factors] = {}
    for statistics, factors, before in zip(collected, starts, costs, strict=True):
        place, after = statistics.projections, before
        if job.calibrate and not whole:
            calibrated = calibrate(statistics, factors, job)
            losses = _by_key(statistics, calibrated)
            if sum(losses) < sum(before):
                factors, after = calibrated, losses
        plan[place.name] = factors
        heads += [
            HeadWidth(
                part="width",
                stack=place.stack,
                site=place.name,
                layer=place.layer,
                head=head,
                before=place.width,
                width=len(kept),
                kl=before[head],
                kl_calibrated=after[head],
            )
            for head, kept in enumerate(factors.kept)
        ]
    projections = [statistics.projections for statistics in collected]
    kl: dict[str, float] = {}
    for statistics in collect_statistics(job.model, projections, job.eval_batches, job.on_progress):
        name = statistics.projections.name
        kl[name] = 0.0 if whole else float(layer_divergence(statistics.samples, plan[name]).mean())
    return Solution(
        narrow_layers(job.model, [] if whole else [(layer, plan[layer.name]) for layer in projections]),
        heads,
        kl=kl,
        skipped=skipped,
    )


def _curves(layer: Candidate, job: Job) -> list[Curve]:
    """Return the curves of a layer's key heads. With a tolerance, attention KL is of all calibration data."""
    if job.tolerance is None:
        return [(order.widths, order.losses) for order in layer.orders]
    job.on_progress(f"measuring widths of {layer.statistics.projections.name} on all data", math.nan)
    widths = [order.widths for order in layer.orders]
    losses = [_by_key(layer.statistics, layer.factors(list(each))) for each in zip(*widths, strict=True)]
    return list(zip(widths, map(list, zip(*losses, strict=True)), strict=True))


def _by_key(layer: QueryKeyStatistics, factors: Factors) -> list[float]:
    """Return mean attention KL of the query heads of each key head."""
    by_head = layer_divergence(layer.samples, factors).unflatten(0, (-1, layer.projections.groups))
    by_key: list[float] = by_head.mean(1).tolist()
    return by_key


# --- widths ----------------------------------------------------------------------------------------------


def hull_steps(curves: list[Curve]) -> list[tuple[int, float]]:
    """Return the steps by one channel along the lower convex hulls of the curves, the largest saving first.

    Each step has its head and the attention KL that it saves. Later steps of a head save less.
    """
    steps: list[tuple[float, int, int]] = []
    for head, (widths, losses) in enumerate(curves):
        point = 0
        while point < len(widths) - 1:
            later = range(point + 1, len(widths))
            gain, to = max(((losses[point] - losses[to]) / (widths[to] - widths[point]), to) for to in later)
            if gain <= 0:
                break
            steps += [(-gain, head, width) for width in range(widths[point], widths[to])]
            point = to
    return [(head, -gain) for gain, head, _ in sorted(steps)]


def _widened(curves: list[Curve], steps: list[tuple[int, float]]) -> list[int]:
    """Return the widths of all heads after some steps from their least widths."""
    added = Counter(head for head, _ in steps)
    return [widths[0] + added[head] for head, (widths, _) in enumerate(curves)]


def allocate_widths(
    curves: list[list[Curve]], keep: float | int | None, tolerance: float | int | None
) -> list[list[int]]:
    """Return the width of each key head, by layer, for a share of all widths or for a tolerance.

    A width between two widths of a curve, inside of a rotary pair, is rounded down.
    """
    every = [*chain.from_iterable(curves)]
    if tolerance is not None:
        widths = iter(widths_for_tolerance(every, tolerance))
    else:
        assert keep is not None
        widths = iter(widths_under_budget(every, round(keep * sum(sizes[-1] for sizes, _ in every))))
    return [[sizes[bisect_right(sizes, next(widths)) - 1] for sizes, _ in heads] for heads in curves]


def widths_under_budget(curves: list[Curve], budget: int) -> list[int]:
    """Return the widths of all heads that sum to a budget, with the least attention KL on the hulls.

    The step that saves most is taken next. On convex curves this greedy choice is optimal. Raise
    `CompressionError` if the budget is below the sum of the least widths.

    Examples:
        >>> widths_under_budget([([1, 2, 4], [1.0, 0.1, 0.0]), ([1, 2, 4], [0.3, 0.2, 0.15])], 4)
        [2, 2]
    """
    least = sum(widths[0] for widths, _ in curves)
    if budget < least:
        raise CompressionError(
            "budget",
            expected=f"a width of at least {math.ceil(least / len(curves))} on average",
            got=f"{budget / max(len(curves), 1):.2f}",
            fix="Keep more.",
        )
    return _widened(curves, hull_steps(curves)[: budget - least])


def widths_for_tolerance(curves: list[Curve], tolerance: float) -> list[int]:
    """Return the least widths, in the order of `widths_under_budget`, with mean KL within a tolerance.

    The last step along a line of a hull goes to its end, a width of the curve, because the KL of the widths
    before the end may be above the line.

    Examples:
        >>> widths_for_tolerance([([1, 2, 4], [1.0, 0.1, 0.0]), ([1, 2, 4], [0.3, 0.2, 0.15])], 0.2)
        [2, 1]
    """
    excess = sum(losses[0] for _, losses in curves) - tolerance * len(curves)
    taken: list[tuple[int, float]] = []
    for step in hull_steps(curves):
        if excess <= 1e-9 * step[1] and step not in taken[-1:]:
            break
        excess -= step[1]
        taken.append(step)
    return _widened(curves, taken)
