"""What is put around a model to train it on many devices: copies, and weights gathered while they run."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rankwise._internals.torch_private import original_of
from rankwise.errors import CaptureError

COPIES = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def is_of(thing: object, package: str, name: str) -> bool:
    """Whether something is of a class of torch.distributed; False where that package is not imported.

    Args:
        thing: anything.
        package: below ``torch.distributed``.
        name: of the class.
    """
    kind = getattr(sys.modules.get(f"torch.distributed.{package}"), name, None)
    return kind is not None and isinstance(thing, kind)


def without_copies(model: Any) -> Any:
    """The model that DDP or `torch.nn.DataParallel` copies to each device; any other as it is.

    The wrapper hides what the model takes and how it is built, and waits for the other processes.

    Args:
        model: the model, or its wrapper, compiled or not.
    """
    inner = original_of(model)
    return inner.module if isinstance(inner, COPIES) else model


@contextmanager
def sharded_again(model: Any) -> Iterator[None]:
    """Give every process its share of FSDP2's weights back afterwards.

    A forward without a backward leaves the outermost weights gathered. An optimiser changes the shares alone:
    the next step would run with the weights before, and one made meanwhile would hold the gathered weights.

    Args:
        model: the model.

    Raises:
        CaptureError: if it is wrapped by FSDP1, which has no way to do so.
    """
    modules: list[Any] = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(is_of(module, "fsdp", "FullyShardedDataParallel") for module in modules):
        raise CaptureError(
            f"model {type(model).__name__}",
            expected="a model sharded by FSDP2, if it is sharded",
            got="one wrapped by FSDP1, which may go on to train with the weights gathered for the audit",
            fix="Shard it by `torch.distributed.fsdp.fully_shard` (accelerate: `fsdp_version: 2`), or audit "
            "its saved checkpoints.",
        )
    try:
        yield
    finally:
        for module in modules:
            if is_of(module, "fsdp", "FSDPModule"):
                module.reshard()
