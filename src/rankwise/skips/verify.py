"""Verify added λ-skips: raise `SkipError` if the model with hooks differs from the model with scaled sums."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from rankwise._internals.batches import Batch
from rankwise._internals.linalg import as_float64
from rankwise.errors import SkipError
from rankwise.skips.hook_places import SkipPlace
from rankwise.skips.observe import scaled_sum, without_skips
from rankwise.skips.residual_sums import SumName, run_with


def verify(model: nn.Module, example: Batch, places: Sequence[SkipPlace], every: Sequence[SkipPlace]) -> None:
    """Raise `SkipError` if a model with λ-skips at some places does not compute λ·x + f(x) on an example.

    At λ = 1, outputs must be bit-identical to the original model. At λ from 0.6 to 0.9, different per site,
    every sum must equal the scaled sum (`SumCheck`), and outputs must agree up to a relative error of √ε
    (ε of the dtype). Each compared sum is replaced by the scaled sum, so that rounding errors do not add up.
    """
    scales = {place.name: 0.9 - 0.3 * i / len(places) for i, place in enumerate(places)}
    with without_skips(model):
        plain = run_with(model, example, {})
    try:
        with _filled(model, places, dict.fromkeys(scales, 1.0)):
            changed = run_with(model, example, {})
    except RuntimeError as error:
        raise _failure(model, "a forward pass at λ = 1", f"{type(error).__name__}: {error}") from error
    if len(plain) != len(changed) or not all(map(torch.equal, plain, changed)):
        raise _failure(model, "outputs that λ = 1 does not change", "others")
    checks = [SumCheck(place, scales.get(place.name, 1.0)) for place in every]
    with without_skips(model):
        exact = {name: partial(check.keep, name) for check in checks for name in check.place.sums}
        wanted = run_with(model, example, exact)
    with _filled(model, places, scales):
        taken = {name: partial(check.at_sum, name) for check in checks for name in check.place.sums}
        got = run_with(model, example, taken)
    wrong = [check.place.name for check in checks if not check.right]
    if wrong or len(wanted) != len(got) or not all(map(_close, wanted, got)):
        where = f" at {', '.join(wrong[:3])}" if wrong else ""
        raise _failure(model, "the scaled residual sums at λ ≠ 1", f"something else{where}")


class SumCheck:
    """Comparison of a sum in a model with hooks to λ·x + y, for the same x and y.

    The error e of a token is accepted if

        ‖e‖ ≤ ¼ % · |λ|·‖x‖ + 5 · ε/2 · ‖|x| + |y|‖.

    The first term allows an error of λ. The second term allows rounding errors: two for λ·x and its sum with
    y, three for x + y and its correction by (λ − 1)·x. Each is at most ε/2 of |x| + |y| for |λ| ≤ 1, with ε
    of the coarser dtype. An effect of λ below rounding passes.
    """

    def __init__(self, place: SkipPlace, scale: float) -> None:
        self.place, self._scale = place, scale
        self._scaled = partial(scaled_sum, place.which, scale, None)
        self._operands: dict[SumName, tuple[Tensor, Tensor]] = {}
        self._agreed: set[SumName] = set()

    @property
    def right(self) -> bool:
        """True if every sum of the pass without hooks agreed with the pass with hooks."""
        return self._agreed == self._operands.keys()

    def keep(self, name: SumName, first: Tensor, other: Tensor) -> Tensor:
        """In the pass without hooks, store the operands of a sum, and return the scaled sum."""
        self._operands[name] = (first.detach().clone(), other.detach().clone())
        return self._scaled(first, other)

    def at_sum(self, name: SumName, first: Tensor, other: Tensor) -> Tensor:
        """In the pass with hooks, compare a sum to the scaled sum, and return the scaled sum."""
        got = first + other
        if name not in self._operands:  # the pass without hooks had no such sum: compare outputs only
            return got
        operands = self._operands[name]
        wanted = self._scaled(*operands)
        if wanted.shape == got.shape:
            sizes = [as_float64(value).abs() for value in operands]
            eps = max(torch.finfo(value.dtype).eps for value in operands)
            rounding = 2.5 * eps * (sizes[0] + sizes[1]).norm(dim=-1)
            allowed = 0.0025 * self._scale * sizes[self.place.which].norm(dim=-1) + rounding
            if bool((_difference(wanted, got.detach()).norm(dim=-1) <= allowed).all()):
                self._agreed.add(name)
        return wanted


@contextmanager
def _filled(model: nn.Module, places: Sequence[SkipPlace], scales: dict[str, float]) -> Iterator[None]:
    """Context manager in which λ of each place has a given value."""
    modules = [model.get_submodule(place.module) for place in places]
    pairs = zip(modules, places, strict=True)
    parameters = [module.get_parameter(place.parameter) for module, place in pairs]
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        for parameter, place in zip(parameters, places, strict=True):
            parameter.data.fill_(scales[place.name])
        yield
    finally:
        for parameter, values in zip(parameters, before, strict=True):
            parameter.data.copy_(values)


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
