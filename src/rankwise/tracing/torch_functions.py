"""Sets of torch functions that a capture and the search for skip connections recognize."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Any]


def named_functions(home: Any, names: str) -> set[Function]:
    """Return the functions of a module or class whose names are listed in a string."""
    return {getattr(home, name) for name in names.split()}


SUMS = {torch.add, *named_functions(Tensor, "add add_ __add__ __radd__ __iadd__")}
DIFFERENCES = {torch.sub, *named_functions(Tensor, "sub sub_ __isub__ __sub__")}
PRODUCTS = {*named_functions(torch, "matmul bmm mm"), *named_functions(Tensor, "matmul __matmul__ bmm mm")}
ADDED_PRODUCTS = {torch.baddbmm, *named_functions(Tensor, "baddbmm baddbmm_")}
"""Functions that compute scores as bias + Q Kᵀ in one call."""
LINEAR_LAYERS = {torch.addmm, *named_functions(F, "linear conv1d conv2d conv3d")}
STARTS_ANEW = LINEAR_LAYERS | named_functions(F, "layer_norm rms_norm group_norm batch_norm embedding")
"""Layers with parameters. Their output does not count as scores, unless they only mix heads of scores."""
LAST_AXIS = named_functions(F, "linear layer_norm rms_norm")
"""Layers with parameters that act on the last axis."""
SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax}
FILLS = {torch.masked_fill, *named_functions(Tensor, "masked_fill masked_fill_")}
CUTS = {Tensor.__getitem__}
MOVES_AXES = {
    *named_functions(torch, "transpose permute swapaxes movedim"),
    *named_functions(Tensor, "transpose permute swapaxes movedim"),
    Tensor.mT.__get__,  # type: ignore[attr-defined]
    Tensor.T.__get__,  # type: ignore[attr-defined]
}
KEEPS_VALUES = {
    F.dropout,
    *named_functions(torch, "dropout clone reshape flatten unsqueeze squeeze"),
    *named_functions(Tensor, "clone reshape flatten unsqueeze squeeze view unflatten contiguous detach"),
    *named_functions(Tensor, "to type type_as float half bfloat16 double"),
}
"""Casts, dropout and reshapes: their result still holds the weights of the softmax."""
