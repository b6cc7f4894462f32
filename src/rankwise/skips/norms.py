"""The norm that reads the sum of a skip connection, told by what it computes and not by its name."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankwise._internals.forward import map_tensors
from rankwise.skips.skip_sums import SkipSum
from rankwise.skips.skips import SkipSite
from rankwise.tracing import RecordedCall, record_calls

Kind = Literal["none", "LayerNorm", "RMSNorm", "unknown"]
RANGE = 6
"""Rows are tried from 10⁻⁶ to 10⁶ times the size of the states at hand."""
STEPS = 4 * RANGE + 1
ROUNDINGS = 8
"""A mean over D channels loses about √D roundings; eight times that are allowed, of float32, since norms
compute in it whatever their dtype."""


@dataclass(frozen=True)
class Norm:
    """What lies between the sum of a skip connection and the state of the next layer."""

    kind: Kind
    eps: float = 0.0
    gain: Tensor | None = None
    """γ of each channel, of LayerNorm and RMSNorm."""
    reason: str = ""
    """Why it is not known."""

    @property
    def centre(self) -> bool:
        """Whether it takes the mean off each row."""
        return self.kind == "LayerNorm"

    @property
    def known(self) -> bool:
        """Whether it is LayerNorm or RMSNorm."""
        return self.kind in ("LayerNorm", "RMSNorm")

    def of(self, rows: Tensor) -> Tensor:
        """What it makes of rows, without its gain and bias; rows as they are where there is no norm."""
        return normed(rows, self.centre, self.eps) if self.known else rows


def normed(rows: Tensor, centre: bool, eps: float) -> Tensor:
    """LayerNorm or RMSNorm without its gain and bias.

    Args:
        rows: what it reads.
        centre: whether it is LayerNorm.
        eps: its ε.
    """
    rows = rows - rows.mean(-1, keepdim=True) if centre else rows
    size = (rows.square().mean(-1, keepdim=True) + eps).sqrt()
    return rows / torch.where(size > 0, size, 1.0)


def record_norms(model: nn.Module, sites: Sequence[SkipSite]) -> AbstractContextManager[list[RecordedCall]]:
    """Record copies of the calls of the modules that alone read the sums of skip connections.

    Args:
        model: the model.
        sites: the skip connections.
    """
    return record_calls(model, {site.location.norm for site in sites} - {""}, copy=True)


def norms_behind(seen: Sequence[SkipSum], calls: Sequence[RecordedCall]) -> dict[str, Norm]:
    """The norm after each skip connection, by the name of its site.

    Args:
        seen: the sums of one run.
        calls: recorded by `record_norms` in the same run.
    """
    found: dict[str, Norm] = {}
    for added in seen:
        before = found.get(added.site.name)
        if before is None or before.kind != "unknown":  # of several calls, one that is not known decides
            found[added.site.name] = _norm_behind(added, calls)
    return found


def _norm_behind(added: SkipSum, calls: Sequence[RecordedCall]) -> Norm:
    location = added.site.location
    if location.read_by:
        return Norm("unknown", reason=f"the function {location.read_by} reads the sum outside of any module")
    if not location.norm:
        return Norm("none")
    total = added.total.transpose(0, 1) if location.axis == 0 and added.total.dim() == 3 else added.total
    for call in (call for call in calls if call.name == location.norm):
        at = _argument_of(call, total)
        if at is not None:
            return recognised(call, at)
    return Norm("unknown", reason=f"{location.norm} was not given the sum as it is")


def _argument_of(call: RecordedCall, total: Tensor) -> int | str | None:
    """Which argument is the sum, number for number."""
    given: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    for key, value in given:
        if (
            isinstance(value, Tensor)
            and value.numel() == total.numel()
            and value.shape[-1:] == total.shape[-1:]
            and torch.equal(_finite(value.reshape(total.shape)), _finite(total))
        ):
            return key
    return None


def _finite(rows: Tensor) -> Tensor:
    """In float64, with 0 for what is not finite: rows of padding may be anything."""
    return rows.double().nan_to_num(0.0, 0.0, 0.0)


def recognised(call: RecordedCall, at: int | str) -> Norm:
    r"""LayerNorm or RMSNorm, if a module computes one: out = γ∘N(w; ε) + β for each row w by itself.

    γ and β are read off random rows of a size at which no ε matters, ε off smaller ones. Then the formula
    must give what the module gives, up to rounding: on the states at hand, on these in another order with
    each row scaled, and on random rows of all sizes from 10⁻⁶ to 10⁶ times theirs. A norm that looks at other
    rows, at groups of channels, or bounds rows in another way does not pass.

    Args:
        call: a call of the module.
        at: which argument is the rows.
    """
    for dtype in (torch.float64, torch.float32):
        try:
            again = _Again(call, at, dtype)
            same = again.agrees()
        except Exception:  # whatever it raises: it cannot be copied, or takes no other dtype
            continue
        name = type(call.module).__name__
        if not same:
            return Norm("unknown", reason=f"{name} gives something else when it is run again")
        for kind in ("LayerNorm", "RMSNorm"):
            found = _fitted(again, kind == "LayerNorm")
            if found is not None:
                return Norm(kind, *found)
        return Norm("unknown", reason=f"{name} computes neither LayerNorm nor RMSNorm of each row")
    return Norm("unknown", reason=f"{type(call.module).__name__} cannot be run again in float64 or float32")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


class _Again:
    """A copy of a module that takes other rows in place of those it was given."""

    def __init__(self, call: RecordedCall, at: int | str, dtype: torch.dtype) -> None:
        self._module = deepcopy(call.module).to(dtype)
        self._args, self._kwargs, self._at = _cast(call.args, dtype), _cast(call.kwargs, dtype), at
        given = self._args[at] if isinstance(at, int) else self._kwargs[at]
        self._output, self._dtype = call.output, dtype
        self.finite = given.isfinite().all(-1)
        self.rows: Tensor = _finite(given)
        self.width = given.shape[-1]
        self.size = float(self.rows.square().mean().sqrt()) or 1.0

    def __call__(self, rows: Tensor) -> Tensor | None:
        """What it gives, in float64; None if that is not of the same shape."""
        args, kwargs, at = list(self._args), dict(self._kwargs), self._at
        given = rows.to(self._dtype)
        if isinstance(at, int):
            args[at] = given
        else:
            kwargs[at] = given
        with torch.no_grad():
            return self._state(self._module(*args, **kwargs))

    def agrees(self) -> bool:
        """Whether it gives on the states at hand what the module gave, up to the rounding of that."""
        gave, gives = self._state(self._output), self(self.rows)
        if gave is None or gives is None:
            return False
        first = self._output if isinstance(self._output, Tensor) else self._output[0]
        lost = _amplified(self.rows, self.rows - self.rows.mean(-1, keepdim=True))
        # γ∘N(w) is not known yet: of all numbers of a row, the largest stands for it
        allowed = _tolerance(self.width, first.dtype) * lost * gives.abs().amax(-1, keepdim=True)
        return bool(((gave - gives).abs() <= allowed)[self.finite].all())

    def _state(self, output: Any) -> Tensor | None:
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, Tensor) or first.shape != self.rows.shape:
            return None
        return first.double()


def _fitted(again: _Again, centre: bool) -> tuple[float, Tensor] | None:
    """ε and γ with which a module computes LayerNorm, or RMSNorm; None if it does neither."""
    generator = torch.Generator().manual_seed(0)

    def random(size: float | Tensor) -> Tensor:
        rows = torch.randn(again.rows.shape, generator=generator, dtype=torch.float64)
        return rows.to(again.rows.device) * size

    outside = tuple(range(again.rows.dim() - 1))
    rows = random(10**RANGE * again.size)
    out, ideal = again(rows), normed(rows, centre, 0.0)
    if out is None or not bool(out.isfinite().all()):
        return None
    mean, middle = out.mean(outside), ideal.mean(outside)
    square = (ideal - middle).square().sum(outside)
    if not bool((square > 0).all()):
        return None
    gain = ((out - mean) * (ideal - middle)).sum(outside) / square
    bias = mean - gain * middle
    if not bool(gain.any()):
        return None
    eps = _eps(again, random, gain, bias, centre)

    def holds(rows: Tensor) -> bool:
        out, ideal = again(rows), normed(rows, centre, eps)
        if out is None:
            return False
        lost = _amplified(rows, rows - rows.mean(-1, keepdim=True) if centre else rows)
        size = gain.abs() * (ideal.abs() + 1) + bias.abs()
        return bool(((out - gain * ideal - bias).abs() <= _tolerance(again.width) * lost * size).all())

    def factors() -> Tensor:
        exponent = 2 * torch.rand(again.rows.shape[:-1], generator=generator, dtype=torch.float64) - 1
        return (10 ** (RANGE * exponent))[..., None].to(again.rows.device)

    states = again.rows
    others = states.flatten(0, -2).flip(0).reshape(states.shape)
    tried = (
        rows,
        states,
        others * factors(),
        random(again.size * factors()),
        -random(again.size * factors()),
    )
    return (eps, gain) if all(map(holds, tried)) else None


def _eps(again: _Again, random: Any, gain: Tensor, bias: Tensor, centre: bool) -> float:
    """ε of a norm, from where it gives rows about √½ of their length; 0 if it never shortens them."""
    off, eps = math.inf, 0.0
    for step in range(STEPS):
        rows = random(again.size * 10 ** (RANGE * (2 * step / (STEPS - 1) - 1)))
        out, ideal = again(rows), gain * normed(rows, centre, 0.0)
        if out is None:
            return 0.0
        share = float((((out - bias) * ideal).sum(-1) / ideal.square().sum(-1)).square().median())
        rows = rows - rows.mean(-1, keepdim=True) if centre else rows
        if 0 < share < 1 - _tolerance(again.width) and abs(share - 0.5) < off:
            off, eps = abs(share - 0.5), float(rows.square().mean(-1).median()) * (1 / share - 1)
    named = [getattr(again._module, name, None) for name in ("eps", "variance_epsilon", "epsilon")]
    close = [
        float(value) for value in named if isinstance(value, float) and math.isclose(value, eps, rel_tol=1e-3)
    ]
    return close[0] if close else eps


def _amplified(rows: Tensor, centred: Tensor) -> Tensor:
    """How many times rounding of a row's numbers counts once its mean is taken off."""
    size = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    left = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    return torch.where(left > 0, size / torch.where(left > 0, left, 1.0), 1.0).clamp(min=1)


def _tolerance(width: int, dtype: torch.dtype = torch.float32) -> float:
    return ROUNDINGS * math.sqrt(width) * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
