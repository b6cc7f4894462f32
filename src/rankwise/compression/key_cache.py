"""Caches that keep of the keys only the channels a narrowed model computes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rankwise._internals.torch_private import forward_pre_hooks
from rankwise.compression.narrow import Runs


class NarrowKeysHook:
    """Before attention runs: a cache that still is empty gets a layer that keeps narrow keys.

    Only `DynamicLayer`, what models of transformers make by themselves, is replaced; caches of a fixed size
    and windows keep keys in full, and work.

    Args:
        runs: channels of the keys, counted over heads, that are not zero.
    """

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        self.runs: Runs = [(int(first), int(count)) for first, count in runs]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look for a cache among the arguments."""

        def narrow() -> Any:
            from rankwise.compression.narrow_keys import NarrowKeys

            return NarrowKeys(self.runs)

        keep_in_cache(module, args, kwargs, narrow)


def keep_in_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], make: Callable[[], Any]
) -> None:
    """Give a cache that still is empty a layer of another kind, where it has or would make a `DynamicLayer`.

    Args:
        module: the attention layer.
        args: what it is called with.
        kwargs: likewise.
        make: makes the layer of the cache.
    """
    cache = next((value for value in (*kwargs.values(), *args) if hasattr(value, "get_seq_length")), None)
    cache = getattr(cache, "self_attention_cache", cache)
    at, layers = getattr(module, "layer_idx", None), getattr(cache, "layers", None)
    if layers is None or not isinstance(at, int):
        return
    from transformers.cache_utils import DynamicLayer

    grows = getattr(cache, "layer_class_to_replicate", None) is DynamicLayer
    if len(layers) == at and grows:
        layers.append(make())
    elif at < len(layers) and type(layers[at]) is DynamicLayer and not layers[at].is_initialized:
        layers[at] = make()


def add_key_cache(module: nn.Module, runs: Sequence[tuple[int, int]]) -> Callable[[], None]:
    """Let an attention layer keep narrow keys.

    Args:
        module: the attention layer.
        runs: channels of the keys, counted over heads, that are not zero.

    Returns:
        What takes it away again.
    """
    return module.register_forward_pre_hook(NarrowKeysHook(runs), with_kwargs=True).remove


def key_cache_of(module: nn.Module) -> NarrowKeysHook | None:
    """The hook that `add_key_cache` put on a module.

    Args:
        module: the attention layer.
    """
    return next((hook for hook in forward_pre_hooks(module) if isinstance(hook, NarrowKeysHook)), None)


def whole_keys(
    narrow: Float[Tensor, "B S n"], channels: Int[Tensor, "n"], size: int
) -> Float[Tensor, "B S N"]:
    """Keys of all heads side by side, with zeros for the channels that are not computed.

    Args:
        narrow: the channels that are.
        channels: where they go.
        size: N, channels of all heads.
    """
    return narrow.new_zeros(*narrow.shape[:2], size).index_copy_(-1, channels, narrow)


def kept_channels(runs: Runs, device: torch.device) -> Int[Tensor, "n"]:
    """Numbers of the channels in runs.

    Args:
        runs: the runs.
        device: where to.
    """
    return torch.cat(
        [torch.arange(first, first + count, device=device) for first, count in runs]
        or [torch.arange(0, device=device)]
    )
