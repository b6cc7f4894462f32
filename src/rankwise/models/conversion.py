"""Released ToST checkpoints → our models."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
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
from rankwise.models.released import ReleasedModel, Weights, as_ours, understand_language, understand_vision
from rankwise.models.vision import ToSTForImageClassification
from rankwise.ops.arguments import FLOATS

WRAPPERS = (COMPILED_PREFIX, "module.")
"""What torch.compile and DistributedDataParallel put before every name."""

MODELS = {"language": ToSTForCausalLM, "vision": ToSTForImageClassification}

LANGUAGE_MARK, VISION_MARK = "transformer.wte.weight", "patch_embed.proj.0.0.weight"

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BICUBIC = 3
"""Pillow's number for it."""
MARGIN = 256 / 224
"""The shorter side before the crop, over the side of the crop."""


def load_released_tost(
    path: str | Path, *, tokens_norm: bool = True
) -> ToSTForCausalLM | ToSTForImageClassification:
    """Load a checkpoint of the released code: language (.pt) or vision (.pth).

    The configuration is read off the shapes. Nothing but tensors, plain containers and `argparse.Namespace`,
    which vision checkpoints hold their command line in, is unpickled.

    Args:
        path: the file.
        tokens_norm: vision: whether it was trained with ``tokens_norm``, as all released sizes are; shapes do
            not tell.

    Returns:
        The model in evaluation mode, float32 as stored.

    Raises:
        InputError: if the file cannot be read, is of another model, or lacks weights or has wrong shapes.

    Examples:
        >>> load_released_tost("nothing.pt")
        Traceback (most recent call last):
        ...
        rankwise.errors.InputError: checkpoint nothing.pt: expected a file, got nothing there. Check the path.
    """
    path = Path(path)
    weights = weights_of(_read(path), path)
    if LANGUAGE_MARK in weights:
        released = _understood(lambda: understand_language(weights), path)
    elif VISION_MARK in weights:
        released = _understood(lambda: understand_vision(weights, tokens_norm), path)
    else:
        raise _foreign(path, f"names such as {_listed(sorted(weights))}")
    renamed = _renamed(weights, released, path)
    model = MODELS[released.kind](released.config)
    model.load_state_dict(renamed)
    model.tie_weights()
    return model.eval()


def save_model(model: PreTrainedModel, folder: str | Path) -> list[Path]:
    """Write a model as safetensors and JSON: all files, or none.

    An image classifier's folder says how its pictures are prepared: see `picture_settings`.

    Args:
        model: one of ours.
        folder: where to; made if it is not there.

    Returns:
        The files written.

    Raises:
        InputError: if the folder cannot be written to.
    """

    def write(partial: Path) -> None:
        try:
            model.save_pretrained(partial)
        except SafetensorError as error:  # of a full disk
            raise OSError(str(error)) from error
        if model.main_input_name == "pixel_values":
            settings = json.dumps(picture_settings(model.config), indent=2) + "\n"
            Path(partial, "preprocessor_config.json").write_text(settings, encoding="utf-8")

    return write_files(Path(folder), write, "folder")


def weights_of(checkpoint: Any, path: Path) -> dict[str, Tensor]:
    """The weights in what was loaded, without what compiling or distributing put before their names.

    Raises:
        InputError: if there are none.
    """
    inner = checkpoint
    if isinstance(checkpoint, Mapping):
        inner = next((checkpoint[key] for key in ("model", "state_dict") if key in checkpoint), checkpoint)
    named = isinstance(inner, Mapping) and all(
        isinstance(name, str) and torch.is_tensor(weight) for name, weight in inner.items()
    )
    if not named or not inner:
        held = isinstance(checkpoint, Mapping) and len(checkpoint)
        raise _foreign(path, f"keys {_listed(checkpoint)}" if held else "no weights")
    weights = {}
    for name, weight in inner.items():
        while name.startswith(WRAPPERS):
            name = name.split(".", 1)[1]
        _check_kind(name, weight, path)
        weights[name] = weight
    return weights


def _check_kind(name: str, weight: Tensor, path: Path) -> None:
    """Refuse what is not a dense array of real numbers, each of them in the file."""
    counter = name.endswith("num_batches_tracked") and weight.dtype == torch.int64
    dense = weight.layout == torch.strided and weight.device.type == "cpu"
    if not (counter or weight.dtype in FLOATS) or not dense:
        got = f"{weight.dtype}, {weight.layout}, on {weight.device.type}"
    elif not weight.numel() or weight.numel() * weight.element_size() > weight.untyped_storage().nbytes():
        got = f"shape {tuple(weight.shape)} of {weight.untyped_storage().nbytes()} bytes"
    else:
        return
    raise InputError(
        f"checkpoint {path}, weight {_plain(name)}",
        expected="a dense tensor of floating-point numbers",
        got=got,
        fix="The released files hold no other weights.",
    )


def _read(path: Path) -> Any:
    if not path.is_file():
        got = "a folder" if path.is_dir() else "nothing there"
        raise InputError(f"checkpoint {path}", expected="a file", got=got, fix="Check the path.")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    # damaged bytes raise anything, and torch's texts advise to switch its check of the contents off
    except Exception as error:
        refused = isinstance(error, PermissionError)
        raise InputError(
            f"checkpoint {path}",
            expected="a file of torch.save that holds tensors and plain values only",
            got="no permission to read it" if refused else "a damaged file, or one that holds other things",
            fix="Only the released .pt and .pth files are read; no code from a checkpoint is ever run.",
        ) from None


def _understood(understand: Callable[[], ReleasedModel], path: Path) -> ReleasedModel:
    try:
        return understand()
    except KeyError as error:
        name = error.args[0]
        if name.endswith("attn.temp"):
            raise _foreign(path, f"no {name}: a model with another attention") from None
        raise InputError(
            f"checkpoint {path}",
            expected=f"a weight {name}",
            got="none",
            fix="The file is not whole: get it again.",
        ) from None
    except InputError as error:
        raise InputError(
            f"checkpoint {path}, {error.subject}",
            expected=error.expected,
            got=error.got,
            fix="Its sizes are not those of a released model.",
        ) from None


def _renamed(weights: Weights, released: ReleasedModel, path: Path) -> dict[str, Tensor]:
    """The weights by our names, all there and of the right shapes; before memory is taken for a model.

    Raises:
        InputError: if not.
    """
    missing = [name for name in released.names if name not in weights and name != "lm_head.weight"]
    foreign = [name for name in weights if name not in released.names]
    if missing or foreign:
        raise InputError(
            f"checkpoint {path}",
            expected=f"the {len(released.names)} weights of a released {released.kind} model",
            got=f"{_some(missing)} missing, {_some(foreign)} unknown",
            fix="Variants of the released models cannot be loaded.",
        )
    renamed = {own: as_ours(name, weights[name]) for name, own in released.names.items() if name in weights}
    if released.kind == "language":
        renamed.setdefault("lm_head.weight", renamed["model.embed_tokens.weight"])
    ours = _empty(released).state_dict()
    for name, own in released.names.items():
        if own in renamed and renamed[own].shape != ours[own].shape:
            raise InputError(
                f"checkpoint {path}, weight {name}",
                expected=f"shape {tuple(ours[own].shape)}",
                got=f"{tuple(renamed[own].shape)}",
                fix="Sizes are read off the other weights: this one is of another model.",
            )
    if released.kind == "language":
        _check_tied(renamed, path)
    return renamed


def _empty(released: ReleasedModel) -> PreTrainedModel:
    """The model without memory for its weights: shapes alone."""
    with torch.device("meta"):
        return MODELS[released.kind](released.config)


def _check_tied(renamed: dict[str, Tensor], path: Path) -> None:
    """The head shares the embedding's weights; a file that says otherwise is not a released one."""
    embedding = renamed["model.embed_tokens.weight"]
    if not torch.equal(renamed["lm_head.weight"], embedding):
        raise InputError(
            f"checkpoint {path}, weight lm_head.weight",
            expected="the same numbers as transformer.wte.weight, which the released models tie it to",
            got="other numbers",
            fix="A model with a head of its own cannot be loaded.",
        )


def _some(names: list[str]) -> str:
    return f"{len(names)} ({_listed(names)})" if names else "none"


def _listed(names: Iterable[Any]) -> str:
    first = list(names)
    return ", ".join([_plain(name) for name in first[:3]] + ["…"] * (len(first) > 3))


def _plain(name: Any) -> str:
    """A name out of a file, short and without what a terminal would obey."""
    text = ascii(name)
    return (text[1:-1] if isinstance(name, str) else text)[:60]


def _foreign(path: Path, got: str) -> InputError:
    return InputError(
        f"checkpoint {path}",
        expected="a checkpoint of the released ToST code, language or vision",
        got=got,
        fix="Models in Hugging Face's format are loaded by from_pretrained, without conversion.",
    )


def picture_settings(config: ToSTConfig) -> dict[str, Any]:
    """What ``preprocessor_config.json`` holds: resize, crop from the middle, ImageNet's mean and deviation.

    A released checkpoint does not say how its pictures were prepared; this is how the training code that the
    release is based on (DeiT's) evaluates.

    Args:
        config: of the model, for the size.

    Examples:
        >>> settings = picture_settings(ToSTConfig(image_size=224))
        >>> settings["size"], settings["crop_size"]
        ({'shortest_edge': 256}, {'height': 224, 'width': 224})
    """
    side = config.image_size
    return {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": round(MARGIN * side)},
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(IMAGENET_MEAN),
        "image_std": list(IMAGENET_STD),
        "do_convert_rgb": True,
    }
