"""Narrower heads of one layer: factors from what it saw, and the modules that compute them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from rankwise.compression.divergence import head_divergence, width_curves
from rankwise.compression.key_cache import add_key_cache
from rankwise.compression.layers import AttentionLayer, Found, Step
from rankwise.compression.narrow import HeadFactors, Runs, narrowed, put, runs_of
from rankwise.compression.widths import curve_widths, widths_for_tolerance, widths_under_budget
from rankwise.measures.logits import LogitBases, logit_bases

CURVE_SEQUENCES = 16
"""Sequences on which the curve of each head is measured, at most."""


@dataclass
class Factors:
    """A and B of one layer's heads, before any rotation."""

    query: Float64[Tensor, "H K K"]
    """Columns of channels that go are zero."""
    key: Float64[Tensor, "G K K"]
    kept: list[list[int]]
    """Channels that are left, of each key head, ascending."""


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


@dataclass
class Swap:
    """Modules and caches that can be put in and taken out again."""

    model: nn.Module
    modules: dict[str, nn.Module]
    """What is to be in, by name; after `swap`, what was there before."""
    runs: dict[str, Runs]
    """Channels of the keys that caches keep, by attention layer."""
    _remove: list[Callable[[], None]] = field(default_factory=list)

    def apply(self) -> None:
        """Narrow projections and caches go in."""
        self._exchange()
        self._remove = [
            add_key_cache(self.model.get_submodule(name), runs) for name, runs in self.runs.items()
        ]

    def undo(self) -> None:
        """The model is as it was."""
        self._exchange()
        for remove in self._remove:
            remove()

    def _exchange(self) -> None:
        self.modules = {name: put(self.model, name, module) for name, module in self.modules.items()}


def narrow_layers(model: nn.Module, plan: Sequence[tuple[Found, Factors]], cache: bool = True) -> Swap:
    """Make narrower projections for a model; `Swap.apply` puts them there.

    Args:
        model: the model.
        plan: layers and their factors.
        cache: whether caches are to keep narrow keys.
    """
    changes: dict[str, list[HeadFactors]] = {}
    for found, factors in plan:
        for side, own, groups in ((found.query, factors.query, found.groups), (found.key, factors.key, 1)):
            places = [kept for kept in factors.kept for _ in range(groups)]
            columns = [factor[:, kept] for factor, kept in zip(own, places, strict=True)]
            changes.setdefault(side.module, []).append(HeadFactors(side.channels, columns, places))
    modules: dict[str, nn.Module] = {
        name: narrowed(model.get_submodule(name), change) for name, change in changes.items()
    }
    runs = {
        found.name: runs_of([h * found.width + c for h, kept in enumerate(factors.kept) for c in kept])
        for found, factors in plan
        if cache
    }
    return Swap(model, modules, runs)


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
    swap = narrow_layers(model, plan, cache=False)
    swap.apply()
    try:
        yield
    finally:
        swap.undo()
