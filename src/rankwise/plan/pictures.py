"""Token states of pictures without a model: their patches through a random patch embedding."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from rankwise.data import read_images
from rankwise.errors import InputError
from rankwise.plan.states import gaussian

SIDE = 224
"""Pixels to which pictures of several sizes are brought, as ViT reads them."""


def picture_states(
    path: Path, width: int, tokens: int, sequences: int, seed: int
) -> tuple[Float[Tensor, "B T D"], list[str]]:
    """Patches of pictures through a random patch embedding, a Gaussian linear map as ViT begins with.

    Patches are square and as small as gives at most so many; pixels lie in [−1, 1].

    Args:
        path: a folder of pictures, one of them, or a ``.npz`` file (`rankwise.data.arrays.open_array`).
        width: D.
        tokens: patches of a picture, at most.
        sequences: pictures, at most.
        seed: of the embedding.

    Returns:
        States, and in words what they are, then notes.

    Raises:
        InputError: if the pictures cannot be read, or be cut into 2 to ``tokens`` patches.
    """
    batches = list(read_images(path, _stacked, sequences=sequences, batch_size=sequences))
    pixels = batches[0]["pixel_values"]
    height, across = pixels.shape[-2:]
    side = patch_side(height, across, tokens)
    if side is None:
        raise InputError(
            f"--images {path}",
            expected=f"pictures that square patches cut into 2 to {tokens} tokens",
            got=f"{height} × {across} pixels",
            fix="Give more --tokens, or pictures whose sides share a divisor.",
        )
    patches = F.unfold(pixels, side, stride=side).mT
    states = patches @ gaussian(torch.Generator().manual_seed(seed), patches.shape[-1], width)
    count = states.shape[1]
    notes = [f"{count} patches of {side} × {side} of {height} × {across} pixels."]
    if count < tokens:
        notes[0] += f" Fewer than --tokens {tokens}: smaller patches would be more."
    if batches[0]["resized"].item():
        notes.append(f"Pictures of several sizes were brought to {SIDE} × {SIDE} pixels.")
    said = f"patches of {path} through a random embedding ({len(states)} pictures)"
    return states, [said, *notes]


def patch_side(height: int, width: int, tokens: int) -> int | None:
    """Side of the smallest square patches that cut a picture whole into 2 to so many; None: there are none.

    Args:
        height: of the picture, in pixels.
        width: likewise.
        tokens: patches at most.

    Examples:
        >>> patch_side(32, 32, 256), patch_side(224, 224, 200), patch_side(7, 5, 10)
        (2, 16, None)
    """
    sides = range(1, min(height, width) + 1)
    whole = (side for side in sides if height % side == 0 and width % side == 0)
    return next((side for side in whole if 2 <= (height // side) * (width // side) <= tokens), None)


def _stacked(images: list[Any], return_tensors: str) -> dict[str, Tensor]:
    """Pixels of pictures of one size; of several, all resized."""
    several = len({image.size for image in images}) > 1
    sized = [image.resize((SIDE, SIDE)) for image in images] if several else images
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in sized])).float()
    return {"pixel_values": pixels.permute(0, 3, 1, 2) / 127.5 - 1, "resized": torch.tensor(several)}
