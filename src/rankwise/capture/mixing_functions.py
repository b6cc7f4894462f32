"""Torch functions that mix tokens beside attention: convolutions, shifts, running sums, Fourier transforms.

Capture makes no operator of them. It takes note of those that act along tokens, so that the module that
called them is named.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Reader = Callable[..., set[int]]
"""From a call to the lengths of the axes along which it mixes, none of them where it mixes nothing."""


def mixed_lengths(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[str, set[int]]:
    """What a call of one of `FUNCTIONS` does, and the lengths of the axes along which it does it."""
    name, lengths = FUNCTIONS[func]
    return name, lengths(out, *args, **kwargs)


def _convolution(out: Tensor, input: Tensor, weight: Tensor, *rest: Any, **named: Any) -> set[int]:
    if prod(weight.shape[2:]) == 1 or input.dim() != weight.dim():
        return set()
    return {prod(input.shape[2:]), prod(out.shape[2:])}


def _shift(out: Tensor, input: Tensor, pad: Sequence[int], *rest: Any, **named: Any) -> set[int]:
    """As many entries added on one side as are cut off on the other."""
    pairs = zip(pad[::2], pad[1::2], strict=True)
    return {input.shape[-1 - axis] for axis, (left, right) in enumerate(pairs) if left == -right != 0}


def _along(out: Tensor, input: Tensor, dim: Any = -1, *rest: Any, **named: Any) -> set[int]:
    return _lengths(input, dim)


def _rolled(out: Tensor, input: Tensor, shifts: Any, dims: Any = None, *rest: Any, **named: Any) -> set[int]:
    return _lengths(input, dims)


def _fourier(out: Tensor, input: Tensor, n: Any = None, dim: Any = -1, *rest: Any, **named: Any) -> set[int]:
    return _lengths(input, dim)


def _fourier_planes(
    out: Tensor, input: Tensor, s: Any = None, dim: Any = None, *rest: Any, **named: Any
) -> set[int]:
    return _lengths(input, dim)


def _linear(out: Tensor, input: Tensor, weight: Tensor, *rest: Any, **named: Any) -> set[int]:
    """Its inputs are tokens where they lie on the last axis, as in the token-mixing part of an MLP-Mixer."""
    turned = input.dim() > 2 and input.shape[-1] != input.shape[-2]
    return {input.shape[-1]} if turned else set()


def _lengths(input: Tensor, dims: Any) -> set[int]:
    """The length of each axis, and of all of them together."""
    axes = range(input.dim()) if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
    lengths = [input.shape[axis] for axis in axes]
    return {*lengths, prod(lengths)}


LINEAR = "a linear layer over its tokens"
CONVOLUTIONS = {torch.conv1d, F.conv1d, torch.conv2d, F.conv2d, torch.conv3d, F.conv3d}
RUNNING = {torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod, torch.logcumsumexp}
FUNCTIONS: dict[Any, tuple[str, Reader]] = (
    dict.fromkeys(CONVOLUTIONS, ("a convolution over its tokens", _convolution))
    | dict.fromkeys(RUNNING, ("a running sum or product along its tokens", _along))
    | dict.fromkeys({torch.fft.fft, torch.fft.rfft}, ("a Fourier transform of its tokens", _fourier))
    | dict.fromkeys({torch.fft.fft2, torch.fft.rfft2}, ("a Fourier transform of its tokens", _fourier_planes))
    | dict.fromkeys({torch.fft.fftn, torch.fft.rfftn}, ("a Fourier transform of its tokens", _fourier_planes))
    | dict.fromkeys({torch.roll, Tensor.roll}, ("a shift of its tokens", _rolled))
    | {F.pad: ("a shift of its tokens", _shift), F.linear: (LINEAR, _linear)}
)
