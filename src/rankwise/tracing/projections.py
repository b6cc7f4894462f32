"""Find the linear layer that computes queries, keys or values, by comparing its output with the heads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rankwise._internals.linalg import as_float64

CLOSE = 64
"""Largest allowed difference of heads and linear output, in units of eps times the largest entry."""


@dataclass(frozen=True)
class Projection:
    """A linear layer that computes queries, keys or values, and the output channels that form each head."""

    module: str
    """Name of the linear layer in the model."""
    channels: Int[Tensor, "H K"]
    """Output channels of each head: ``heads[..., h, :, i] = factor · output[..., channels[h, i]]``."""
    factor: float = 1.0
    """Factor that the model multiplies the output by before attention, such as 1/√K in OPT."""


def linear_parts(module: nn.Module) -> tuple[Float[Tensor, "O D"], Float[Tensor, "O"] | None] | None:
    """Return weight (out, in) and bias of a linear layer, as views; None for another module.

    ``Conv1D`` of transformers counts as linear; its weight is stored transposed.
    """
    if isinstance(module, nn.Linear):
        return module.weight, module.bias
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return module.weight.mT, module.bias  # type: ignore[return-value]
    return None


def find_projection(
    heads: Float[Tensor, "B H T K"], outputs: Mapping[str, Float[Tensor, "B T O"]]
) -> Projection | None:
    """Return the linear layer whose output, cut into heads, equals ``heads`` up to a constant factor.

    Channels of head h may begin at ``offset + h·K``, as in a projection of queries or in ``[q | k | v]``. Or
    they begin at ``(h·g + j)·K``, if each head has g adjacent parts (queries, keys, values) and j is the
    part. Without a layer that fits, as before rotary positions or a norm, None is returned.
    """
    batch, count, tokens, width = heads.shape
    flat = as_float64(heads.transpose(1, 2).reshape(batch * tokens, count, width))
    for name, output in outputs.items():
        if output.shape[-1] < count * width or output.numel() != flat.shape[0] * output.shape[-1]:
            continue
        rows = as_float64(output.reshape(-1, output.shape[-1]))
        for channels in head_layouts(count, width, rows.shape[-1]):
            factor = _factor(flat, rows[:, channels], output.dtype)
            if factor is not None:
                return Projection(name, channels, factor)
    return None


def side_of(output: Float[Tensor, "B T O"], side: Projection) -> Float[Tensor, "B H T K"]:
    """Return the part of a linear layer's output that holds the heads, as (B, H, T, K)."""
    return output[..., side.channels.to(output.device)].permute(0, 2, 1, 3)


def head_layouts(heads: int, width: int, outputs: int) -> list[Int[Tensor, "H K"]]:
    """Return the channels (H, K) of each possible layout of H heads of width K in a linear output."""
    head, dim = torch.arange(heads)[:, None], torch.arange(width)
    blocks = [start + head * width + dim for start in range(0, outputs - heads * width + 1, width)]
    group = outputs // (heads * width)
    interleaved = [head * group * width + part * width + dim for part in range(group)] if group > 1 else []
    return blocks + interleaved


def _factor(heads: Tensor, candidate: Tensor, dtype: torch.dtype) -> float | None:
    norm = float((candidate * candidate).sum())
    if norm == 0:
        return None
    factor = float((heads * candidate).sum()) / norm
    off = float((heads - factor * candidate).abs().max())
    fits = off <= CLOSE * torch.finfo(dtype).eps * float(heads.abs().max())
    if not fits or factor == 0:
        return None
    return 1.0 if abs(factor - 1) < 1e-9 else factor


def each_once(heads: Float[Tensor, "B H S K"]) -> Float[Tensor, "B G S K"]:
    """Return the G distinct key or value heads, which attention code may repeat for groups of queries."""
    count = heads.shape[1]
    for group in range(count, 1, -1):
        if count % group == 0:
            grouped = heads.unflatten(1, (-1, group))
            if bool((grouped == grouped[:, :, :1]).all()):
                return grouped[:, :, 0]
    return heads


def names_below(names: Sequence[str], site: str) -> list[str]:
    """Return the names inside a module; if there are none, the names inside its parent module."""
    parent = site.rpartition(".")[0]
    inside = [name for name in names if name.startswith(f"{site}.") or not site]
    return inside or [name for name in names if name.startswith(f"{parent}.")]
