"""Readers for attention within windows and blocks: Longformer, the encoder of LED, BigBird."""

import math
from typing import Any

import torch
from torch import Tensor

from rankwise.operators import SoftmaxMixing
from rankwise.tracing.module_calls import ModuleCall
from rankwise.tracing.read_operators import MixingCall
from rankwise.tracing.readers.base import InnerCalls, NotExactError, OperatorReader, output_of, split_heads

DRAWN = "in training it draws its random blocks inside itself; call model.eval()"


class LongformerReader(OperatorReader):
    """Reads Longformer: one softmax over a window and the global tokens; a mask hides all other columns.

    Global tokens have separate queries and keys. The reader concatenates local and global queries along
    features. A local row is 0 in the second half, and a global row is 0 in the first half. So one product
    Q Kᵀ contains both scores. Global rows also have separate values, so these calls keep no values.
    """

    classes = frozenset({"LongformerSelfAttention", "LEDEncoderSelfAttention"})
    inner = ("query", "key", "value", "query_global", "key_global")
    output_projection = ""
    head_count = "num_heads"

    def mixing(self, call: ModuleCall, inner: InnerCalls, values: bool) -> MixingCall:
        """Return the operator: one softmax over the whole sequence per head."""
        layer: Any = call.module
        # the layer's order of axes is (T, B, D)
        projected = [output_of(inner, name).transpose(0, 1) for name in self.inner[:3]]
        query, key, value = (split_heads(tokens, layer.num_heads) for tokens in projected)
        masked = call.argument("is_index_masked")
        if not call.argument("is_global_attn"):
            # scale=1, because the layer has already divided the queries by √K in place
            operator = SoftmaxMixing(query, key, _local(layer, masked), scale=1.0)
            output = split_heads(call.output[0].detach(), layer.num_heads)
            return MixingCall(operator, value, output, whole=True)
        is_global = call.argument("is_index_global_attn")
        chosen = torch.zeros_like(query)
        places = torch.nonzero(is_global, as_tuple=True)
        place = is_global.cumsum(1)[places] - 1
        global_queries = output_of(inner, "query_global").unflatten(-1, (layer.num_heads, -1))
        chosen[places[0], :, places[1]] = global_queries[place, places[0]]
        key_global = split_heads(output_of(inner, "key_global").transpose(0, 1), layer.num_heads)
        query = query.masked_fill(is_global[:, None, :, None], 0)
        allowed = _local(layer, masked | is_global) | (is_global[:, None, None] & ~masked[:, None, :, None])
        allowed = torch.where(is_global[:, None, :, None], ~masked[:, None, None], allowed)
        both = torch.cat([query, chosen], -1), torch.cat([key, key_global], -1)
        return MixingCall(SoftmaxMixing(*both, allowed, scale=1.0), whole=True)


def _local(layer: Any, hidden: Tensor) -> Tensor:
    """Return booleans (B, 1, T, T), True at columns in the window of a row if neither is hidden."""
    tokens = torch.arange(hidden.shape[1], device=hidden.device)
    near = (tokens[:, None] - tokens).abs() <= layer.one_sided_attn_window_size
    return near & ~hidden[:, None, None] & ~hidden[:, None, :, None]


class BigBirdReader(OperatorReader):
    """Reads BigBird: one softmax over the three blocks around a row, the first block and the last block.

    All other blocks are hidden, except for rows of the first and last block, which see all blocks.

    In evaluation, transformers replaces every random block by the first block. The softmax then counts the
    first block n times, which equals one block with log n added to its scores.
    """

    classes = frozenset({"BigBirdBlockSparseAttention", "BigBirdPegasusBlockSparseAttention"})
    inner = ("query", "key", "value")
    output_projection = ""
    head_count = "num_attention_heads"

    def mixing(self, call: ModuleCall, inner: InnerCalls, values: bool) -> MixingCall:
        """Return the operator: one softmax over the whole sequence per head."""
        layer: Any = call.module
        if layer.training:
            raise NotExactError(DRAWN)
        heads = layer.num_attention_heads
        query, key, value = (split_heads(output_of(inner, name), heads) for name in self.inner)
        rows, columns = call.argument("from_mask") > 0, call.argument("to_mask") > 0
        bias = _log_counts(layer, query.shape[-2]).to(query)
        bias = bias.masked_fill(~(rows & columns), -torch.inf)
        output = split_heads(call.output[0].detach(), heads)
        return MixingCall(SoftmaxMixing(query, key, bias), value, output, whole=True)


def _log_counts(layer: Any, tokens: int) -> Tensor:
    """Return log n (T, T), where the softmax of a row counts a column n times; −∞ for n = 0."""
    blocks = tokens // layer.block_size
    block = torch.arange(blocks)
    near = (block[:, None] - block).abs() <= 1
    ends = (block == 0) | (block == blocks - 1)
    seen = (near | ends | ends[:, None]).double().log()
    seen[1:-1, 0] = math.log(1 + layer.num_random_blocks)
    return seen.repeat_interleave(layer.block_size, 0).repeat_interleave(layer.block_size, 1)
