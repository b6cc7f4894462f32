"""What an audit leaves in a training as it was: random state, buffers, and weights that layers merge."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from rankwise._internals.forward import overrides_train
from rankwise._internals.torch_private import changes_in_place, preserve_registered_buffers


def random_state_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Afterwards torch draws the numbers that it would have drawn, on the CPU and the model's devices.

    Args:
        model: the model.
    """
    devices = {
        parameter.device for parameter in model.parameters() if parameter.device.type not in ("cpu", "meta")
    }
    kind = next(iter(devices)).type if devices else "cuda"
    return torch.random.fork_rng([device.index or 0 for device in devices], device_type=kind)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards the model has the buffers it had, those that were None as None, with the values they had.

    Cost: a copy of the buffers. Values are written back only where torch counted a change: a write would
    spoil a backward pass that still needs the buffer.

    Args:
        model: the model.
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
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards the weights of layers that merge them for evaluation have the bits they had.

    w + BA − BA is w but for its rounding. Only a module that has a ``train`` of its own and is in training
    mode is looked at, and only the parameters that are its own, not those of modules in it.

    Cost: a copy of these parameters.

    Args:
        model: the model.
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
    """How often it was written to; torch does not count, nor allow, writes to tensors of inference mode."""
    return 0 if buffer.is_inference() else int(changes_in_place(buffer))
