"""The lightning attention of MiniMax, as transformers computes it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.capture.adapters.base import CONTINUED, Adapter, CallsInside, call_of, check_on_device, named
from rankwise.capture.mixing_calls import MixingCall
from rankwise.capture.module_calls import ABSENT, ModuleCall
from rankwise.operators import SemiseparableMixing


class LightningAdapter(Adapter):
    """Linear attention with one constant decay a head: q_t · k_s exp(−slope (t − s)) for s ≤ t.

    Values are the heads behind the projection, its activation and the padding mask; the norm, the gate and
    the output projection come after.
    """

    watched = ("qkv_proj", "output_gate")
    classes = frozenset({"MiniMaxLightningAttention"})

    def reads(self, module: nn.Module) -> bool:
        """Whether it is the layer of transformers' MiniMax."""
        return named(module, self.classes)

    def why_not(self, call: ModuleCall) -> str | None:
        """It goes on from a state of earlier tokens."""
        layer: Any = call.module
        cache = call.argument("past_key_values")
        fresh = cache in (None, ABSENT) or cache.get_linear_cache(layer.layer_idx) is None
        return None if fresh else CONTINUED

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """The decayed products of a whole sequence."""
        layer: Any = call.module
        check_on_device(layer.slope_rate)
        projected = layer.act_fn(call_of(inside, "qkv_proj").gave)
        mask = call.argument("attention_mask")
        if isinstance(mask, Tensor):
            projected = (projected * mask[:, :, None]).to(projected.dtype)
        heads = projected.unflatten(-1, (layer.num_attention_heads, -1)).transpose(1, 2)
        query, key, value = heads.split(layer.head_dim, dim=-1)
        slope = layer.slope_rate.detach()[:, 0].to(query.dtype)
        operator = SemiseparableMixing(query, key, -slope.expand(query.shape[:-1]))
        if not values:
            return MixingCall(operator, whole=True)
        return MixingCall(
            operator, value, finish=_finish(layer, call_of(inside, "output_gate").gave), whole=True
        )


def _finish(layer: Any, gate: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda mixed: layer.out_proj(torch.sigmoid(gate) * layer.norm(mixed.transpose(1, 2).flatten(2)))
