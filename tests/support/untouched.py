"""Check that code leaves a model, and the random states of torch and NumPy, exactly unchanged."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module, but: str = "\0") -> Iterator[None]:
    """Fail if the block changes weights, buffers, gradients, hooks, modes, attributes or random states.

    Tensors whose names end with `but` may change. An error that leaves the block is not followed by a check:
    put `pytest.raises` inside.
    """
    before = state_of(model, but)
    yield
    after = state_of(model, but)
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    assert not changed, f"the block changed {', '.join(changed)}"


def state_of(model: nn.Module, but: str = "\0") -> dict[str, Any]:
    """Return values to compare: one per tensor and module of a model, and per random generator."""
    state: dict[str, Any] = {  # without Python's generator, from which the type checks of the tests draw
        "torch's random state": bytes_of(torch.get_rng_state()),
        "NumPy's random state": repr(np.random.get_state(legacy=False)),
    }
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if not name.endswith(but):
            grad = None if tensor.grad is None else bytes_of(tensor.grad)
            state[name] = id(tensor), tensor.data_ptr(), tensor.requires_grad, grad, bytes_of(tensor)
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            state[f"attribute {key!r} of module {name!r}"] = _value_of(value)
    return state


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor, which tell −0 from 0 and compare NaN."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _value_of(value: Any) -> Any:
    """Return an attribute for comparison: identities of hooks, parameters and modules, plain numbers."""
    if isinstance(value, dict):  # hooks are keyed by numbers that no later hook has again
        return [(key, id(one)) for key, one in value.items()]
    return value if isinstance(value, bool | int | float | str | None) else id(value)
