"""Small pictures, shifted and mirrored at random when they are read for training."""

import torch
from torch.nn.functional import pad

from rankwise.data.tasks.examples import Item

SHIFT = 4
"""Pixels of black around a picture before it is cropped, as He et al. (2016) train on CIFAR-10."""


def crop(item: Item) -> Item:
    """Shift a picture by up to four pixels each way; what comes in is black.

    Random numbers are torch's own, so that the seed of a Trainer decides them.

    Args:
        item: with ``pixel_values`` (C, H, W) in [−1, 1].
    """
    pixels = item["pixel_values"]
    height, width = pixels.shape[-2:]
    top, left = torch.randint(0, 2 * SHIFT + 1, (2,)).tolist()
    padded = pad(pixels, (SHIFT,) * 4, value=-1.0)
    return {**item, "pixel_values": padded[..., top : top + height, left : left + width]}


def crop_and_flip(item: Item) -> Item:
    """Shift a picture as `crop` does, and mirror it left to right in half of the cases.

    Args:
        item: with ``pixel_values`` (C, H, W) in [−1, 1].
    """
    item = crop(item)
    if torch.rand(()) < 0.5:
        item["pixel_values"] = item["pixel_values"].flip(-1)
    return item
