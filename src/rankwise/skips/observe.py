"""Observe λ-skips: run a model with chosen λ, and return the tensors and norm of each sum λx + f(x)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rankwise._internals.batches import Batch, real_tokens, tensors_in, tensors_of
from rankwise._internals.forward import Change, run_model
from rankwise._internals.linalg import as_float64, float64_device
from rankwise._internals.records import grouped
from rankwise._internals.torch_private import without_forward_hooks
from rankwise.auditing.error_hints import batch_errors
from rankwise.errors import SkipError
from rankwise.skips.hook_places import SkipPlace, find_places, skip_places
from rankwise.skips.hooks import SkipHook
from rankwise.skips.lambda_skip import LambdaSkip
from rankwise.skips.residual_sums import SumChange, SumName, probe_mode, replacing_sums
from rankwise.tracing import RecordedCall, record_calls

ROUNDINGS = 8
"""Tolerance for the output of a norm with D channels, in units of √D rounding errors of float32."""
TRIED = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Values of |λ| to try, the smallest first."""
Lambdas = Mapping[str, Tensor | float]
"""Values of λ by the name of the site."""
OnSum = Callable[[SkipPlace, Tensor, Tensor, Tensor], None]
"""Function that is called with the place, x, f(x) and λx + f(x) of a sum."""


@dataclass(frozen=True)
class Norm:
    """Norm layer between the sum of a λ-skip and the next state."""

    kind: Literal["none", "LayerNorm", "RMSNorm", "unknown"]
    eps: float = 0.0
    gain: Tensor | None = None
    """Gain γ per channel, for LayerNorm and RMSNorm."""
    reason: str = ""
    """Reason why the norm is unknown. Empty if the norm is known."""

    @property
    def centre(self) -> bool:
        """True if the norm subtracts the mean of each row."""
        return self.kind == "LayerNorm"

    @property
    def known(self) -> bool:
        """True for LayerNorm and RMSNorm, whose formulas are known."""
        return self.kind in ("LayerNorm", "RMSNorm")

    def of(self, rows: Tensor) -> Tensor:
        """Return normalized rows without gain and bias. Without a known norm, return the rows unchanged."""
        return normed(rows, self.centre, self.eps) if self.known else rows


@dataclass
class ObservedSkip:
    """Tensors of one sum λx + f(x) in a forward pass: x, branch f(x), total, token mask, and the norm."""

    place: SkipPlace
    x: Float[Tensor, "B T D"]
    branch: Float[Tensor, "B T D"]
    total: Float[Tensor, "B T D"]
    mask: Bool[Tensor, "B T"]
    norm: Norm


def observe(
    model: nn.Module, batch: Batch, places: Sequence[SkipPlace], lambdas: Lambdas
) -> list[ObservedSkip]:
    """Run a batch with the given λ, and return every sum of the places in the order of the forward pass."""
    skips: list[ObservedSkip] = []
    unlike: set[str] = set()

    def record(place: SkipPlace, x: Tensor, branch: Tensor, total: Tensor) -> None:
        if x.shape != branch.shape or x.shape[-1] != place.width:
            unlike.add(place.name)
            return
        device = float64_device(x.device)  # all numbers are computed in float64
        x, branch, total = (as_batch(states, place.axis).to(device) for states in (x, branch, total))
        decodes = "decoder" in place.name.split(".") and "decoder_input_ids" in tensors_of(batch)
        mask = real_tokens(batch, x.shape[:2], decodes).to(x.device)
        skips.append(ObservedSkip(place, x, branch, total, mask, Norm("none")))

    norms = {place.norm for place in places} - {""}
    recording, scaled = record_calls(model, norms, copy=True), with_lambdas(model, places, lambdas, record)
    with batch_errors(model, batch), scaled, recording as calls, probe_mode(model), torch.no_grad():
        run_model(model, batch)
    by_site = grouped(skips, lambda skip: skip.place.name)
    if missing := unlike | {place.name for place in places} - set(by_site):
        expected = "a batch with the sums of the example that the skips were added with"
        fix = "Pass a batch of that kind, or one of this kind as `example=` to `add_lambda_skip`."
        raise SkipError(f"site {min(missing)!r}", expected=expected, got="one without this sum", fix=fix)
    for same_site in by_site.values():
        candidates = [_norm_behind(skip, calls) for skip in same_site]
        # one unknown norm makes the norm of the site unknown
        norm = next((norm for norm in candidates if norm.kind == "unknown"), candidates[-1])
        for skip in same_site:
            skip.norm = norm
    return skips


@contextmanager
def with_lambdas(
    model: nn.Module, places: Sequence[SkipPlace], lambdas: Lambdas, on_sum: OnSum | None = None
) -> Iterator[None]:
    """Context manager in which a model runs with the given λ at some places; no weight of the model changes.

    Places may be λ-skips, `LambdaSkip` modules or plain residual connections. Places without a given λ keep
    their λ. ``on_sum`` is called for each sum.
    """
    scaled = scaled_sums(places, {**lambdas_of(model, places), **lambdas}, on_sum)
    with plain_skips(model), replacing_sums(model, scaled):
        yield


def without_skips(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager in which the hooks of λ-skips are turned off."""
    return without_forward_hooks(model, lambda hook: isinstance(hook, SkipHook))


@contextmanager
def plain_skips(model: nn.Module) -> Iterator[None]:
    """Context manager in which hooks are off, and every `LambdaSkip` computes a plain x + f(x)."""
    plain = {"kind": "fixed", "init": 1.0, "weight": None}
    changes = {name: plain for name, module in model.named_modules() if isinstance(module, LambdaSkip)}
    with without_skips(model), Change(model, attributes=changes):
        yield


def places_in(model: nn.Module, batch: Batch) -> tuple[list[SkipPlace], list[str]]:
    """Return the places of the λ-skips of a model, and an empty list.

    If the model has no λ-skips, run the batch to find its residual connections. Return the places of these
    connections, and the names of blocks whose connections no hook can reach. A `LambdaSkip` module is found
    as a residual connection, independent of its λ.
    """
    if places := skip_places(model):
        return places, []
    with plain_skips(model):
        return find_places(model, batch)


def lambdas_of(model: nn.Module, places: Sequence[SkipPlace]) -> dict[str, Tensor]:
    """Return the current λ of each site, with shape (1,) or (D,). A site without λ has λ = 1."""
    lambdas = {}
    for place in places:
        module, around = model.get_submodule(place.module), model.get_submodule(place.block)
        plain = around.current() if isinstance(around, LambdaSkip) else torch.ones(1, dtype=torch.float32)
        scale = getattr(module, place.parameter, plain)
        lambdas[place.name] = scale.detach().reshape(-1)
    return lambdas


def raise_lambdas(lambdas: Mapping[str, Tensor], value: float) -> dict[str, Tensor]:
    """Return λ with every |λ| raised to at least `value`. Signs are preserved, and 0 counts as positive."""
    return {
        site: torch.where(scale < 0, -1, 1) * scale.abs().clamp(min=value) for site, scale in lambdas.items()
    }


def scaled_sums(
    places: Sequence[SkipPlace], lambdas: Lambdas, on_sum: OnSum | None = None
) -> dict[SumName, SumChange]:
    """Return the function that computes λx + f(x) for each sum of the places, by the name of the sum."""
    return {
        name: partial(scaled_sum, place.which, lambdas[place.name], on_sum and partial(on_sum, place))
        for place in places
        for name in place.sums
    }


def scaled_sum(
    which: int, scale: Tensor | float, on_sum: Callable[..., None] | None, first: Tensor, other: Tensor
) -> Tensor:
    """Return λ·x + y, where x is operand ``which`` (0 or 1). Call ``on_sum`` with x, y and the sum."""
    x, branch = (other, first) if which else (first, other)
    scale = scale.to(x.device) if isinstance(scale, Tensor) else scale
    total = (x * scale).to(x.dtype) + branch
    if on_sum is not None:
        on_sum(x.clone(), branch.clone(), total)
    return total


def as_batch(value: Tensor, axis: int) -> Tensor:
    """Return states of shape (B, T, D), (T, B, D) or (T, D) as (B, T, D)."""
    value = value.detach()
    if value.dim() == 2:
        return value[None]
    return value.transpose(0, 1) if axis == 0 else value


def normed(rows: Tensor, centre: bool, eps: float) -> Tensor:
    """Return LayerNorm (if ``centre``) or RMSNorm of rows, without gain and bias. Zero rows stay zero."""
    rows = rows - rows.mean(-1, keepdim=True) if centre else rows
    size = (rows.square().mean(-1, keepdim=True) + eps).sqrt()
    return rows / torch.where(size > 0, size, 1.0)


def _norm_behind(skip: ObservedSkip, calls: Sequence[RecordedCall]) -> Norm:
    """Return the norm that reads a sum, by the recorded calls of its module."""
    place, total = skip.place, skip.total
    if place.read_by:
        return Norm("unknown", reason=f"the function {place.read_by} reads the sum outside of any module")
    if not place.norm:
        return Norm("none")
    total = total.transpose(0, 1) if place.axis == 0 else total
    for call in (call for call in calls if call.name == place.norm):
        for value in tensors_in((call.args, call.kwargs)):
            if value.numel() == total.numel() and value.shape[-1:] == total.shape[-1:]:
                pair = as_float64(value.reshape(total.shape)), as_float64(total)
                if torch.allclose(*pair, rtol=0, atol=0, equal_nan=True):
                    return read_norm(call.module, total, call.output)
    return Norm("unknown", reason=f"{place.norm} does not receive the sum itself")


def read_norm(module: nn.Module, rows: Tensor, output: Any) -> Norm:
    """Return the norm that a module computes: LayerNorm or RMSNorm, if its output is γ∘N(row; ε) + β.

    N is the norm of a row without gain γ and bias β; rounding errors are tolerated. γ and β are attributes of
    the module, and γ may be 1 + the weight. ε is an attribute, or is computed from the lengths of the output
    rows. Any other norm is unknown.
    """
    output = output[0] if isinstance(output, tuple) and output else output
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    gain = as_float64(weight.detach() if isinstance(weight, Tensor) else rows.new_ones(rows.shape[-1]))
    shift = as_float64(bias.detach() if isinstance(bias, Tensor) else rows.new_zeros(rows.shape[-1]))
    fits = gain.shape == shift.shape == rows.shape[-1:]
    fitting: list[tuple[float, Norm]] = []
    if fits and isinstance(output, Tensor) and output.numel() == rows.numel():
        finite = rows.isfinite().all(-1)  # padding rows can be infinite or NaN
        read, out = as_float64(rows)[finite], as_float64(output.detach().reshape(rows.shape))[finite] - shift
        for centre in (True, False):
            centred = read - read.mean(-1, keepdim=True) if centre else read
            # subtracting the mean of a row amplifies its relative rounding errors
            size, left = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (read, centred))
            grown = torch.where(left > 0, size / torch.where(left > 0, left, 1.0), 1.0).clamp(min=1)
            lost = ROUNDINGS * rows.shape[-1] ** 0.5 * torch.finfo(torch.float32).eps * grown
            for scale in (gain, 1 + gain):
                eps = _eps(module, out, scale * normed(read, centre, 0.0), centred, rows.dtype)
                ideal = normed(read, centre, eps)
                allowed = lost * (scale.abs() * (ideal.abs() + 1) + shift.abs())
                # gain and bias may be applied in the dtype of the output
                allowed += 2 * torch.finfo(output.dtype).eps * ((scale * ideal).abs() + shift.abs())
                error = (out - scale * ideal).abs()
                if bool(scale.any()) and bool((error <= allowed).all()):
                    fitting.append(
                        (float(error.sum()), Norm("LayerNorm" if centre else "RMSNorm", eps, scale))
                    )
    if fitting:  # in bfloat16, both norms may fit: take the norm with the smaller error
        return min(fitting, key=lambda error_and_norm: error_and_norm[0])[1]
    reason = f"{type(module).__name__} computes neither LayerNorm nor RMSNorm of each row"
    return Norm("unknown", reason=reason)


def _eps(module: nn.Module, out: Tensor, ideal: Tensor, rows: Tensor, dtype: torch.dtype) -> float:
    """Return ε of a norm: an attribute (None means ε of the dtype), or an estimate from its output."""
    for name in ("eps", "variance_epsilon", "epsilon", "norm_eps"):
        value = getattr(module, name, 0)
        if value is None or isinstance(value, float):
            return torch.finfo(dtype).eps if value is None else value
    share = ((out * ideal).sum(-1) / ideal.square().sum(-1)).square()
    eps = rows.square().mean(-1) * (1 / share - 1)
    eps = eps[eps.isfinite()]
    return max(float(eps.median()), 0.0) if len(eps) else 0.0
