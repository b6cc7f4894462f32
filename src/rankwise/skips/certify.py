"""`certify_skip`: what the λ of a model guarantee, measured and proved, side by side."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rankwise._internals.forward import Batch
from rankwise.errors import RankwiseError, SkipError
from rankwise.skips.certificate import LayerCertificate, SkipCertificate, StackCertificate
from rankwise.skips.certify_layer import layer_certificate
from rankwise.skips.norms import Norm, norms_behind, record_norms
from rankwise.skips.probe import check_traceable, find_skip_locations
from rankwise.skips.skip_sums import SkipSum, check_tokens, skip_sums
from rankwise.skips.skips import SkipSite, name_sites, skip_sites
from rankwise.skips.threshold import equal_at_start, kept_by, stacks_of, threshold
from rankwise.skips.value_weights import mixings
from rankwise.skips.verify import unhooked
from rankwise.theory.paper_bound import check_share as check_share


class NoResidualError(SkipError):
    """A model without a residual connection around a mixer, or with none that a λ could be put into."""


def certify_skip(
    model: nn.Module, batch: Batch, a: float = 0.5, target: float | None = None
) -> SkipCertificate:
    r"""Say what the skip connections of a model guarantee against collapse, and what a λ would have to be.

    For each residual mixer, with or without a λ-skip of its own (then λ = 1): μ before and after; the
    paper's condition (Eq. 7), its b, and the least |λ| of both; the sound bound and its least |λ|; and how
    much mixing the sum holds. For each stack: the least |λ|, one for all its layers, from which on it keeps
    a target on this batch, by bisection: of μ/‖Y‖, and of μ.

    Layer by layer, the sound scale is a guarantee for the states this batch gave that layer: with that |λ|
    or a larger one, μ after it is at least √a of μ before. A λ in one layer changes what the next one
    reads; and what stands between the mixers (feed-forward parts, gains of norms) is not part of it.

    Cost: about 25 forward passes, ‖M‖_F of each head in memory of T×T.

    Args:
        model: any module, as `add_lambda_skip` takes it.
        batch: what to run it on, as `audit` takes it; also tells where residuals are, if there are no skips.
        a: the part of μ² each layer is to keep.
        target: the part of μ/‖Y‖, or of μ, a stack is to keep; √a by default.

    Raises:
        SkipError: if a sequence is all padding or none has two tokens, a λ or a state is not finite, or the
            model has no residual mixer (`NoResidualError`).
        RankwiseError: if a is not in (0, 1).

    Examples:
        >>> import torch, rankwise.skips as surgery
        >>> torch.manual_seed(0) and None
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> certificate = surgery.certify_skip(layer, torch.randn(2, 5, 8))
        >>> [(one.site, one.norm, one.sound_bound <= one.kept) for one in certificate.layers]
        [('dropout1', 'LayerNorm', True)]
    """
    check_traceable(model)
    check_share(a)
    wanted = math.sqrt(a) if target is None else target
    if not 0 < wanted <= 1:
        raise RankwiseError(
            "`target`", expected="a number above 0, at most 1", got=repr(target), fix="√a is the default."
        )
    check_tokens(batch)
    sites = skip_sites(model) or _found(model, batch)
    scales = _scales(model, sites)
    with record_norms(model, sites) as norm_calls:
        seen = skip_sums(model, batch, sites, scales)
    if not any(bool((added.mask.sum(-1) > 1).any()) for added in seen):
        raise SkipError(
            "`batch`",
            expected="two real tokens in a sequence, or more",
            got="one at most",
            fix="One token is always its own mean: μ = 0 with any λ. Give longer sequences.",
        )
    _check_finite(seen)
    norms = norms_behind(seen, norm_calls)
    known = mixings(model, batch, sites, scales)
    calls = [sum(added.site is other.site for other in seen[:at]) for at, added in enumerate(seen)]
    certified = [
        layer_certificate(
            added, scales[added.site.name], norms[added.site.name], known.get((added.site.name, call)), a
        )
        for added, call in zip(seen, calls, strict=True)
    ]
    layers = [layer for layer, _ in certified]
    stacks = _stacks(model, batch, sites, seen, norms, layers, wanted)
    unlike = {layer.site: reason for layer, reason in certified}
    return SkipCertificate(
        a=a,
        target=wanted,
        sequences=max(added.residual.shape[0] for added in seen),
        layers=layers,
        stacks=stacks,
        notes=[*_notes(layers, stacks, norms, unlike), *_padding_notes(batch)],
    )


def _found(model: nn.Module, batch: Batch) -> list[SkipSite]:
    with unhooked(model):
        locations, missed = find_skip_locations(model, batch)
    if not locations:
        raise NoResidualError(
            f"model {type(model).__name__}",
            expected="residual connections around mixers",
            got=f"none in reach ({', '.join(missed[:3])})" if missed else "none",
            fix="A block must compute x + f(x), and the batch have sequences of two tokens or more.",
        )
    return name_sites(locations)


def _scales(model: nn.Module, sites: Sequence[SkipSite]) -> dict[str, Tensor]:
    scales = {}
    for site in sites:
        module = model.get_submodule(site.location.module)
        found = dict(module.named_parameters(recurse=False)).get(site.parameter)
        scale = torch.ones(1) if found is None else found.detach()
        if not bool(scale.isfinite().all()):
            raise SkipError(
                f"λ of {site.name!r}",
                expected="a finite number",
                got="NaN or infinity",
                fix="Set it, or fit it again with a lower learning rate.",
            )
        scales[site.name] = scale
    return scales


def _check_finite(seen: Sequence[SkipSum]) -> None:
    for added in seen:
        for what, value in (("the residual", added.residual), ("what the mixer gave", added.branch)):
            if not bool(value[added.mask].isfinite().all()):
                raise SkipError(
                    f"states at {added.site.name!r}",
                    expected="finite numbers",
                    got=f"NaN or infinity in {what}",
                    fix="Look for it in the weights or the batch; in float16, try bfloat16 or float32.",
                )


def _stacks(
    model: nn.Module,
    batch: Batch,
    sites: Sequence[SkipSite],
    seen: Sequence[SkipSum],
    norms: Mapping[str, Norm],
    layers: Sequence[LayerCertificate],
    target: float,
) -> list[StackCertificate]:
    kept, equal = kept_by(seen, norms), equal_at_start(seen)
    least = threshold(model, batch, sites, target, norms)
    found = []
    for stack, numbers in stacks_of(seen).items():
        inside, share, scale = [layers[at] for at in numbers], kept[stack].share, least[stack].share
        helps = share is not None and share < target and scale is not None and math.isfinite(scale)
        found.append(
            StackCertificate(
                stack=stack,
                layers=len(inside),
                kept=share,
                target=target,
                threshold=scale,
                recommended=scale if helps else None,
                kept_mu=kept[stack].mu,
                threshold_mu=least[stack].mu,
                left_out=int(equal[stack].sum()),
                paper_scale=_largest([layer.paper_scale for layer in inside]),
                paper_scale_with_floor=_largest([layer.paper_scale_with_floor for layer in inside]),
                sound_scale=_largest([layer.sound_scale for layer in inside]),
                sound_scale_any_mixing=_largest([layer.sound_scale_any_mixing for layer in inside]),
            )
        )
    return found


def _largest(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _notes(
    layers: Sequence[LayerCertificate],
    stacks: Sequence[StackCertificate],
    norms: Mapping[str, Norm],
    unlike: Mapping[str, str],
) -> list[str]:
    notes = [
        f"sequences of equal tokens at the start of {stack.stack or 'the model'}: {stack.left_out}; there is "
        "nothing to keep apart, and they are left out of what the stack keeps"
        for stack in stacks
        if stack.left_out
    ]
    reasons = {site: norm.reason for site, norm in norms.items() if norm.kind == "unknown"}
    notes += _grouped("nothing is promised, and μ after the layer is not measured", reasons)
    if any(layer.scale == 0 for layer in layers):
        notes.append("λ = 0 somewhere: nothing is sure there, whatever the mixer does")
    known = [layer for layer in layers if layer.norm != "unknown"]
    if any(layer.value_norm is None for layer in known):
        notes.append(
            "the λ for any mixing needs the weights of softmax attention, and nothing between its output "
            "projection and the sum: it is left out where the mixer is another, its weights were not found, "
            "or a gain, a norm or a second summand stands there"
        )
    if any(layer.sound_scale is None for layer in known):
        notes.append(
            "λ differs by channel before a norm: there is a sound bound for it, but no single least |λ|"
        )
    paper = {site: reason for site, reason in unlike.items() if reason and site not in reasons}
    return notes + _grouped("the paper's theorem says nothing", paper)


def _grouped(what: str, reasons: Mapping[str, str]) -> list[str]:
    """One note for each reason, with the first site it is given for."""
    sites: dict[str, list[str]] = {}
    for site, reason in reasons.items():
        sites.setdefault(reason, []).append(site)
    return [
        f"{what} at {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {reason}"
        for reason, names in sites.items()
    ]


def _padding_notes(batch: Batch) -> list[str]:
    """Of masks of torch's own layers, whose names and signs vary, nothing but that they are not read."""
    given = batch if isinstance(batch, Mapping) else {}
    return [
        f"`{name}` of the batch marks padding, and that was counted as tokens: give sequences of one length "
        "without padding"
        for name, value in given.items()
        if name.endswith("key_padding_mask") and isinstance(value, Tensor) and bool(value.any())
    ]
