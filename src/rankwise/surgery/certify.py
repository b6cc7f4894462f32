"""`certify_skip`: what the λ of a model guarantee, measured and proved, side by side."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.errors import RankwiseError
from rankwise.surgery.certificate import LayerCertificate, SkipCertificate, StackCertificate
from rankwise.surgery.errors import SkipError
from rankwise.surgery.examples import Example
from rankwise.surgery.probe import check_traceable, find_places
from rankwise.surgery.skips import SkipSite, name_sites, skip_sites
from rankwise.surgery.threshold import equal_at_start, kept_by, norm_of, normed, stacks_of, threshold
from rankwise.surgery.values import Mixing, mixings
from rankwise.surgery.verify import unhooked
from rankwise.surgery.watch import Added, check_tokens, watch_sums
from rankwise.theory import (
    norm_bound,
    norm_scale,
    paper_condition,
    paper_floor,
    paper_scale,
    paper_scale_with_floor,
    spread,
    sum_bound,
    sum_scale,
)


def certify_skip(
    model: nn.Module, batch: Example, a: float = 0.5, target: float | None = None
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
            model has no residual mixer.
        RankwiseError: if a is not in (0, 1).

    Examples:
        >>> import torch, rankwise.surgery as surgery
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
            "`target`", wanted="a number above 0, at most 1", got=repr(target), fix="√a is the default."
        )
    check_tokens(batch)
    sites = skip_sites(model) or _found(model, batch)
    scales = _scales(model, sites)
    seen = watch_sums(model, batch, sites, scales)
    if not any(bool((one.mask.sum(-1) > 1).any()) for one in seen):
        raise SkipError(
            "`batch`",
            wanted="two real tokens in a sequence, or more",
            got="one at most",
            fix="One token is always its own mean: μ = 0 with any λ. Give longer sequences.",
        )
    _check_finite(seen)
    known = mixings(model, batch, sites, scales)
    calls = [sum(one.site is other.site for other in seen[:at]) for at, one in enumerate(seen)]
    layers = [
        _layer(one, model, scales[one.site.name], known.get((one.site.name, call)), a)
        for one, call in zip(seen, calls, strict=True)
    ]
    stacks = _stacks(model, batch, sites, seen, layers, wanted)
    return SkipCertificate(
        a=a,
        target=wanted,
        sequences=max(one.residual.shape[0] for one in seen),
        layers=layers,
        stacks=stacks,
        notes=[*_notes(layers, stacks), *_padding_notes(batch)],
    )


def check_share(a: float) -> None:
    """Refuse a part of μ² that no layer can be asked to keep.

    Args:
        a: the part.

    Raises:
        RankwiseError: if it is not in (0, 1).
    """
    paper_scale(1.0, a)


def _found(model: nn.Module, batch: Example) -> list[SkipSite]:
    with unhooked(model):
        places, missed = find_places(model, batch)
    if not places:
        raise SkipError(
            f"model {type(model).__name__}",
            wanted="residual connections around mixers",
            got=f"none in reach ({', '.join(missed[:3])})" if missed else "none",
            fix="A block must compute x + f(x), and the batch have sequences of two tokens or more.",
        )
    return name_sites(places)


def _scales(model: nn.Module, sites: Sequence[SkipSite]) -> dict[str, Tensor]:
    scales = {}
    for site in sites:
        module = model.get_submodule(site.place.module)
        found = module._parameters.get(site.parameter)
        scale = torch.ones(1) if found is None else found.detach()
        if not bool(scale.isfinite().all()):
            raise SkipError(
                f"λ of {site.name!r}",
                wanted="a finite number",
                got="NaN or infinity",
                fix="Set it, or fit it again with a lower learning rate.",
            )
        scales[site.name] = scale
    return scales


def _check_finite(seen: Sequence[Added]) -> None:
    for one in seen:
        for what, value in (("the residual", one.residual), ("what the mixer gave", one.branch)):
            if not bool(value[one.mask].isfinite().all()):
                raise SkipError(
                    f"states at {one.site.name!r}",
                    wanted="finite numbers",
                    got=f"NaN or infinity in {what}",
                    fix="Look for it in the weights or the batch; in float16, try bfloat16 or float32.",
                )


def _layer(
    added: Added, model: nn.Module, scale: Tensor, mixing: Mixing | None, a: float
) -> LayerCertificate:
    norm, centre, eps = norm_of(model, added.site)
    mask = added.mask
    y, b = (x.double().masked_fill(~mask[..., None], 0) for x in (added.residual, added.branch))
    least = float(scale.abs().min())
    common = bool((scale == scale.flatten()[0]).all())
    several = mask.sum(-1) > 1
    after = scale.to(y) * y + b
    if norm == "none":
        before, ends = spread(y, mask), spread(after, mask)
        bound, needed = _sum_bound(y, b, scale, mask), sum_scale(y, b, a, mask)
        relative = _worst(sum_scale(y, b, a, mask, relative=True), several) if common else None
    else:
        before, ends = (spread(normed(x, centre, eps), mask) for x in (y, after))
        before = norm_bound(y, 0 * b, 1.0, mask, centre)  # μ of the directions, times √D
        bound, needed = _norm_bound(y, b, scale, mask, centre, eps), norm_scale(y, b, a, mask, centre, eps)
        relative = None
    sizes = [torch.linalg.vector_norm(x, dim=(-2, -1)) for x in (y, b, after)]
    collapses = [spread(x, mask) / size for x, size in ((y, sizes[0]), (after, sizes[2]))]
    paper = _paper(mixing, y, mask, before[several], least if common else None, a)
    any_mixing = _any_mixing(mixing, y, mask, several, a, (norm, centre, eps))
    proved = common or norm == "none"  # behind a norm a channel with a large λ turns all rows towards it
    kept = torch.where(before > 0, ends / before, math.inf)  # where there is nothing to keep
    return LayerCertificate(
        site=added.site.name,
        scale=float(scale.flatten()[scale.abs().argmin()]),
        norm=norm,
        collapse_in=float(before[several].mean()),
        collapse_out=float(ends[several].mean()),
        kept=float(kept[several].min()),
        relative_in=float(collapses[0][several].mean()),
        relative_out=float(collapses[1][several].mean()),
        price=float((sizes[1] / sizes[2])[several].mean()),
        gain=float((sizes[1] / sizes[0])[several].max()),
        mixing_norm=None if mixing is None else mixing.norm,
        mixing_norm_worst=None if mixing is None else mixing.worst,
        value_norm=None if mixing is None else mixing.value_norm,
        **paper,
        sound_bound=float((bound / before).nan_to_num(0.0)[several].min()),
        sound_scale=_worst(needed, several) if proved else None,
        sound_scale_relative=relative,
        sound_scale_any_mixing=any_mixing if proved else None,
    )


def _sum_bound(y: Tensor, b: Tensor, scale: Tensor, mask: Tensor) -> Tensor:
    """With one λ for each channel: μ(Y·diag(λ)) ≥ min|λ|·μ(Y)."""
    return sum_bound(y, b, float(scale.abs().min()), mask)


def _norm_bound(y: Tensor, b: Tensor, scale: Tensor, mask: Tensor, centre: bool, eps: float) -> Tensor:
    """With one λ for each channel: λ∘y + b = c·y + (b + (λ − c)∘y) for any number c; the best of some c."""
    values = scale.to(y).flatten()
    tried = torch.stack([values.mean(), values.median(), values.min(), values.max()]).unique()
    bounds = [norm_bound(y, b + (values - c) * y, c, mask, centre, eps) for c in tried]
    return torch.stack(bounds).amax(0)


def _any_mixing(
    mixing: Mixing | None,
    y: Tensor,
    mask: Tensor,
    several: Tensor,
    a: float,
    norm: tuple[str, bool, float],
) -> float | None:
    if mixing is None or mixing.reach is None or mixing.reach.shape != y.shape[:1]:
        return None
    reach = mixing.reach.to(y.device)
    kind, centre, eps = norm
    if kind == "none":
        farthest = reach * mask.sum(-1).sqrt()
        return _worst(math.sqrt(a) + farthest / spread(y, mask), several)
    any_way = torch.zeros_like(y)  # rows of that length, without a mean that centring would take off
    any_way[..., 0], any_way[..., 1] = reach[:, None] / math.sqrt(2), -reach[:, None] / math.sqrt(2)
    return _worst(norm_scale(y, any_way, a, mask, centre, eps), several)


def _paper(
    mixing: Mixing | None, y: Tensor, mask: Tensor, collapse: Tensor, scale: float | None, a: float
) -> dict[str, Any]:
    names = ("paper_holds", "paper_scale", "paper_scale_worst", "paper_floor", "paper_scale_with_floor")
    if mixing is None or mixing.value_norm is None:
        return dict.fromkeys(names)
    strength = mixing.norm * mixing.value_norm
    tokens, width = int(mask.sum(-1).max()), y.shape[-1]
    worst = None if mixing.worst is None else paper_scale(mixing.worst * mixing.value_norm, a)
    found = (
        None if scale is None else paper_condition(scale, strength, a) > 0,
        paper_scale(strength, a),
        worst,
        None if scale is None else paper_floor(scale, strength, a, tokens, width),
        paper_scale_with_floor(strength, a, tokens, width, float(collapse.min())),
    )
    return dict(zip(names, found, strict=True))


def _stacks(
    model: nn.Module,
    batch: Example,
    sites: Sequence[SkipSite],
    seen: Sequence[Added],
    layers: Sequence[LayerCertificate],
    target: float,
) -> list[StackCertificate]:
    kept, equal = kept_by(model, seen), equal_at_start(seen)
    least = threshold(model, batch, sites, target)
    found = []
    for stack, places in stacks_of(seen).items():
        inside = [layers[at] for at in places]
        found.append(
            StackCertificate(
                stack=stack,
                layers=len(inside),
                kept=kept[stack].share,
                target=target,
                threshold=least[stack].share,
                kept_mu=kept[stack].mu,
                threshold_mu=least[stack].mu,
                left_out=int(equal[stack].sum()),
                paper_scale=_largest([one.paper_scale for one in inside]),
                paper_scale_with_floor=_largest([one.paper_scale_with_floor for one in inside]),
                sound_scale=_largest([one.sound_scale for one in inside]),
            )
        )
    return found


def _largest(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _worst(values: Tensor, several: Tensor) -> float:
    return float(values[several].max())


def _notes(layers: Sequence[LayerCertificate], stacks: Sequence[StackCertificate]) -> list[str]:
    notes = [
        f"sequences of equal tokens at the start of {stack.stack or 'the model'}: {stack.left_out}; there is "
        "nothing to keep apart, and they are left out of what the stack keeps"
        for stack in stacks
        if stack.left_out
    ]
    if any(layer.scale == 0 for layer in layers):
        notes.append("λ = 0 somewhere: nothing is sure there, whatever the mixer does")
    if any(layer.paper_scale is None for layer in layers):
        notes.append(
            "the paper's condition and the λ for any mixing need the weights of softmax attention, and "
            "nothing between its output projection and the sum: they are left out where the mixer is "
            "another, its weights were not found, or a gain, a norm or a second summand stands there"
        )
    if any(layer.sound_scale is None for layer in layers):
        notes.append(
            "λ differs by channel before a norm: there is a sound bound for it, but no single least |λ|"
        )
    return notes


def _padding_notes(batch: Example) -> list[str]:
    """Of masks of torch's own layers, whose names and signs vary, nothing but that they are not read."""
    given = batch if isinstance(batch, Mapping) else {}
    return [
        f"`{name}` of the batch marks padding, and that was counted as tokens: give sequences of one length "
        "without padding"
        for name, value in given.items()
        if name.endswith("key_padding_mask") and isinstance(value, Tensor) and bool(value.any())
    ]
