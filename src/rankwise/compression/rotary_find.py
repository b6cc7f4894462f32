"""Find attention layers with rotary positions, and the pairs of channels that are rotated together.

No formula for the angles is assumed. The rotation takes a pair (x, y) to (x cos − y sin, x sin + y cos), with
one angle for all heads. The cos and sin of each token and pair are fitted to the model's own values, and
the residual must be rounding alone.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.rotary import fit_rotation
from rankwise.compression.layers import FIT, Nearby, Projections, equal_norms, find_layers, keep_passing
from rankwise.compression.qk_find import turned
from rankwise.operators import DenseMixing, SoftmaxMixing
from rankwise.tracing import CapturedMixer
from rankwise.tracing.projections import each_once, find_projection, side_of


def find_rotary_layers(model: nn.Module, batch: Any) -> tuple[list[Projections], dict[str, str]]:
    """Return the layers in which pairs may be turned by any angle, and why each other layer is left out."""
    return keep_passing(
        model,
        batch,
        find_layers(model, batch, read_rotations),
        turned,
        "its outputs change if a pair turns by the same angle in queries and keys",
        expected="softmax attention whose queries and keys are rotated by position and nothing else",
        fix="For outputs of nn.Linear without rotated positions, the part `qk` may do.",
    )


def read_rotations(site: CapturedMixer, near: Nearby) -> Projections | str:
    """Return the projections behind rotated queries and keys, or the reason why there are none."""
    operator = site.operator
    if isinstance(operator, DenseMixing):
        return "its softmax is written out by hand: load the model with attn_implementation='sdpa'"
    assert isinstance(operator, SoftmaxMixing)
    keys = each_once(operator.key)
    query, key = equal_norms(operator.query, near.linear), equal_norms(keys, near.linear)
    if not query or not key:
        return near.reason("keys", keys) if query else near.reason("queries", operator.query)
    bound = FIT * torch.finfo(operator.query.dtype).eps
    for q in query:
        for k in key:
            before = [side_of(near.linear[side.module], side) for side in (q, k)]
            pairs = _pairs(before, [operator.query, keys], bound)
            if pairs is not None:
                return Projections(site.name, site.stack, site.layer, q, k, pairs=pairs)
    if find_projection(operator.query, near.linear) and find_projection(keys, near.linear):
        return "positions are not rotated into its queries and keys"
    return "its queries and keys are not rotated by one angle per pair of channels, equal for all heads"


def _pairs(before: list[Tensor], after: list[Tensor], bound: float) -> Tensor | None:
    """Return the channels that rotate into each other: halves of the rotated channels, or neighbors."""
    width = before[0].shape[-1]
    prefixes = [torch.arange(end, device=before[0].device) for end in range(width - width % 2, 1, -2)]
    layouts = (pairs for dims in prefixes for pairs in (dims.reshape(2, -1).T, dims.reshape(-1, 2)))
    fitting = next((pairs for pairs in layouts if fit_rotation(pairs, before, after)[1] <= bound), None)
    if fitting is None:
        return None
    # Two channels that attention reads bit by bit unchanged are no pair.
    same = torch.stack([(a == b).flatten(0, 2).all(0) for a, b in zip(before, after, strict=True)]).all(0)
    turning = fitting[~same[fitting].all(1)]
    return turning if len(turning) else None
