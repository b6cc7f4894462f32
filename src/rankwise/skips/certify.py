"""Certify λ-skips: measure the absolute token spread μ on a batch, and prove bounds by `rankwise.theory`.

In this file Y are the states x of a sequence, and B is the branch f(Y).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rankwise._internals.batches import Batch, check_batch, tensors_of
from rankwise._internals.records import grouped
from rankwise._internals.threads import exclusive
from rankwise.errors import SkipError
from rankwise.measures import absolute_spread
from rankwise.skips.add import check_finite, check_traceable, check_values
from rankwise.skips.hook_places import SkipPlace
from rankwise.skips.observe import ObservedSkip, lambdas_of, observe, places_in
from rankwise.skips.records import LayerCertificate, SkipCertificate
from rankwise.theory import min_lambda_for_spread, skip_bound
from rankwise.theory.skip_bounds import Norm as NormKind
from rankwise.theory.skip_bounds import check_keep_spread

KEEP_SPREAD = math.sqrt(0.5)
"""Share of μ that each layer should keep by default: half of μ², the energy in which tokens differ."""
NORM_KINDS: dict[str, NormKind] = {"none": "none", "LayerNorm": "layer", "RMSNorm": "rms"}
"""Names of norms in `rankwise.theory`, by their names in a certificate."""


@exclusive
def certify_skip(model: nn.Module, batch: Batch, keep_spread: float = KEEP_SPREAD) -> SkipCertificate:
    """Certify each skip connection: the absolute token spread μ kept on this batch, and the least |λ| proved.

    μ(Y) = ‖Y − 1ȳᵀ‖_F is the distance of the token states Y from their mean ȳ. The certificate has for each
    layer the measured ratio of μ after and before the skip connection, a proved lower bound of the ratio
    (`rankwise.theory.skip_bound`), the least |λ| for which the bound is ``keep_spread``
    (`rankwise.theory.min_lambda_for_spread`), and ‖f(x)‖ relative to the sum. A model without λ-skips is
    certified at λ = 1. Without residual connections around mixers, the certificate has a note and no layers.

    The bounds hold for single layers on the states of this batch; a changed λ changes the states of later
    layers. Feed-forward parts and gains of norms are not part of the bounds. `choose_lambda` recommends λ.

    Cost: one forward pass. A model without λ-skips needs a second pass, and derivatives.
    Source: this project, docs/explanation/skip-bound.md.

    Args:
        model: any module that `add_lambda_skip` accepts, or a ToST model with its own λ.
        batch: inputs, as in `audit`.
        keep_spread: share of μ that each layer should keep, in (0, 1); the default √½ keeps half of μ².

    Raises:
        SkipError: if a sequence is all padding, no sequence has two tokens, or λ or a state is not finite.
        InputError: if ``keep_spread`` is not in (0, 1), or the model does not run on the batch.

    Examples:
        >>> import torch, rankwise as rw
        >>> torch.manual_seed(0) and None
        >>> skip_layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> (layer,) = rw.certify_skip(skip_layer, torch.randn(2, 5, 8)).layers
        >>> layer.site, layer.norm, layer.absolute_spread_ratio_bound <= layer.absolute_spread_ratio
        ('dropout1', 'LayerNorm', True)
    """
    check_traceable(model)
    check_keep_spread(keep_spread)
    check_tokens(batch)  # a sequence of padding alone may have NaN in the search for skip connections
    places, missed = places_in(model, batch)
    if places:
        return certify_places(model, batch, places, keep_spread)
    reason = f"none within reach of a module ({', '.join(missed[:3])})" if missed else "none"
    note = f"residual connections around mixers: {reason}; a block must compute x + f(x) on several tokens"
    return SkipCertificate(keep_spread=keep_spread, sequences=0, layers=[], notes=[note])


def certify_places(
    model: nn.Module, batch: Batch, places: Sequence[SkipPlace], keep_spread: float
) -> SkipCertificate:
    """Return the certificate for chosen places (λ-skips or plain residual connections) of a model."""
    check_tokens(batch)
    lambdas = lambdas_of(model, places)
    check_values(lambdas, "", "Set it, or train it again with a lower learning rate.")
    skips = observe(model, batch, places, lambdas)
    _check_several(any(bool((skip.mask.sum(-1) > 1).any()) for skip in skips))
    fix = "Look for it in the weights or the batch; in float16, try bfloat16 or float32."
    for skip in skips:
        for name, states in (("residual", skip.x), ("output of the mixer", skip.branch)):
            check_finite(f"states at {skip.place.name!r}", states[skip.mask], fix, f" in the {name}")
    layers = [_certify_layer(skip, lambdas[skip.place.name], keep_spread) for skip in skips]
    notes = _notes(layers, skips)
    for name, tensor in tensors_of(batch).items():
        # padding masks of torch's own layers are not read, because their names and signs vary
        if name.endswith("key_padding_mask") and bool(tensor.any()):
            advice = "give sequences of one length without padding"
            notes.append(f"`{name}` of the batch marks padding, and that was counted as tokens: {advice}")
    sequences = max(skip.x.shape[0] for skip in skips)
    return SkipCertificate(keep_spread=keep_spread, sequences=sequences, layers=layers, notes=notes)


def check_tokens(batch: Batch) -> None:
    """Raise if a value is not a batch, a sequence has no real token, or all sequences have one token."""
    check_batch(batch)
    ids = tensors_of(batch).get("input_ids")
    _check_several(ids is None or ids.shape[-1] > 1)
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = tensors_of(batch).get(name)
        if mask is not None and mask.dim() == 2 and (empty := int((~mask.bool().any(-1)).sum())):
            got, fix = f"{empty} of {len(mask)} sequences that are all padding", "Leave them out."
            expected = "a real token in every sequence"
            raise SkipError(f"`{name}` of the batch", expected=expected, got=got, fix=fix)


def _check_several(several: bool) -> None:
    if not several:
        expected = "two real tokens in a sequence, or more"
        fix = "One token is its own mean: μ = 0 with any λ."
        raise SkipError("`batch`", expected=expected, got="one at most", fix=fix)


def _certify_layer(skip: ObservedSkip, scale: Tensor, keep_spread: float) -> LayerCertificate:
    """Return the certificate of one sum λ·Y + B, in float64 and without sequences of one token."""
    mask, several = skip.mask, skip.mask.sum(-1) > 1
    y, b = (states.double().masked_fill(~mask[..., None], 0) for states in (skip.x, skip.branch))
    total = scale.to(y) * y + b
    size, whole = (torch.linalg.vector_norm(states, dim=(-2, -1)) for states in (b, total))
    proved: dict[str, float] = {}
    if skip.norm.kind != "unknown":
        before = skip_bound(y, torch.zeros_like(b), 1.0, mask, NORM_KINDS[skip.norm.kind])
        read = skip.norm.of(total)
        after = absolute_spread(read, mask)
        mean = (read * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None].clamp(min=1)
        largest = ((read - mean) * mask[..., None]).square().sum(-1).amax(1)
        shares = (largest / after.square())[several & (after > 0)]
        ratio = torch.where(before > 0, after / before, math.inf)  # ∞ if there is no spread to keep
        bound = (_bound(skip, scale, y, b) / before).nan_to_num(0.0)
        proved = {
            "absolute_spread_ratio": float(ratio[several].min()),
            "absolute_spread_ratio_bound": float(bound[several].min()),
            **({"largest_token_share": min(float(shares.max()), 1.0)} if len(shares) else {}),
            **_least_lambdas(skip, scale, y, b, keep_spread),
        }
    return LayerCertificate(
        site=skip.place.name,
        lambda_value=float(scale.flatten()[scale.abs().argmin()]),
        norm=skip.norm.kind,
        mixing_share=float((size / whole)[several].mean()),
        **proved,
    )


def _bound(skip: ObservedSkip, scale: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """Return the lower bound of μ at the current λ, for each sequence."""
    norm, kind = skip.norm, NORM_KINDS[skip.norm.kind]
    if kind == "none":  # with one λ per channel: μ(Y·diag(λ)) ≥ min|λ|·μ(Y)
        return skip_bound(y, b, float(scale.abs().min()), skip.mask)
    # λ∘y + b = c·y + (b + (λ − c)∘y) for any number c: take the best of four
    channels = scale.to(y).flatten()
    numbers = torch.stack([channels.mean(), channels.median(), channels.min(), channels.max()]).unique()
    bounds = [skip_bound(y, b + (channels - c) * y, c, skip.mask, kind, norm.eps) for c in numbers]
    return torch.stack(bounds).amax(0)


def _least_lambdas(
    skip: ObservedSkip, scale: Tensor, y: Tensor, b: Tensor, keep_spread: float
) -> dict[str, float]:
    """Return the proved least |λ| for the worst sequence, as fields of `LayerCertificate`.

    A field is missing if no single |λ| is proved.
    """
    mask, kind = skip.mask, NORM_KINDS[skip.norm.kind]
    common = bool((scale == scale.flatten()[0]).all())  # one λ for all channels
    least: dict[str, Tensor] = {}
    if common or kind == "none":  # after a norm, a channel with a large λ dominates all rows
        least["min_lambda_proved"] = min_lambda_for_spread(y, b, keep_spread, mask, kind, skip.norm.eps)
    if common and kind == "none":
        relative = min_lambda_for_spread(y, b, keep_spread, mask, relative=True)
        least["min_lambda_proved_relative"] = relative
    return {name: float(values[mask.sum(-1) > 1].max()) for name, values in least.items()}


def _notes(layers: Sequence[LayerCertificate], skips: Sequence[ObservedSkip]) -> list[str]:
    notes = []
    reasons = {skip.place.name: skip.norm.reason for skip in skips if skip.norm.kind == "unknown"}
    for reason, sites in grouped(reasons, lambda site: reasons[site]).items():
        more = f" and {len(sites) - 1} more" if sites[1:] else ""
        effect = f"nothing is promised at {sites[0]}{more}, and μ after the layer is not measured"
        notes.append(f"{effect}: {reason}")
    if single := [layer.site for layer in layers if (layer.largest_token_share or 0) > 0.5]:
        more = f" and {len(single) - 1} more" if single[1:] else ""
        notes.append(
            f"one token has more than half of μ² at {single[0]}{more}: μ says little about the others"
        )
    if any(layer.lambda_value == 0 for layer in layers):
        notes.append("λ = 0 somewhere: nothing is sure there, whatever the mixer does")
    if any(layer.min_lambda_proved is None and layer.norm != "unknown" for layer in layers):
        notes.append("λ differs by channel before a norm: a sound bound is known, but no single least |λ|")
    return notes
