"""Whether a request to compress can be met, before anything is run."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from torch import Tensor, nn

from rankwise._internals.forward import batch_size, map_tensors
from rankwise.compression.parts import parts
from rankwise.compression.structure import structure_of
from rankwise.errors import CompressionError, InputError, did_you_mean


def chosen_parts(names: Sequence[str]) -> list[str]:
    """Parts in the order they are done.

    Args:
        names: as the user gave them.

    Raises:
        CompressionError: if one is unknown, or there is none.
    """
    names = [names] if isinstance(names, str) else list(names)
    known = parts()
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise CompressionError(
            "`parts`",
            expected="names of parts",
            got=repr(wrong[0]) if wrong else "none",
            fix=did_you_mean(wrong[0] if wrong else "", known),
        )
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise CompressionError(
            "`parts`", expected="each part once", got=f"{twice[0]!r} twice", fix="Name each part once."
        )
    return [name for name in known if name in names]


def targets_of(
    names: str | Sequence[str],
    keep: float | int | Mapping[str, float | int] | None,
    tolerance: float | int | Mapping[str, float | int] | None,
) -> dict[str, tuple[float | int | None, float | int | None]]:
    """Return the share to keep or the tolerance of each part, in the order in which parts are done.

    Raises:
        CompressionError: if a part is unknown, or has two targets.
    """
    if not isinstance(keep, Mapping) and not isinstance(tolerance, Mapping):
        if keep is not None and tolerance is not None:
            raise CompressionError(
                "`compress`",
                expected="a share to keep or a tolerance",
                got="both",
                fix="Omit one of them, or pass mappings with different parts.",
            )
        return dict.fromkeys(chosen_parts(names), (keep, tolerance))
    for name, value in (("keep", keep), ("tolerance", tolerance)):
        if value is not None and not isinstance(value, Mapping):
            raise CompressionError(
                f"`{name}`",
                expected="a mapping of parts, like the other target",
                got=repr(value),
                fix='Name the parts: `{"heads": 0.9, "kv": 0.5}`.',
            )
    shares = dict(keep) if isinstance(keep, Mapping) else {}
    tolerances = dict(tolerance) if isinstance(tolerance, Mapping) else {}
    for name in shares.keys() & tolerances.keys():
        raise CompressionError(
            f"part {name!r}",
            expected="a share to keep or a tolerance",
            got="both",
            fix="Omit one of them.",
        )
    for name, value in {**shares, **tolerances}.items():
        if value is None:
            fix = "Omit a part that should not be compressed."
            raise CompressionError(f"part {name!r}", expected="a share or a tolerance", got="None", fix=fix)
    return {name: (shares.get(name), tolerances.get(name)) for name in chosen_parts([*shares, *tolerances])}


def check_untouched(model: nn.Module) -> None:
    """Refuse a model that is compressed already.

    Args:
        model: the model.
    """
    if structure_of(model).changes:
        raise CompressionError(
            f"model {type(model).__name__}",
            expected="a model that is not compressed yet",
            got="one that is",
            fix="Load the original, and compress it once to the budget you want.",
        )


def check_budget(keep: Any, tolerance: Any, calibrate: Any) -> None:
    """Refuse what is no number, or a number out of range.

    Args:
        keep: share to keep, or None.
        tolerance: nats, or None.
        calibrate: steps.
    """
    asked = [
        ("`keep`", "a share above 0 and below 1", keep, _real(keep) and 0 < keep < 1),
        ("`tolerance`", "nats above 0", tolerance, _real(tolerance) and 0 < tolerance < float("inf")),
    ]
    wrong = [(name, wanted, got) for name, wanted, got, good in asked if got is not None and not good]
    if isinstance(calibrate, bool) or not isinstance(calibrate, Integral) or int(calibrate) < 0:
        wrong.append(("`calibrate`", "0 or more steps, a whole number", calibrate))
    for name, wanted, got in wrong:
        raise CompressionError(name, expected=wanted, got=repr(got), fix="Mend the number.")


def _real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def listed_batches(batches: Iterable[Any], name: str) -> list[Any]:
    """Batches as a list.

    Args:
        batches: as the user gave them.
        name: how an error calls them.

    Raises:
        InputError: if it is one batch alone, or there is no sequence in it.
    """
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise InputError(
            f"`{name}`",
            expected="an iterable of batches",
            got=type(batches).__name__,
            fix="Put a single batch into a list: `[batch]`.",
        )
    data = list(batches)
    if not data or not sum(batch_size(batch) for batch in data):
        raise InputError(
            f"`{name}`", expected="a batch or more", got="none", fix="Give data the model takes."
        )
    return data


def every_other_sequence(batch: Any, first: int) -> Any:
    """A copy of every other sequence of a batch that lies batch first; None where there is none.

    Args:
        batch: the batch.
        first: 0 for the first, third, … sequence, 1 for the second, fourth, …
    """
    sequences = batch_size(batch)
    if sequences <= first:
        return None

    def copied(tensor: Tensor) -> Tensor:
        batched = tensor.dim() > 0 and tensor.shape[0] == sequences
        return (tensor[first::2] if batched else tensor).clone()

    return map_tensors(batch, copied)
