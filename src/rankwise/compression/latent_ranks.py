"""Ranks of the latents of all layers under one budget: the directions worth most, in whichever layer."""

import torch
from jaxtyping import Float64
from torch import Tensor

from rankwise.compression.kv_modules import LatentLayer
from rankwise.errors import CompressionError


def ranks_for_keep(
    layers: list[LatentLayer], nats: list[Float64[Tensor, "_"]], keep: float | int, size: int
) -> list[int]:
    """Ranks whose cache takes a share of the bytes, positions counted.

    Each layer gets at least 1; then the directions of all layers are taken by what they are worth. The sum of
    what is left out is the least there is for that many bytes: each layer's are taken in falling order.

    Args:
        layers: at full rank.
        nats: what each direction of each layer is worth, falling.
        keep: share of the bytes of full keys and values.
        size: bytes of a number in the cache.

    Raises:
        CompressionError: if the budget does not reach a rank of 1 in each layer.
    """
    room = keep * size * sum(layer.full for layer in layers)
    positions = sum(layer.position_bytes for layer in layers)
    count = int((room - positions) // size)
    if count < len(layers):
        least = (positions + size * len(layers)) / (size * sum(layer.full for layer in layers))
        raise CompressionError(
            "`keep`", expected=f"at least {least:.3g} of the cache", got=f"{keep:g}", fix="Keep more."
        )
    return _best(nats, count)


def ranks_for_tolerance(nats: list[Float64[Tensor, "_"]], tolerance: float | int) -> list[int]:
    """Least ranks, in the order of `ranks_for_keep`, whose left-out directions are worth no more than that.

    Args:
        nats: what each direction of each layer is worth, falling.
        tolerance: nats a token, sum over layers.
    """
    importance = torch.cat(nats).sort(descending=True).values
    left = importance.flip(0).cumsum(0).flip(0)  # left[n] is what is lost when n are kept
    count = int((left > tolerance).sum())
    return _best(nats, max(count, len(nats)))


def _best(nats: list[Float64[Tensor, "_"]], count: int) -> list[int]:
    first = [1] * len(nats)
    rest = [(float(value), layer) for layer, gains in enumerate(nats) for value in gains[1:]]
    rest.sort(key=lambda gain: (-gain[0], gain[1]))
    for _, layer in rest[: max(0, count - len(nats))]:
        first[layer] += 1
    return first
