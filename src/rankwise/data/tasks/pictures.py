"""CIFAR-10, CIFAR-100 and SVHN: as pictures, or as sequences of grey pixels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rankwise.data.tasks.arrays import open_array, open_labels
from rankwise.data.tasks.augment import crop, crop_and_flip
from rankwise.data.tasks.checks import need_whole
from rankwise.data.tasks.examples import Examples, Item
from rankwise.data.tasks.sources import HubData, chosen, local_files, open_splits
from rankwise.data.tasks.task import Task, make_task
from rankwise.errors import InputError, need_package


class Pictures(NamedTuple):
    """A data set of pictures, and what its training pictures go through where they are augmented."""

    name: str
    classes: int
    data: HubData
    augmented: Callable[[Item], Item] = crop_and_flip


CIFAR10 = Pictures("cifar10", 10, HubData("uoft-cs/cifar10", "img", "label", 144, ("cifar10.npz",)))
CIFAR100 = Pictures("cifar100", 100, HubData("uoft-cs/cifar100", "img", "fine_label", 142, ("cifar100.npz",)))
SVHN = Pictures(
    "svhn",
    10,
    HubData("ufldl-stanford/svhn", "image", "label", 1140, ("svhn.npz",), "cropped_digits"),
    crop,
)
LUMA = np.array([0.299, 0.587, 0.114])
"""Red, green and blue in grey, ITU-R BT.601."""

Split = tuple[np.ndarray, np.ndarray]


def cifar10(
    source: str | Path | None = None,
    *,
    augment: bool = False,
    train_examples: int | None = None,
    test_examples: int | None = None,
    seed: int = 0,
) -> Task:
    """CIFAR-10: colour pictures of 32×32 pixels in ten classes (Krizhevsky 2009).

    From a ``.npz`` file with ``x_train`` (N, H, W, 3), ``y_train`` (N,), ``x_test`` and ``y_test``, a folder
    that holds one as ``cifar10.npz``, a folder written by ``datasets``, or, without a source, from the
    Hugging Face Hub (50,000 and 10,000 pictures). Pixels are scaled to [−1, 1].

    Args:
        source: file or folder, or None.
        augment: train on crops and mirror images (`rankwise.data.tasks.crop_and_flip`).
        train_examples: so many of the training split, drawn at random; None = all.
        test_examples: likewise of the test split.
        seed: of these draws.

    Raises:
        InputError: if source or Hub does not give these pictures.

    Examples:
        >>> import tempfile
        >>> pixels, labels = np.zeros((4, 32, 32, 3), np.uint8), np.arange(4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = f"{folder}/cifar10.npz"
        ...     np.savez(file, x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
        ...     task = cifar10(folder)
        >>> task.train[0]["pixel_values"].shape, task.num_labels, task.chance
        (torch.Size([3, 32, 32]), 10, 0.25)
    """
    return _task(CIFAR10, source, augment, train_examples, test_examples, seed)


def cifar100(
    source: str | Path | None = None,
    *,
    augment: bool = False,
    train_examples: int | None = None,
    test_examples: int | None = None,
    seed: int = 0,
) -> Task:
    """CIFAR-100: as `cifar10`, in the hundred fine classes; a file is called ``cifar100.npz``.

    Args:
        source: file or folder, or None for the Hub.
        augment: train on crops and mirror images.
        train_examples: so many of the training split, drawn at random; None = all.
        test_examples: likewise of the test split.
        seed: of these draws.

    Raises:
        InputError: if source or Hub does not give these pictures.
    """
    return _task(CIFAR100, source, augment, train_examples, test_examples, seed)


def svhn(
    source: str | Path | None = None,
    *,
    augment: bool = False,
    train_examples: int | None = None,
    test_examples: int | None = None,
    seed: int = 0,
) -> Task:
    """Street View House Numbers, cropped digits (Netzer et al. 2011); a file is called ``svhn.npz``.

    Its 531,131 extra pictures are downloaded with the others and not used.

    Args:
        source: file or folder, or None for the Hub.
        augment: train on crops; digits are not mirrored.
        train_examples: so many of the training split, drawn at random; None = all.
        test_examples: likewise of the test split.
        seed: of these draws.

    Raises:
        InputError: if source or Hub does not give these pictures.
    """
    return _task(SVHN, source, augment, train_examples, test_examples, seed)


def cifar10_sequence(
    source: str | Path | None = None,
    *,
    side: int | None = None,
    train_examples: int | None = None,
    test_examples: int | None = None,
    seed: int = 0,
) -> Task:
    """CIFAR-10 as sequences of 1,024 grey pixels, row by row: the task Image of Long Range Arena.

    A token is a level of grey from 0 to 255: 0.299 red + 0.587 green + 0.114 blue, rounded (Tay et al. 2021,
    section 2.1.4).

    Args:
        source: as `cifar10`.
        side: pictures are shrunk to ``side`` pixels along an edge, each the mean of a square block, for
            sequences of ``side``² tokens; None = as they are.
        train_examples: so many of the training split, drawn at random; None = all.
        test_examples: likewise of the test split.
        seed: of these draws.

    Raises:
        InputError: if source or Hub does not give these pictures, or blocks do not tile them.
    """
    options = {"train_examples": train_examples, "test_examples": test_examples}
    parts, origin = _read(CIFAR10._replace(name="cifar10_sequence"), source, options, seed)
    train, test = (
        Examples({"input_ids": grey(pixels).reshape(len(pixels), -1), "labels": labels})
        for pixels, labels in (part if side is None else (shrunk(part[0], side), part[1]) for part in parts)
    )
    length = train.arrays["input_ids"].shape[1]
    return make_task(
        "cifar10_sequence",
        "sequence",
        train,
        test,
        length=length,
        source=origin,
        seed=seed if any(options.values()) else None,
        options={**options, "side": side},
        vocab_size=256,
        num_labels=10,
    )


def shrunk(pixels: np.ndarray, side: int) -> np.ndarray:
    """Pictures (N, H, W, 3) of ``side``² pixels, each the mean of a square block.

    Cost: O(N H W), and a copy of the pictures in float64.

    Args:
        pixels: square pictures.
        side: a divisor of their edge.

    Raises:
        InputError: if blocks do not tile the pictures.

    Examples:
        >>> shrunk(np.arange(12.0).reshape(1, 2, 2, 3), 1).tolist()
        [[[[4.5, 5.5, 6.5]]]]
    """
    need_whole("side", side)
    count, high, wide, channels = pixels.shape
    if high % side or wide != high:
        raise InputError(
            "`side`",
            expected="a divisor of the edge of square pictures",
            got=f"{side} for pictures of {high}×{wide} pixels",
            fix="Leave it out, or take half the edge of pictures with an even, equal edge.",
        )
    block = high // side
    return pixels.reshape(count, side, block, side, block, channels).mean((2, 4))


def grey(pixels: np.ndarray) -> np.ndarray:
    """Levels of grey of pictures (N, H, W, 3), as bytes (N, H, W).

    Args:
        pixels: red, green, blue, from 0 to 255.

    Examples:
        >>> grey(np.array([[[[255, 0, 0], [9, 9, 9]]]], dtype=np.uint8)).tolist()
        [[[76, 9]]]
    """
    return np.rint(pixels @ LUMA).astype(np.uint8)


def _task(
    pictures: Pictures,
    source: str | Path | None,
    augment: bool,
    train_examples: int | None,
    test_examples: int | None,
    seed: int,
) -> Task:
    options = {"train_examples": train_examples, "test_examples": test_examples}
    parts, origin = _read(pictures, source, options, seed)
    arrays = [
        {"pixel_values": np.ascontiguousarray(np.moveaxis(pixels, -1, 1)), "labels": labels}
        for pixels, labels in parts
    ]
    shape = arrays[0]["pixel_values"].shape[1:]
    return make_task(
        pictures.name,
        "image",
        Examples(arrays[0], transform=pictures.augmented if augment else None),
        Examples(arrays[1]),
        length=shape[1] * shape[2],
        source=origin,
        seed=seed if any(options.values()) else None,
        options={**options, "augment": augment},
        num_labels=pictures.classes,
        image_shape=shape,
    )


def _read(
    pictures: Pictures, source: str | Path | None, options: dict[str, int | None], seed: int
) -> tuple[list[Split], str]:
    """Pictures (N, H, W, 3) and classes of both splits, and what the record calls their source."""
    need_whole("seed", seed, 0)
    name, classes, data, _ = pictures
    files = None if source is None else local_files(source, data)
    if files is not None:
        parts = [_from_file(files[0], split, classes) for split in ("train", "test")]
        origin = files[0].name
    else:
        splits = open_splits(source, data)
        parts = [_from_datasets(splits[split], data) for split in ("train", "test")]
        origin = data.repository if source is None else Path(source).name
    shapes = {pixels.shape[1:] for pixels, _ in parts}
    if len(shapes) > 1:
        raise InputError(
            name, expected="pictures of one size", got=f"{sorted(shapes)}", fix="Give both splits one size."
        )
    kept = []
    for part, ((pixels, labels), (option, wanted)) in enumerate(zip(parts, options.items(), strict=True)):
        which = chosen(option, len(pixels), wanted, seed, part)
        kept.append((pixels[which], labels[which]))
    return kept, origin


def _from_file(file: Path, split: str, classes: int) -> Split:
    pixels = open_array(f"{file}:x_{split}")
    if pixels.ndim != 4 or pixels.shape[-1] != 3 or not len(pixels):
        raise InputError(
            f"{file}:x_{split}",
            expected="colour pictures (N, H, W, 3)",
            got=f"shape {pixels.shape}",
            fix="Save them so with `numpy.savez`.",
        )
    return pixels, open_labels(f"{file}:y_{split}", len(pixels), classes)


def _from_datasets(rows: Any, data: HubData) -> Split:
    need_package("PIL.Image", "pictures", "images")
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in rows[data.inputs]])
    return pixels, np.asarray(rows[data.labels], dtype=np.int64)
