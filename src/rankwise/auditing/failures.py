"""What an audit says when the model, its batches or a measure fail; what was measured before is kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rankwise._internals.forward import Batch, tensors_of
from rankwise.auditing.error_hints import fix_hint, label_error
from rankwise.auditing.result import Audit
from rankwise.auditing.statistics import AuditStatistics
from rankwise.errors import RankwiseError


class AuditError(RankwiseError):
    """The model or its batches failed while it was audited.

    ``audit`` holds the whole batches before; where the first failed, the layers it got through, or None.
    """

    def __init__(self, audit: Audit | None, subject: str, *, expected: str, got: str, fix: str) -> None:
        super().__init__(subject, expected=expected, got=got, fix=fix)
        self.audit = audit
        self.statistics: AuditStatistics | None = None
        """Statistics behind `audit`, with what records do not hold."""


@contextmanager
def measuring(name: str) -> Iterator[None]:
    """Say of a failure in here that it is none of the model.

    Args:
        name: of what is measured.

    Raises:
        RankwiseError: for any other exception.
    """
    try:
        yield
    except RankwiseError:
        raise
    except Exception as error:
        raise RankwiseError(
            f"measures of {name!r}",
            expected="numbers",
            got=f"{type(error).__name__}: {error}",
            fix="If memory ran out, use fewer tokens or a smaller batch.",
        ) from error


def batch_failed(
    error: Exception, model: nn.Module, number: int, batch: Any, kept: Audit | None
) -> Exception:
    """What to raise where a batch failed.

    Args:
        error: what was raised.
        model: the model.
        number: of the batch, from 1.
        batch: as the model was given it; None where it could not be had.
        kept: what was measured before, if anything.
    """
    if "meta tensor" in str(error) and any(weight.is_meta for weight in model.parameters()):
        return AuditError(
            kept,
            f"the model {type(model).__name__}",
            expected="weights that hold numbers",
            got="weights on the device meta",
            fix="Load them first, such as by `from_pretrained`.",
        )
    if isinstance(error, RankwiseError):
        return error if kept is None else _with(kept, error)
    wrong = label_error(model, batch, number, error)
    if wrong is not None:
        return _with(kept, wrong)
    subject, got = f"batch {number}", f"{type(error).__name__}: {error}"
    if batch is None:
        fix = "Iterate over the batches by themselves to see the whole traceback."
        return AuditError(kept, subject, expected="a batch", got=got, fix=fix)
    return AuditError(
        kept,
        subject,
        expected=f"a forward pass of {type(model).__name__} over {_described(batch)}",
        got=got,
        fix=fix_hint(model, batch, error),
    )


def step_failed(error: Exception, subject: str, wanted: str, whole: Audit) -> AuditError:
    """What to raise where a step after the batches failed.

    Args:
        error: what was raised.
        subject: the step.
        wanted: what it was to measure.
        whole: the audit without it.
    """
    if not isinstance(error, RankwiseError):
        error = RankwiseError(
            subject,
            expected=wanted,
            got=f"{type(error).__name__}: {error}",
            fix=f"Audit without {subject}, or with smaller batches if memory ran out.",
        )
    return _with(whole, error)


def _with(audit: Audit | None, error: RankwiseError) -> AuditError:
    return AuditError(audit, error.subject, expected=error.expected, got=error.got, fix=error.fix)


def _described(batch: Batch) -> str:
    tensors = tensors_of(batch)
    return (
        ", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors.items()) or type(batch).__name__
    )
