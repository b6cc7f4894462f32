"""Everything of a model that a measurement must leave alone, as values that can be compared."""

from typing import Any

import torch
from torch import nn


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Bytes, versions and gradients of parameters and buffers, modes, hooks, and the random state."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    hooks = [
        (name, key, [id(hook) for hook in value.values()])
        for name, module in model.named_modules()
        for key, value in sorted(vars(module).items())
        if key.endswith("hooks") and hasattr(value, "values")
    ]
    return {
        "bytes": {
            name: one.detach().contiguous().view(torch.uint8).numpy().tobytes()
            for name, one in tensors.items()
        },
        "places": {name: (id(one), one.data_ptr(), one.requires_grad) for name, one in tensors.items()},
        "gradients": {name: None if one.grad is None else one.grad.clone() for name, one in tensors.items()},
        "modes": [(name, module.training) for name, module in model.named_modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": hooks,
        "random": torch.get_rng_state().numpy().tobytes(),
    }
