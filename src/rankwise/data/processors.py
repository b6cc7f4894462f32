"""The image processor of a model, with Pillow and NumPy alone.

transformers ≥ 5 has two backends for most image processors, torchvision and Pillow, and takes torchvision
where it is installed. Rankwise asks for Pillow always: nothing more to install, and the same pixels on
every machine. A few image processors exist for torchvision only, and a model trained from scratch is often
saved without one; for these there is :class:`PlainImageProcessor`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankwise.data.images import ImageProcessor, need_pillow
from rankwise.errors import InputError

HALF = (0.5, 0.5, 0.5)
BILINEAR = 2
"""Pillow's number for it, and the default of the image processors of transformers."""


@dataclass(frozen=True, kw_only=True)
class PlainImageProcessor:
    """Resize, crop, scale and normalise: ``(pixel·scale − mean)/std``.

    Args:
        size: height and width, or one number for the shorter side, the other in proportion.
        crop: height and width of a crop from the middle after resizing, or none.
        mean: by channel; for pictures with fewer channels the first channels count.
        std: likewise.
        scale: what pixels from 0 to 255 are multiplied with first.
        resample: Pillow's number of the interpolation.
        note: why it stands in for the model's own image processor; belongs beside the numbers.

    Examples:
        >>> from PIL import Image
        >>> made = PlainImageProcessor(size=(2, 2))(images=[Image.new("RGB", (5, 4), "white")])
        >>> made["pixel_values"].shape, made["pixel_values"].unique()  # white is 1, black −1
        (torch.Size([1, 3, 2, 2]), tensor([1.]))
    """

    size: tuple[int, int] | int
    crop: tuple[int, int] | None = None
    mean: Sequence[float | int] = HALF
    std: Sequence[float | int] = HALF
    scale: float | int = 1 / 255
    resample: int = BILINEAR
    note: str = ""

    def __call__(self, *, images: list[Any], return_tensors: str = "pt") -> dict[str, Tensor]:
        """Make ``{"pixel_values": Float[Tensor, "B C H W"]}``, float32.

        Raises:
            ValueError: if the results differ in size.
        """
        pixels = [self._pixels(image) for image in images]
        if len({array.shape for array in pixels}) > 1:
            raise ValueError("the resized pictures differ in size")
        return {"pixel_values": torch.from_numpy(np.stack(pixels))}

    def _pixels(self, image: Any) -> np.ndarray:
        image = image.resize(self._target(image.width, image.height), resample=self.resample)
        if self.crop is not None:
            height, width = self.crop
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))
        array = np.asarray(image, dtype=np.float32)
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
        mean, std = (np.asarray(x, dtype=np.float32)[: len(array), None, None] for x in (self.mean, self.std))
        return (array * np.float32(self.scale) - mean) / std

    def _target(self, width: int, height: int) -> tuple[int, int]:
        if isinstance(self.size, tuple):
            return self.size[1], self.size[0]
        short = min(width, height)
        return width * self.size // short, height * self.size // short


def load_image_processor(
    model: str | Path, *, config: Any = None, revision: str | None = None, trust_remote_code: bool = False
) -> ImageProcessor:
    """Load the image processor that belongs to a model, in its Pillow form.

    Where the model has settings but transformers no Pillow class for them, the settings are followed by a
    :class:`PlainImageProcessor`; where it has none, ``config.image_size`` is, with mean and standard
    deviation 0.5 (the values of ViT). Both say so in ``note``.

    Args:
        model: folder, or name on the Hugging Face Hub.
        config: the configuration of the loaded model.
        revision: of the model, on the Hub.
        trust_remote_code: whether code that comes with the model may run.

    Returns:
        An image processor for :func:`rankwise.data.read_images`.

    Raises:
        InputError: if Pillow is missing, or neither settings nor an image size are to be found.
    """
    need_pillow()
    from transformers import AutoImageProcessor

    options = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    try:
        return AutoImageProcessor.from_pretrained(str(model), backend="pil", **options)
    except (OSError, ValueError, ImportError) as error:
        settings = _settings(str(model), revision or "main")
        if settings:
            return plain_processor(
                settings, note=f"pictures prepared by Rankwise from the settings of {model}"
            )
        size = _image_size(config)
        if size is None:
            raise InputError(
                str(model),
                expected="a model that reads pictures",
                got="neither preprocessor_config.json nor image_size in its configuration",
                fix="Give --text for a language model, or save the image processor beside the model.",
            ) from error
        note = f"{model} has no image processor: pictures resized to {size[0]}×{size[1]}, mean and std 0.5"
        return PlainImageProcessor(size=size, note=note)


def plain_processor(settings: dict[str, Any], note: str = "") -> PlainImageProcessor:
    """Follow the settings of a ``preprocessor_config.json``: size, crop_size, image_mean, image_std and the
    like.

    Args:
        settings: what the file holds.
        note: passed on.

    Raises:
        InputError: if its size is of no known form.

    Examples:
        >>> plain_processor({"size": {"shortest_edge": 256}, "crop_size": 224}).crop
        (224, 224)
    """
    default = {"height": 224, "width": 224}
    size = settings.get("size", default) if settings.get("do_resize", True) else None
    cropped = settings.get("do_center_crop", "crop_size" in settings)
    crop = _pair(settings.get("crop_size", default)) if cropped else None
    edge = size.get("shortest_edge") if isinstance(size, dict) else None
    target = edge or _pair(size)
    if target is None:
        known = 'a number, {"height": …, "width": …} or {"shortest_edge": …}'
        raise InputError(
            "size in preprocessor_config.json",
            expected=known,
            got=repr(size),
            fix="Install torchvision for this model.",
        )
    normalised = settings.get("do_normalize", True)
    return PlainImageProcessor(
        size=target,
        crop=crop,
        mean=settings.get("image_mean") or HALF if normalised else (0.0,) * 3,
        std=settings.get("image_std") or HALF if normalised else (1.0,) * 3,
        scale=settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0,
        resample=settings.get("resample", BILINEAR),
        note=note,
    )


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    if isinstance(size, dict) and size.get("height") and size.get("width"):
        return size["height"], size["width"]
    if isinstance(size, (list, tuple)) and len(size) == 2:
        return size[0], size[1]
    return None


def _settings(model: str, revision: str) -> dict[str, Any]:
    from transformers.models.auto.image_processing_auto import get_image_processor_config

    try:
        return get_image_processor_config(model, revision=revision)
    except (OSError, ValueError):
        return {}


def _image_size(config: Any) -> tuple[int, int] | None:
    vision = getattr(config, "vision_config", config)
    return _pair(getattr(vision, "image_size", None))
