"""Restore buffers and merged weights after an audit during training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rankwise._internals.forward import overrides_train
from rankwise._internals.torch_private import changes_in_place, preserve_registered_buffers


@contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Restore which buffers a model has and their values.

    Values are written only if torch counted a change: a write would spoil a backward pass that still needs
    the buffer. Cost: a copy of the buffers.
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
    """Restore weights that layers merge for evaluation, bit for bit: w + BA − BA is w up to rounding.

    Only modules in training mode with a ``train`` of their own are copied, and only their own parameters.
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
                weight.data.copy_(copy)  # past autograd, as layers merge: a backward pass may still need it


def _changes(buffer: Tensor) -> int:
    """Return how often a buffer was written; torch neither counts nor allows it in inference mode."""
    return 0 if buffer.is_inference() else int(changes_in_place(buffer))
