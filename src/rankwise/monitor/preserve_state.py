"""Context managers that restore buffers and merged weights after an audit during training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rankwise._internals.forward import overrides_train
from rankwise._internals.torch_private import changes_in_place, preserve_registered_buffers


@contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the set of buffers of a model, and their values.

    Only changed buffers are written, because a write invalidates a pending backward pass that uses the
    buffer. Cost: a copy of the buffers.
    """
    before = [(buffer, _changes(buffer), buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with preserve_registered_buffers(model):
            yield
    finally:
        for buffer, changes, copy in before:
            if _changes(buffer) != changes:
                with torch.no_grad():
                    buffer.copy_(copy)


@contextmanager
def preserve_merged_weights(model: nn.Module) -> Iterator[None]:
    """Context manager that restores weights that layers merge for evaluation (LoRA).

    Unmerging would leave rounding errors in the weights. Only direct parameters of modules in training mode
    that override ``train`` are copied.
    """
    before = [
        (weight, weight.detach().clone())
        for module in model.modules()
        if module.training and overrides_train(module)
        for weight in module.parameters(recurse=False)
        if not weight.is_meta
    ]
    try:
        yield
    finally:
        for weight, copy in before:
            if not torch.equal(weight, copy):
                weight.data.copy_(copy)  # unseen by autograd: a pending backward pass may use the weight


def _changes(buffer: Tensor) -> int:
    """Return the number of writes to a buffer; 0 for an inference tensor, which torch does not count."""
    return 0 if buffer.is_inference() else int(changes_in_place(buffer))
