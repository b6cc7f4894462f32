"""CIFAR-10 (Krizhevsky 2009): as pictures, or as sequences of gray pixels."""

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import pad

from experiments.tasks.task import Examples, Item, Task, chosen, make_task
from rankwise.errors import InputError

CLASSES = 10
LUMA = np.array([0.299, 0.587, 0.114])
"""Red, green and blue in gray, ITU-R BT.601."""
SHIFT = 4
"""Black pixels around a picture before it is cropped, as He et al. (2016) train on CIFAR-10."""

Split = tuple[np.ndarray, np.ndarray]


def cifar10(
    folder: Path,
    *,
    augment: bool = False,
    train_examples: int | None = None,
    test_examples: int | None = None,
    seed: int = 0,
) -> Task:
    """Return color pictures of 32 × 32 pixels in ten classes.

    Args:
        folder: holds `cifar10.npz` with `x_train` (N, H, W, 3), `y_train` (N,), `x_test` and `y_test`.
        augment: train on crops and mirror images.
        train_examples: number of training examples, drawn at random; None: all.
        test_examples: the same for the test split.
        seed: of these draws.
    """
    wanted = {"train_examples": train_examples, "test_examples": test_examples}
    parts = _read(folder, wanted, seed)
    train, test = (
        {"pixel_values": np.ascontiguousarray(np.moveaxis(pixels, -1, 1)), "labels": labels}
        for pixels, labels in parts
    )
    channels, height, width = train["pixel_values"].shape[1:]
    return make_task(
        "cifar10",
        "image",
        Examples(train, transform=crop_and_flip if augment else None),
        Examples(test),
        length=height * width,
        source="cifar10.npz",
        seed=seed if any(wanted.values()) else None,
        options={**wanted, "augment": augment},
        num_labels=CLASSES,
        image_shape=(channels, height, width),
    )


def cifar10_sequence(
    folder: Path,
    *,
    side: int | None = None,
    train_examples: int | None = None,
    test_examples: int | None = None,
    seed: int = 0,
) -> Task:
    """Return sequences of gray pixels, row by row: the task Image of Long Range Arena.

    A token is a level of gray from 0 to 255 (Tay et al. 2021, section 2.1.4).

    Args:
        folder: as for `cifar10`.
        side: shrink pictures to `side` × `side` pixels, each the mean of a square block; None: as they are.
        train_examples: as for `cifar10`.
        test_examples: as for `cifar10`.
        seed: of these draws.
    """
    wanted = {"train_examples": train_examples, "test_examples": test_examples}
    train, test = (
        Examples({"input_ids": gray(pixels).reshape(len(pixels), -1), "labels": labels})
        for pixels, labels in (
            part if side is None else (shrink(part[0], side), part[1]) for part in _read(folder, wanted, seed)
        )
    )
    return make_task(
        "cifar10_sequence",
        "sequence",
        train,
        test,
        length=train.arrays["input_ids"].shape[1],
        source="cifar10.npz",
        seed=seed if any(wanted.values()) else None,
        options={**wanted, "side": side},
        vocab_size=256,
        num_labels=CLASSES,
    )


def shrink(pixels: np.ndarray, side: int) -> np.ndarray:
    """Return pictures (N, H, H, C) of side × side pixels, each the mean of a square block, in float64."""
    count, high, wide, channels = pixels.shape
    if high % side or wide != high:
        raise ValueError(f"expected a divisor of the edge of square pictures, got {side} for {high}×{wide}")
    block = high // side
    return pixels.reshape(count, side, block, side, block, channels).mean((2, 4))


def gray(pixels: np.ndarray) -> np.ndarray:
    """Return the levels of gray (N, H, W) of pictures (N, H, W, 3), as bytes."""
    return np.rint(pixels @ LUMA).astype(np.uint8)


def crop_and_flip(item: Item) -> Item:
    """Shift a picture by up to four pixels each way, and mirror it with probability 1/2.

    The shift brings in black. Random numbers are those of torch.
    """
    pixels = item["pixel_values"]
    height, width = pixels.shape[-2:]
    top, left = torch.randint(0, 2 * SHIFT + 1, (2,)).tolist()
    pixels = pad(pixels, (SHIFT,) * 4, value=-1.0)[..., top : top + height, left : left + width]
    return {**item, "pixel_values": pixels.flip(-1) if torch.rand(()) < 0.5 else pixels}


def _read(folder: Path, wanted: dict[str, int | None], seed: int) -> list[Split]:
    """Return the pictures (N, H, W, 3) and the classes (N,) of both splits."""
    file = folder / "cifar10.npz"
    if not file.is_file():
        raise InputError(
            str(file),
            expected="a .npz file with x_train, y_train, x_test and y_test",
            got="no such file",
            fix="Write the arrays of CIFAR-10 with numpy.savez.",
        )
    with np.load(file, allow_pickle=False) as arrays:
        parts = [(arrays[f"x_{split}"], arrays[f"y_{split}"].astype(np.int64)) for split in ("train", "test")]
    for pixels, labels in parts:
        if pixels.dtype != np.uint8 or pixels.shape[3:] != (3,) or labels.shape != (len(pixels),):
            raise InputError(
                str(file),
                expected="bytes (N, H, W, 3) and classes (N,)",
                got=f"{pixels.dtype} {pixels.shape} and {labels.shape}",
                fix="Write the arrays of CIFAR-10 with numpy.savez.",
            )
    rows = [chosen(len(parts[part][1]), count, seed, part) for part, count in enumerate(wanted.values())]
    return [(pixels[which], labels[which]) for (pixels, labels), which in zip(parts, rows, strict=True)]
