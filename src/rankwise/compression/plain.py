"""Changes after which the class of a model and its configuration alone describe the model.

Such a model is saved as a plain checkpoint, which loads anywhere.
"""

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from rankwise._internals.forward import Change
from rankwise.compression.save import PLAIN, new_of_class, pretrained_models, rebuilt, structure_of
from rankwise.compression.trials import at_once_and_in_halves, relative_error
from rankwise.errors import CompressionError


def change_configs(
    model: nn.Module,
    layers: Iterable[str],
    edit: Callable[[str, Any], None],
    modules: dict[str, nn.Module] | None = None,
    others: Mapping[str, dict[str, Any]] | None = None,
) -> Change:
    """Return the change that replaces the configurations read by some layers with edited copies.

    `edit` gets the name of a module and its configuration: once for each configuration that a layer reads,
    and for each outermost model, whose configuration is saved. T5 has a further copy for each stack. The
    change also replaces `modules` and sets the attributes `others`.
    """
    configs = {name: module.config for name, module in model.named_modules() if hasattr(module, "config")}
    copies: dict[int, Any] = {}  # modules that share a configuration share its copy
    new = {name: copy.deepcopy(config, copies) for name, config in configs.items()}
    edited = [*_outermost(model), *(name for name in layers if name in new)]
    for name in {id(new[name]): name for name in reversed(edited)}.values():
        edit(name, new[name])
    attributes: dict[str, dict[str, Any]] = {name: {"config": config} for name, config in new.items()}
    attributes.setdefault("", {})[PLAIN] = True
    for name, values in (others or {}).items():
        attributes.setdefault(name, {}).update(values)
    return Change(model, modules or {}, attributes)


def check_plain(model: nn.Module, batch: Any) -> None:
    """Raise `CompressionError` unless a new model of the same class and configuration equals a changed model.

    The new model gets the weights and buffers of the changed model, without a copy. It must have the same
    names and shapes, and return the same outputs, also with a cache.
    """
    reason = "" if _outermost(model) else f"{type(model).__name__}, which no configuration describes"
    try:
        for name in _outermost(model):
            new = _rebuilt_from_config(model.get_submodule(name))
            with Change(model, modules={name: new} if name else {}):
                again = at_once_and_in_halves(model if name else new, batch)
            for output, before in zip(again, at_once_and_in_halves(model, batch), strict=True):
                # The same code reads the same memory, so that only atomic sums on a GPU change an output.
                if not (off := relative_error(output, before)) <= torch.finfo(before.dtype).eps:
                    reason = f"outputs that are off by {off:.1e}"
    except Exception as error:  # configurations raise errors of many classes, some in two lines
        reason = " ".join(str(error).split())
    if reason:
        raise CompressionError(
            f"model {type(model).__name__}",
            expected="a model that its class builds from the changed configuration",
            got=reason,
            fix="The model is unchanged. Leave out the parts that write plain checkpoints.",
        )


def _outermost(model: nn.Module) -> list[str]:
    """Return the names of the outermost models of transformers in a module."""
    outermost = {id(inner) for inner in pretrained_models(model)}
    return [name for name, module in model.named_modules() if id(module) in outermost]


def _rebuilt_from_config(model: nn.Module) -> nn.Module:
    """Return a new model of the class and the saved configuration of a model, which shares its weights.

    Raise `ValueError` if names or shapes differ.
    """
    with Change(model, attributes={"": {"config": _as_saved(model.config)}}):
        new = new_of_class(model)
    with torch.device("meta"), rebuilt(new, structure_of(model)):
        pass
    there, built = dict(model.named_modules()), dict(new.named_modules())
    if differing := there.keys() ^ built.keys():
        raise ValueError(f"its class builds other modules, such as {min(differing)!r}")
    for name, module in there.items():
        tensors, expected = (
            {**dict(x.named_parameters(recurse=False)), **dict(x.named_buffers(recurse=False))}
            for x in (module, built[name])
        )
        for key in tensors | expected:
            shape, other = (tuple(x[key].shape) if key in x else "nothing" for x in (tensors, expected))
            if shape != other:
                raise ValueError(f"its class builds {f'{name}.{key}'!r} with {other} instead of {shape}")
            setattr(built[name], key, tensors[key])
    return new.eval()


def _as_saved(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration that its file describes: fields that a class derives from others are new."""
    new = type(config).from_dict(json.loads(config.to_json_string()))

    def set_kernels(new: PreTrainedConfig, old: PreTrainedConfig) -> None:  # files do not have these fields
        vars(new).update(
            {name: value for name, value in vars(old).items() if name.endswith("implementation_internal")}
        )
        for name in old.sub_configs:
            if isinstance(inner := getattr(old, name, None), PreTrainedConfig):
                set_kernels(getattr(new, name), inner)

    set_kernels(new, config)
    return new
