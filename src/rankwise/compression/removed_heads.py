"""Attention layers with fewer heads: smaller linear layers, and the sizes that the layer's own code reads.

Removed heads leave the tensors: attention computes fewer of them, and caches hold fewer. Where no head of a
layer is left, a head of zeros stands in its place, which no weights make, so that masks, caches and the
layer's code go on as they were.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel
from torch import Tensor, nn

from rankwise._internals.forward import Change
from rankwise.compression.qk_modules import find_module, other_module
from rankwise.tracing.projections import linear_parts

RECORD = "_removed_heads"
"""Attribute of an attention layer from which heads were removed: its `RemovedHeads`."""


class CutLinear(BaseModel, extra="forbid"):
    """A linear layer with fewer inputs or outputs."""

    module: str
    side: Literal["in", "out"]
    size: int
    """Channels on that side before."""
    runs: list[tuple[int, int]]
    """Channels that are left, as (first, how many)."""
    slot: int
    """Channels of the head of zeros where none are left; 0 elsewhere."""


class RemovedHeads(BaseModel, extra="forbid"):
    """An attention layer with fewer heads."""

    kind: Literal["heads"] = "heads"
    module: str
    cuts: list[CutLinear]
    sizes: dict[str, int]
    """Attributes of the layer that its code reads."""
    config: dict[str, int]
    """Fields of the configuration that its code reads: the layer sees them changed, the model does not."""


def renamed(change: RemovedHeads, module: str) -> RemovedHeads:
    """The same change where the attention layer has another name: inside another model, or out of one.

    Args:
        change: the change.
        module: the name of the attention layer now.
    """
    old, before, after = change.module, "", ""
    if old.endswith(module):
        before = old[: len(old) - len(module)]
    elif module.endswith(old):
        after = module[: len(module) - len(old)]
    cuts = [cut.model_copy(update={"module": after + cut.module.removeprefix(before)}) for cut in change.cuts]
    return change.model_copy(update={"module": module, "cuts": cuts})


class EmptyLinear(nn.Module):
    """A linear layer none of whose inputs, or outputs, are left: its bias, or zeros.

    Args:
        in_features: of what it is given.
        out_features: of what it gives.
        bias: whether there is one.
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool, **options: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features, **options)) if bias else None)

    @property
    def weight(self) -> Float[Tensor, "0"]:
        """No numbers: what initializes a family's layers by name finds something to fill."""
        return torch.empty(0)

    def forward(self, tokens: Float[Tensor, "... D"]) -> Float[Tensor, "... O"]:
        """The same for every token."""
        zeros = tokens.new_zeros(*tokens.shape[:-1], self.out_features)
        return zeros if self.bias is None else zeros + self.bias

    def extra_repr(self) -> str:
        """Sizes, as `nn.Linear` shows them."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


class OwnSizes:
    """A configuration that one layer reads, with fields of its own; all others are those of the model's.

    Args:
        config: of the model.
        fields: what the layer reads in the place of the model's.
    """

    def __init__(self, config: Any, fields: dict[str, int]) -> None:
        self._of_model = config
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_of_model":
            raise AttributeError(name)
        return getattr(self._of_model, name)


def removed_heads_of(module: nn.Module) -> RemovedHeads | None:
    """What was removed from an attention layer.

    Args:
        module: the layer.
    """
    return vars(module).get(RECORD)


def build(model: nn.Module, changes: Sequence[RemovedHeads]) -> Change:
    """Build the change that records describe: smaller layers with the remaining weights, and sizes."""
    modules: dict[str, nn.Module] = {}
    attributes: dict[str, dict[str, Any]] = {}
    for change in changes:
        for cut in change.cuts:
            modules[cut.module] = cut_linear(modules.get(cut.module, find_module(model, cut.module)), cut)
        own = attributes[change.module] = {**change.sizes, RECORD: change}
        if change.config:
            own["config"] = OwnSizes(find_module(model, change.module).config, change.config)
    return Change(model, modules, attributes)


def cut_linear(module: nn.Module, cut: CutLinear) -> nn.Module:
    """A smaller layer of the same class, with the weights that are left.

    Args:
        module: `nn.Linear` or ``Conv1D``.
        cut: what is left.

    Raises:
        CompressionError: if the layer has another size.
    """
    parts = linear_parts(module)
    if parts is None or parts[0].shape[0 if cut.side == "out" else 1] != cut.size:
        raise other_module(cut.module, f"a linear layer with {cut.size} channels ({cut.side})", module)
    weight, bias = parts[0].detach(), None if parts[1] is None else parts[1].detach()
    options: Any = {"device": weight.device, "dtype": weight.dtype}
    outputs, inputs = weight.shape
    small: Any
    if not cut.runs:
        inputs, outputs = (inputs, cut.slot) if cut.side == "out" else (cut.slot, outputs)
        bias = bias if cut.side == "in" else None
        small = EmptyLinear(inputs, outputs, bias is not None, **options)
    else:
        places = torch.cat([torch.arange(first, first + count) for first, count in cut.runs])
        places = places.to(weight.device)
        weight = weight.index_select(0 if cut.side == "out" else 1, places)
        bias = bias.index_select(0, places) if bias is not None and cut.side == "out" else bias
        small = _like(module, weight, bias is not None, options)
        with torch.no_grad():
            linear_parts(small)[0].copy_(weight)  # type: ignore[index]
    if bias is not None:
        with torch.no_grad():
            small.bias.copy_(bias)
    small.requires_grad_(any(parameter.requires_grad for parameter in module.parameters()))
    trained: nn.Module = small.train(module.training)
    return trained


def _like(module: nn.Module, weight: Tensor, bias: bool, options: dict[str, Any]) -> nn.Module:
    if isinstance(module, nn.Linear):
        return nn.Linear(weight.shape[1], weight.shape[0], bias, **options)
    small: nn.Module = type(module)(*weight.shape).to(**options)  # Conv1D, with a bias
    return small
