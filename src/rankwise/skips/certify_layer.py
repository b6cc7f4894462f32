"""One λ-skip on a batch: what it keeps, and what each bound asks for."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rankwise.measures import token_spread
from rankwise.skips.certificate import LayerCertificate
from rankwise.skips.norms import Norm
from rankwise.skips.skip_sums import SkipSum
from rankwise.skips.value_weights import Mixing
from rankwise.theory import min_lambda, min_lambda_paper, mixing_strength, skip_bound
from rankwise.theory.skip_bounds import Norm as NormKind

spread = partial(token_spread, normalized=False)
SPHERE = 0.01
"""States whose rows are √D long up to 1 % count as on the sphere; the strength takes in the rest."""
ROUNDING = 1e-5
"""By which ‖B‖ may pass S·C_M·‖Y‖: all three are sums of float32 numbers."""


@dataclass(frozen=True)
class _Sum:
    """λ·Y + B in float64, rows of padding 0."""

    y: Tensor
    b: Tensor
    after: Tensor
    scale: Tensor
    mask: Tensor
    several: Tensor
    """Sequences of two tokens or more: of others nothing is said."""
    norm: Norm

    @property
    def kind(self) -> NormKind:
        """The norm, by the name that theory uses."""
        kinds: dict[str, NormKind] = {"LayerNorm": "layer", "RMSNorm": "rms"}
        return kinds.get(self.norm.kind, "none")

    @property
    def common(self) -> bool:
        """Whether λ is one number."""
        return bool((self.scale == self.scale.flatten()[0]).all())

    def least(self, values: Tensor) -> float:
        return float(values[self.several].min())

    def largest(self, values: Tensor) -> float:
        return float(values[self.several].max())

    def mean(self, values: Tensor) -> float:
        return float(values[self.several].mean())


def layer_certificate(
    added: SkipSum, scale: Tensor, norm: Norm, mixing: Mixing | None, a: float
) -> tuple[LayerCertificate, str]:
    """The certificate of one λ-skip, and why the paper's theorem says nothing of it; empty if it does.

    Args:
        added: what it adds.
        scale: λ.
        norm: what makes the next state of the sum.
        mixing: what is known of the mixer.
        a: the part of μ² to keep.
    """
    mask = added.mask
    y, b = (x.double().masked_fill(~mask[..., None], 0) for x in (added.residual, added.branch))
    sum_ = _Sum(y, b, scale.to(y) * y + b, scale, mask, mask.sum(-1) > 1, norm)
    before, ends = _collapses(sum_)
    kept = torch.where(before > 0, ends / before, math.inf)  # where there is nothing to keep
    sizes = [torch.linalg.vector_norm(x, dim=(-2, -1)) for x in (y, b, sum_.after)]
    known = norm.kind != "unknown"
    unlike = _unlike(sum_, mixing)
    found = LayerCertificate(
        site=added.site.name,
        scale=float(scale.flatten()[scale.abs().argmin()]),
        norm=norm.kind,
        norm_gain=_norm_gain(norm),
        collapse_in=sum_.mean(before),
        collapse_out=sum_.mean(ends) if known else None,
        kept=sum_.least(kept) if known else None,
        relative_in=sum_.mean(spread(y, mask) / sizes[0]),
        relative_out=sum_.mean(spread(sum_.after, mask) / sizes[2]),
        price=sum_.mean(sizes[1] / sizes[2]),
        gain=_gain(sum_),
        mixing_norm=None if mixing is None else mixing.norm,
        mixing_norm_worst=None if mixing is None else mixing.worst,
        value_norm=None if mixing is None else mixing.value_norm,
        **(_no_paper() if unlike or mixing is None else _paper(sum_, mixing, before, a)),
        **(_sound(sum_, before, mixing, a) if known else _nothing_sound()),
    )
    return found, unlike


def _collapses(sum_: _Sum) -> tuple[Tensor, Tensor]:
    """μ of what is read and of what comes of it, by sequence; before a norm, that of directions times √D."""
    ends = spread(sum_.norm.of(sum_.after), sum_.mask)
    return skip_bound(sum_.y, torch.zeros_like(sum_.b), 1.0, sum_.mask, sum_.kind), ends


def _norm_gain(norm: Norm) -> float | None:
    if norm.kind == "none":
        return 1.0
    return None if norm.gain is None else float(norm.gain.abs().min())


def _nothing_sound() -> dict[str, Any]:
    return dict.fromkeys(("sound_bound", "sound_scale", "sound_scale_relative", "sound_scale_any_mixing"))


def _sound(sum_: _Sum, before: Tensor, mixing: Mixing | None, a: float) -> dict[str, Any]:
    y, b, mask, norm = sum_.y, sum_.b, sum_.mask, sum_.norm
    if norm.known:
        bound = _norm_bound(sum_)
        relative = None
    else:  # with one λ for each channel: μ(Y·diag(λ)) ≥ min|λ|·μ(Y)
        bound = skip_bound(y, b, float(sum_.scale.abs().min()), mask)
        relative = sum_.largest(min_lambda(y, b, a, mask, relative=True)) if sum_.common else None
    needed = min_lambda(y, b, a, mask, sum_.kind, norm.eps)
    proved = sum_.common or not norm.known  # after a norm a channel with a large λ turns all rows towards it
    return {
        "sound_bound": sum_.least((bound / before).nan_to_num(0.0)),
        "sound_scale": sum_.largest(needed) if proved else None,
        "sound_scale_relative": relative,
        "sound_scale_any_mixing": _any_mixing(sum_, mixing, a) if proved else None,
    }


def _norm_bound(sum_: _Sum) -> Tensor:
    """With one λ for each channel: λ∘y + b = c·y + (b + (λ − c)∘y) for any number c; the best of some c."""
    values = sum_.scale.to(sum_.y).flatten()
    tried = torch.stack([values.mean(), values.median(), values.min(), values.max()]).unique()
    bounds = [
        skip_bound(sum_.y, sum_.b + (values - c) * sum_.y, c, sum_.mask, sum_.kind, sum_.norm.eps)
        for c in tried
    ]
    return torch.stack(bounds).amax(0)


def _any_mixing(sum_: _Sum, mixing: Mixing | None, a: float) -> float | None:
    if mixing is None or mixing.reach is None or mixing.reach.shape != sum_.y.shape[:1]:
        return None
    reach = mixing.reach.to(sum_.y.device)
    if not sum_.norm.known:
        farthest = reach * sum_.mask.sum(-1).sqrt()
        return sum_.largest(math.sqrt(a) + farthest / spread(sum_.y, sum_.mask))
    way = sum_.y.new_zeros(sum_.y.shape[-1])
    way[:2] = way.new_tensor([1, -1])[: len(way)]  # without a mean that centring would take off
    any_way = (reach[:, None, None] * way / way.norm()).expand_as(sum_.y)
    return sum_.largest(min_lambda(sum_.y, any_way, a, sum_.mask, sum_.kind, sum_.norm.eps))


def _unlike(sum_: _Sum, mixing: Mixing | None) -> str:
    """Why the paper's theorem says nothing here; empty if it does."""
    norm = sum_.norm
    if not norm.known:
        return norm.reason or "no norm reads the sum: the theorem is about blocks that end in one"
    if mixing is None:
        return "the mixer was not captured, or shares its branch with others"
    if mixing.unlike:
        return mixing.unlike
    assert mixing.value_norm is not None  # it is known where nothing is unlike the paper
    if any(bool(((_lengths(rows)[sum_.mask] - 1).abs() > SPHERE).any()) for rows in (sum_.y, _rows(sum_))):
        return "the states it reads do not lie on the sphere of the norm"
    if _gain(sum_) > (1 + ROUNDING) * mixing.norm * mixing.value_norm:
        return "the mixer gives more than its matrix and weights can"
    return ""


def _gain(sum_: _Sum) -> float:
    """The largest ‖B‖_F/‖Y‖_F of a sequence."""
    branch, state = (torch.linalg.vector_norm(x, dim=(-2, -1)) for x in (sum_.b, sum_.y))
    return sum_.largest(branch / state)


def _rows(sum_: _Sum) -> Tensor:
    """The rows of Y as the norm takes them."""
    return sum_.y - sum_.y.mean(-1, keepdim=True) if sum_.norm.centre else sum_.y


def _lengths(rows: Tensor) -> Tensor:
    """In units of √D."""
    return rows.square().mean(-1).sqrt()


def _no_paper() -> dict[str, None]:
    names = ("paper_holds", "paper_guaranteed", "paper_scale", "paper_scale_worst")
    return dict.fromkeys((*names, "paper_floor", "paper_scale_with_floor"))


def _paper(sum_: _Sum, mixing: Mixing, before: Tensor, a: float) -> dict[str, Any]:
    """The numbers of Theorem 4.1, with the strength for which docs/proofs/skip-bound.md proves it."""
    size = sum_.largest((_lengths(sum_.y).square().sum(-1) / sum_.mask.sum(-1).clamp(min=1)).sqrt())
    shortest = float(_lengths(_rows(sum_))[sum_.mask].min())
    tokens, width, collapse = int(sum_.mask.sum(-1).max()), sum_.y.shape[-1], sum_.least(before)

    def strength(mixing_norm: float) -> float:
        product = max(mixing_norm * (mixing.value_norm or 0.0), _gain(sum_))  # of equal ones, the unrounded
        return mixing_strength(product, sum_.norm.eps, size, shortest)

    measured = strength(mixing.norm)
    scale = float(sum_.scale.flatten()[0]) if sum_.common else None
    condition = None if scale is None else scale**2 - a * (measured + abs(scale)) ** 2  # Eq. 7: above 0
    floor = None
    if scale is not None and condition is not None:
        floor = 2 * abs(scale) * tokens * width * measured / condition if condition > 0 else math.inf
    worst = None if mixing.worst is None else strength(mixing.worst)
    return {
        "paper_holds": None if condition is None else condition > 0,
        "paper_guaranteed": None if floor is None else collapse**2 >= floor,
        "paper_scale": min_lambda_paper(measured, a, tokens, width, math.inf),
        "paper_scale_worst": None if worst is None else min_lambda_paper(worst, a, tokens, width, math.inf),
        "paper_floor": floor,
        "paper_scale_with_floor": min_lambda_paper(measured, a, tokens, width, collapse),
    }
