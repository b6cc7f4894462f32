"""Simulated caches of few bits: keys and values, or latents, are rounded before attention reads them."""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from rankwise._internals.forward import AddedHook, Change, config_value
from rankwise.compression.kv_modules import LatentProjection
from rankwise.errors import CompressionError

GROUP = 64
"""Numbers that share one scale and one zero in a quantized cache. Each of the two takes 2 bytes."""


def is_decoder(model: nn.Module) -> bool:
    """Return True if a model generates text and is not an encoder-decoder."""
    can = getattr(model, "can_generate", None)
    return callable(can) and bool(can()) and not config_value(model, "is_encoder_decoder")


def quantize(values: Float[Tensor, "..."], bits: int, dim: int) -> Float[Tensor, "..."]:
    """Return numbers rounded to 2^bits levels between the extremes of each group of 64 along an axis.

    The lowest level and the distance of levels of a group are rounded to float16.

    Examples:
        >>> quantize(torch.tensor([[0.0, 1.0, 2.1, 3.0]]), 2, dim=1)
        tensor([[0., 1., 2., 3.]])
    """
    parts = []
    for part in values.split(GROUP, dim):
        low, high = part.amin(dim, keepdim=True), part.amax(dim, keepdim=True)
        low, step = (x.half().to(values.dtype) for x in (low, (high - low) / (2**bits - 1)))
        levels = ((part - low) / step.clamp_min(torch.finfo(step.dtype).tiny)).round()
        parts.append(levels.clamp(0, 2**bits - 1) * step + low)
    return torch.cat(parts, dim)


def quantized_cache(model: nn.Module, bits: int) -> Change:
    """Return the change after which attention without a window reads keys and values of few bits.

    Keys are quantized by channel, in groups of 64 tokens; values by token, in groups of 64 channels. Raise
    `CompressionError` if no layer of a `DynamicCache` keeps all tokens, or if a batch has a cache.
    """
    subject, expected = f"model {type(model).__name__}", "a decoder that keeps all tokens in a `DynamicCache`"
    if not is_decoder(model):
        got = "an encoder-decoder, or a model that does not generate text"
        raise CompressionError(subject, expected=expected, got=got, fix="")
    caches: list[Any] = []

    def fill(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if (given := kwargs.get("past_key_values")) is not None:
            got = f"a {type(given).__name__}"
            raise CompressionError("the batch", expected="no cache", got=got, fix="Leave it out.")
        caches[:] = [DynamicCache(config=model.config)]
        for layer in caches[0].layers:
            if isinstance(layer, DynamicLayer) and not layer.is_sliding:
                layer.update = partial(quantized_update, layer.update, bits)
        return args, {**kwargs, "past_key_values": caches[0], "use_cache": True}

    def check(*_: Any) -> None:
        if not any(layer.is_initialized and not layer.is_sliding for layer in caches[0].layers):
            raise CompressionError(subject, expected=expected, got="windows, or a cache of its own", fix="")

    return Change(model, hooks=[AddedHook("", "before", fill), AddedHook("", "after", check)])


def quantized_update(update: Any, bits: int, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call ``update`` of a cache layer with rounded keys and values."""
    by_token = quantize(values.transpose(1, 2).flatten(2), bits, dim=2)
    values = by_token.unflatten(2, (values.shape[1], -1)).transpose(1, 2)
    return update(quantize(keys, bits, dim=2), values, *args, **kwargs)


def quantized_latents(model: nn.Module, bits: int) -> Change:
    """Return the change that rounds all latents of a model, in groups of 64 channels of a token."""
    hooks = [
        AddedHook(f"{name}.down", "after", lambda _m, _a, _k, output: quantize(output, bits, dim=-1))
        for name, module in model.named_modules()
        if isinstance(module, LatentProjection) and hasattr(module, "down")
    ]
    return Change(model, hooks=hooks)
