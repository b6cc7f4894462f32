"""Attention whose weights decay, as transformers computes it: MiniMax's lightning attention, RWKV-4."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.operators import DiagonalMixing, IndexedMixing, SemiseparableMixing, SumMixing
from rankwise.tracing.adapters.base import CONTINUED, Adapter, CallsInside, call_of, check_on_device, named
from rankwise.tracing.mixing_calls import MixingCall
from rankwise.tracing.module_calls import ABSENT, ModuleCall


class LightningAdapter(Adapter):
    """Linear attention with one constant decay a head: q_t · k_s exp(−slope (t − s)) for s ≤ t.

    Values are the heads after the projection, its activation and the padding mask; the norm, the gate and
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

    def output_projection(self, module: nn.Module) -> tuple[str, int] | None:
        """Its heads, after the norm and the gate."""
        layer: Any = module
        return "out_proj", layer.num_attention_heads

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
            operator, value, apply_output=_finish(layer, call_of(inside, "output_gate").gave), whole=True
        )


def _finish(layer: Any, gate: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda mixed: layer.out_proj(torch.sigmoid(gate) * layer.norm(mixed.transpose(1, 2).flatten(2)))


class RwkvAdapter(Adapter):
    """One operator for each channel: weights that decay, with a bonus for the token itself, rows of sum 1.

    ``M[t, s] = exp(k_s − (t − 1 − s) w) / z_t`` for s < t and ``exp(k_t + u) / z_t`` for s = t: a scan that
    each row reads one token late, plus a diagonal. Values are what the value projection gave; the receptance
    and the output projection come after. The layer knows no padding mask.
    """

    watched = ("key", "value", "receptance")
    classes = frozenset({"RwkvSelfAttention"})

    def reads(self, module: nn.Module) -> bool:
        """Whether it is the time mixing of transformers' RWKV."""
        return named(module, self.classes)

    def why_not(self, call: ModuleCall) -> str | None:
        """It goes on from a state that holds earlier tokens; a new one has sums of zero."""
        state, layer = call.argument("state"), call.module.layer_id
        fresh = state in (None, ABSENT) or not bool(state[3][:, :, layer].any())
        return None if fresh else CONTINUED

    def output_projection(self, module: nn.Module) -> tuple[str, int] | None:
        """Its channels, after the receptance."""
        return "output", 0

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """The weighted means of a whole sequence."""
        layer: Any = call.module
        check_on_device(layer.time_decay, layer.time_first)
        key = call_of(inside, "key").gave.float().transpose(1, 2)
        operator = weighted_means(key, -layer.time_decay.detach().exp(), layer.time_first.detach())
        receptance = torch.sigmoid(call_of(inside, "receptance").gave)

        def finish(mixed: Tensor) -> Tensor:
            return layer.output(receptance * mixed[..., 0].transpose(1, 2).to(receptance.dtype))

        applied = call_of(inside, "value").gave.transpose(1, 2)[..., None]
        return MixingCall(operator, applied, apply_output=finish, whole=True)


def weighted_means(key: Tensor, log_decay: Tensor, bonus: Tensor) -> SumMixing:
    """RWKV's matrix for each channel, (B, D, T, T), no exponential of it above 1.

    Every sum of weights is kept relative to the largest of them, exp(m_t), as the layer itself does.

    Args:
        key: k (B, D, T).
        log_decay: −w (D), at most 0.
        bonus: u (D).
    """
    most = total = None
    kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for k in key.unbind(-1):
        own = bonus + k
        shift = own if most is None else torch.maximum(most, own)
        read = torch.zeros_like(k) if most is None else (most - shift).exp()
        mean = (own - shift).exp() + (0 if total is None else read * total)
        now = k if most is None else torch.maximum(most + log_decay, k)
        decay = torch.zeros_like(k) if most is None else most + log_decay - now
        enter = (k - now).exp()
        total = enter if total is None else decay.exp() * total + enter
        most = now
        kept.append((decay, enter, read / mean, (own - shift).exp() / mean))
    decay, enter, read, own = (torch.stack(steps, -1) for steps in zip(*kept, strict=True))
    # one token more, so that row t reads what has entered up to t − 1
    c = F.pad(read, (0, 1))[..., None]
    scan = SemiseparableMixing(c, torch.ones_like(c), F.pad(decay, (1, 0)), F.pad(enter, (1, 0)))
    last = torch.arange(c.shape[-2], device=c.device)
    return SumMixing(IndexedMixing(scan, last < len(last) - 1, last > 0), DiagonalMixing(own))
