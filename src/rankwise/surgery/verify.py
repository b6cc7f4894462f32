"""λ-skips that were put in are tried before they are handed over."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rankwise.surgery.errors import SkipError
from rankwise.surgery.examples import Example
from rankwise.surgery.hooks import SkipHook
from rankwise.surgery.probe import run_with
from rankwise.surgery.sums import Scale

if TYPE_CHECKING:
    from rankwise.surgery.skips import SkipSite


def verify(model: nn.Module, example: Example, sites: Sequence["SkipSite"]) -> None:
    """Compare a model with its λ-skips, on an example, with what it should give.

    At λ = 1 every output must be the same bit by bit; at λ between 0.6 and 0.9, a different one for each
    site, it must be what scaled sums give, up to √ε of the dtype.

    Args:
        model: the model, its λ all 1.
        example: what to run on.
        sites: where its skips are.

    Raises:
        SkipError: if it is not.
    """
    with unhooked(model):
        plain = run_with(model, example, {})
    try:
        changed = run_with(model, example, {})
    except RuntimeError as error:
        raise _failure(model, "a forward pass at λ = 1", f"{type(error).__name__}: {error}") from error
    if not _identical(plain, changed):
        raise _failure(model, "outputs that λ = 1 does not change", "others")
    scales = {site.name: 0.9 - 0.3 * at / len(sites) for at, site in enumerate(sites)}
    parameters = {
        site.name: model.get_submodule(site.place.module).get_parameter(site.parameter) for site in sites
    }
    with unhooked(model):
        wanted = run_with(model, example, scaled_sums(sites, scales))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.fill_(scales[name])
    try:
        got = run_with(model, example, {})
    finally:
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.fill_(1)
    if not _close(wanted, got):
        raise _failure(model, "what scaling the residual sums gives at λ ≠ 1", "something else")


def scaled_sums(
    sites: Sequence["SkipSite"], scales: Mapping[str, Tensor | float]
) -> dict[int, tuple[int, Scale]]:
    """What to do with which sum so that each site has its λ.

    Args:
        sites: the sites.
        scales: λ by name of the site.
    """
    return {
        number: (site.place.which, _Times(scales[site.name]))
        for site in sites
        if site.name in scales
        for number in site.sums
    }


class _Times:
    def __init__(self, scale: Tensor | float) -> None:
        self.scale = scale

    def __call__(self, residual: Tensor) -> Tensor:
        return residual * self.scale


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


def _identical(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(one, other, strict=True)
    )


def _close(wanted: list[Tensor], got: list[Tensor]) -> bool:
    for one, other in zip(wanted, got, strict=True):
        if one.shape != other.shape:
            return False
        tolerance = torch.finfo(one.dtype).eps ** 0.5
        if (one - other).double().norm() > tolerance * one.double().norm():
            return False
    return True


def _failure(model: nn.Module, wanted: str, got: str) -> SkipError:
    return SkipError(
        f"λ-skips of {type(model).__name__}",
        wanted=wanted,
        got=got,
        fix="This model uses its residuals in a way that hooks cannot follow; it was left as it was. Choose "
        "other `sites`, or write λ into its blocks.",
    )
