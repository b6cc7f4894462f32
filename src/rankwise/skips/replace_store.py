"""Models with replaced attention in files: all weights in safetensors, what was replaced in its metadata."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_model
from torch import Tensor, nn

from rankwise._internals.files import write_file
from rankwise._internals.forward import Batch
from rankwise.errors import InputError, ReplacementError
from rankwise.skips.replace import put, replace_attention, replaced_layers, replacements_of
from rankwise.skips.replacement import Replacement

FILE = "replaced_attention.safetensors"
NOTE = "rankwise"
"""Where the file's metadata say what it is."""


class _Saved(BaseModel, extra="forbid"):
    format: Literal[1] = 1
    model_class: str
    layers: list[Replacement]


def save_replaced_attention(model: nn.Module, folder: str | Path) -> Path:
    """Write a model with replaced attention: all its weights, and which layers are of what kind.

    Args:
        model: the model.
        folder: where to; it is made if it is missing.

    Returns:
        The file, ``replaced_attention.safetensors``.

    Raises:
        ReplacementError: if nothing was replaced.
        InputError: if the file cannot be written.
    """
    layers = replacements_of(model)
    if not layers:
        raise ReplacementError(
            f"model {type(model).__name__}", expected="a model with replaced attention", got="none replaced",
            fix="Call `replace_attention(model, layers)` first.",
        )  # fmt: skip
    note = _Saved(model_class=_class(model), layers=layers).model_dump_json()

    def save(path: Path) -> None:
        try:
            save_model(model, str(path), metadata={NOTE: note})
        except SafetensorError as error:  # what safetensors makes of a full disk
            raise OSError(str(error)) from error

    return write_file(Path(folder) / FILE, save, "replaced attention")


def load_replaced_attention(
    model: nn.Module, folder: str | Path, example: Batch | None = None
) -> list[Replacement]:
    """Make a model what it was when `save_replaced_attention` wrote it: layers replaced, all weights loaded.

    Args:
        model: one of the same class and configuration, with its softmax attention.
        folder: where it was written.
        example: as in `replace_attention`.

    Returns:
        What was replaced.

    Raises:
        ReplacementError: if the file is missing or broken, or is of another model; then nothing has changed.
    """
    path = Path(folder) / FILE
    saved, weights = _read(path)
    if saved.model_class != _class(model):
        raise _another(path, model, f"one of {saved.model_class}")
    before = {id(module) for module in replaced_layers(model).values()}
    try:
        for one in saved.layers:
            replace_attention(model, [one.name], one.kind, example, **one.options)
        _check_weights(path, model, weights)
    except (ReplacementError, InputError):
        for name, module in replaced_layers(model).items():
            if id(module) not in before:
                put(model, name, module.attention)
        raise
    model.load_state_dict(
        weights, strict=False
    )  # names that are missing share their memory with one that is not
    return replacements_of(model)


def _read(path: Path) -> tuple[_Saved, dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            saved = _Saved.model_validate(json.loads((file.metadata() or {})[NOTE]))
            return saved, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, ValueError, KeyError, ValidationError, SafetensorError) as error:
        gone = isinstance(error, FileNotFoundError)
        raise ReplacementError(
            f"replaced attention {path}", expected="a file that `save_replaced_attention` wrote",
            got="no such file" if gone else f"{type(error).__name__}: {str(error).splitlines()[0]}",
            fix="Check the folder." if gone else "Save the model again.",
        ) from error  # fmt: skip


def _check_weights(path: Path, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    own = model.state_dict()
    held = {own[name].data_ptr() for name in weights if name in own}
    for name in {**own, **weights}:
        if name not in own or (name not in weights and own[name].data_ptr() not in held):
            raise _another(path, model, f"a difference in {name!r}")
        if name in weights and weights[name].shape != own[name].shape:
            raise _another(path, model, f"{name!r} of shape {tuple(weights[name].shape)}")


def _another(path: Path, model: nn.Module, got: str) -> ReplacementError:
    return ReplacementError(
        f"replaced attention {path}",
        expected=f"weights of a {type(model).__name__} of this configuration, with its own attention",
        got=got,
        fix="Load them into the architecture that they were saved from.",
    )


def _class(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"
