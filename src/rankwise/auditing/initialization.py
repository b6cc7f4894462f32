"""Copies of a model at initialization: same architecture, weights drawn again from random numbers."""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from rankwise._internals.forward import preserve_random_state
from rankwise._internals.torch_private import RESET, original_of
from rankwise.errors import RankwiseError, instance_of

RESET_METHODS = ("reset_parameters", RESET, "init_weights", "_init_weights", "initialize_weights")
"""Names of methods that draw the weights of a module, in PyTorch and in common model code."""
TRANSFORMERS_FLAG = "_is_hf_initialized"
"""Attribute that transformers sets on drawn or loaded modules and weights, which ``init_weights`` skips."""
BY_HAND = (
    "Give a function that builds the model at initialization: `factory=build` without arguments, or to an "
    "audit `at_init=build` of a seed."
)


class InitializationError(RankwiseError):
    """Raised if a copy of a model at initialization cannot be built."""


def reinitialized(
    model: nn.Module, seed: int = 0, factory: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """Return a copy of a model at initialization, on the same device, in the same dtypes and modes.

    A transformers model is built from its configuration. Any other module is copied, its weights are set to
    NaN, and the methods of its modules (such as `reset_parameters`, `init_weights`) draw new weights. A
    weight that is still NaN afterwards raises an error. Buffers keep their values unless these methods change
    them. Changes that ``__init__`` makes to drawn weights, as in some GPT-2 code, are not repeated.

    Cost: one more copy of the model. PyTorch's global random state is neither read nor changed.

    Args:
        model: any module with floating-point weights; the module is not changed.
        seed: random seed of the weights.
        factory: function without arguments that builds the model at initialization, for models that the
            default way cannot build. PyTorch's random state is seeded before the call.

    Raises:
        InitializationError: if no method draws a weight, the configuration cannot build the model, names or
            shapes of weights differ, or weights are quantized, offloaded or on several devices.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(3, 3)
        >>> initial = reinitialized(model, seed=1)
        >>> bool((initial.weight != model.weight).all()), initial.weight.shape == model.weight.shape
        (True, True)
    """
    if factory is None:
        _check_floating_point(model)
    with preserve_random_state(model):
        torch.manual_seed(seed)
        if factory is not None:
            initial = factory()
        elif _is_transformers(model):
            initial = _from_configuration(model)
        else:
            initial = _redrawn(model)
    _check_same_weights(model, initial)
    return _placed_like(model, initial)


@dataclass(frozen=True)
class AtInitSettings:
    """Settings of audits of copies of the model at initialization, on the same batches.

    Args:
        seeds: number of copies, with seeds 0, 1, …; each copy costs one audit. Use at least three: two seeds
            do not show how results vary.
        build: function that builds the model from a seed, for models that `reinitialized` cannot build.
    """

    seeds: int = 3
    build: Callable[[int], nn.Module] | None = None


def initial_copies(model: nn.Module, settings: AtInitSettings) -> Iterator[tuple[int, nn.Module]]:
    """Yield pairs (seed, copy at initialization). No reference is kept, so the caller can free each copy."""
    model, build = original_of(model), settings.build
    for seed in range(settings.seeds):
        yield seed, reinitialized(model, seed, None if build is None else partial(build, seed))


def built_words(model: nn.Module, settings: AtInitSettings) -> str:
    """Return a text that describes how `initial_copies` builds copies."""
    if settings.build is not None:
        return "by the function given"
    if _is_transformers(original_of(model)):
        return "from its configuration"
    return "by the methods of its modules that draw weights"


def _check_floating_point(model: nn.Module) -> None:
    """Raise `InitializationError` if weights are not floating-point numbers in the memory of one device."""
    for name, weight in model.named_parameters():
        if not (weight.is_floating_point() or weight.is_complex()):
            raise _not_drawn(model, [name], f"{weight.dtype} weights, which no method draws")
    devices = getattr(model, "hf_device_map", None) or {}
    reasons = {
        "quantized weights": bool(getattr(model, "is_quantized", False)),
        "weights on more than one device": len(set(map(str, devices.values()))) > 1,
        "weights that are not in memory": any(parameter.is_meta for parameter in model.parameters()),
    }
    expected = "a model with floating-point weights in the memory of one device"
    fix = "Load it without quantization or offloading, or give a function that builds the model elsewhere."
    for reason, holds in reasons.items():
        if holds:
            raise _failed(model, expected, reason, fix)


def _is_transformers(model: nn.Module) -> bool:
    """Return True for a transformers model, without importing transformers."""
    return any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__)


def _from_configuration(model: nn.Module) -> nn.Module:
    try:
        return type(model)(copy.deepcopy(model.config))
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise _failed(model, "a configuration that builds the model at initialization", got) from error


def _redrawn(model: nn.Module) -> nn.Module:
    try:
        initial = copy.deepcopy(model)
    except Exception as error:  # for example, a model wrapped in FSDP cannot be copied
        raise _failed(model, "a model that can be copied", f"{type(error).__name__}: {error}") from error
    with torch.no_grad():
        for parameter in initial.parameters():
            parameter.fill_(torch.nan)
            vars(parameter).pop(TRANSFORMERS_FLAG, None)
        for module in initial.modules():
            vars(module).pop(TRANSFORMERS_FLAG, None)
        for module in reversed(list(initial.modules())):  # children first: a parent can redraw their weights
            for method in RESET_METHODS:
                _reset(initial, module, method)
    missed = [name for name, parameter in initial.named_parameters() if bool(parameter.isnan().any())]
    if missed:
        raise _not_drawn(model, missed, "no method that draws them")
    return initial


def _reset(model: nn.Module, module: nn.Module, name: str) -> None:
    method = getattr(module, name, None)
    if not callable(method):
        return
    required = [
        parameter
        for parameter in inspect.signature(method).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if not required:
        method()
    elif len(required) == 1 and module is model:  # a method of one module is meant for `model.apply`
        model.apply(method)


def _failed(model: nn.Module, expected: str, got: str, fix: str = BY_HAND) -> InitializationError:
    subject = f"initialization of {type(model).__name__}"
    return InitializationError(subject, expected=expected, got=got, fix=fix)


def _not_drawn(model: nn.Module, names: list[str], got: str) -> InitializationError:
    several = f" and {len(names) - 1} more" if len(names) > 1 else ""
    expected = f"a method that draws it: {', '.join(RESET_METHODS[:3])} of its module"
    subject = f"weight {names[0]!r}{several} of {type(model).__name__}"
    return InitializationError(subject, expected=expected, got=got, fix=BY_HAND)


def _check_same_weights(model: nn.Module, initial: Any) -> None:
    subject, fix = "the factory of a model at initialization", "Return the model."
    instance_of(subject, initial, nn.Module, "a module", fix=fix, error=InitializationError)
    old = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    new = {name: tuple(parameter.shape) for name, parameter in initial.named_parameters()}
    if old == new:
        return
    name = next(name for name in {**old, **new} if old.get(name) != new.get(name))
    expected = f"{name!r} of shape {old[name]}" if name in old else f"no weight {name!r}"
    got = f"shape {new[name]}" if name in new else "none of that name"
    fix = "λ-skips, adapters, quantization and other changes to a model are not in its configuration."
    raise _failed(model, expected, got, f"{fix} {BY_HAND}")


def _placed_like(model: nn.Module, initial: nn.Module) -> nn.Module:
    """Move a copy to the devices, dtypes and modes of the model, in place, so shared weights stay shared."""
    with torch.no_grad():
        for tensors in ("named_parameters", "named_buffers"):
            like = dict(getattr(model, tensors)())
            for name, tensor in getattr(initial, tensors)():
                if name in like:
                    floats = tensor.is_floating_point() and like[name].is_floating_point()
                    dtype = like[name].dtype if floats else tensor.dtype  # keep quantized dtypes
                    tensor.data = tensor.data.to(device=like[name].device, dtype=dtype)
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in initial.named_modules():
        module.training = modes.get(name, model.training)
    return initial
