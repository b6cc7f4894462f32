"""The whole path through a gated state-space layer as one operator."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rankwise.capture.module_calls import ABSENT, ModuleCall
from rankwise.capture.trace import Path
from rankwise.operators import DiagonalMixing, MixingOperator, ProductMixing, SumMixing, ToeplitzMixing

SILU = ("silu", "swish")
"""Activations x·σ(x): what they keep of a token, σ(x), is a factor."""


def short_convolution(weight: Tensor, sequences: int, tokens: int) -> ToeplitzMixing:
    """The depthwise causal convolution of `torch.nn.Conv1d`, weights (D, 1, L), for every sequence."""
    taps = weight.detach()[:, 0].flip(-1)
    kernel = F.pad(taps, (0, max(tokens - taps.shape[-1], 0)))[:, :tokens]
    return ToeplitzMixing(kernel.expand(sequences, -1, -1))


def convolved(mixer: Any, inner: Tensor) -> Tensor:
    """The short causal convolution of a layer and its activation, (B, T, C), as transformers has them."""
    weight, bias = mixer.conv1d.weight.detach(), mixer.conv1d.bias
    tokens, channels = inner.shape[1:]
    out = F.conv1d(
        inner.transpose(1, 2).to(weight.dtype),
        weight,
        None if bias is None else bias.detach(),
        padding=weight.shape[-1] - 1,
        groups=channels,
    )
    return mixer.act(out[..., :tokens]).to(inner.dtype).transpose(1, 2)


def without_padding(tokens: Tensor, mask: object) -> Tensor:
    """Zeros where a token is padding, as transformers sets them."""
    if mask is None or mask is ABSENT:
        return tokens
    assert isinstance(mask, Tensor)
    return (tokens * mask[:, :, None]).to(tokens.dtype)


def gated_path(
    call: ModuleCall,
    mixing: MixingOperator,
    given: Tensor,
    gate: Tensor,
    skip: Tensor,
    finish: Callable[[Tensor], Tensor],
) -> Path | None:
    """diag(silu(z)) (M + diag(D)) diag(σ(u)) K, where u = K x + bias is what the short convolution gave.

    Args:
        call: the call of the layer.
        mixing: M, one for each channel.
        given: x (B, D, T), what the short convolution reads.
        gate: z (B, D, T).
        skip: D (D).
        finish: from what the gate gave to what the layer gave.

    Returns:
        None where the layer's activation is no SiLU.
    """
    layer: Any = call.module
    if layer.activation not in SILU:
        return None
    with torch.autocast(given.device.type, enabled=False):  # which the operators' own sums are none of
        return _gated_path(call, mixing, given, gate, skip, finish)


def _gated_path(
    call: ModuleCall,
    mixing: MixingOperator,
    given: Tensor,
    gate: Tensor,
    skip: Tensor,
    finish: Callable[[Tensor], Tensor],
) -> Path:
    layer: Any = call.module
    sequences, channels, tokens = given.shape
    weight, bias = layer.conv1d.weight[:channels], layer.conv1d.bias
    convolution = short_convolution(weight, sequences, tokens)
    convolved = (convolution @ given[..., None])[..., 0]
    added = given.new_zeros(channels) if bias is None else bias.detach()[:channels].to(given.dtype)
    share = torch.sigmoid(convolved + added[:, None])
    mask = call.argument("attention_mask")
    if mask is not None and mask is not ABSENT:
        share = share * mask[:, None, :].to(share.dtype)
    kept = DiagonalMixing(share)
    skipped = DiagonalMixing(skip.detach().float()[:, None].expand(sequences, -1, tokens))
    scan = ProductMixing(DiagonalMixing(F.silu(gate)), SumMixing(mixing, skipped), kept)
    offset = scan @ added[:, None, None].expand(sequences, -1, tokens, 1)
    return Path(ProductMixing(scan, convolution), given[..., None], offset, finish)
