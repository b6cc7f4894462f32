"""From an image to tokens: the released frame's convolutions and Fourier positions."""

import math
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rankwise.errors import InputError
from rankwise.models.configuration import ToSTConfig


class PatchEmbedding(nn.Module):
    """Halve an image with 3×3 convolutions until one pixel is left for each patch.

    Each convolution doubles the channels, up to D, and is followed by a batch norm; GELU between them.
    Source: El-Nouby et al., "XCiT: Cross-Covariance Image Transformers", NeurIPS 2021.

    Args:
        config: patch size, colours and width.

    Raises:
        InputError: if the patch is not 2, 4, 8 or 16 pixels wide, or the width cannot be halved so often.
    """

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__()
        halvings = config.patch_size.bit_length() - 1
        if config.patch_size not in (2, 4, 8, 16) or config.hidden_size % 2 ** (halvings - 1):
            raise InputError(
                "ToSTConfig `patch_size`",
                expected="2, 4, 8 or 16, and a hidden_size that patch_size / 2 divides",
                got=f"patch_size={config.patch_size}, hidden_size={config.hidden_size}",
                fix="The released models use 16 or 8.",
            )
        widths = [config.num_channels] + [config.hidden_size >> i for i in reversed(range(halvings))]
        self.patch_size, self.num_channels = config.patch_size, config.num_channels
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False) for a, b in pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])

    def forward(self, pixel_values: Float[Tensor, "B C Y X"]) -> Float[Tensor, "B D Y2 X2"]:
        """Tokens, still laid out as an image.

        Raises:
            InputError: if patches do not tile the image, or the colours are not what was configured.
        """
        _, colours, height, width = pixel_values.shape
        if height % self.patch_size or width % self.patch_size or colours != self.num_channels:
            raise InputError(
                "`pixel_values`",
                expected=f"(B, {self.num_channels}, Y, X) with sides that {self.patch_size} divides",
                got=f"{tuple(pixel_values.shape)}",
                fix="Resize or crop the images.",
            )
        x = pixel_values
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = norm(convolution(x if index == 0 else nn.functional.gelu(x)))
        return x


class FourierPositions(nn.Module):
    """Sines and cosines of row and column, mapped to the width.

    Positions run from 1 / (rows + ε) to about 1 times 2π, so a model takes images of any size.
    Source: as `PatchEmbedding`.

    Args:
        hidden_size: D.
        frequencies: sines and cosines of each axis.
        temperature: the slowest frequency's inverse.
    """

    def __init__(self, hidden_size: int, frequencies: int = 32, temperature: float = 10_000.0) -> None:
        super().__init__()
        self.frequencies, self.temperature = frequencies, temperature
        self.projection = nn.Conv2d(2 * frequencies, hidden_size, kernel_size=1)

    def forward(self, rows: int, columns: int) -> Float[Tensor, "1 D Y X"]:
        """The encoding of every place of a grid."""
        weight = self.projection.weight
        down, across = self._axis(rows, weight.device), self._axis(columns, weight.device)
        grid = torch.cat([down[:, None].expand(-1, columns, -1), across.expand(rows, -1, -1)], -1)
        return self.projection(grid.permute(2, 0, 1)[None].to(weight.dtype))

    def _axis(self, places: int, device: torch.device) -> Float[Tensor, "Y F"]:
        """Sine and cosine in turns: (places, frequencies)."""
        angle = torch.arange(1, places + 1, device=device) / (places + 1e-6) * (2 * math.pi)
        index = torch.arange(self.frequencies, device=device)
        turns = angle[:, None] / self.temperature ** (2 * (index // 2) / self.frequencies)
        return torch.stack([turns[:, 0::2].sin(), turns[:, 1::2].cos()], -1).flatten(1)
