"""Remove heads from attention layers: make linear layers smaller, and change the counts that the code reads.

Tensors and caches do not contain removed heads.
"""

from typing import Any, Literal

from pydantic import BaseModel
from torch import nn

from rankwise._internals.forward import Change
from rankwise.compression.width_modules import (
    Runs,
    channels_of,
    find_module,
    linear_of,
    trained_like,
    weights_of,
)

RECORD = "_removed_heads"
"""Name of the attribute that keeps the `RemovedHeads` record of an attention layer."""


class CutLinear(BaseModel, extra="forbid"):
    """Record of a linear layer with fewer inputs or outputs."""

    module: str
    side: Literal["in", "out"]
    size: int
    """Number of input or output channels (see `side`) before heads were removed."""
    runs: Runs
    """Remaining channels, as (first, count)."""


class RemovedHeads(BaseModel, extra="forbid"):
    """Record of an attention layer with fewer heads."""

    kind: Literal["heads"] = "heads"
    module: str
    cuts: list[CutLinear]
    sizes: dict[str, int]
    """New values of the layer's attributes that depend on the number of heads."""
    config: dict[str, int]
    """New values of configuration fields for this layer. The model's own configuration does not change."""


class LayerConfig:
    """Configuration of one layer: it has its own values of some fields, and reads others from the model's."""

    def __init__(self, config: Any, fields: dict[str, int]) -> None:
        self._of_model = config
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_of_model":  # `copy` and `pickle` ask before `__init__` has run
            raise AttributeError(name)
        return getattr(self._of_model, name)


def build(model: nn.Module, *changes: RemovedHeads) -> Change:
    """Return the change that records describe: smaller layers with the remaining weights, and head counts."""
    modules: dict[str, nn.Module] = {}
    attributes: dict[str, dict[str, Any]] = {}
    for change in changes:
        for cut in change.cuts:
            modules[cut.module] = cut_linear(modules.get(cut.module, find_module(model, cut.module)), cut)
        attributes[change.module] = {**change.sizes, RECORD: change}
        if change.config:
            attributes[change.module]["config"] = LayerConfig(
                find_module(model, change.module).config, change.config
            )
    return Change(model, modules, attributes)


def cut_linear(module: nn.Module, cut: CutLinear) -> nn.Module:
    """Return a smaller layer. Raise `CompressionError` if the layer does not have the recorded size."""
    axis, expected = 0 if cut.side == "out" else 1, f"a linear layer with {cut.size} channels ({cut.side})"
    weight, bias = weights_of(cut.module, module, expected, lambda size: size[axis] == cut.size)
    kept = channels_of(cut.runs)
    small = linear_of(weight[:, kept], bias) if axis else linear_of(weight, bias, kept)
    trained: nn.Module = trained_like(module, small)
    return trained
