"""Other choices of rotary pairs, measured beside the greedy one."""

from collections.abc import Callable

import torch

from rankwise.compression.layers import Factors
from rankwise.compression.parts import Job
from rankwise.compression.qk_solve import widths_under_budget
from rankwise.compression.qk_statistics import QueryKeyStatistics
from rankwise.compression.records import BudgetCurve, BudgetPoint
from rankwise.compression.rotary_solve import Order, along, rows_of, units_of

SHARES = (0.125, 0.25, 0.5, 0.75)
"""Of the head's width, at which curves are measured."""

Choice = Callable[[QueryKeyStatistics, int], list[int]]


def pair_curves(
    job: Job,
    layers: list[QueryKeyStatistics],
    figures: list[QueryKeyStatistics],
    wholes: list[Factors],
    orders: list[list[Order]],
) -> list[BudgetCurve]:
    """Attention KL against mean width: greedy pairs with and without widths per head, and other pairs.

    Args:
        job: for its seed.
        layers: what the layers saw of the calibration data.
        figures: what they saw of the data of the figures.
        wholes: factors that change no logit.
        orders: how the units of each key head go.
    """
    every = [(at, head) for at, layer in enumerate(layers) for head in range(layer.found.key_heads)]
    ways: dict[str, Choice | None] = {
        "greedy by attention KL": None,
        "largest queries and keys": _by_size,
        "random pairs": lambda layer, head: _at_random(layer, head, job.seed),
        "slowest pairs": lambda layer, head: _by_speed(layer),
        "fastest pairs": lambda layer, head: _by_speed(layer)[::-1],
    }
    measured: dict[str, list[Order]] = {name: [] for name in ways}
    for at, head in every:
        units = units_of(layers[at])
        rows = rows_of(figures[at].samples, head, wholes[at], units, job.seed)
        for name, way in ways.items():
            order = orders[at][head].units if way is None else way(layers[at], head)
            measured[name].append(along(rows, units, order))
    widths = sorted({max(2, round(share * layers[0].found.width)) for share in SHARES})
    curves = [(order.widths, order.losses) for own in orders for order in own]
    own_widths = [widths_under_budget(curves, width * len(curves)) for width in widths]
    ours = [
        _point([_at(curve, w) for curve, w in zip(measured["greedy by attention KL"], own, strict=True)])
        for own in own_widths
    ]
    out = [BudgetCurve(method="greedy by attention KL, widths per head", points=ours)]
    for name, found in measured.items():
        points = [_point([_at(order, width) for order in found]) for width in widths]
        out.append(BudgetCurve(method=f"{name}, one width", points=points))
    return out


def _at(order: Order, width: int) -> tuple[int, float]:
    """The widest that fits, and its attention KL."""
    at = max(i for i, own in enumerate(order.widths) if own <= width or i == 0)
    return order.widths[at], order.losses[at]


def _point(found: list[tuple[int, float]]) -> BudgetPoint:
    count = len(found)
    return BudgetPoint(width=sum(w for w, _ in found) / count, kl=sum(kl for _, kl in found) / count)


def _by_size(layer: QueryKeyStatistics, head: int) -> list[int]:
    """Smallest E‖q‖²·E‖k‖² first."""
    sizes = layer.query_moments[head].diagonal(), layer.key_moments[head].diagonal()
    products = [float(sizes[0][unit].sum() * sizes[1][unit].sum()) for unit in units_of(layer)]
    return sorted(range(len(products)), key=products.__getitem__)


def _at_random(layer: QueryKeyStatistics, head: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * layer.found.layer + head + 10**6 * seed)
    order: list[int] = torch.randperm(len(units_of(layer)), generator=generator).tolist()
    return order


def _by_speed(layer: QueryKeyStatistics) -> list[int]:
    """Fastest first, by how far a pair turns from one token to the next; unrotated channels last."""
    rotation = layer.samples[0].rotation
    assert rotation is not None
    angles = torch.atan2(rotation.sin, rotation.cos)
    steps = (angles[:, 1:] - angles[:, :-1] + torch.pi) % (2 * torch.pi) - torch.pi
    speeds = [*steps.abs().median(1).values.mean(0).tolist()]
    speeds += [0.0] * (len(units_of(layer)) - len(speeds))
    return sorted(range(len(speeds)), key=lambda unit: -speeds[unit])
