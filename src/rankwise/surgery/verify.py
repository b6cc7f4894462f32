"""λ-skips that were put in are tried before they are handed over."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rankwise.surgery.errors import SkipError
from rankwise.surgery.examples import Example
from rankwise.surgery.hooks import SkipHook
from rankwise.surgery.probe import run_with
from rankwise.surgery.sums import SumName

if TYPE_CHECKING:
    from rankwise.surgery.skips import SkipSite

OnSum = Callable[[SumName, Tensor, Tensor, Tensor], None]
Seen = Callable[[Tensor, Tensor, Tensor], None]


def verify(
    model: nn.Module, example: Example, sites: Sequence["SkipSite"], found: Sequence["SkipSite"]
) -> None:
    """Compare a model with its λ-skips, on an example, with what it should give.

    At λ = 1 every output must be the same bit by bit; at λ between 0.6 and 0.9, a different one for each
    site, it must be what scaled sums give, up to √ε of the dtype. Rounding does not add up over layers: a
    residual sum that agrees so far is replaced by the one it agrees with.

    Args:
        model: the model, its λ all 1.
        example: what to run on.
        sites: where its skips are.
        found: all its residual connections around mixers.

    Raises:
        SkipError: if it is not.
    """
    with unhooked(model):
        plain = run_with(model, example, {})
    try:
        changed = run_with(model, example, {})
    except RuntimeError as error:
        raise _failure(model, "a forward pass at λ = 1", f"{type(error).__name__}: {error}") from error
    if len(plain) != len(changed) or not all(map(torch.equal, plain, changed)):
        raise _failure(model, "outputs that λ = 1 does not change", "others")
    scales = {site.name: 0.9 - 0.3 * at / len(sites) for at, site in enumerate(sites)}
    parameters = {
        site.name: model.get_submodule(site.place.module).get_parameter(site.parameter) for site in sites
    }
    exact = {
        name: _Kept(site.place.which, scales.get(site.name, 1.0)) for site in found for name in site.sums
    }
    with unhooked(model):
        wanted = run_with(model, example, exact)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.fill_(scales[name])
    try:
        got = run_with(model, example, {name: kept.nearest for name, kept in exact.items()})
    finally:
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.fill_(1)
    if len(wanted) != len(got) or not all(map(_close, wanted, got)):
        raise _failure(model, "what scaling the residual sums gives at λ ≠ 1", "something else")


def scaled_sums(
    sites: Sequence["SkipSite"], scales: Mapping[str, Tensor | float], on_sum: OnSum | None = None
) -> dict[SumName, "ScaledSum"]:
    """What to do with which sum so that each site has its λ.

    Args:
        sites: the sites.
        scales: λ by name of the site.
        on_sum: called with the name of each of these sums, its residual before λ, its branch and its value.
    """
    return {
        name: ScaledSum(
            site.place.which, scales[site.name], None if on_sum is None else partial(on_sum, name)
        )
        for site in sites
        if site.name in scales
        for name in site.sums
    }


class ScaledSum:
    """λ·x + y in place of x + y.

    Args:
        which: which operand is x.
        scale: λ.
        seen: called with copies of x and y, and the sum.
    """

    def __init__(self, which: int, scale: Tensor | float, seen: Seen | None = None) -> None:
        self.which, self.scale, self.seen = which, scale, seen

    def __call__(self, one: Tensor, other: Tensor) -> Tensor:
        """Take the sum."""
        residual, branch = (other, one) if self.which else (one, other)
        total = (residual * self.scale).to(residual.dtype) + branch
        if self.seen is not None:
            self.seen(residual.clone(), branch.clone(), total)
        return total


class _Kept(ScaledSum):
    """Keeps what the sum is, with λ and without: hooks that correct it later leave it without."""

    sums: tuple[Tensor, ...] = ()

    def __call__(self, one: Tensor, other: Tensor) -> Tensor:
        scaled = super().__call__(one, other)
        self.sums = (scaled.detach().clone(), (one + other).detach())
        return scaled

    def nearest(self, one: Tensor, other: Tensor) -> Tensor:
        """The kept sum that this one is but for rounding; this one if it is another."""
        total = (one + other).detach()
        near = [kept for kept in self.sums if _close(kept, total)]
        return min(near, key=lambda kept: float((kept - total).norm()), default=total)


@contextmanager
def unhooked(model: nn.Module) -> Iterator[None]:
    """A model as it is without its λ-skips, for as long as the block runs."""
    kept = [
        (module, dict(module._forward_pre_hooks), dict(module._forward_hooks)) for module in model.modules()
    ]
    try:
        for module, _, _ in kept:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for number in [number for number, hook in hooks.items() if isinstance(hook, SkipHook)]:
                    del hooks[number]
        yield
    finally:
        for module, before, after in kept:
            module._forward_pre_hooks.clear()
            module._forward_pre_hooks.update(before)
            module._forward_hooks.clear()
            module._forward_hooks.update(after)


def _close(wanted: Tensor, got: Tensor) -> bool:
    if wanted.shape != got.shape:
        return False
    difference = torch.where(wanted == got, 0, (wanted - got).double())  # ∞ where it should be is none
    size = wanted.double().nan_to_num(0.0, 0.0, 0.0).norm()
    return bool(difference.norm() <= torch.finfo(wanted.dtype).eps ** 0.5 * size)


def _failure(model: nn.Module, wanted: str, got: str) -> SkipError:
    return SkipError(
        f"λ-skips of {type(model).__name__}",
        wanted=wanted,
        got=got,
        fix="This model uses its residuals in a way that hooks cannot follow; it was left as it was. Choose "
        "other `sites`, or write λ into its blocks.",
    )
