"""CIFAR-10 (Krizhevsky 2009): as pictures, or as sequences of gray pixels."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from experiments.tasks.task import Examples, Item, Task, choose, make_task

LUMA = np.array([0.299, 0.587, 0.114])
"""Red, green and blue in gray, ITU-R BT.601."""
SHIFT = 4
"""Black pixels around a picture before it is cropped, as He et al. (2016) train on CIFAR-10."""


def cifar10(folder: Path, *, augment: bool = False, **drawn: Any) -> Task:
    """Return color pictures of 32 × 32 pixels in ten classes; `augment`: train on crops and mirror images.

    `drawn`: numbers of `train_examples` and `test_examples` that are drawn at random, and their `seed`.
    """
    splits, record = _read(folder, **drawn)
    train, test = (
        {"pixel_values": np.ascontiguousarray(np.moveaxis(pixels, -1, 1)), "labels": labels}
        for pixels, labels in splits
    )
    channels, height, width = train["pixel_values"].shape[1:]
    record["options"]["augment"] = augment
    return make_task(
        "cifar10",
        "image",
        Examples(train, transform=crop_and_flip if augment else None),
        Examples(test),
        length=height * width,
        image_shape=(channels, height, width),
        **record,
    )


def cifar10_sequence(folder: Path, *, side: int | None = None, **drawn: Any) -> Task:
    """Return sequences of gray pixels, row by row: the task Image of Long Range Arena.

    A token is a level of gray from 0 to 255 (Tay et al. 2021, section 2.1.4). `side`: see `shrink`.
    """
    splits, record = _read(folder, **drawn)
    train, test = (
        Examples(
            {
                "input_ids": gray(pixels if side is None else shrink(pixels, side)).reshape(len(pixels), -1),
                "labels": labels,
            }
        )
        for pixels, labels in splits
    )
    record["options"]["side"] = side
    length = train.arrays["input_ids"].shape[1]
    return make_task("cifar10_sequence", "sequence", train, test, length=length, vocab_size=256, **record)


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
    """Shift a picture by up to four pixels each way, and mirror it with probability 1/2."""
    pixels = item["pixel_values"]
    height, width = pixels.shape[-2:]
    top, left = torch.randint(2 * SHIFT + 1, (2,)).tolist()
    pixels = pad(pixels, (SHIFT,) * 4, value=-1.0)[..., top : top + height, left : left + width]
    return {**item, "pixel_values": pixels.flip(-1) if torch.rand(()) < 0.5 else pixels}


def _read(
    folder: Path, train_examples: int | None = None, test_examples: int | None = None, seed: int = 0
) -> tuple[list[tuple[np.ndarray, np.ndarray]], dict[str, Any]]:
    """Return the pictures (N, H, W, 3) and the classes (N,) of both splits, and their record."""
    splits = []
    with np.load(folder / "cifar10.npz", allow_pickle=False) as arrays:
        for part, (name, count) in enumerate((("train", train_examples), ("test", test_examples))):
            pixels, labels = arrays[f"x_{name}"], arrays[f"y_{name}"].astype(np.int64)
            if pixels.dtype != np.uint8 or pixels.shape[3:] != (3,) or labels.shape != (len(pixels),):
                got = f"{pixels.dtype} {pixels.shape} and {labels.shape}"
                raise ValueError(f"cifar10.npz: expected bytes (N, H, W, 3) and classes (N,), got {got}")
            rows = choose(len(labels), count, seed, part)
            splits.append((pixels[rows], labels[rows]))
    wanted = {"train_examples": train_examples, "test_examples": test_examples}
    shown = seed if any(wanted.values()) else None
    return splits, {"source": "cifar10.npz", "seed": shown, "options": wanted, "num_labels": 10}
