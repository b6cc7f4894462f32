"""Verify added λ-skips: raise if the model with hooks differs from the model with scaled sums."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.forward import AddedHook, Batch, Change
from rankwise._internals.linalg import as_float64
from rankwise.errors import SkipError
from rankwise.skips.find import SumName, run_with
from rankwise.skips.hooks import picked, with_value
from rankwise.skips.locate import SkipSite
from rankwise.skips.observe import scaled_sum, without_skips
from rankwise.tracing.module_calls import holds


def verify(model: nn.Module, example: Batch, sites: Sequence[SkipSite], found: Sequence[SkipSite]) -> None:
    """Raise if a model with λ-skips does not compute λ·x + f(x) on an example.

    At λ = 1, outputs must be bit-identical to the original model. At λ from 0.6 to 0.9, different per site,
    every sum must equal the scaled sum (`SumCheck`), and outputs must agree up to a relative error of √ε
    (ε of the dtype). Each compared sum is then replaced by the scaled sum, so that rounding does not add up.
    """
    with without_skips(model):
        plain = run_with(model, example, {})
    try:
        changed = run_with(model, example, {})
    except RuntimeError as error:
        raise _failure(model, "a forward pass at λ = 1", f"{type(error).__name__}: {error}") from error
    if len(plain) != len(changed) or not all(map(torch.equal, plain, changed)):
        raise _failure(model, "outputs that λ = 1 does not change", "others")
    scales = {site.name: 0.9 - 0.3 * at / len(sites) for at, site in enumerate(sites)}
    checks = [SumCheck(site, scales.get(site.name, 1.0)) for site in found]
    with without_skips(model):
        exact = {name: partial(check.keep, name) for check in checks for name in check.site.sums}
        wanted = run_with(model, example, exact)
    try:
        _fill(model, sites, scales)
        hooks = [AddedHook(check.site.write.module, "after", check.at_return) for check in checks]
        with Change(model, hooks=hooks):
            taken = {name: partial(check.at_sum, name) for check in checks for name in check.site.sums}
            got = run_with(model, example, taken)
    finally:
        _fill(model, sites, dict.fromkeys(scales, 1.0))
    wrong = [check.site.name for check in checks if not check.right]
    if wrong or len(wanted) != len(got) or not all(map(_close, wanted, got)):
        where = f" at {', '.join(wrong[:3])}" if wrong else ""
        raise _failure(model, "the scaled residual sums at λ ≠ 1", f"something else{where}")


class SumCheck:
    """Compare a sum of a model with hooks to λ·x + y, for the same x and y.

    If a hook corrects the output of the module around the sum, the output is compared in place of the sum.
    The error e of a token is accepted if

        ‖e‖ ≤ ¼ % · |λ|·‖x‖ + 5 · ε/2 · ‖|x| + |y|‖.

    The first term allows an error of λ. The second term allows rounding errors: two for λ·x and its sum with
    y, three for x + y and its correction by (λ − 1)·x. Each is at most ε/2 of |x| + |y| for |λ| ≤ 1, with ε
    of the coarser dtype. An effect of λ below rounding passes.
    """

    def __init__(self, site: SkipSite, scale: float) -> None:
        self.site, self._scale = site, scale
        self._scaled = partial(scaled_sum, site.which, scale, None)
        self._operands: dict[SumName, tuple[Tensor, Tensor]] = {}
        self._agreed: set[SumName] = set()
        self._due: SumName | None = None
        # a hook corrects the output of a module around the sum, after the sum
        self._corrected_later = site.write.argument is None and holds(site.write.module, site.block)

    @property
    def right(self) -> bool:
        """True if every sum of the pass without hooks agreed with the pass with hooks."""
        return self._agreed == self._operands.keys()

    def keep(self, name: SumName, first: Tensor, other: Tensor) -> Tensor:
        """Store the operands of a sum, and return the scaled sum; for the pass without hooks."""
        self._operands[name] = (first.detach().clone(), other.detach().clone())
        return self._scaled(first, other)

    def at_sum(self, name: SumName, first: Tensor, other: Tensor) -> Tensor:
        """Return a sum of the pass with hooks; it is compared now, or when a hook has corrected it."""
        if self._corrected_later:
            self._due = name
            return first + other
        return self._compared(name, first + other)

    def at_return(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Compare a sum in the output of a module, after the λ hook has corrected the output."""
        name, self._due, key = self._due, None, self.site.write.key
        return None if name is None else with_value(output, key, self._compared(name, picked(output, key)))

    def _compared(self, name: SumName, got: Tensor) -> Tensor:
        if name not in self._operands:  # the pass has other sums: only outputs are compared
            return got
        operands = self._operands[name]
        wanted = self._scaled(*operands)
        if wanted.shape == got.shape:
            sizes = [as_float64(value).abs() for value in operands]
            eps = max(torch.finfo(value.dtype).eps for value in operands)
            rounding = 2.5 * eps * (sizes[0] + sizes[1]).norm(dim=-1)
            allowed = 0.0025 * self._scale * sizes[self.site.which].norm(dim=-1) + rounding
            if bool((_difference(wanted, got.detach()).norm(dim=-1) <= allowed).all()):
                self._agreed.add(name)
        return wanted


def _fill(model: nn.Module, sites: Sequence[SkipSite], scales: dict[str, float]) -> None:
    for site in sites:
        model.get_submodule(site.write.module).get_parameter(site.parameter).data.fill_(scales[site.name])


def _close(wanted: Tensor, got: Tensor) -> bool:
    if wanted.shape != got.shape:
        return False
    size = as_float64(wanted).nan_to_num(0.0, 0.0, 0.0).norm()
    return bool(_difference(wanted, got).norm() <= torch.finfo(wanted.dtype).eps ** 0.5 * size)


def _difference(wanted: Tensor, got: Tensor) -> Tensor:
    return as_float64(torch.where(wanted == got, 0, wanted - got))  # equal infinities are not an error


def _failure(model: nn.Module, wanted: str, got: str) -> SkipError:
    return SkipError(
        f"λ-skips of {type(model).__name__}", expected=wanted, got=got,
        fix="This model uses its residuals in a way that hooks cannot follow; it is unchanged. Choose "
        "other `sites`, or write λ into its blocks.",
    )  # fmt: skip
