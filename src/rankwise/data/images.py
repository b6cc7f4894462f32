"""A folder of pictures into batches for a vision model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rankwise.auditing.text_inputs import ALL, Shard, evenly
from rankwise.data.arrays import is_array_file, open_array
from rankwise.errors import InputError, whole_number

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""What is taken for a picture in a folder."""

ImageProcessor = Callable[..., Any]
"""An image processor of transformers, or what is called as one is: ``(images=…, return_tensors="pt")``."""


def read_images(
    folder: str | Path,
    processor: ImageProcessor,
    *,
    sequences: int = 8,
    batch_size: int = 4,
    mode: str = "RGB",
    shard: Shard = ALL,
) -> Iterator[dict[str, Tensor]]:
    """Read pictures and make them what the model reads.

    ``sequences`` of them are taken, spread evenly over the sorted paths (folders are often sorted by
    class), or all where there are no more. Each is turned the way its EXIF data say and converted to
    ``mode``; of a moving picture the first frame is taken.

    Cost: a picture is opened when its batch is asked for.

    Args:
        folder: a folder, searched to any depth for files named like pictures (``SUFFIXES``; hidden ones are
            left out), or one picture, or a ``.npz`` file (`open_array`).
        processor: from :func:`load_image_processor`, or any image processor of transformers.
        sequences: how many pictures to take at most.
        batch_size: pictures in a batch; the last batch may hold fewer.
        mode: Pillow's name for the channels: ``"RGB"``, or ``"L"`` for models with one channel.
        shard: which of the pictures to take, where several processes share them.

    Returns:
        An iterator over what the processor makes, its tensors only: ``{"pixel_values": Float[Tensor, "B C H
        W"]}`` and, for some models, more.

    Raises:
        InputError: at the call, if a number is below 1, Pillow is missing, or there is no such folder or no
            picture in it; while iterating, if a picture cannot be read or a batch of them not be stacked.

    Examples:
        >>> read_images("missing", processor=dict)
        Traceback (most recent call last):
        ...
        rankwise.errors.InputError: missing: expected a folder of pictures, got no such folder. Check the ...
    """
    whole_number("`sequences`", sequences)
    whole_number("`batch_size`", batch_size)
    need_pillow()
    if is_array_file(folder):
        return _from_array(folder, processor, sequences, batch_size, mode, shard)
    paths = find_images(folder)
    chosen = shard.of([paths[i] for i in evenly(len(paths), sequences)])
    return (
        _process([open_image(path, mode) for path in chosen[i : i + batch_size]], processor, str(chosen[i]))
        for i in range(0, len(chosen), batch_size)
    )


def _from_array(
    path: str | Path, processor: ImageProcessor, sequences: int, batch_size: int, mode: str, shard: Shard
) -> Iterator[dict[str, Tensor]]:
    from PIL import Image

    pixels = open_array(path)
    chosen = shard.of(evenly(len(pixels), sequences))

    def picture(at: int) -> Any:
        image = pixels[at]
        return Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image).convert(
            mode
        )

    return (
        _process(
            [picture(at) for at in chosen[i : i + batch_size]], processor, f"picture {chosen[i]} of {path}"
        )
        for i in range(0, len(chosen), batch_size)
    )


def find_images(folder: str | Path) -> list[Path]:
    """List the pictures of a folder, sorted by path; a file is a list of one, whatever its name.

    Args:
        folder: a folder or a file.

    Raises:
        InputError: if there is no such folder, or no picture in it.
    """
    folder = Path(folder)
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise InputError(
            str(folder), expected="a folder of pictures", got="no such folder", fix="Check the path."
        )
    found = sorted(
        path for path in folder.rglob("*") if _is_picture(path.relative_to(folder)) and path.is_file()
    )
    if not found:
        others = sum(path.is_file() for path in folder.rglob("*"))
        fix = f"Give a folder with files ending in {', '.join(SUFFIXES)}."
        raise InputError(
            str(folder), expected="a folder of pictures", got=f"{others} files, none a picture", fix=fix
        )
    return found


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not any(part.startswith(".") for part in path.parts)


def open_image(path: Path, mode: str = "RGB") -> Any:
    """Read one picture, upright, in ``mode``: a ``PIL.Image.Image``.

    Args:
        path: the file.
        mode: Pillow's name for the channels.

    Raises:
        InputError: naming the file, if Pillow cannot read it.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(_eight_bits(image)).convert(mode)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow says broken PNG as SyntaxError, truncated files as OSError, odd headers as ValueError
        raise InputError(
            str(path),
            expected="a picture",
            got=f"a file that cannot be read as one ({error})",
            fix="Remove or mend it.",
        ) from error


def _eight_bits(image: Any) -> Any:
    """Scale 16-bit grey to 8 bits: Pillow's own conversion clips, and makes most of the picture white."""
    from PIL import Image

    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise ValueError(f"pixels of mode {image.mode} have no known white; save it with 8 or 16 bits")
    scaled = Image.fromarray((values // 257).astype(np.uint8))
    scaled.info = image.info
    return scaled


def need_pillow() -> None:
    """Refuse to go on without Pillow.

    Raises:
        InputError: naming the extra that brings it.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        fix = "Install it: pip install 'rankwise[images]'"
        raise InputError(
            "pictures", expected="Pillow to read them", got="no Pillow installed", fix=fix
        ) from error


def _process(images: list[Any], processor: ImageProcessor, first: str) -> dict[str, Tensor]:
    try:
        made = processor(images=images, return_tensors="pt")
    except ValueError as error:
        sizes = sorted({f"{image.width}×{image.height}" for image in images})
        if len(sizes) == 1:
            raise
        raise InputError(
            f"the batch that begins with {first}",
            expected="pictures that the model's image processor makes the same size",
            got=f"sizes {', '.join(sizes)} ({str(error).splitlines()[0].rstrip('.')})",
            fix="Use --batch-size 1, or pictures of one size.",
        ) from error
    return {name: value for name, value in made.items() if isinstance(value, Tensor)}
