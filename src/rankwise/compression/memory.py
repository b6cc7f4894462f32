"""Where memory ran out: the layer at which it did."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rankwise.errors import CompressionError


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a CPU or on an accelerator.

    Args:
        error: any.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


@contextmanager
def naming_layer(name: str) -> Iterator[None]:
    """Where memory is short, say at which layer. The model is still as it was.

    Args:
        name: of the layer.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise CompressionError(
            f"attention layer {name!r}",
            expected="memory for its attention matrices",
            got=_said(error),
            fix="Give fewer or shorter sequences, or smaller batches; the model is unchanged.",
        ) from error


def no_memory(model: nn.Module, error: BaseException, under_way: str) -> CompressionError:
    """The error where memory ran out while the model ran.

    Args:
        model: the model, with all changes taken back.
        error: what was raised; the innermost module that was running is told from its frames.
        under_way: what was done then.
    """
    names = {id(module): name for name, module in model.named_modules() if name}
    running = [
        names[id(frame.f_locals.get("self"))]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if id(frame.f_locals.get("self")) in names
    ]
    subject = f"layer {running[-1]!r}" if running else f"model {type(model).__name__}"
    return CompressionError(
        subject,
        expected=f"memory for {under_way or 'a batch'}",
        got=_said(error),
        fix="Give fewer or shorter sequences, or smaller batches; the model is unchanged.",
    )


def _said(error: BaseException) -> str:
    return (str(error).splitlines() or ["out of memory"])[0]
