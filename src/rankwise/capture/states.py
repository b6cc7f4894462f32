"""Token states as (B, T, D), however a model lays them out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rankwise.capture.trace import MixerSite


def shown_as(
    tokens: Tensor, module: nn.Module, mixers: Sequence[MixerSite]
) -> Callable[[Tensor], Tensor] | None:
    """How to turn the states that a block reads into (B, T, D), by the shapes of the mixers inside it.

    Models may keep tokens on the first axis, have no batch axis, or nest sequences of different lengths. None
    where two axes are no token states.
    """
    shapes = {(site.operator.shape[0], site.operator.shape[2]) for site in mixers if not site.cross}
    if tokens.is_nested:
        return _as_it_is
    if tokens.dim() == 2:
        return _as_batch if (1, tokens.shape[0]) in shapes else None
    first, second = tokens.shape[:2]
    if _keeps_tokens_first(module) or ((second, first) in shapes and (first, second) not in shapes):
        return _as_batch_first
    return _as_it_is


def padded(tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """A nested tensor as a padded one with its mask; anything else as it is."""
    if not tokens.is_nested:
        return tokens, None
    lengths = torch.tensor([item.shape[0] for item in tokens.unbind()], device=tokens.device)
    dense = tokens.to_padded_tensor(0.0)
    return dense, torch.arange(dense.shape[1], device=tokens.device) < lengths[:, None]


def _keeps_tokens_first(module: nn.Module) -> bool:
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return not module.self_attn.batch_first
    return False


def _as_it_is(tokens: Tensor) -> Tensor:
    return padded(tokens)[0]


def _as_batch(tokens: Tensor) -> Tensor:
    return tokens.unsqueeze(0)


def _as_batch_first(tokens: Tensor) -> Tensor:
    return tokens.transpose(0, 1)
