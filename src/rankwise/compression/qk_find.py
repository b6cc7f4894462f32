"""Find attention layers whose queries and keys are outputs of linear layers and may have any basis."""

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rankwise._internals.forward import Change
from rankwise._internals.linalg import as_float64
from rankwise.compression.layers import Nearby, Projections, find_layers, keep_passing, random_bases
from rankwise.compression.qk_modules import narrow_layers
from rankwise.operators import DenseMixing, SoftmaxMixing
from rankwise.tracing import CapturedMixer
from rankwise.tracing.projections import Projection, each_once, find_projection, head_layouts

SMALLEST = 1e-12
"""Smaller entries of an attention matrix are ignored: masked, or too imprecise for their logarithm."""


def find_query_key_layers(model: nn.Module, batch: Any) -> tuple[list[Projections], dict[str, str]]:
    """Return the layers that work in any basis of queries and keys, and why each other layer is left out."""
    return keep_passing(
        model,
        batch,
        find_layers(model, batch, read_projections),
        turned,
        "its outputs change with the basis of queries and keys: not only inner products read them",
        expected="softmax attention whose queries and keys are outputs of linear layers, unrotated",
        fix="Where positions are rotated in, replace `qk` by `rotary` in the parts; eager attention also "
        "needs `model.set_attn_implementation('sdpa')` before.",
    )


def turned(model: nn.Module, layers: list[Projections]) -> Change:
    """Return the trial change: queries and keys of every head in a random basis of full width.

    It changes outputs if code reads queries or keys other than by their inner products: a norm, a rotation.
    """
    return narrow_layers(model, [(layer, random_bases(layer)) for layer in layers], cache=False)


def read_projections(site: CapturedMixer, near: Nearby) -> Projections | str:
    """Return the projections behind queries and keys, or the reason why there are none."""
    operator = site.operator
    if isinstance(operator, DenseMixing):
        explicit = find_explicit_softmax(operator.matrix, near)
        if isinstance(explicit, str):
            return f"its softmax is written out by hand, and {explicit}"
        return Projections(site.name, site.stack, site.layer, *explicit)
    assert isinstance(operator, SoftmaxMixing)
    keys = operator.key
    query = find_projection(operator.query, near.linear)
    key = find_projection(keys, near.linear) or find_projection(keys := each_once(keys), near.linear)
    if query is None or key is None:
        return near.reason("queries", operator.query) if query is None else near.reason("keys", keys)
    return Projections(site.name, site.stack, site.layer, query, key)


def find_explicit_softmax(
    matrix: Float[Tensor, "B H T S"], near: Nearby
) -> tuple[Projection, Projection, float] | str:
    """Find two linear layers whose outputs, as queries and keys, have the logits of an attention matrix.

    Return the query projection, the key projection and the scale of their inner products, or the reason why
    no pair fits. Masks and position biases are equal in all sequences. So the logarithms of the attention of
    two sequences differ only by their scaled inner products, up to one number per row.
    """
    if matrix.shape[-2] != matrix.shape[-1]:
        return "its queries and keys are of different tokens"
    if matrix.shape[0] < 2:
        return "the first batch has one sequence: begin with two"
    pair = as_float64(matrix[:2])
    seen = (pair > SMALLEST).all(0)
    target = _centred(pair.clamp(min=1e-300).log(), seen)
    size = float(target.norm())
    if size == 0:
        return "the first two sequences are equal, or their logits do not depend on them"
    bound = torch.finfo(matrix.dtype).eps ** 0.5
    heads = matrix.shape[1]
    sides = list(_candidates(heads, matrix.shape[2], {**near.linear, **near.others}))
    for (name_q, q, at_q), (name_k, k, at_k) in permutations(sides, 2):
        if q.shape != k.shape:
            continue
        found = _centred(q @ k.mT, seen)
        scale = float((found * target).sum()) / max(float((found * found).sum()), 1e-300)
        if scale != 0 and float((target - scale * found).norm()) <= bound * size:
            for what, name in (("queries", name_q), ("keys", name_k)):
                if name in near.others:
                    return near.source(what, name)
            return Projection(name_q, at_q), Projection(name_k, at_k), scale
    return (
        "its logits are not scaled inner products of two projections plus terms that all sequences share; "
        "attn_implementation='sdpa' may show more"
    )


def _centred(logits: Float[Tensor, "2 H T S"], seen: Tensor) -> Float[Tensor, "H T S"]:
    """Return the difference of two sequences' logits, minus its mean over each row's unmasked entries."""
    change = torch.where(seen, logits[0] - logits[1], 0.0)
    mean = change.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(seen, change - mean, 0.0)


def _candidates(
    heads: int, tokens: int, outputs: Mapping[str, Tensor]
) -> Iterator[tuple[str, Float[Tensor, "2 H T K"], Tensor]]:
    """Yield each way to split outputs into heads, if they hold one, two or three of queries, keys, values."""
    for name, output in outputs.items():
        if output.dim() != 3 or output.shape[1] != tokens or output.shape[0] < 2:
            continue
        for share in (1, 2, 3):
            width, rest = divmod(output.shape[-1], share * heads)
            if rest or not width:
                continue
            for channels in head_layouts(heads, width, output.shape[-1]):
                yield name, as_float64(output[:2, :, channels].permute(0, 2, 1, 3)), channels
