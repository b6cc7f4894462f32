"""Conversion of released ToST checkpoints to models of this package, and saving of models."""

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from rankwise._internals.files import write_files
from rankwise._internals.torch_private import COMPILED_PREFIX
from rankwise.errors import InputError
from rankwise.models.configuration import ToSTConfig
from rankwise.models.language import ToSTForCausalLM
from rankwise.models.released import (
    ReleasedModel,
    Weights,
    drop_unit_axes,
    read_language_config,
    read_vision_config,
)
from rankwise.models.vision import ToSTForImageClassification
from rankwise.ops.arguments import FLOATS

WRAPPERS = (COMPILED_PREFIX, "module.")
"""Prefixes that torch.compile and DistributedDataParallel put before weight names."""

MODELS = {"language": ToSTForCausalLM, "vision": ToSTForImageClassification}


def load_released_tost(
    path: str | Path, *, tokens_norm: bool = True
) -> ToSTForCausalLM | ToSTForImageClassification:
    """Load a released ToST checkpoint (.pt: language, .pth: vision) in float32 and evaluation mode.

    The configuration is inferred from weight shapes. Only tensors, plain containers and
    `argparse.Namespace` (the command line in vision checkpoints) are unpickled.

    Args:
        path: checkpoint file.
        tokens_norm: field of `ToSTConfig` for vision models, because weight shapes do not determine it.

    Raises:
        InputError: if the file cannot be read, lacks weights, has wrong shapes or is of another model.

    Examples:
        >>> load_released_tost("nothing.pt")
        Traceback (most recent call last):
        ...
        rankwise.errors.InputError: checkpoint nothing.pt: expected a file, got nothing there. Check the path.
    """
    path = Path(path)
    weights = weights_of(_read(path), path)
    released = _read_config(weights, path, tokens_norm)
    renamed = rename_weights(weights, released, path)
    model = MODELS[released.kind](released.config)
    model.load_state_dict(renamed)
    model.tie_weights()
    return model.eval()


def save_model(model: PreTrainedModel, folder: str | Path) -> list[Path]:
    """Save a model of this package as safetensors and JSON files, and return the paths of the files.

    Either all files are written, or no file is. An image classifier also gets the settings that
    `image_processor_config` returns.

    Raises:
        InputError: if the folder cannot be written to.

    Examples:
        >>> import tempfile, rankwise as rw
        >>> config = rw.models.ToSTConfig(hidden_size=24, num_hidden_layers=1, vocab_size=9)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sorted(path.name for path in save_model(rw.models.ToSTForCausalLM(config), folder))
        ['config.json', 'generation_config.json', 'model.safetensors']
    """

    def write(partial: Path) -> None:
        try:
            model.save_pretrained(partial)
        except SafetensorError as error:  # raised if the disk is full
            raise OSError(str(error)) from error
        if model.main_input_name == "pixel_values":
            settings = json.dumps(image_processor_config(model.config), indent=2) + "\n"
            Path(partial, "preprocessor_config.json").write_text(settings, encoding="utf-8")

    return write_files(Path(folder), write, "folder")


def _read(path: Path) -> Any:
    """Return the content of a checkpoint file, without running code in it; raise if it cannot be read."""
    if not path.is_file():
        got = "a folder" if path.is_dir() else "nothing there"
        raise _unusable(path, "a file", got, "Check the path.")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    # A damaged file can raise any error, and the messages of torch suggest turning off weights_only.
    except Exception as error:
        refused = isinstance(error, PermissionError)
        expected = "a file of torch.save that holds tensors and plain values only"
        got = "no permission to read it" if refused else "a damaged file, or one that holds other things"
        fix = "Only the released .pt and .pth files are read; no code from a checkpoint is ever run."
        raise _unusable(path, expected, got, fix) from None


def weights_of(checkpoint: Any, path: Path) -> dict[str, Tensor]:
    """Return weights by name, without prefixes of wrappers; raise if a weight is invalid or none exists."""
    inner = checkpoint
    if isinstance(checkpoint, Mapping):
        inner = next((checkpoint[key] for key in ("model", "state_dict") if key in checkpoint), checkpoint)
    by_name = isinstance(inner, Mapping) and all(
        isinstance(name, str) and torch.is_tensor(weight) for name, weight in inner.items()
    )
    if not by_name or not inner:
        keys = isinstance(checkpoint, Mapping) and len(checkpoint)
        raise _foreign(path, f"keys {_listed(checkpoint)}" if keys else "no weights")
    weights = {}
    for name, weight in inner.items():
        while name.startswith(WRAPPERS):
            name = name.split(".", 1)[1]
        _check_weight(name, weight, path)
        weights[name] = weight
    return weights


def _check_weight(name: str, weight: Tensor, path: Path) -> None:
    """Raise InputError if a weight is not a dense tensor of finite floats, or is incomplete in the file."""
    counter = name.endswith("num_batches_tracked") and weight.dtype == torch.int64
    dense = weight.layout == torch.strided and weight.device.type == "cpu"
    if not (counter or weight.dtype in FLOATS) or not dense:
        got = f"{weight.dtype}, {weight.layout}, on {weight.device.type}"
    elif not weight.numel() or weight.numel() * weight.element_size() > weight.untyped_storage().nbytes():
        got = f"shape {tuple(weight.shape)} of {weight.untyped_storage().nbytes()} bytes"
    else:
        wrong = weight.numel() - int(weight.float().isfinite().sum())  # float64 weights may overflow float32
        if wrong:
            got, fix = f"{wrong} of {weight.numel()} NaN or infinite", "The file is damaged: get it again."
            raise _unusable(path, "finite numbers", got, fix, weight=name)
        return
    expected, fix = "a dense tensor of floating-point numbers", "Released files hold nothing else."
    raise _unusable(path, expected, got, fix, weight=name)


def _read_config(weights: Weights, path: Path, tokens_norm: bool) -> ReleasedModel:
    """Return configuration and weight names of a checkpoint; raise if it fits no released model."""
    try:
        if "transformer.wte.weight" in weights:
            return read_language_config(weights)
        if "patch_embed.proj.0.0.weight" in weights:
            return read_vision_config(weights, tokens_norm)
    except KeyError as error:
        name = error.args[0]
        if name.endswith("attn.temp"):
            raise _foreign(path, f"no {name}: a model with another attention") from None
        raise _unusable(path, f"a weight {name}", "none", "The file is incomplete: get it again.") from None
    except InputError as error:
        subject, fix = f"checkpoint {path}, {error.subject}", "No released model has such sizes."
        raise InputError(subject, expected=error.expected, got=error.got, fix=fix) from None
    raise _foreign(path, f"names such as {_listed(sorted(weights))}")


def rename_weights(weights: Weights, released: ReleasedModel, path: Path) -> dict[str, Tensor]:
    """Return weights by their names in this package; raise if one is missing, unknown or of wrong shape.

    The expected shapes come from a model on the meta device, which takes no memory.
    """
    missing = [name for name in released.names if name not in weights and name != "lm_head.weight"]
    foreign = [name for name in weights if name not in released.names]
    if missing or foreign:
        expected = f"the {len(released.names)} weights of a released {released.kind} model"
        got = f"{_counted(missing)} missing, {_counted(foreign)} unknown"
        raise _unusable(path, expected, got, "Variants of the released models cannot be loaded.")
    renamed = {
        new: drop_unit_axes(name, weights[name]) for name, new in released.names.items() if name in weights
    }
    with torch.device("meta"):
        shapes = {
            name: weight.shape for name, weight in MODELS[released.kind](released.config).state_dict().items()
        }
    for name, new in released.names.items():
        if new in renamed and renamed[new].shape != shapes[new]:
            expected, got = f"shape {tuple(shapes[new])}", f"{tuple(renamed[new].shape)}"
            fix = "Sizes are read from the other weights: this weight is of another model."
            raise _unusable(path, expected, got, fix, weight=name)
    if released.kind == "language":
        embedding = renamed["model.embed_tokens.weight"]
        if not torch.equal(renamed.setdefault("lm_head.weight", embedding), embedding):
            expected = "the same numbers as transformer.wte.weight, which the released models tie it to"
            fix = "A model with a head of its own cannot be loaded."
            raise _unusable(path, expected, "other numbers", fix, weight="lm_head.weight")
    return renamed


def _counted(names: list[str]) -> str:
    return f"{len(names)} ({_listed(names)})" if names else "none"


def _listed(names: Iterable[Any]) -> str:
    first = list(names)
    return ", ".join([_plain(name) for name in first[:3]] + ["…"] * (len(first) > 3))


def _plain(name: Any) -> str:
    """Return a name as text of at most 60 characters, with control and non-ASCII characters escaped."""
    text = ascii(name)
    return (text[1:-1] if isinstance(name, str) else text)[:60]


def _foreign(path: Path, got: str) -> InputError:
    expected = "a checkpoint of the released ToST code, language or vision"
    fix = "Models in Hugging Face's format are loaded by from_pretrained, without conversion."
    return _unusable(path, expected, got, fix)


def _unusable(path: Path, expected: str, got: str, fix: str, *, weight: str = "") -> InputError:
    subject = f"checkpoint {path}" + (f", weight {_plain(weight)}" if weight else "")
    return InputError(subject, expected=expected, got=got, fix=fix)


def image_processor_config(config: ToSTConfig) -> dict[str, Any]:
    """Return the content of ``preprocessor_config.json``: resize, center crop, ImageNet mean and deviation.

    Released checkpoints do not store how images were preprocessed. The returned settings are the evaluation
    settings of DeiT, on which the released code is based, for the ``image_size`` of the configuration.

    Examples:
        >>> settings = image_processor_config(ToSTConfig(image_size=224))
        >>> settings["size"], settings["crop_size"]
        ({'shortest_edge': 256}, {'height': 224, 'width': 224})
    """
    side = config.image_size
    return {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": round(256 / 224 * side)},
        "resample": 3,  # bicubic interpolation
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        "do_convert_rgb": True,
    }
