"""The block-sparse attention of BigBird, as transformers computes it."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.capture.adapters.base import Adapter, CallsInside, NotExactError, call_of, named
from rankwise.capture.mixing_calls import MixingCall
from rankwise.capture.module_calls import ModuleCall
from rankwise.operators import SoftmaxMixing

DRAWN = "in training it draws its random blocks inside itself; call model.eval()"


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

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """The softmax of a whole sequence."""
        layer: Any = call.module
        if layer.training:
            raise NotExactError(DRAWN)
        gave = (call_of(inside, name).gave for name in self.watched)
        query, key, value = (_heads(layer, one) for one in gave)
        rows, columns = call.argument("from_mask") > 0, call.argument("to_mask") > 0
        bias = _log_counts(layer, query.shape[-2]).to(query)
        bias = bias.masked_fill(~(rows & columns), -torch.inf)
        output = _heads(layer, call.output[0].detach())
        return MixingCall(SoftmaxMixing(query, key, bias), value, output, whole=True)


def _heads(layer: Any, projected: Tensor) -> Tensor:
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
