"""What every part checks of the layers it found, before and while it does them."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from rankwise._internals.forward import device_of, first_sequences, to_device
from rankwise.compression.outputs import check_finite, main_output
from rankwise.errors import CompressionError

Layer = TypeVar("Layer")

LEAST_TOKENS = 0.5
"""Calibration tokens for each unit of width, below which they say too little to go on."""


def keep_sound(
    model: nn.Module,
    batch: Any,
    layers: list[Layer],
    same: Callable[[list[Layer], Any, Tensor, float], bool],
) -> list[Layer]:
    """Take the layers out of a list whose trial changes what the model gives; all are tried together first.

    Args:
        model: the model.
        batch: what it takes; two sequences of it are run.
        layers: in the order they run; those that fail are removed from it.
        same: whether the outputs stay with these layers on trial: of the layers, the short batch, the outputs
            before and the bound on their relative error, the root of the dtype's rounding.

    Returns:
        Those that failed.
    """
    short = to_device(first_sequences(batch, 2), device_of(model))
    before = main_output(model, short)
    check_finite(model, before)
    bound = torch.finfo(before.dtype).eps ** 0.5
    if not layers or same(layers, short, before, bound):
        return []
    failed = [layer for layer in layers if not same([layer], short, before, bound)]
    layers[:] = [layer for layer in layers if not any(layer is other for other in failed)]
    return failed


def check_some(model: nn.Module, layers: list[Any], reasons: dict[str, str], wanted: str, fix: str) -> None:
    """Refuse a model in which no layer is left, with the first reasons.

    Args:
        model: the model.
        layers: those that are left.
        reasons: why others are not, by name.
        wanted: what the part needs.
        fix: what to do instead.

    Raises:
        CompressionError: if there is none.
    """
    if layers:
        return
    said = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:2])
    raise CompressionError(
        f"model {type(model).__name__}", expected=wanted, got=said or "no such attention", fix=fix
    )


def no_finite_layer(broken: dict[str, str]) -> CompressionError:
    """The error where no layer has finite queries and keys.

    Args:
        broken: what is not finite, by the name of the layer.
    """
    name, reason = next(iter(broken.items()))
    return CompressionError(
        f"attention layer {name!r}",
        expected="finite queries and keys",
        got=reason,
        fix="Mend the weights, or use float32: `rankwise audit` shows where it begins.",
    )


def check_width(width: int | float | None, least: int) -> None:
    """Refuse a mean width that is no less than the present one.

    Args:
        width: asked for; None where something else is.
        least: the least present width.

    Raises:
        CompressionError: if it is too wide.
    """
    if width is not None and width >= least:
        raise CompressionError(
            "`width`",
            expected=f"a mean width below the present {least}",
            got=f"{width:g}",
            fix="Ask for less.",
        )


def check_moments(
    moments: Iterable[Float64[Tensor, "*G K K"]], kinds: str, tokens: int, width: int
) -> list[str]:
    """Raise if there are too few tokens for the widest latent or head; note second moments of lower rank."""
    if tokens < LEAST_TOKENS * width:
        raise CompressionError(
            "the calibration data",
            expected=f"at least {round(LEAST_TOKENS * width)} tokens for width {width}, better {10 * width}",
            got=f"{tokens}",
            fix="Give more text.",
        )
    ranks = [torch.linalg.matrix_rank(moment, hermitian=True) < moment.shape[-1] for moment in moments]
    singular = sum(int(below.sum()) for below in ranks)
    if not singular:
        return []
    return [
        f"{singular} second moments of {kinds} do not have full rank on {tokens} tokens: a ridge was added, "
        "and directions without data are dropped first. Use more text."
    ]
