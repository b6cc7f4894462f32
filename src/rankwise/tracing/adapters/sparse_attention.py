"""Attention of windows and blocks, as transformers computes it: Longformer, the encoder of LED, BigBird."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.operators import SoftmaxMixing
from rankwise.tracing.adapters.base import Adapter, CallsInside, NotExactError, call_of, named
from rankwise.tracing.mixing_calls import MixingCall
from rankwise.tracing.module_calls import ModuleCall

DRAWN = "in training it draws its random blocks inside itself; call model.eval()"


class LongformerAdapter(Adapter):
    """One softmax over a window and the global tokens, with a mask for all that no row sees.

    Tokens with global attention have queries and keys of their own. They stand beside the others as further
    features: a local row has zeros in the second half, a global row in the first, so that one product of
    queries and keys gives the scores of both. Global rows also weigh values of their own, so that values
    are given only where there are none.
    """

    watched = ("query", "key", "value", "query_global", "key_global")
    classes = frozenset({"LongformerSelfAttention", "LEDEncoderSelfAttention"})

    def reads(self, module: nn.Module) -> bool:
        """Whether it is such an attention of transformers."""
        return named(module, self.classes)

    def output_projection(self, module: nn.Module) -> tuple[str, int] | None:
        """What the layer gives."""
        layer: Any = module
        return "", layer.num_heads

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """The softmax of a whole sequence."""
        layer: Any = call.module
        query, key, value = (self._heads(layer, call_of(inside, name).gave) for name in self.watched[:3])
        masked = call.argument("is_index_masked")
        if not call.argument("is_global_attn"):
            # the layer has divided the queries by √K in place
            operator = SoftmaxMixing(query, key, _local(layer, masked), scale=1.0)
            output = self._heads(layer, call.output[0].detach().transpose(0, 1))
            return MixingCall(operator, value, output, whole=True)
        is_global = call.argument("is_index_global_attn")
        chosen = torch.zeros_like(query)
        at = torch.nonzero(is_global, as_tuple=True)
        place = is_global.cumsum(1)[at] - 1
        gave = call_of(inside, "query_global").gave.unflatten(-1, (layer.num_heads, -1))
        chosen[at[0], :, at[1]] = gave[place, at[0]]
        key_global = self._heads(layer, call_of(inside, "key_global").gave)
        query = query.masked_fill(is_global[:, None, :, None], 0)
        allowed = _local(layer, masked | is_global) | (is_global[:, None, None] & ~masked[:, None, :, None])
        allowed = torch.where(is_global[:, None, :, None], ~masked[:, None, None], allowed)
        both = torch.cat([query, chosen], -1), torch.cat([key, key_global], -1)
        return MixingCall(SoftmaxMixing(*both, allowed, scale=1.0), whole=True)

    @staticmethod
    def _heads(layer: Any, projected: Tensor) -> Tensor:
        """From (T, B, D), as the layer has it, to (B, H, T, K)."""
        return projected.unflatten(-1, (layer.num_heads, -1)).permute(1, 2, 0, 3)


def _local(layer: Any, hidden: Tensor) -> Tensor:
    """The columns that each row sees in its window, (B, 1, T, T): none that is hidden; hidden rows, none."""
    tokens = torch.arange(hidden.shape[1], device=hidden.device)
    near = (tokens[:, None] - tokens).abs() <= layer.one_sided_attn_window_size
    return near & ~hidden[:, None, None] & ~hidden[:, None, :, None]


class BigBirdAdapter(Adapter):
    """One softmax over a window of three blocks, the first and the last block, with a mask for the rest.

    In evaluation transformers takes the first block for every random one: it stands in the softmax of such a
    row so many times more, which is the logarithm of that number added to its scores.
    """

    watched = ("query", "key", "value")
    classes = frozenset({"BigBirdBlockSparseAttention", "BigBirdPegasusBlockSparseAttention"})

    def reads(self, module: nn.Module) -> bool:
        """Whether it is such an attention of transformers."""
        return named(module, self.classes)

    def output_projection(self, module: nn.Module) -> tuple[str, int] | None:
        """What the layer gives."""
        layer: Any = module
        return "", layer.num_attention_heads

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """The softmax of a whole sequence."""
        layer: Any = call.module
        if layer.training:
            raise NotExactError(DRAWN)
        gave = (call_of(inside, name).gave for name in self.watched)
        query, key, value = (_big_bird_heads(layer, projected) for projected in gave)
        rows, columns = call.argument("from_mask") > 0, call.argument("to_mask") > 0
        bias = _log_counts(layer, query.shape[-2]).to(query)
        bias = bias.masked_fill(~(rows & columns), -torch.inf)
        output = _big_bird_heads(layer, call.output[0].detach())
        return MixingCall(SoftmaxMixing(query, key, bias), value, output, whole=True)


def _big_bird_heads(layer: Any, projected: Tensor) -> Tensor:
    return projected.unflatten(-1, (layer.num_attention_heads, -1)).transpose(1, 2)


def _log_counts(layer: Any, tokens: int) -> Tensor:
    """Logarithm of how often each row's softmax holds each column, (T, T)."""
    blocks = tokens // layer.block_size
    at = torch.arange(blocks)
    near = (at[:, None] - at).abs() <= 1
    ends = (at == 0) | (at == blocks - 1)
    seen = (near | ends | ends[:, None]).double().log()
    seen[1:-1, 0] = math.log(1 + layer.num_random_blocks)
    return seen.repeat_interleave(layer.block_size, 0).repeat_interleave(layer.block_size, 1)
