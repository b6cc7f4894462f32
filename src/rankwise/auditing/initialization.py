"""A copy of a model at fresh weights: what training started from, as far as the model itself can say."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rankwise._internals import torch_private as torch_private
from rankwise.errors import RankwiseError

RESETS = ("reset_parameters", torch_private.RESET, "init_weights", "_init_weights", "initialize_weights")
"""Methods by which modules draw their weights, in PyTorch and in the code that follows it."""

TRANSFORMERS_FLAG = "_is_hf_initialized"
"""On modules and weights that transformers has drawn or loaded: its ``init_weights`` leaves those alone."""


class FreshWeightsError(RankwiseError):
    """The weights of a model cannot be drawn anew."""


def reinitialized(
    model: nn.Module, seed: int = 0, factory: Callable[[], nn.Module] | None = None
) -> nn.Module:
    """The same architecture at weights drawn anew, on the same device and in the same dtypes and modes.

    A transformers model is built from its configuration. Of any other module a deep copy is made, all its
    weights are set to NaN, and its own methods (`reset_parameters`, `init_weights` and the like) draw them; a
    weight that is NaN afterwards has no method that draws it, and the copy is refused. Buffers keep their
    values, unless those methods change them. What a constructor does to weights after these methods (such
    as GPT-2's smaller output projections in code that scales them in ``__init__``) is not repeated.

    Cost: one more copy of the model. PyTorch's global random state is neither read nor moved.

    Args:
        model: any module with floating-point weights.
        seed: of the weights.
        factory: builds the model at fresh weights, where the model itself cannot say how; it is called
            with PyTorch's random state seeded.

    Returns:
        The copy. The model is not changed.

    Raises:
        FreshWeightsError: if a weight has no method that draws it, the configuration cannot build the model,
            or the factory's model has other weights.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(3, 3)
        >>> fresh = reinitialized(model, seed=1)
        >>> bool((fresh.weight != model.weight).all()), fresh.weight.shape == model.weight.shape
        (True, True)
    """
    devices = {parameter.device for parameter in model.parameters()}
    if factory is None:
        _check_can_be_drawn(model)
    with _seeded(seed, devices):
        if factory is not None:
            fresh = factory()
        elif _has_configuration(model):
            fresh = _from_configuration(model)
        else:
            fresh = _drawn_anew(model)
    _check_same_weights(model, fresh)
    return _placed_like(model, fresh)


def way_to_fresh_weights(model: nn.Module) -> str:
    """How `reinitialized` makes a copy of a model, in words, where no factory is given.

    Args:
        model: the model.

    Examples:
        >>> way_to_fresh_weights(torch.nn.Linear(2, 2))
        'by the methods of its modules that draw weights'
    """
    from_configuration = _has_configuration(model)
    return (
        "from its configuration" if from_configuration else "by the methods of its modules that draw weights"
    )


def _check_can_be_drawn(model: nn.Module) -> None:
    """Refuse weights that are not numbers as they would be drawn, or not here."""
    where = getattr(model, "hf_device_map", None) or {}
    reasons = {
        "quantised weights": bool(getattr(model, "is_quantized", False)),
        "weights on more than one device": len(set(map(str, where.values()))) > 1,
        "weights that are not in memory": any(parameter.is_meta for parameter in model.parameters()),
    }
    for name, weight in model.named_parameters():
        if not (weight.is_floating_point() or weight.is_complex()):
            raise _no_way(model, [name], f"{weight.dtype} weights, which no method draws")
    for reason, holds in reasons.items():
        if holds:
            raise FreshWeightsError(
                f"fresh weights of {type(model).__name__}",
                expected="a model with floating-point weights in the memory of one device",
                got=reason,
                fix="Load it without quantisation or offloading, or give a function that builds a model "
                "that runs where this one does.",
            )


@contextmanager
def _seeded(seed: int, devices: set[torch.device]) -> Iterator[None]:
    cuda = [device.index or 0 for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(cuda):
        torch.manual_seed(seed)
        yield


def _has_configuration(model: nn.Module) -> bool:
    """Whether it is a transformers model; the library is not loaded to find out."""
    return any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__)


def _from_configuration(model: nn.Module) -> nn.Module:
    try:
        return type(model)(copy.deepcopy(model.config))
    except Exception as error:
        raise FreshWeightsError(
            f"configuration of {type(model).__name__}",
            expected="one that builds the model at fresh weights",
            got=f"{type(error).__name__}: {error}",
            fix="Give a function without arguments that builds it: `factory=build`.",
        ) from error


def _drawn_anew(model: nn.Module) -> nn.Module:
    try:
        fresh = copy.deepcopy(model)
    except Exception as error:  # a model under FSDP cannot be copied
        raise FreshWeightsError(
            f"fresh weights of {type(model).__name__}",
            expected="a model that can be copied",
            got=f"{type(error).__name__}: {error}",
            fix="Give a function without arguments that builds it: `factory=build`.",
        ) from error
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.fill_(torch.nan)
            vars(parameter).pop(TRANSFORMERS_FLAG, None)
        for module in fresh.modules():
            vars(module).pop(TRANSFORMERS_FLAG, None)
        for module in reversed(list(fresh.modules())):  # the parts first: the whole has the last word
            for method in RESETS:
                _reset(fresh, module, method)
    missed = [name for name, parameter in fresh.named_parameters() if bool(parameter.isnan().any())]
    if missed:
        raise _no_way(model, missed, "no method that draws them")
    return fresh


def _reset(model: nn.Module, module: nn.Module, method: str) -> None:
    found = getattr(module, method, None)
    if not callable(found):
        return
    needed = [
        parameter
        for parameter in inspect.signature(found).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if not needed:
        found()
    elif len(needed) == 1 and module is model:  # for `model.apply`
        model.apply(found)


def _no_way(model: nn.Module, names: list[str], got: str) -> FreshWeightsError:
    several = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return FreshWeightsError(
        f"weight {names[0]!r}{several} of {type(model).__name__}",
        expected=f"a method that draws it: {', '.join(RESETS[:3])} of its module",
        got=got,
        fix="Give a function without arguments that builds the model at fresh weights: `factory=build`.",
    )


def _check_same_weights(model: nn.Module, fresh: Any) -> None:
    if not isinstance(fresh, nn.Module):
        raise FreshWeightsError(
            "the factory of fresh weights",
            expected="a module",
            got=type(fresh).__name__,
            fix="Return the model.",
        )
    old = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    new = {name: tuple(parameter.shape) for name, parameter in fresh.named_parameters()}
    if old != new:
        hidden = [name for name in new if name not in old and _is_hidden(model, name)]
        if hidden:
            raise FreshWeightsError(
                f"fresh weights of {type(model).__name__}",
                expected="floating-point weights, which fresh ones can stand beside",
                got=f"quantised layers, such as {hidden[0].rpartition('.')[0]!r}",
                fix="Audit the model before it is quantised: `factory=build` gives fresh weights of a model "
                "whose weights are parameters.",
            )
        name = next(name for name in {**old, **new} if old.get(name) != new.get(name))
        raise FreshWeightsError(
            f"fresh weights of {type(model).__name__}",
            expected=f"{name!r} of shape {old[name]}" if name in old else f"no weight {name!r}",
            got=f"shape {new[name]}" if name in new else "none of that name",
            fix="λ-skips, adapters and other changes to a model are not in its configuration: give a "
            "function that builds the changed model at fresh weights, `factory=build`.",
        )


def _is_hidden(model: nn.Module, name: str) -> bool:
    """Whether a module has no parameter of that name but a method that unpacks it, as quantised layers do."""
    path, _, weight = name.rpartition(".")
    modules = dict(model.named_modules())
    return path in modules and callable(getattr(modules[path], weight, None))


def _placed_like(model: nn.Module, fresh: nn.Module) -> nn.Module:
    """Devices, dtypes and modes, tensor by tensor and module by module; shared weights stay shared."""
    with torch.no_grad():
        for tensors in ("named_parameters", "named_buffers"):
            like = dict(getattr(model, tensors)())
            for name, tensor in getattr(fresh, tensors)():
                if name in like:
                    numbers = tensor.is_floating_point() and like[name].is_floating_point()
                    dtype = like[name].dtype if numbers else tensor.dtype  # no cast to a quantised type
                    tensor.data = tensor.data.to(device=like[name].device, dtype=dtype)
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in fresh.named_modules():
        module.training = modes.get(name, model.training)
    return fresh
