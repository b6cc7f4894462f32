"""Context manager that restores merged weights after an audit during training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rankwise._internals.forward import overrides_train


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
