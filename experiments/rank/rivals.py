"""Alternatives to `rankwise.compress`: other bases of queries and keys, other latents.

Each function returns costs by method, then by mean width or by share of the cache.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.compression.kv_modules import LatentLayer, latent_change
from rankwise.compression.kv_solve import SecondMoments, WeightedSVD, largest_ranks, weighted_svd
from rankwise.compression.width_factors import (
    Curve,
    Factors,
    kept_factors,
    layer_divergence,
    make_order,
    units_of,
    whole_factors,
    width_curves,
)
from rankwise.compression.width_find import QueryKeyStatistics, first_samples
from rankwise.compression.width_solve import widths_under_budget
from rankwise.measures.required_width import LogitBases, logit_bases
from rankwise.tracing.projections import QueryKeyProjections, linear_parts

SHARES = (0.125, 0.25, 0.5, 0.75)
"""Shares of the head width at which attention KL is measured."""
CACHE_SHARES = (0.125, 0.25, 0.5)
"""Shares of the cache at which output KL is measured."""
SEQUENCES = 32
"""Sequences on which bases are compared, at most."""
Costs = dict[str, dict[float, float]]
"""KL in nats by method, then by mean width or by share of the cache."""

# --- bases of queries and keys: the first r columns of K×K bases are A and B ------------------------------


def key_components(query: Float64[Tensor, "K K"], key: Float64[Tensor, "K K"]) -> LogitBases:
    """Return the principal components of the keys, for both sides."""
    basis = torch.linalg.eigh(key).eigenvectors.flip(-1)
    return LogitBases(basis, basis)


def joint_components(query: Float64[Tensor, "K K"], key: Float64[Tensor, "K K"]) -> LogitBases:
    """Return the principal components of queries and keys, each side scaled to the same mean square."""
    return key_components(query, query / query.trace() + key / key.trace())


def random_directions(query: Float64[Tensor, "K K"], key: Float64[Tensor, "K K"], seed: int) -> LogitBases:
    """Draw orthonormal directions, for both sides."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(key.shape, generator=generator, dtype=torch.float64)).Q
    return LogitBases(basis, basis)


def weight_moments(model: nn.Module, found: QueryKeyProjections, head: int) -> tuple[Tensor, Tensor]:
    """Return the second moments W_q W_qᵀ and W_k W_kᵀ of a key head for tokens that are white noise.

    With these moments `logit_bases` is the SVD of W_qᵀ W_k, which ignores data (CLOVER, arXiv 2411.17426).
    """

    def gram(name: str, channels: Tensor) -> Tensor:
        parts = linear_parts(model.get_submodule(name))
        assert parts is not None
        rows = parts[0].detach()[channels].double().cpu()
        return rows @ rows.mT

    members = found.query.channels[head * found.groups : (head + 1) * found.groups]
    query = torch.stack([gram(found.query.module, channels) for channels in members]).sum(0)
    return query, gram(found.key.module, found.key.channels[head])


def closed_form(layer: QueryKeyStatistics, widths: list[int]) -> Factors:
    """Return the factors of least squared error of logits, with the given width for each key head."""
    last_first = [*range(layer.projections.width)][::-1]
    order = make_order(last_first, [0.0] * len(last_first), units_of(layer))
    return kept_factors(layer, whole_factors(layer), [order] * len(widths), widths)


def basis_costs(
    model: nn.Module,
    layers: list[QueryKeyStatistics],
    evaluated: list[QueryKeyStatistics],
    curves: list[Curve],
    seed: int = 0,
) -> Costs:
    """Return attention KL of our closed form, with and without widths per head, and of four alternatives.

    `layers` are statistics of the calibration data, `evaluated` of other data, and `curves` the `head_curves`
    of all layers. `model` is not compressed yet.
    """
    ways: dict[str, Callable[[QueryKeyStatistics, int], LogitBases]] = {
        "closed form, one width": lambda layer, head: logit_bases(*_moments(layer, head)),
        "joint PCA": lambda layer, head: joint_components(*_moments(layer, head)),
        "key PCA": lambda layer, head: key_components(*_moments(layer, head)),
        "weights alone (SVD)": lambda layer, head: logit_bases(
            *weight_moments(model, layer.projections, head)
        ),
        "random directions": lambda layer, head: random_directions(
            *_moments(layer, head), seed=1000 * layer.projections.layer + head + 10**6 * seed
        ),
    }
    widths = sorted({max(1, round(share * layers[0].projections.width)) for share in SHARES})
    few = [replace(layer, samples=first_samples(layer.samples, SEQUENCES)) for layer in evaluated]
    ours = {}
    for width in widths:
        left = iter(widths_under_budget(curves, width * len(curves)))
        kl = [
            layer_divergence(own.samples, closed_form(layer, [next(left) for _ in layer.key_moments])).mean()
            for layer, own in zip(layers, few, strict=True)
        ]
        ours[float(width)] = float(sum(kl)) / len(kl)
    costs = {"closed form, widths per head": ours}
    for method, way in ways.items():
        total = torch.zeros(len(widths), dtype=torch.float64)
        for layer, own in zip(layers, few, strict=True):
            bases = [way(layer, head) for head in range(layer.projections.key_heads)]
            total += width_curves(own.samples, bases, widths).mean(0)
        costs[method] = dict(zip(map(float, widths), (total / len(layers)).tolist(), strict=True))
    return costs


def _moments(layer: QueryKeyStatistics, head: int) -> tuple[Tensor, Tensor]:
    return layer.query_moments[head], layer.key_moments[head]


# --- latents of keys and values --------------------------------------------------------------------------


def latent_costs(
    model: nn.Module,
    batches: list[dict[str, Any]],
    layers: list[LatentLayer],
    moments: list[SecondMoments],
    ours: list[WeightedSVD],
) -> Costs:
    """Return output KL on batches without padding: our factors, and factors of tokens or weights alone."""
    ways = {
        "tokens and gradients, ranks per layer": (ours, True),
        "tokens and gradients, one rank": (ours, False),
        "tokens alone, one rank": ([weighted_svd(own.weight, own.tokens) for own in moments], False),
        "weights alone (SVD), one rank": ([weighted_svd(own.weight) for own in moments], False),
    }
    before = [_log_probabilities(model, batch) for batch in batches]
    costs: Costs = {method: {} for method in ways}
    size = next(model.parameters()).element_size()
    for method, (spectra, by_layer) in ways.items():
        for share in CACHE_SHARES:
            room = share * sum(layer.full for layer in layers) - sum(
                4 / size for layer in layers if layer.rotary
            )
            ranks = largest_ranks([spectrum.nats for spectrum in spectra], int(room))
            if not by_layer:
                ranks = [min(layer.rank, max(1, sum(ranks) // len(ranks))) for layer in layers]
            factors = [spectrum.factors(rank) for spectrum, rank in zip(spectra, ranks, strict=True)]
            with latent_change(model, layers, factors):
                after = [_log_probabilities(model, batch) for batch in batches]
            pairs = zip(after, before, strict=True)
            total = sum(float(F.kl_div(*pair, reduction="sum", log_target=True)) for pair in pairs)
            costs[method][share] = total / sum(own[..., 0].numel() for own in before)
    return costs


def _log_probabilities(model: nn.Module, batch: dict[str, Any]) -> Float64[Tensor, "B T V"]:
    with torch.no_grad():
        logits: Tensor = model(**batch).logits
    return logits.double().log_softmax(-1)
