"""Other ways to narrow queries and keys, measured beside ours at the same widths."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from rankwise.compression.factors import joint_components, key_components, random_directions
from rankwise.compression.layers import Projections
from rankwise.compression.parts import Job
from rankwise.compression.qk_solve import closed_form, widths_under_budget
from rankwise.compression.qk_statistics import (
    QueryKeyStatistics,
    first_samples,
    layer_divergence,
    width_curves,
)
from rankwise.compression.records import BudgetCurve, BudgetPoint
from rankwise.measures.logits import LogitBases, logit_bases
from rankwise.tracing.projections import linear_parts

SHARES = (0.125, 0.25, 0.5, 0.75)
"""Of the head's width, at which curves are measured."""
SEQUENCES = 32
"""On which curves are measured, at most."""

Way = Callable[[QueryKeyStatistics, int], LogitBases]


def null_curves(
    job: Job,
    layers: list[QueryKeyStatistics],
    figures: list[QueryKeyStatistics],
    head_curves: list[tuple[list[int], list[float]]],
) -> list[BudgetCurve]:
    """Attention KL against mean width: our closed form with and without widths per head, and four nulls.

    Args:
        job: for the model, its seed and what to tell.
        layers: what the layers saw of the calibration data.
        figures: what they saw of the data of the figures.
        head_curves: attention KL against width of each key head.
    """
    ways: dict[str, Way] = {
        "closed form, one width": lambda layer, head: logit_bases(*_moments(layer, head)),
        "joint PCA": lambda layer, head: joint_components(*_moments(layer, head)),
        "key PCA": lambda layer, head: key_components(*_moments(layer, head)),
        "weights alone (SVD)": lambda layer, head: logit_bases(*weight_moments(job.model, layer.found, head)),
        "random directions": lambda layer, head: random_directions(
            *_moments(layer, head), seed=1000 * layer.found.layer + head + 10**6 * job.seed
        ),
    }
    widths = _widths(layers[0].found.width)
    few = [replace(layer, samples=first_samples(layer.samples, SEQUENCES)) for layer in figures]
    out = [
        BudgetCurve(method="closed form, widths per head", points=_per_head(layers, few, head_curves, widths))
    ]
    for method, way in ways.items():
        job.on_step(f"measuring {method}")
        total = torch.zeros(len(widths), dtype=torch.float64)
        for layer, seen in zip(layers, few, strict=True):
            groups = layer.found.groups
            bases = [way(layer, head) for head in range(layer.found.key_heads)]
            each = [bases[head // groups] for head in range(layer.found.heads)]
            total += width_curves(seen.samples, [b.query for b in each], [b.key for b in each], widths).mean(
                0
            )
        points = zip(widths, (total / len(layers)).tolist(), strict=True)
        out.append(BudgetCurve(method=method, points=[BudgetPoint(width=w, kl=kl) for w, kl in points]))
    return out


def weight_moments(model: nn.Module, found: Projections, head: int) -> tuple[Tensor, Tensor]:
    """Second moments of queries and keys of a key head if tokens were white noise: W_q W_qᵀ and W_k W_kᵀ.

    With them, `logit_bases` is the SVD of W_qᵀ W_k, which looks at weights alone (CLOVER, arXiv 2411.17426).

    Args:
        model: before it is narrowed.
        found: the layer.
        head: the key head.
    """
    groups = found.groups
    members = range(head * groups, (head + 1) * groups)
    query = sum(_gram(model, found.query.module, found.query.channels[member]) for member in members)
    assert isinstance(query, Tensor)
    return query, _gram(model, found.key.module, found.key.channels[head])


def _gram(model: nn.Module, name: str, channels: Tensor) -> Tensor:
    parts = linear_parts(model.get_submodule(name))
    assert parts is not None
    rows = parts[0].detach()[channels].double().cpu()
    return rows @ rows.mT


def _moments(layer: QueryKeyStatistics, head: int) -> tuple[Tensor, Tensor]:
    return layer.query_moments[head], layer.key_moments[head]


def _per_head(
    layers: list[QueryKeyStatistics],
    figures: list[QueryKeyStatistics],
    curves: list[tuple[list[int], list[float]]],
    widths: list[int],
) -> list[BudgetPoint]:
    points = []
    for width in widths:
        chosen, at, total = widths_under_budget(curves, width * len(curves)), 0, 0.0
        for layer, seen in zip(layers, figures, strict=True):
            own, at = chosen[at : at + layer.found.key_heads], at + layer.found.key_heads
            total += float(layer_divergence(seen, closed_form(layer, own)).mean())
        points.append(BudgetPoint(width=width, kl=total / len(layers)))
    return points


def _widths(width: int) -> list[int]:
    return sorted({max(1, round(share * width)) for share in SHARES})
