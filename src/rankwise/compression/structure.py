"""What a compressed model looks like, as data: enough to build it empty and to load its weights.

Each kind of change is a record with ``kind`` and a function that makes it on a model whose weights are still
to come. A new kind goes into `Change` and `MAKERS`.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from torch import nn

from rankwise.compression import kv_modules
from rankwise.compression.key_cache import add_key_cache, key_cache_of
from rankwise.compression.kv_modules import LatentLayer, latent_layers
from rankwise.compression.narrow import NarrowProjection, narrow_projections, put
from rankwise.compression.removed_heads import RemovedHeads, cut_linear, removed_heads_of, renamed, set_sizes
from rankwise.errors import CompressionError, did_you_mean
from rankwise.tracing.projections import linear_parts


class NarrowedLinear(BaseModel, extra="forbid"):
    """A linear layer with fewer channels."""

    kind: Literal["narrow"] = "narrow"
    module: str
    out_features: int
    runs: list[tuple[int, int]]
    """Channels that are computed, as (first, how many)."""


class NarrowedKeys(BaseModel, extra="forbid"):
    """An attention layer whose cache keeps fewer channels of the keys."""

    kind: Literal["keys"] = "keys"
    module: str
    runs: list[tuple[int, int]]


Change = Annotated[RemovedHeads | NarrowedLinear | NarrowedKeys | LatentLayer, Field(discriminator="kind")]


class Structure(BaseModel, extra="forbid"):
    """All changes of a model."""

    format: Literal[1] = 1
    changes: list[Change]


def structure_of(model: nn.Module) -> Structure:
    """What was changed in a model.

    Args:
        model: the model.
    """
    named = [(name, removed_heads_of(module)) for name, module in model.named_modules()]
    # heads go first: what is narrowed has their number
    changes: list[Any] = [renamed(change, name) for name, change in named if change is not None]
    changes += [
        NarrowedLinear(module=name, out_features=projection.out_features, runs=projection.runs)
        for name, projection in narrow_projections(model)
    ]
    for name, module in model.named_modules():
        hook = key_cache_of(module)
        if hook is not None:
            changes.append(NarrowedKeys(module=name, runs=hook.runs))
    return Structure(changes=[*changes, *latent_layers(model)])


def rebuild(model: nn.Module, structure: Structure) -> None:
    """Change a model as another one was, with weights still to be loaded.

    Args:
        model: a fresh model of the same class and configuration.
        structure: of the other one.

    Raises:
        CompressionError: if the model lacks a module, or has one of another size.
    """
    for change in structure.changes:
        MAKERS[change.kind](model, change)


def read_structure(content: Any, where: str) -> Structure:
    """Read a structure from JSON.

    Args:
        content: what the JSON held.
        where: how an error calls it.

    Raises:
        CompressionError: if it is none.
    """
    try:
        return TypeAdapter(Structure).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise CompressionError(
            where,
            expected="the structure of a compressed model, as `save_compressed` writes it",
            got=f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            fix="Save the model again, with the same version of Rankwise.",
        ) from error


def _narrow(model: nn.Module, change: NarrowedLinear) -> None:
    before = _module(model, change.module)
    parts = linear_parts(before)
    if parts is None or parts[0].shape[0] != change.out_features:
        raise _another(change.module, f"a linear layer with {change.out_features} channels", before)
    weight, bias = parts
    count = sum(count for _, count in change.runs)
    options: Any = {"device": weight.device, "dtype": weight.dtype}
    narrow = nn.Linear(weight.shape[1], count, bias is not None, **options)
    put(model, change.module, NarrowProjection(narrow, change.runs, change.out_features))


def _keys(model: nn.Module, change: NarrowedKeys) -> None:
    add_key_cache(_module(model, change.module), change.runs)


def _heads(model: nn.Module, change: RemovedHeads) -> None:
    for cut in change.cuts:
        put(model, cut.module, cut_linear(_module(model, cut.module), cut))
    set_sizes(_module(model, change.module), change)


def _latent(model: nn.Module, change: LatentLayer) -> None:
    kv_modules.build(model, change).apply()


MAKERS: dict[str, Callable[[nn.Module, Any], None]] = {
    "heads": _heads,
    "narrow": _narrow,
    "keys": _keys,
    "latent": _latent,
}


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [name for name, _ in model.named_modules()]
        raise CompressionError(
            f"model {type(model).__name__}",
            expected=f"a module {name!r}, which was compressed",
            got="none",
            fix=did_you_mean(name, known) or "Load it into the class it was saved from.",
        ) from None


def _another(name: str, wanted: str, got: nn.Module) -> CompressionError:
    return CompressionError(
        f"module {name!r}", expected=wanted, got=f"a {got!r}", fix="Load it into the class it was saved from."
    )
