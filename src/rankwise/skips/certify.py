"""Certify λ-skips: measure the absolute token spread μ on a batch, and prove bounds by `rankwise.theory`.

In this file Y are the states x of a sequence, and B is the branch f(Y).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.forward import Batch, check_batch, tensors_of
from rankwise._internals.linalg import as_float64, float64_device
from rankwise._internals.records import grouped
from rankwise.errors import CaptureError, SkipError
from rankwise.measures import absolute_spread, spread
from rankwise.skips.add import check_finite, check_traceable, check_values
from rankwise.skips.certificate import LayerCertificate, SkipCertificate, StackCertificate
from rankwise.skips.locate import SkipSite
from rankwise.skips.observe import ObservedSkip, as_batch, lambdas_of, observe, sites_in
from rankwise.theory import min_lambda, min_lambda_paper, mixing_strength, skip_bound
from rankwise.theory.paper_bound import check_share
from rankwise.theory.skip_bounds import Norm as NormKind
from rankwise.tracing import CapturedMixer, RecordedCall, capture, record_calls
from rankwise.tracing.module_calls import holds
from rankwise.tracing.projections import Projection, each_once, find_projection

SPHERE = 0.01
"""Largest relative deviation of a state's norm from √D for which the paper's theorem is still applied."""
NORM_KINDS: dict[str, NormKind] = {"LayerNorm": "layer", "RMSNorm": "rms"}
"""Names of norms in `rankwise.theory`, by their names in a certificate."""


def certify_skip(model: nn.Module, batch: Batch, a: float = 0.5) -> SkipCertificate:
    """Certify each skip connection: the absolute token spread μ kept on this batch, and the least |λ| proved.

    This is μ(Y) = ‖Y − 1ȳᵀ‖_F, the distance of the token states Y from their mean ȳ. The certificate
    has for each layer: μ before and after the skip connection; a proved lower bound of their ratio, and the
    least |λ| for which it is √a (`rankwise.theory.skip_bound`, `min_lambda`); the least |λ| of the paper's
    theorem; and ‖f(x)‖ relative to the sum. A model without λ-skips is certified at λ = 1;
    without residual connections around mixers, the certificate has a note and no layers.

    The bounds hold for single layers on the states of this batch; a changed λ changes the states of later
    layers. Feed-forward parts and gains of norms are not part of the bounds. `choose_lambda` recommends λ.

    Cost: one forward pass (two, and derivatives, if the model has no λ-skips), and ‖M‖_F of the mixing matrix
    M of each head, in the memory of a T×T matrix.
    Source: bounds of this project, docs/explanation/skip-bound.md; "Lambda-Skip Connections: the
    architectural component that prevents Rank Collapse", Theorem 4.1.

    Args:
        model: any module that `add_lambda_skip` accepts, or a ToST model with its own λ.
        batch: inputs, as in `audit`.
        a: fraction of μ² that each layer should keep, in (0, 1).

    Raises:
        SkipError: if a sequence is all padding, no sequence has two tokens, or λ or a state is not finite.
        InputError: if a is not in (0, 1), or the model does not run on the batch.

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
    check_tokens(batch)  # a sequence of padding alone may have NaN in the search for sites
    sites, missed = sites_in(model, batch)
    if sites:
        return certify_sites(model, batch, sites, a)
    reason = f"none within reach of a module ({', '.join(missed[:3])})" if missed else "none"
    note = f"residual connections around mixers: {reason}; a block must compute x + f(x) on several tokens"
    return SkipCertificate(a=a, sequences=0, layers=[], stacks=[], notes=[note])


def certify_sites(model: nn.Module, batch: Batch, sites: Sequence[SkipSite], a: float) -> SkipCertificate:
    """Return the certificate for chosen sites (λ-skips or plain residual connections) of a model."""
    check_tokens(batch)
    lambdas = lambdas_of(model, sites)
    check_values(lambdas, "", "Set it, or fit it again with a lower learning rate.")
    # Outputs are copied: otherwise, a gate or a gain applied in place would look like a part of the weights.
    recording = record_calls(model, lambda _, module: _weight(module) is not None, copy=True)
    # `capture` raises at the end if it found no mixer; the measured numbers need none.
    with suppress(CaptureError), recording as calls, capture(model, values=True) as trace:
        seen = observe(model, batch, sites, lambdas)
    _check_several(any(bool((added.mask.sum(-1) > 1).any()) for added in seen))
    fix = "Look for it in the weights or the batch; in float16, try bfloat16 or float32."
    for added in seen:
        for what, value in (("residual", added.x), ("output of the mixer", added.branch)):
            check_finite(f"states at {added.site.name!r}", value[added.mask], fix, f" in the {what}")
    layers, unlike = [], {}
    for added, mixing in zip(seen, _mixings(seen, sites, trace.mixers, calls), strict=True):
        layer, unlike[added.site.name] = _layer(added, lambdas[added.site.name], mixing, a)
        layers.append(layer)
    stacks = _stacks(seen, layers, {state.name: state.stack for state in trace.states})
    notes = _notes(layers, stacks, seen, unlike)
    for name, value in tensors_of(batch).items():
        # padding masks of torch's own layers are not read, because their names and signs vary
        if name.endswith("key_padding_mask") and bool(value.any()):
            advice = "give sequences of one length without padding"
            notes.append(f"`{name}` of the batch marks padding, and that was counted as tokens: {advice}")
    sequences = max(added.x.shape[0] for added in seen)
    return SkipCertificate(a=a, sequences=sequences, layers=layers, stacks=stacks, notes=notes)


def check_tokens(batch: Batch) -> None:
    """Raise if a value is not a batch, if a sequence has no real token, or if all have one token."""
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


# --- mixers ----------------------------------------------------------------------------------------------


@dataclass
class _Mixing:
    """Norms of the mixing matrices and weights of the mixer in one λ-skip."""

    norm: float
    """‖M‖_F of the mixing matrices M of all heads together, in the worst sequence."""
    value_norm: float | None = None
    """‖C‖_F of value and output weights C of all heads; None unless the output projection writes f(x)."""
    max_row_norm: Tensor | None = None
    """Largest norm of a row of f(x) for any attention weights, shape (B,)."""
    unlike: str = "its value and output weights were not found"
    """Difference between the branch f(Y) and the paper's Σ_h M_h Y C_h; empty if there is none."""


def _mixings(
    seen: Sequence[ObservedSkip],
    sites: Sequence[SkipSite],
    mixers: Sequence[CapturedMixer],
    calls: Sequence[RecordedCall],
) -> list[_Mixing | None]:
    """Return the norms of the mixer of each observed skip; None if its branch has no or several mixers."""
    behind: dict[str, list[CapturedMixer]] = {site.name: [] for site in sites}
    for mixer in mixers:
        site = max(sites, key=lambda site: _common(site.name, mixer.name))
        if _common(site.name, mixer.name):
            behind[site.name].append(mixer)
    maps = [call for call in calls if _of_rows(call)]
    found: list[_Mixing | None] = [None] * len(seen)
    for name, places in grouped(range(len(seen)), lambda at: seen[at].site.name).items():
        if len(behind[name]) == len(places):  # otherwise, several mixers add to one sum
            for at, mixer in zip(places, behind[name], strict=True):
                found[at] = _mixing(mixer, seen[at], maps)
    return found


def _weight(module: nn.Module) -> Tensor | None:
    """Return the weight matrix of a module; None if the module has none."""
    weight = getattr(module, "weight", None)
    return weight.detach() if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _of_rows(call: RecordedCall) -> bool:
    """Return True if a recorded call maps each row of its input to one row of its output."""
    rows = [value for value in (*call.args[:1], call.output) if isinstance(value, Tensor)]
    matrices = len(rows) == 2 and rows[1].dim() > 1 and rows[0].is_floating_point()
    return matrices and rows[0].shape[:-1] == rows[1].shape[:-1]


def _common(first: str, other: str) -> int:
    """Return the number of leading parts that two module names share; 0 if they differ in a number."""
    count = 0
    for a, b in zip(first.split("."), other.split("."), strict=False):
        if a != b:
            return 0 if a.isdigit() and b.isdigit() else count
        count += 1
    return count


def _mixing(mixer: CapturedMixer, added: ObservedSkip, calls: Sequence[RecordedCall]) -> _Mixing:
    operator, valid = mixer.operator.to(float64_device(mixer.operator.device)), mixer.valid_tokens
    batch, heads = operator.shape[0], operator.shape[1]
    squares = torch.zeros(batch, dtype=torch.float64)
    for head in range(heads):
        dense = operator[:, head].dense(torch.float64)
        squares += (dense * valid.to(dense.device)[..., None]).square().sum((-2, -1)).cpu()
    found = _Mixing(float(squares.max().sqrt()))
    if mixer.kind != "softmax" or mixer.values is None or mixer.output is None:
        return found
    once = each_once(mixer.values)
    read = _projection(once, mixer.valid_sources, [call.output for call in calls])
    gave = _projection(mixer.output, valid, [call.args[0] for call in calls])
    if read is None or gave is None:
        return found
    into, out = calls[int(read.module)], calls[int(gave.module)]
    values, projection = _linear(into), _linear(out)
    written = as_float64(as_batch(out.output, added.site.axis))
    if values is None or projection is None or not torch.equal(written, as_float64(added.branch)):
        return found  # not linear, or the projection's output is changed before the sum
    group = heads // once.shape[1]
    square, reach = 0.0, torch.zeros(batch, dtype=torch.float64)
    for head in range(heads):
        weights = projection[0][:, gave.channels[head]]
        square += float((weights @ values[0][read.channels[head // group]]).square().sum())
        lengths = (as_float64(once[:, head // group]).cpu() @ weights.mT).norm(dim=-1)
        reach += lengths.masked_fill(~mixer.valid_sources.cpu(), 0).amax(-1)
    found.value_norm, found.max_row_norm = square**0.5, reach + float(projection[1].norm())
    if not torch.equal(as_float64(as_batch(into.args[0], added.site.axis)), as_float64(added.x)):
        found.unlike = "the mixer reads something else than the state that the skip connection adds"
    elif bool(values[1][read.channels].any()):
        found.unlike = "its values have a bias"
    else:
        found.unlike = "its output has a bias" if bool(projection[1].any()) else ""
    return found


def _projection(heads: Tensor, mask: Tensor, tables: Iterable[Tensor]) -> Projection | None:
    """Find the table that holds the heads' values at real tokens; `Projection.module` is its index."""
    real = mask.to(heads.device)
    rows, likely = heads.transpose(1, 2)[real], {}
    for at, table in reversed(list(enumerate(tables))):
        if len(rows) and table.dtype == heads.dtype and table.numel() == real.numel() * table.shape[-1]:
            numbers = table.reshape(*real.shape, -1)[real]
            # Whole columns are compared only if one row matches, which excludes most tables.
            if torch.isin(as_float64(rows[0]), as_float64(numbers[0])).all():
                likely[str(at)] = numbers[None]
    found = find_projection(rows.transpose(0, 1)[None], likely)
    return found if found is not None and found.factor == 1 else None


def _linear(call: RecordedCall) -> tuple[Tensor, Tensor] | None:
    """Return weight matrix (outputs first) and bias; None if the call did not compute this linear map.

    Tolerance for a sum of K products: 8√K roundings of the sum of magnitudes, in float32 or finer, and two
    roundings of the output dtype.
    """
    weight, bias = _weight(call.module), getattr(call.module, "bias", None)
    assert weight is not None  # only modules with a matrix are recorded
    given, gave, own_weight = (as_float64(value) for value in (call.args[0], call.output, weight))
    shift = as_float64(bias.detach()) if isinstance(bias, Tensor) else gave.new_zeros(gave.shape[-1])
    for matrix in (own_weight, own_weight.mT):
        if matrix.shape != (gave.shape[-1], given.shape[-1]) or shift.shape != gave.shape[-1:]:
            continue
        own = torch.finfo(call.output.dtype).eps
        summed = 8 * math.sqrt(given.shape[-1]) * min(own, torch.finfo(torch.float32).eps)
        allowed = summed * (given.abs() @ matrix.abs().mT) + 2 * own * (gave.abs() + shift.abs())
        if bool(((given @ matrix.mT + shift - gave).abs() <= allowed).all()):
            return matrix.cpu(), shift.cpu()
    return None


# --- layers ----------------------------------------------------------------------------------------------


class _Sum:
    """Sum λ·Y + B in float64, with 0 for rows of padding; numbers leave out sequences of one token."""

    def __init__(self, added: ObservedSkip, scale: Tensor) -> None:
        self.scale, self.mask, self.norm = scale, added.mask, added.norm
        self.y, self.b = (x.double().masked_fill(~added.mask[..., None], 0) for x in (added.x, added.branch))
        self.after = scale.to(self.y) * self.y + self.b
        self.rows = self.y - self.y.mean(-1, keepdim=True) if added.norm.centre else self.y
        self.several = added.mask.sum(-1) > 1
        self.common = bool((scale == scale.flatten()[0]).all())  # one λ for all channels
        self.kind = NORM_KINDS.get(added.norm.kind, "none")
        self.gain = self.largest(_size(self.b) / _size(self.y))

    def least(self, values: Tensor) -> float:
        return float(values[self.several].min())

    def largest(self, values: Tensor) -> float:
        return float(values[self.several].max())

    def mean(self, values: Tensor) -> float:
        return float(values[self.several].mean())


def _size(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1))


def _layer(
    added: ObservedSkip, scale: Tensor, mixing: _Mixing | None, a: float
) -> tuple[LayerCertificate, str]:
    """Return the certificate of one sum, and why the paper's theorem does not apply (empty if it does)."""
    sum_, norm, mask = _Sum(added, scale), added.norm, added.mask
    y, b, after = sum_.y, sum_.b, sum_.after
    known, unlike = norm.kind != "unknown", _unlike(sum_, mixing)
    ends = absolute_spread(norm.of(after), mask)
    before = skip_bound(y, torch.zeros_like(b), 1.0, mask, sum_.kind)
    kept = torch.where(before > 0, ends / before, math.inf)  # ∞ if there is no spread to keep
    proved: dict[str, Any] = {}
    if mixing:
        proved = {"mixing_norm": mixing.norm, "value_norm": mixing.value_norm}
        proved |= {} if unlike else _paper(sum_, mixing, before, a)
    if known:
        proved |= _proved(sum_, before, mixing, a)
        proved |= {"absolute_spread_out": sum_.mean(ends), "kept": sum_.least(kept)}
    certificate = LayerCertificate(
        site=added.site.name, lambda_value=float(scale.flatten()[scale.abs().argmin()]), norm=norm.kind,
        norm_gain=1.0 if norm.kind == "none" else None if norm.gain is None else float(norm.gain.abs().min()),
        absolute_spread_in=sum_.mean(before), spread_in=sum_.mean(spread(y, mask)),
        spread_out=sum_.mean(spread(after, mask)),
        mixing_share=sum_.mean(_size(b) / _size(after)), **proved,
    )  # fmt: skip
    return certificate, unlike


def _proved(sum_: _Sum, before: Tensor, mixing: _Mixing | None, a: float) -> dict[str, float | None]:
    """Return the lower bound at the current λ, and the least |λ| of each kind that is proved."""
    y, b, mask, norm = sum_.y, sum_.b, sum_.mask, sum_.norm
    found: dict[str, float | None] = {}
    if norm.known:  # λ∘y + b = c·y + (b + (λ − c)∘y) for any number c: take the best of four
        values = sum_.scale.to(y).flatten()
        tried = torch.stack([values.mean(), values.median(), values.min(), values.max()]).unique()
        bounds = [skip_bound(y, b + (values - c) * y, c, mask, sum_.kind, norm.eps) for c in tried]
        bound = torch.stack(bounds).amax(0)
    else:  # with one λ per channel: μ(Y·diag(λ)) ≥ min|λ|·μ(Y)
        bound = skip_bound(y, b, float(sum_.scale.abs().min()), mask)
        if sum_.common:
            found["min_lambda_proved_relative"] = sum_.largest(min_lambda(y, b, a, mask, relative=True))
    if sum_.common or not norm.known:  # after a norm, a channel with a large λ dominates all rows
        found["min_lambda_proved"] = sum_.largest(min_lambda(y, b, a, mask, sum_.kind, norm.eps))
        found["min_lambda_any_mixing"] = _any_mixing(sum_, mixing, a)
    return found | {"kept_lower_bound": sum_.least((bound / before).nan_to_num(0.0))}


def _any_mixing(sum_: _Sum, mixing: _Mixing | None, a: float) -> float | None:
    """Return the least |λ| for any attention weights, from the largest possible norm of a row of B."""
    if mixing is None or mixing.max_row_norm is None or mixing.max_row_norm.shape != sum_.y.shape[:1]:
        return None
    longest = mixing.max_row_norm.to(sum_.y.device)
    if not sum_.norm.known:
        farthest = longest * sum_.mask.sum(-1).sqrt()
        return sum_.largest(math.sqrt(a) + farthest / absolute_spread(sum_.y, sum_.mask))
    # With a norm only the norms of the rows of B count: take rows of mean 0, which centering does not change.
    row = sum_.y.new_zeros(sum_.y.shape[-1])
    row[:2] = row.new_tensor([1, -1])[: len(row)]
    rows = (longest[:, None, None] * row / row.norm()).expand_as(sum_.y)
    return sum_.largest(min_lambda(sum_.y, rows, a, sum_.mask, sum_.kind, sum_.norm.eps))


def _unlike(sum_: _Sum, mixing: _Mixing | None) -> str:
    """Return why the paper's theorem does not apply; empty if it does."""
    norm = sum_.norm
    if not norm.known:
        return norm.reason or "no norm reads the sum: the theorem is about blocks that end in one"
    if mixing is None:
        return "the mixer was not captured, or shares its branch with others"
    lengths = [_lengths(rows)[sum_.mask] for rows in (sum_.y, sum_.rows)]
    if not mixing.unlike and any(bool(((length - 1).abs() > SPHERE).any()) for length in lengths):
        return "the states it reads do not lie on the sphere of the norm"
    return mixing.unlike


def _lengths(rows: Tensor) -> Tensor:
    """Return the norms of rows in units of √D."""
    return rows.square().mean(-1).sqrt()


def _paper(sum_: _Sum, mixing: _Mixing, before: Tensor, a: float) -> dict[str, float | bool | None]:
    """Return the least |λ| of the paper's Theorem 4.1, and if λ reaches it."""
    size = sum_.largest((_lengths(sum_.y).square().sum(-1) / sum_.mask.sum(-1).clamp(min=1)).sqrt())
    shortest = float(_lengths(sum_.rows)[sum_.mask].min())
    product = max(mixing.norm * (mixing.value_norm or 0.0), sum_.gain)  # rounding may lower the product
    strength = mixing_strength(product, sum_.norm.eps, size, shortest)
    tokens, width = int(sum_.mask.sum(-1).max()), sum_.y.shape[-1]
    least = min_lambda_paper(strength, a, tokens, width, sum_.least(before))
    now = abs(float(sum_.scale.flatten()[0]))
    held = (now >= least and now > 0) if sum_.common else None
    return {"min_lambda_paper": least, "paper_guaranteed": held}


def _stacks(
    seen: Sequence[ObservedSkip], layers: Sequence[LayerCertificate], blocks: Mapping[str, str]
) -> list[StackCertificate]:
    """Return a certificate per stack, by the stacks of blocks; a site outside of all is its own stack."""

    def stack_of(site: str) -> str:
        inside = [block for block in blocks if holds(block, site)]
        return blocks[max(inside, key=len)] if inside else site

    found = []
    pairs = grouped(zip(seen, layers, strict=True), lambda pair: stack_of(pair[0].site.name))
    for stack, inside in pairs.items():
        first, last = inside[0][0], inside[-1][0]
        ends = (first.x, first.mask), (last.total, last.mask)
        start, end = (spread(rows, mask).nan_to_num(0.0) for rows, mask in ends)
        several = first.mask.sum(-1) > 1
        # tokens that are equal (up to rounding) at the start of the stack have no spread to keep
        apart = several & (start > torch.finfo(first.x.dtype).eps)
        numbers: dict[str, float | None] = {}
        if bool(apart.any()):
            numbers["kept"] = float((end / start)[apart].mean())
        if bool(apart.any()) and last.norm.kind != "unknown":
            after = absolute_spread(last.norm.of(last.total.double()), last.mask).nan_to_num(0.0)
            numbers["kept_mu"] = float((after / absolute_spread(first.x, first.mask))[apart].mean())
        for name in ("min_lambda_proved", "min_lambda_any_mixing", "min_lambda_paper"):
            values = [getattr(layer, name) for _, layer in inside]
            numbers[name] = None if None in values else max(values)
        left_out = int((several & ~apart).sum())
        found.append(StackCertificate(stack=stack, layers=len(inside), left_out=left_out, **numbers))
    return found


def _notes(
    layers: Sequence[LayerCertificate],
    stacks: Sequence[StackCertificate],
    seen: Sequence[ObservedSkip],
    unlike: Mapping[str, str],
) -> list[str]:
    effect = "there is nothing to keep, and they are left out of the shares of the stack"
    notes = [
        f"sequences of equal tokens at the start of {stack.stack or 'the model'}: {stack.left_out}; {effect}"
        for stack in stacks
        if stack.left_out
    ]
    reasons = {added.site.name: added.norm.reason for added in seen if added.norm.kind == "unknown"}
    notes += _by_reason("nothing is promised, and μ after the layer is not measured", reasons)
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
        notes.append("λ differs by channel before a norm: a sound bound is known, but no single least |λ|")
    paper = {site: reason for site, reason in unlike.items() if reason and site not in reasons}
    return notes + _by_reason("the paper's theorem says nothing", paper)


def _by_reason(what: str, reasons: Mapping[str, str]) -> list[str]:
    """Return one note per reason, with the name of the first site and the number of others."""
    return [
        f"{what} at {sites[0]}{f' and {len(sites) - 1} more' if sites[1:] else ''}: {reason}"
        for reason, sites in grouped(reasons, lambda site: reasons[site]).items()
    ]
