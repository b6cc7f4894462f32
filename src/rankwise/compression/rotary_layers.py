"""Attention layers whose queries and keys are rotated by position, and the rotation, told from values.

No formula of positions is assumed. A pair of channels before the rotation, (x, y), comes out as
(x cos − y sin, x sin + y cos) with one angle for all heads: cos and sin of each token and pair are fitted to
what the model did, and the fit must leave nothing but rounding.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.forward import device_of, first_sequences, run_model, to_device
from rankwise._internals.rotary import fit_rotation
from rankwise.compression.layers import Found, outputs_by_name
from rankwise.operators import SoftmaxMixing
from rankwise.tracing import MixerSite, capture, record_calls
from rankwise.tracing.projections import (
    Projection,
    each_once,
    head_layouts,
    is_linear,
    names_below,
    side_of,
)

FIT = 16
"""Roundings of the dtype, relative in the Frobenius norm, that the fitted rotation may be off."""
NO_ROTATION = (
    "its queries and keys are no rotated output of linear layers: positions are not rotated in, or a norm "
    "comes between, which reads all pairs of a head"
)


def find_rotary_layers(model: nn.Module, batch: Any) -> tuple[list[Found], dict[str, str]]:
    """Find the projections behind rotated queries and keys, and which channels are pairs.

    Args:
        model: the model, in evaluation mode.
        batch: what it takes; a sequence or two are run.

    Returns:
        The layers; and the reason for each one that cannot be done.
    """
    sites: list[MixerSite] = []
    short = to_device(first_sequences(batch, 2), device_of(model))
    with record_calls(model, is_linear) as linear, torch.no_grad(), capture(model, on_mixer=sites.append):
        run_model(model, short)
    outputs = outputs_by_name(linear)
    found: dict[str, Found] = {}
    reasons: dict[str, str] = {}
    for site in sites:
        if site.name in found or site.name in reasons:
            found.pop(site.name, None)
            reasons[site.name] = "it runs more than once"
            continue
        layer = _rotary_layer(
            site, {name: outputs[name][0] for name in names_below(list(outputs), site.name)}
        )
        if isinstance(layer, str):
            reasons[site.name] = layer
        else:
            found[site.name] = layer
    return list(found.values()), reasons


def _rotary_layer(site: MixerSite, outputs: dict[str, Tensor]) -> Found | str:
    operator = site.operator
    if not isinstance(operator, SoftmaxMixing):
        return "its softmax is written out by hand: load the model with attn_implementation='sdpa'"
    if site.cross:
        return "its queries and keys come from different sequences"
    if not bool(operator.query.isfinite().all() and operator.key.isfinite().all()):
        return "its queries or keys hold NaN or infinity"
    keys = each_once(operator.key)
    query, key = _of_equal_norms(operator.query, outputs), _of_equal_norms(keys, outputs)
    bound = FIT * torch.finfo(operator.query.dtype).eps
    for q in query:
        for k in key:
            before = [side_of(outputs[side.module], side) for side in (q, k)]
            pairs = _pairs(before, [operator.query, keys], bound)
            if pairs is not None:
                return Found(site.name, site.stack, site.layer, q, k, pairs=pairs)
    return NO_ROTATION


def _of_equal_norms(heads: Tensor, outputs: dict[str, Tensor]) -> list[Projection]:
    """Projections whose heads are as long as those that attention got: rotations keep lengths."""
    batch, count, tokens, width = heads.shape
    wanted = heads.transpose(1, 2).double().norm(dim=-1)
    bound = FIT * torch.finfo(heads.dtype).eps * float(wanted.norm())
    found = []
    for name, output in outputs.items():
        if output.shape[:-1] != (batch, tokens) or output.shape[-1] < count * width:
            continue
        for channels in head_layouts(count, width, output.shape[-1]):
            norms = output[..., channels.to(output.device)].double().norm(dim=-1)
            if float((norms - wanted).norm()) <= bound:
                found.append(Projection(name, channels))
    return found


def _pairs(before: list[Tensor], after: list[Tensor], bound: float) -> Tensor | None:
    """Channels that turn into each other: halves of the rotated channels, or neighbours."""
    width = before[0].shape[-1]
    device = before[0].device
    for rotated in range(width - width % 2, 1, -2):
        dims = torch.arange(rotated, device=device)
        for pairs in (dims.reshape(2, -1).T, dims.reshape(-1, 2)):
            if fit_rotation(pairs, before, after)[1] <= bound:
                return _moving(pairs, before, after)
    return None


def _moving(pairs: Tensor, before: list[Tensor], after: list[Tensor]) -> Tensor | None:
    """The pairs that turn: channels that are passed through keep every bit."""
    same = torch.stack([(a == b).flatten(0, 2).all(0) for a, b in zip(before, after, strict=True)]).all(0)
    turning = pairs[~same[pairs].all(1)]
    return turning if len(turning) else None
