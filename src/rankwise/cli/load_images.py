"""Load images as batches for a vision model, with the Pillow image processors of transformers.

Rankwise uses Pillow even if transformers prefers torchvision: pixels must not depend on installed packages.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rankwise._internals.forward import config_value
from rankwise.auditing.batches import ALL, Shard, evenly
from rankwise.errors import InputError, first_line, need_package

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Endings of file names that count as images in a folder."""
ImageProcessor = Callable[..., Any]
"""Image processor of transformers, or a function with the arguments `(images=…, return_tensors="pt")`."""


def read_images(
    folder: str | Path,
    processor: ImageProcessor,
    *,
    sequences: int = 8,
    batch_size: int = 4,
    mode: str = "RGB",
    shard: Shard = ALL,
) -> Iterator[dict[str, Tensor]]:
    """Return an iterator over batches `{"pixel_values": (B, C, H, W)}` of the images in a folder or file.

    Images are evenly spaced in the sorted paths, because folders are often sorted by class. `mode` is
    Pillow's name for the channels: "RGB", or "L" for one channel. An image is opened when its batch is made.
    """
    paths = find_images(folder)
    chosen = shard.of([paths[i] for i in evenly(len(paths), sequences)])
    return (
        _process([open_image(path, mode) for path in chosen[i : i + batch_size]], processor, chosen[i])
        for i in range(0, len(chosen), batch_size)
    )


def find_images(folder: str | Path) -> list[Path]:
    """Return the visible images in a folder at any depth, sorted by path. For a file, return the file.

    Raise `InputError` if there are no images.
    """
    need_package("PIL", "images", "images")
    folder = Path(folder)
    if folder.is_file():
        return [folder]
    expected = "a folder of images"
    if not folder.is_dir():
        raise InputError(str(folder), expected=expected, got="no such folder", fix="Check the path.")
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    shown = [path for path in files if not any(name.startswith(".") for name in path.parts)]
    images = sorted(folder / path for path in shown if path.suffix.lower() in SUFFIXES)
    if not images:
        fix = f"Pass a folder with files that end in {', '.join(SUFFIXES)}."
        raise InputError(str(folder), expected=expected, got=f"{len(files)} files, none an image", fix=fix)
    return images


def open_image(path: Path, mode: str = "RGB") -> Any:
    """Return the first frame of an image in `mode` as `PIL.Image.Image`, turned upright by its EXIF data."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(_to_eight_bits(image)).convert(mode)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow raises SyntaxError for a broken PNG, OSError for a short file, ValueError for odd headers.
        got = f"a file that cannot be read as one ({error})"
        raise InputError(str(path), expected="an image", got=got, fix="Remove or repair it.") from error


def _to_eight_bits(image: Any) -> Any:
    """Scale 16-bit gray to 8 bits, because Pillow's own conversion clips most values to white."""
    from PIL import Image

    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise ValueError(f"pixels of mode {image.mode} have no known white; save it with 8 or 16 bits")
    scaled = Image.fromarray((values // 257).astype(np.uint8))
    scaled.info = image.info
    return scaled


def _process(images: list[Any], processor: ImageProcessor, first: Path) -> dict[str, Tensor]:
    try:
        batch = processor(images=images, return_tensors="pt")
    except ValueError as error:
        subject, fix = f"the batch that begins with {first}", "Use --batch-size 1, or images of one size."
        expected = "images that the model's image processor makes the same size"
        raise InputError(subject, expected=expected, got=first_line(error), fix=fix) from error
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    pixels = tensors.get("pixel_values")
    if pixels is not None and pixels.dim() == 5 and tuple(pixels.shape[:2]) == (1, len(images)):
        expected, got = "a model of images", f"one of videos: {len(images)} images would be one video"
        fix = "Pass videos by a factory, FILE.py:FUNCTION, which returns the model and its batches."
        raise InputError("--images", expected=expected, got=got, fix=fix)
    return tensors


def load_image_processor(
    model: str | Path, *, config: Any = None, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[ImageProcessor, str]:
    """Return the Pillow image processor of a model, and a note if the processor is a substitute.

    `plain_processor` is the substitute if transformers has no Pillow class for the settings. If the model has
    no settings, images are resized to `config.image_size`, with mean and standard deviation 0.5 as in ViT.
    """
    need_package("PIL", "images", "images")
    from transformers import AutoImageProcessor
    from transformers.models.auto.image_processing_auto import get_image_processor_config

    revision, channels = revision or "main", config_value(config, "num_channels", default=3)
    try:
        return AutoImageProcessor.from_pretrained(
            str(model), backend="pil", revision=revision, trust_remote_code=trust_remote_code
        ), ""
    except (OSError, ValueError, ImportError) as error:
        try:
            settings = get_image_processor_config(str(model), revision=revision)
        except (OSError, ValueError):
            settings = {}
        if settings:
            note = f"images prepared by Rankwise from the settings of {model}"
            return plain_processor(settings, channels), note
        size = config_value(config_value(config, "vision_config", default=config), "image_size")
        if size is None:
            got = "neither preprocessor_config.json nor image_size in its configuration"
            fix = "Pass --text for a language model, or save the image processor with the model."
            raise InputError(str(model), expected="a model that reads images", got=got, fix=fix) from error
        height, width = size if isinstance(size, list | tuple) else (size, size)
        note = f"{model} has no image processor: images resized to {height}×{width}, mean and std 0.5"
        return plain_processor({"size": size}, channels), note


def plain_processor(settings: dict[str, Any], channels: int = 3) -> ImageProcessor:
    """Return CLIP's image processor with settings of a `preprocessor_config.json`. Defaults are ViT's."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = settings.get("size", 224)
    if not isinstance(size, dict):
        height, width = size if isinstance(size, list | tuple) else (size, size)
        size = {"height": height, "width": width}
    if not (size.get("shortest_edge") or (size.get("height") and size.get("width"))):
        forms = 'a number, {"height": …, "width": …} or {"shortest_edge": …}'
        subject, fix = "size in preprocessor_config.json", "Install torchvision for this model."
        raise InputError(subject, expected=forms, got=repr(settings["size"]), fix=fix)
    kept = ("crop_size", "do_resize", "do_rescale", "rescale_factor", "do_normalize")
    return CLIPImageProcessorPil(
        size=size,
        do_center_crop=settings.get("do_center_crop", "crop_size" in settings),
        do_convert_rgb=False,  # `open_image` has already converted colors
        image_mean=(settings.get("image_mean") or [0.5] * 3)[:channels],
        image_std=(settings.get("image_std") or [0.5] * 3)[:channels],
        resample=settings.get("resample", 2),  # bilinear, the default of transformers
        **{name: settings[name] for name in kept if name in settings},
    )
