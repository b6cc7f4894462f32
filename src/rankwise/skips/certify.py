"""Certify λ-skips: the bound proved for a batch, and the spread that was measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from rankwise._internals.forward import Batch
from rankwise.errors import SkipError
from rankwise.measures import token_spread
from rankwise.skips.add import check_traceable
from rankwise.skips.certificate import LayerCertificate, SkipCertificate, StackCertificate
from rankwise.skips.observe import Norm, ObservedSkip, check_tokens, lambdas_of, observe, sites_in
from rankwise.skips.value_weights import Mixing, mixings
from rankwise.theory import min_lambda, min_lambda_paper, mixing_strength, skip_bound
from rankwise.theory.paper_bound import check_share
from rankwise.theory.skip_bounds import Norm as NormKind
from rankwise.tracing.block_finder import stack_of

spread = partial(token_spread, normalized=False)
SPHERE = 0.01
"""States whose rows have length √D up to 1 % count as on the sphere; the strength covers the rest."""
ROUNDING = 1e-5
"""Relative error up to which ‖B‖ may exceed S·C_M·‖Y‖: all three are sums of float32 numbers."""


def certify_skip(model: nn.Module, batch: Batch, a: float = 0.5) -> SkipCertificate:
    r"""Certify each skip connection: the spread that it keeps on this batch, and the least |λ| proved for it.

    A model without λ-skips is certified at λ = 1. μ(Y) = ‖Y − 1ȳᵀ‖_F. Per layer: μ before and after; the
    proved lower bound of their ratio and the least |λ| for it (`rankwise.theory.skip_bound`, `min_lambda`);
    the least |λ| of the paper's theorem; and the share of f(x) in the sum.

    The bound holds for the states of this batch at one layer. A λ changes what later layers read, and
    feed-forward parts and gains of norms between mixers are not part of it. A certificate recommends no λ:
    `rankwise.skips.choose_lambda` does, by trial.

    Cost: two forward passes and ‖M‖_F of each head, in the memory of a T×T matrix.
    Source: own bounds, docs/proofs/skip-bound.md; "Lambda-Skip Connections: the architectural component that
    prevents Rank Collapse", Theorem 4.1.

    Args:
        model: any module that `add_lambda_skip` accepts, or a ToST model with λ of its own.
        batch: inputs, as in `audit`.
        a: fraction of μ² that each layer should keep, in (0, 1).

    Returns:
        The certificate; without residual connections around mixers it has no layers, and a note.

    Raises:
        SkipError: if a sequence is all padding, no sequence has two tokens, or λ or a state is not finite.
        InputError: if a is not in (0, 1).

    Examples:
        >>> import torch, rankwise as rw
        >>> torch.manual_seed(0) and None
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> certificate = rw.certify_skip(layer, torch.randn(2, 5, 8))
        >>> [(one.site, one.norm, one.kept_lower_bound <= one.kept) for one in certificate.layers]
        [('dropout1', 'LayerNorm', True)]
    """
    check_traceable(model)
    check_share(a)
    check_tokens(batch)
    sites, missed = sites_in(model, batch)
    lambdas = lambdas_of(model, sites)
    for name, value in lambdas.items():
        if not bool(value.isfinite().all()):
            raise SkipError(
                f"λ of {name!r}",
                expected="a finite number",
                got="NaN or infinity",
                fix="Set it, or fit it again with a lower learning rate.",
            )
    if not sites:
        reason = f"none within reach of a module ({', '.join(missed[:3])})" if missed else "none"
        note = f"residual connections around mixers: {reason}; a block must compute x + f(x)"
        return SkipCertificate(a=a, sequences=0, layers=[], stacks=[], notes=[note])
    seen = observe(model, batch, sites, lambdas)
    if not any(bool((added.mask.sum(-1) > 1).any()) for added in seen):
        raise SkipError(
            "`batch`",
            expected="two real tokens in a sequence, or more",
            got="one at most",
            fix="One token is always its own mean: μ = 0 with any λ. Give longer sequences.",
        )
    _check_finite(seen)
    known = mixings(model, batch, sites, lambdas)
    calls = [sum(added.site is other.site for other in seen[:at]) for at, added in enumerate(seen)]
    certified = [
        _layer(added, lambdas[added.site.name], known.get((added.site.name, call)), a)
        for added, call in zip(seen, calls, strict=True)
    ]
    layers = [layer for layer, _ in certified]
    stacks = _stacks(seen, layers)
    return SkipCertificate(
        a=a,
        sequences=max(added.x.shape[0] for added in seen),
        layers=layers,
        stacks=stacks,
        notes=[
            *_notes(layers, stacks, seen, {layer.site: reason for layer, reason in certified}),
            *_padding_notes(batch),
        ],
    )


def _check_finite(seen: Sequence[ObservedSkip]) -> None:
    for added in seen:
        for what, value in (("the residual", added.x), ("the output of the mixer", added.branch)):
            if not bool(value[added.mask].isfinite().all()):
                raise SkipError(
                    f"states at {added.site.name!r}",
                    expected="finite numbers",
                    got=f"NaN or infinity in {what}",
                    fix="Look for it in the weights or the batch; in float16, try bfloat16 or float32.",
                )


# --- layers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sum:
    """λ·Y + B in float64 with 0 for rows of padding."""

    y: Tensor
    b: Tensor
    after: Tensor
    scale: Tensor
    mask: Tensor
    several: Tensor
    """True for sequences of two tokens or more; nothing is stated about others."""
    norm: Norm

    @property
    def kind(self) -> NormKind:
        """Name of the norm in `rankwise.theory`."""
        kinds: dict[str, NormKind] = {"LayerNorm": "layer", "RMSNorm": "rms"}
        return kinds.get(self.norm.kind, "none")

    @property
    def common(self) -> bool:
        """True if λ is one number."""
        return bool((self.scale == self.scale.flatten()[0]).all())

    @property
    def gain(self) -> float:
        """The largest ‖B‖_F/‖Y‖_F of a sequence."""
        branch, state = (torch.linalg.vector_norm(x, dim=(-2, -1)) for x in (self.b, self.y))
        return self.largest(branch / state)

    def least(self, values: Tensor) -> float:
        return float(values[self.several].min())

    def largest(self, values: Tensor) -> float:
        return float(values[self.several].max())

    def mean(self, values: Tensor) -> float:
        return float(values[self.several].mean())


def _layer(
    added: ObservedSkip, scale: Tensor, mixing: Mixing | None, a: float
) -> tuple[LayerCertificate, str]:
    """Return the certificate of one sum, and why the paper's theorem does not apply; empty if it does."""
    mask, norm = added.mask, added.norm
    y, b = (x.double().masked_fill(~mask[..., None], 0) for x in (added.x, added.branch))
    sum_ = _Sum(y, b, scale.to(y) * y + b, scale, mask, mask.sum(-1) > 1, norm)
    ends = spread(norm.of(sum_.after), mask)
    before = skip_bound(y, torch.zeros_like(b), 1.0, mask, sum_.kind)
    kept = torch.where(before > 0, ends / before, math.inf)  # nothing to keep
    sizes = [torch.linalg.vector_norm(x, dim=(-2, -1)) for x in (y, b, sum_.after)]
    known = norm.kind != "unknown"
    unlike = _unlike(sum_, mixing)
    gain = 1.0 if norm.kind == "none" else None if norm.gain is None else float(norm.gain.abs().min())
    found = LayerCertificate(
        site=added.site.name,
        lambda_value=float(scale.flatten()[scale.abs().argmin()]),
        norm=norm.kind,
        norm_gain=gain,
        spread_in=sum_.mean(before),
        spread_out=sum_.mean(ends) if known else None,
        kept=sum_.least(kept) if known else None,
        relative_spread_in=sum_.mean(spread(y, mask) / sizes[0]),
        relative_spread_out=sum_.mean(spread(sum_.after, mask) / sizes[2]),
        mixing_share=sum_.mean(sizes[1] / sizes[2]),
        mixing_norm=None if mixing is None else mixing.norm,
        value_norm=None if mixing is None else mixing.value_norm,
        **(_paper(sum_, mixing, before, a) if mixing and not unlike else {"min_lambda_paper": None}),
        **(_proved(sum_, before, mixing, a) if known else dict.fromkeys(PROVED)),
    )
    return found, unlike


PROVED = (
    "kept_lower_bound",
    "min_lambda_proved",
    "min_lambda_proved_relative",
    "min_lambda_any_mixing",
)


def _proved(sum_: _Sum, before: Tensor, mixing: Mixing | None, a: float) -> dict[str, Any]:
    """Return the bound of `rankwise.theory.skip_bound` at λ, and the least |λ| for it."""
    y, b, mask, norm = sum_.y, sum_.b, sum_.mask, sum_.norm
    relative = None
    if norm.known:  # λ∘y + b = c·y + (b + (λ − c)∘y) for any number c: the best of four
        values = sum_.scale.to(y).flatten()
        tried = torch.stack([values.mean(), values.median(), values.min(), values.max()]).unique()
        bounds = [skip_bound(y, b + (values - c) * y, c, mask, sum_.kind, norm.eps) for c in tried]
        bound = torch.stack(bounds).amax(0)
    else:  # with one λ per channel: μ(Y·diag(λ)) ≥ min|λ|·μ(Y)
        bound = skip_bound(y, b, float(sum_.scale.abs().min()), mask)
        relative = sum_.largest(min_lambda(y, b, a, mask, relative=True)) if sum_.common else None
    needed = min_lambda(y, b, a, mask, sum_.kind, norm.eps)
    exists = sum_.common or not norm.known  # behind a norm a channel with a large λ turns all rows towards it
    numbers = (
        sum_.least((bound / before).nan_to_num(0.0)),
        sum_.largest(needed) if exists else None,
        relative,
        _any_mixing(sum_, mixing, a) if exists else None,
    )
    return dict(zip(PROVED, numbers, strict=True))


def _any_mixing(sum_: _Sum, mixing: Mixing | None, a: float) -> float | None:
    """Return the least |λ| for any attention weights, from the largest row that attention can write."""
    if mixing is None or mixing.max_row_norm is None or mixing.max_row_norm.shape != sum_.y.shape[:1]:
        return None
    longest = mixing.max_row_norm.to(sum_.y.device)
    if not sum_.norm.known:
        farthest = longest * sum_.mask.sum(-1).sqrt()
        return sum_.largest(math.sqrt(a) + farthest / spread(sum_.y, sum_.mask))
    way = sum_.y.new_zeros(sum_.y.shape[-1])
    way[:2] = way.new_tensor([1, -1])[: len(way)]  # mean 0, which centering does not change
    any_way = (longest[:, None, None] * way / way.norm()).expand_as(sum_.y)
    return sum_.largest(min_lambda(sum_.y, any_way, a, sum_.mask, sum_.kind, sum_.norm.eps))


def _unlike(sum_: _Sum, mixing: Mixing | None) -> str:
    """Return why the paper's theorem does not apply; empty if it does."""
    norm = sum_.norm
    if not norm.known:
        return norm.reason or "no norm reads the sum: the theorem is about blocks that end in one"
    if mixing is None:
        return "the mixer was not captured, or shares its branch with others"
    if mixing.unlike:
        return mixing.unlike
    assert mixing.value_norm is not None  # known if the mixer is like the paper's
    if any(bool(((_lengths(rows)[sum_.mask] - 1).abs() > SPHERE).any()) for rows in (sum_.y, _rows(sum_))):
        return "the states it reads do not lie on the sphere of the norm"
    if sum_.gain > (1 + ROUNDING) * mixing.norm * mixing.value_norm:
        return "the mixer gives more than its matrix and weights can"
    return ""


def _rows(sum_: _Sum) -> Tensor:
    """Return the rows of Y, centered if the norm centers them."""
    return sum_.y - sum_.y.mean(-1, keepdim=True) if sum_.norm.centre else sum_.y


def _lengths(rows: Tensor) -> Tensor:
    """Return the lengths of rows in units of √D."""
    return rows.square().mean(-1).sqrt()


def _paper(sum_: _Sum, mixing: Mixing, before: Tensor, a: float) -> dict[str, Any]:
    """Return the least |λ| of Theorem 4.1, with the strength of docs/proofs/skip-bound.md."""
    size = sum_.largest((_lengths(sum_.y).square().sum(-1) / sum_.mask.sum(-1).clamp(min=1)).sqrt())
    shortest = float(_lengths(_rows(sum_))[sum_.mask].min())
    product = max(mixing.norm * (mixing.value_norm or 0.0), sum_.gain)  # of equal numbers the unrounded one
    strength = mixing_strength(product, sum_.norm.eps, size, shortest)
    tokens, width = int(sum_.mask.sum(-1).max()), sum_.y.shape[-1]
    least = min_lambda_paper(strength, a, tokens, width, sum_.least(before))
    now = abs(float(sum_.scale.flatten()[0]))
    held = (now >= least and now > 0) if sum_.common else None
    return {"min_lambda_paper": least, "paper_guaranteed": held}


# --- stacks and notes ------------------------------------------------------------------------------------


def stacks_of(seen: Sequence[ObservedSkip]) -> dict[str, list[int]]:
    """Return the indices of the sums of each stack of blocks, by name of the stack."""
    found: dict[str, list[int]] = {}
    for at, added in enumerate(seen):
        parts = added.site.name.split(".")
        numbers = [at for at, part in enumerate(parts) if part.isdigit()]
        stack = stack_of(".".join(parts[: numbers[-1] + 1])) if numbers else added.site.name
        found.setdefault(stack, []).append(at)
    return found


def equal_at_start(first: ObservedSkip) -> Bool[Tensor, " B"]:
    """Return True for sequences of several tokens that are equal up to rounding where a stack starts."""
    rounding = torch.finfo(first.x.dtype).eps
    return (first.mask.sum(-1) > 1) & (_share(first.x, first.mask) <= rounding)


def _stacks(seen: Sequence[ObservedSkip], layers: Sequence[LayerCertificate]) -> list[StackCertificate]:
    found = []
    for stack, numbers in stacks_of(seen).items():
        inside, first, last = [layers[at] for at in numbers], seen[numbers[0]], seen[numbers[-1]]
        equal = equal_at_start(first)
        apart = (first.mask.sum(-1) > 1) & ~equal
        shares = _share(last.total, last.mask) / _share(first.x, first.mask)
        ends = spread(last.norm.of(last.total.double()), last.mask).nan_to_num(0.0)
        mus, some = ends / spread(first.x, first.mask), bool(apart.any())
        found.append(
            StackCertificate(
                stack=stack,
                layers=len(inside),
                kept=float(shares[apart].mean()) if some else None,
                kept_mu=float(mus[apart].mean()) if some and last.norm.kind != "unknown" else None,
                left_out=int(equal.sum()),
                min_lambda_proved=_largest([layer.min_lambda_proved for layer in inside]),
                min_lambda_any_mixing=_largest([layer.min_lambda_any_mixing for layer in inside]),
                min_lambda_paper=_largest([layer.min_lambda_paper for layer in inside]),
            )
        )
    return found


def _share(rows: Tensor, mask: Tensor) -> Tensor:
    size = torch.linalg.vector_norm(rows.double().masked_fill(~mask[..., None], 0), dim=(-2, -1))
    return (spread(rows, mask) / size).nan_to_num(0.0)


def _largest(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _notes(
    layers: Sequence[LayerCertificate],
    stacks: Sequence[StackCertificate],
    seen: Sequence[ObservedSkip],
    unlike: Mapping[str, str],
) -> list[str]:
    notes = [
        f"sequences of equal tokens at the start of {stack.stack or 'the model'}: {stack.left_out}; there is "
        "nothing to keep, and they are left out of the shares of the stack"
        for stack in stacks
        if stack.left_out
    ]
    reasons = {added.site.name: added.norm.reason for added in seen if added.norm.kind == "unknown"}
    notes += _grouped("nothing is promised, and μ after the layer is not measured", reasons)
    if any(layer.lambda_value == 0 for layer in layers):
        notes.append("λ = 0 somewhere: nothing is sure there, whatever the mixer does")
    known = [layer for layer in layers if layer.norm != "unknown"]
    if any(layer.value_norm is None for layer in known):
        notes.append(
            "the λ for any mixing needs the weights of softmax attention, and nothing between its output "
            "projection and the sum: it is left out where the mixer is another, its weights were not found, "
            "or a gain, a norm or a second summand is between"
        )
    if any(layer.min_lambda_proved is None for layer in known):
        notes.append(
            "λ differs by channel before a norm: there is a sound bound for it, but no single least |λ|"
        )
    paper = {site: reason for site, reason in unlike.items() if reason and site not in reasons}
    return notes + _grouped("the paper's theorem says nothing", paper)


def _grouped(what: str, reasons: Mapping[str, str]) -> list[str]:
    """Return one note per reason, with the first site that has it."""
    sites: dict[str, list[str]] = {}
    for site, reason in reasons.items():
        sites.setdefault(reason, []).append(site)
    return [
        f"{what} at {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {reason}"
        for reason, names in sites.items()
    ]


def _padding_notes(batch: Batch) -> list[str]:
    """Return a note for each padding mask of torch's own layers: names and signs vary, so it is not read."""
    given = batch if isinstance(batch, Mapping) else {}
    return [
        f"`{name}` of the batch marks padding, and that was counted as tokens: give sequences of one length "
        "without padding"
        for name, value in given.items()
        if name.endswith("key_padding_mask") and isinstance(value, Tensor) and bool(value.any())
    ]
