"""Narrower heads of one layer: factors from what it saw, and the modules that compute them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rankwise.compression.divergence import head_divergence, width_curves
from rankwise.compression.layers import AttentionLayer, Found, Step
from rankwise.compression.qk_modules import Factors, narrow_layers
from rankwise.compression.widths import curve_widths, widths_for_tolerance, widths_under_budget
from rankwise.measures.logits import LogitBases, logit_bases

CURVE_SEQUENCES = 16
"""Sequences on which the curve of each head is measured, at most."""


def closed_form(
    layer: AttentionLayer, widths: list[int], way: Callable[..., LogitBases] = logit_bases
) -> Factors:
    """The first columns of the bases of each key head.

    Columns of A and B are scaled so that queries and keys come out equally large, whatever the precision.

    Args:
        layer: a layer and what it saw.
        widths: of each key head.
        way: how the bases are found.
    """
    groups = layer.found.groups
    query, key = torch.zeros_like(layer.query_moments), torch.zeros_like(layer.key_moments)
    for head, width in enumerate(widths):
        P, S = layer.query_moments[head], layer.key_moments[head]
        bases = way(P, S)
        a, b = bases.query[:, :width], bases.key[:, :width]
        size_q = (a * (P / groups @ a)).sum(0).clamp(min=1e-300)
        size_k = (b * (S @ b)).sum(0).clamp(min=1e-300)
        balance = (size_k / size_q) ** 0.25
        query[head, :, :width], key[head, :, :width] = a * balance, b / balance
    return Factors(query.repeat_interleave(groups, 0), key, [list(range(width)) for width in widths])


def head_curves(layer: AttentionLayer, on_step: Step) -> list[tuple[list[int], list[float]]]:
    """Attention KL against width for each key head, closed form, on the calibration data.

    Args:
        layer: a layer and what it saw.
        on_step: told what is under way.
    """
    on_step(f"measuring widths of {layer.found.name}")
    widths, groups = curve_widths(layer.found.width), layer.found.groups
    samples, count = [], 0
    for sample in layer.samples:
        if count < CURVE_SEQUENCES:
            samples.append(sample)
        count += sample.query.shape[0]
    bases = [logit_bases(P, S) for P, S in zip(layer.query_moments, layer.key_moments, strict=True)]
    each = [bases[head // groups] for head in range(layer.found.heads)]
    curves = width_curves(samples, [layer.query for layer in each], [layer.key for layer in each], widths)
    by_key = curves.unflatten(0, (-1, groups)).mean(1)
    return [(widths, losses) for losses in by_key.tolist()]


def chosen_widths(
    curves: list[tuple[list[int], list[float]]], tolerance: float | int | None, width: float | int | None
) -> list[int]:
    """Width of every key head of the model, for a tolerance or a mean width.

    Args:
        curves: of all key heads.
        tolerance: nats of attention KL, mean over heads.
        width: mean over heads.
    """
    if width is not None:
        return widths_under_budget(curves, round(width * len(curves)))
    assert tolerance is not None
    return widths_for_tolerance(curves, tolerance)


def layer_divergence(layer: AttentionLayer, factors: Factors) -> Tensor:
    """Mean KL(M ‖ M') over rows, for each query head, on what the layer saw.

    Args:
        layer: a layer and what it saw.
        factors: A and B.
    """
    return head_divergence(layer.samples, list(factors.query), list(factors.key))


@contextmanager
def turned(model: nn.Module, layers: list[Found], seed: int = 0) -> Iterator[None]:
    """The model with queries and keys of every head in another orthonormal basis, at full width.

    Outputs stay what they are wherever queries and keys meet in nothing but their inner products. That is
    what narrowing relies on: rotated positions, norms of queries and keys, and relative positions that read
    the queries all show.

    Args:
        model: the model.
        layers: which.
        seed: of the bases.
    """
    generator = torch.Generator().manual_seed(seed)
    plan = []
    for found in layers:
        drawn = torch.randn(
            found.key_heads, found.width, found.width, generator=generator, dtype=torch.float64
        )
        bases = torch.linalg.qr(drawn).Q
        every = [list(range(found.width))] * found.key_heads
        plan.append((found, Factors(bases.repeat_interleave(found.groups, 0), bases, every)))
    with narrow_layers(model, plan, cache=False):
        yield
