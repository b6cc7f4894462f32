"""What a compressed model looks like, as data: enough to build it empty and to load its weights.

Each kind of change is a record with ``kind`` and a function that makes it on a model whose weights are still
to come. A new kind goes into `Change` and `MAKERS`.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from torch import nn

from rankwise.compression import heads_modules, kv_modules, qk_modules
from rankwise.compression.heads_modules import RemovedHeads, removed_heads
from rankwise.compression.kv_modules import LatentLayer, latent_layers
from rankwise.compression.qk_modules import NarrowedKeys, NarrowedLinear, narrow_records
from rankwise.errors import CompressionError

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
    # Heads come first: what is narrowed has their number.
    return Structure(changes=[*removed_heads(model), *narrow_records(model), *latent_layers(model)])


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


MAKERS: dict[str, Callable[[nn.Module, Any], None]] = {
    "heads": lambda model, change: heads_modules.build(model, [change]).apply(),
    "narrow": lambda model, change: qk_modules.build(model, change).apply(),
    "keys": lambda model, change: qk_modules.build(model, change).apply(),
    "latent": lambda model, change: kv_modules.build(model, change).apply(),
}
