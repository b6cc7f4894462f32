"""Parameter groups for optimizers: weights with weight decay, and weights without weight decay."""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from rankwise.errors import in_range, instance_of

MATRIX_LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
"""Layers whose weights are matrices even if FSDP has flattened them."""

WEIGHT_NAME = re.compile("weight(?!_g$)|_proj$")
"""Pattern of the names of matrices: ``weight``, LSTM's ``weight_ih_l0``, and ``down_proj`` of experts. The
pattern excludes ``weight_g``, the row lengths of the old weight norm."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters in two groups for an optimizer: with and without weight decay.

    Matrices that multiply tokens get weight decay: weights of linear layers, convolutions, embeddings,
    recurrent layers, attention and experts, also if parametrized (as by weight norm). Other parameters get no
    weight decay: λ, scales, norms (with "Norm" in the class name), biases, temperatures, decay rates,
    matrices whose name has no ``weight`` and does not end in ``_proj``, and parameters marked
    ``_no_weight_decay``. A shared parameter is listed once.

    Args:
        weight_decay: weight decay of the first group, at least 0; it is 0 in the second group.

    Raises:
        InputError: if ``model`` is not a module, or ``weight_decay`` is negative or not a number.

    Examples:
        >>> import torch, rankwise as rw
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> [len(group["params"]) for group in rw.models.parameter_groups(model, 0.1)]
        [1, 3]
    """
    instance_of("`model`", model, nn.Module, "a torch.nn.Module", fix="Pass the model, not its parameters.")
    in_range("`weight_decay`", weight_decay, "[0, inf)", fix="Usual values are 0.01 and 0.1.")
    decayed = {
        id(weight)
        for module in model.modules()
        for name, weight in _named_tensors(module)
        if WEIGHT_NAME.search(name) and _is_matrix(module, weight)
    }
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for weight in model.parameters():
        if weight.requires_grad:
            groups[id(weight) not in decayed].append(weight)
    return [{"params": groups[0], "weight_decay": weight_decay}, {"params": groups[1], "weight_decay": 0.0}]


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the (name, parameter) pairs of a module, without its submodules.

    Also yield the parameters from which a parametrized tensor is computed, under the name of the tensor. Omit
    vectors among them, such as the row lengths of weight norm.
    """
    yield from module.named_parameters(recurse=False)
    if parametrize.is_parametrized(module):
        for name, sources in module.parametrizations.items():  # type: ignore[operator, union-attr]
            yield from (
                (name, source)
                for source in sources.parameters(recurse=False)
                if source.numel() > max(source.shape, default=0)  # no magnitudes of weight norm
            )


def _is_matrix(module: nn.Module, weight: nn.Parameter) -> bool:
    """Return True if a weight maps vectors to vectors, and is not marked to have no weight decay.

    Weights of norms only scale vectors, even if they have several axes.
    """
    if getattr(weight, "_no_weight_decay", False):
        return False
    return isinstance(module, MATRIX_LAYERS) or (weight.ndim > 1 and "Norm" not in type(module).__name__)
