"""What an audit leaves in a training as it was: random state and buffers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from rankwise.torch_internals import changes_in_place


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
    """Afterwards every buffer is the tensor it was, with the values it had; nothing else is put back.

    Cost: a copy of the buffers. Values are written back only where torch counted a change: a write would
    spoil a backward pass that still needs the buffer.

    Args:
        model: the model.
    """
    before = [
        (module, name, buffer, _changes(buffer), buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for module, name, buffer, changes, copy in before:
            if _changes(buffer) != changes:
                with torch.no_grad():
                    buffer.copy_(copy)
            if getattr(module, name, None) is not buffer:
                setattr(module, name, buffer)


def _changes(buffer: Tensor) -> int:
    """How often it was written to; torch does not count, nor allow, writes to tensors of inference mode."""
    return 0 if buffer.is_inference() else int(changes_in_place(buffer))
