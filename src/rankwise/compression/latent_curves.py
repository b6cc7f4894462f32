"""Other ways to factor keys and values, measured beside ours at the same bytes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rankwise.compression.kv_modules import LatentLayer
from rankwise.compression.kv_solve import SecondMoments, WeightedSVD, ranks_for_keep, weighted_svd
from rankwise.compression.output_price import compared_batches, log_probabilities, output_kl
from rankwise.compression.parts import Job
from rankwise.compression.qk_modules import channels_of
from rankwise.compression.records import LatentCurve, LatentPoint
from rankwise.errors import CompressionError
from rankwise.tracing.projections import linear_parts

SHARES = (0.125, 0.25, 0.5)
"""Of the bytes of the cache, at which curves are measured."""


def latent_curves(
    job: Job, layers: list[LatentLayer], moments: list[SecondMoments], found: list[WeightedSVD], size: int
) -> list[LatentCurve]:
    """KL of the outputs against bytes kept: ours with and without ranks per layer, and two nulls.

    Args:
        job: for the model, the data of the figures and what to tell.
        layers: at full rank.
        moments: of each.
        found: our directions of each.
        size: bytes of a number in the cache.
    """
    ways = {
        "tokens and gradients, ranks per layer": (found, True),
        "tokens and gradients, one rank": (found, False),
        "tokens alone, one rank": ([weighted_svd(moment.weight, moment.tokens) for moment in moments], False),
        "weights alone (SVD), one rank": ([weighted_svd(moment.weight) for moment in moments], False),
    }
    batches = list(compared_batches(job.model, job.figures))
    before = [log_probabilities(job.model, batch) for batch in batches]
    curves = []
    for method, (spectra, by_layer) in ways.items():
        job.on_step(f"measuring {method}")
        points = []
        for share in SHARES:
            try:
                ranks = ranks_for_keep(
                    layers, [layer_spectrum.nats for layer_spectrum in spectra], share, size
                )
            except CompressionError:  # too few bytes for one direction a layer
                continue
            if not by_layer:
                ranks = [min(layer.rank, max(1, sum(ranks) // len(ranks))) for layer in layers]
            weights = []
            for layer_spectrum, rank in zip(spectra, ranks, strict=True):
                down, up = layer_spectrum.factors(rank)
                weights.append(up @ down)
            with approximated(job.model, layers, weights):
                kl = output_kl(
                    (old, log_probabilities(job.model, batch))
                    for old, batch in zip(before, batches, strict=True)
                )
            points.append(LatentPoint(keep=share, rank=sum(ranks) / len(ranks), output_kl=kl))
        curves.append(LatentCurve(method=method, points=points))
    return curves


@contextmanager
def approximated(model: nn.Module, layers: list[LatentLayer], weights: list[Tensor]) -> Iterator[None]:
    """The model with other weights of keys and values.

    Args:
        model: not compressed.
        layers: which.
        weights: (N, D) of each, rows of keys and then of values.
    """
    before: list[tuple[Tensor, list[int], Tensor]] = []
    with torch.no_grad():
        for layer, weight in zip(layers, weights, strict=True):
            at = 0
            for name, runs in ((layer.key, layer.key_channels), (layer.value, layer.value_channels)):
                parts = linear_parts(model.get_submodule(layer.path(name)))
                assert parts is not None
                rows = channels_of(runs)
                before.append((parts[0], rows, parts[0].detach()[rows].clone()))
                parts[0][rows] = weight[at : at + len(rows)].to(parts[0])
                at += len(rows)
    try:
        yield
    finally:
        with torch.no_grad():
            for matrix, rows, old in before:
                matrix[rows] = old
