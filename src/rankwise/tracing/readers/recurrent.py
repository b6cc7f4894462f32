"""Readers for RG-LRU, lightning attention, RWKV-4 and gated delta rules in transformers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.linalg import as_float64
from rankwise.operators import DiagonalMixing, GatedDeltaMixing, IndexedMixing, SemiseparableMixing, SumMixing
from rankwise.tracing.module_calls import ABSENT, ModuleCall
from rankwise.tracing.read_operators import MixingCall
from rankwise.tracing.readers.base import (
    CONTINUED,
    InnerCalls,
    OperatorReader,
    StateSpaceReader,
    check_on_device,
    named,
    output_of,
)
from rankwise.tracing.readers.mamba import convolved, without_padding

SHARPNESS = 8.0
"""Constant c in the log-decay −c·r·softplus(Λ) of RG-LRU: De et al., "Griffin", 2024, eq. 4."""
NORM_EPS = 1e-6
"""Number that transformers adds to squared norms of queries and keys in a gated delta rule."""


class RGLRUReader(OperatorReader):
    """Reads RG-LRU: one scan per channel, with one number as state. Gates set the decay and input weight.

    Values are the unit's input, after the short convolution; M V is the unit's output. The unit ignores
    padding masks, so real tokens depend on padding to their left, both in the model and in M.
    """

    classes = frozenset({"RecurrentGemmaRglru"})
    output_projection = ""

    def why_not(self, call: ModuleCall) -> str | None:
        """Return why not to read a call if it starts from an earlier state that no first token resets."""
        state, positions = getattr(call.module, "recurrent_states", None), call.argument("position_ids")
        fresh = state is None or not bool(state.any()) or bool((positions[:, 0] == 0).all())
        return None if fresh else CONTINUED

    def mixing(self, call: ModuleCall, inner: InnerCalls, values: bool) -> MixingCall:
        """Return the operator: one scan per channel, with one decay per token."""
        unit: Any = call.module
        check_on_device(unit.recurrent_param, unit.input_gate_weight, unit.recurrent_gate_weight)
        x = call.argument("activations").detach()
        reset = call.argument("position_ids") == 0
        heads = x.unflatten(-1, (unit.num_attention_heads, -1))
        enters = _head_gate(heads, unit.input_gate_weight, unit.input_gate_bias)
        decays = _head_gate(heads, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
        log_decay = -SHARPNESS * decays * F.softplus(unit.recurrent_param.detach())
        scale = torch.where(reset[..., None], 1.0, (1 - (2 * log_decay).exp()).sqrt())
        log_decay = log_decay.masked_fill(reset[..., None], -torch.inf)
        ones = x.new_ones(x.shape[0], 1, x.shape[1], 1)
        step = enters * scale.to(x.dtype)
        operator = SemiseparableMixing(ones, ones, log_decay.transpose(1, 2), step.transpose(1, 2))
        output = call.output.detach().transpose(1, 2)[..., None]
        return MixingCall(operator, x.transpose(1, 2)[..., None], output, whole=True)


def _head_gate(heads: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the sigmoid (B, T, D) of a block-diagonal linear map with one block per head."""
    return torch.sigmoid(torch.einsum("bthi,hio->btho", heads, weight.detach()) + bias.detach()).flatten(2)


class LightningReader(OperatorReader):
    """Reads MiniMax's lightning attention: M[t, s] = q_t · k_s exp(−slope (t − s)) for s ≤ t, slope per head.

    Values are the heads after the projection, its activation and the padding mask. The layer applies the
    norm, the gate and the output projection after M V.
    """

    classes = frozenset({"MiniMaxLightningAttention"})
    inner = ("qkv_proj", "output_gate")
    output_projection = "out_proj"
    head_count = "num_attention_heads"

    def why_not(self, call: ModuleCall) -> str | None:
        """Return why not to read a call if a cache holds earlier tokens."""
        layer: Any = call.module
        cache = call.argument("past_key_values")
        fresh = cache in (None, ABSENT) or cache.get_linear_cache(layer.layer_idx) is None
        return None if fresh else CONTINUED

    def mixing(self, call: ModuleCall, inner: InnerCalls, values: bool) -> MixingCall:
        """Return the operator: one scan per head, with a constant decay."""
        layer: Any = call.module
        check_on_device(layer.slope_rate)
        projected = layer.act_fn(output_of(inner, "qkv_proj"))
        projected = without_padding(projected, call.argument("attention_mask"))
        heads = projected.unflatten(-1, (layer.num_attention_heads, -1)).transpose(1, 2)
        query, key, value = heads.split(layer.head_dim, dim=-1)
        slope = layer.slope_rate.detach()[:, 0].to(query.dtype)
        operator = SemiseparableMixing(query, key, -slope.expand(query.shape[:-1]))
        gate = output_of(inner, "output_gate")

        def apply_output(mixed: Tensor) -> Tensor:
            return layer.out_proj(torch.sigmoid(gate) * layer.norm(mixed.transpose(1, 2).flatten(2)))

        return MixingCall(operator, value, apply_output=apply_output, whole=True)


class RwkvReader(OperatorReader):
    """Reads RWKV-4: one matrix per channel. Its weights decay with distance, and its rows sum to 1.

    ``M[t, s] = exp(k_s − (t − 1 − s) w) / z_t`` for s < t and ``exp(k_t + u) / z_t`` for s = t, with key k,
    decay w, bonus u and row sum z_t: a scan delayed by one token, plus a diagonal. Values are the output of
    the value projection. The layer applies receptance and output projection after M V, and ignores padding.
    """

    classes = frozenset({"RwkvSelfAttention"})
    inner = ("key", "value", "receptance")
    output_projection = "output"

    def why_not(self, call: ModuleCall) -> str | None:
        """Return why not to read a call if the state holds earlier tokens, so that its sums are not zero."""
        state, layer = call.argument("state"), call.module.layer_id
        fresh = state in (None, ABSENT) or not bool(state[3][:, :, layer].any())
        return None if fresh else CONTINUED

    def mixing(self, call: ModuleCall, inner: InnerCalls, values: bool) -> MixingCall:
        """Return the operator: one weighted mean over earlier tokens per channel."""
        layer: Any = call.module
        check_on_device(layer.time_decay, layer.time_first)
        key = output_of(inner, "key").float().transpose(1, 2)
        operator = weighted_means(key, -layer.time_decay.detach().exp(), layer.time_first.detach())
        receptance = torch.sigmoid(output_of(inner, "receptance"))

        def apply_output(mixed: Tensor) -> Tensor:
            return layer.output(receptance * mixed[..., 0].transpose(1, 2).to(receptance.dtype))

        applied = output_of(inner, "value").transpose(1, 2)[..., None]
        return MixingCall(operator, applied, apply_output=apply_output, whole=True)


def weighted_means(key: Tensor, log_decay: Tensor, bonus: Tensor) -> SumMixing:
    """Return RWKV's matrices (B, D, T, T) from keys (B, D, T), log-decay −w ≤ 0 and bonus u, both (D).

    Weights are divided by their sum so far, so no exponential exceeds 1.
    """
    k, log_decay = as_float64(key), as_float64(log_decay)[:, None]
    decayed = torch.arange(k.shape[-1], device=k.device) * log_decay
    total = torch.logcumsumexp(k - decayed, -1) + decayed  # log of the sum of weights after each token
    before = F.pad(total[..., :-1], (1, 0), value=-torch.inf)
    self_weight = as_float64(bonus)[:, None] + k
    mean = torch.logaddexp(before, self_weight)
    decay = (before + log_decay - total).nan_to_num(neginf=0.0)
    steps = decay, (k - total).exp(), (before - mean).exp(), (self_weight - mean).exp()
    decay, enter, read, self_weight = (step.to(key) for step in steps)
    # shift by one token: row t reads the state after token t − 1
    c = F.pad(read, (0, 1))[..., None]
    scan = SemiseparableMixing(c, torch.ones_like(c), F.pad(decay, (1, 0)), F.pad(enter, (1, 0)))
    last = torch.arange(c.shape[-2], device=c.device)
    return SumMixing(IndexedMixing(scan, last < len(last) - 1, last > 0), DiagonalMixing(self_weight))


class GatedDeltaReader(StateSpaceReader):
    """Reads gated delta rules: one operator per value head, from projections and the short convolution.

    Queries and keys are scaled to norm 1 and everything is float32, as in the layer. Values are the heads
    after the short convolution and its activation. The layer applies a gated norm and the output projection
    after M V.
    """

    inner = (
        *("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        *("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "g_b_proj", "forget_gate"),
    )
    by_token = frozenset(
        {
            "OlmoHybridGatedDeltaNet",
            "Qwen3NextGatedDeltaNet",
            "Qwen3_5GatedDeltaNet",
            "Qwen3_5MoeGatedDeltaNet",
            "Qwen4ExpTextGatedDeltaNet",
        }
    )
    """Classes with one decay per head and token."""
    by_feature = frozenset(
        {"BailingHybridDeltaAttention", "Glm5NextTextLinearAttention", "KimiLinearDeltaAttention"}
    )
    """Classes with one decay per head, token and feature."""
    classes = by_token | by_feature

    def joined_heads(self, module: nn.Module) -> tuple[str, int] | None:
        """Return the name of the output projection, and the number of heads in its input."""
        layer: Any = module
        name = "out_proj" if hasattr(layer, "out_proj") else "o_proj"
        width = layer.head_dim if named(layer, self.by_feature) else layer.head_v_dim
        return name, getattr(layer, name).in_features // width

    def mixing(self, call: ModuleCall, inner: InnerCalls, values: bool) -> MixingCall:
        """Return the operator: one gated delta rule per value head."""
        layer: Any = call.module
        check_on_device(layer.conv1d.weight, layer.conv1d.bias, getattr(layer, "A_log", None))
        by_feature = named(layer, self.by_feature)
        joined, gate, beta, log_decay = (_by_feature if by_feature else _by_token)(layer, inner)
        heads = beta.shape[-1]
        width = layer.head_dim if by_feature else layer.head_k_dim
        keys = joined.shape[-1] - gate.flatten(2).shape[-1]
        tokens = convolved(layer.conv1d, joined, _activation(layer))
        query, key, value = tokens.split([keys // 2, keys // 2, tokens.shape[-1] - keys], dim=-1)
        normed = _divided if by_feature else _scaled
        query, key = (  # contiguous as in the layer: strides change how a norm is summed
            normed(heads_of.unflatten(-1, (-1, width)).transpose(1, 2).contiguous().float())
            for heads_of in (query, key)
        )
        groups = heads // key.shape[1]
        operator = GatedDeltaMixing(
            (query * width**-0.5).repeat_interleave(groups, 1),
            key.repeat_interleave(groups, 1),
            beta.transpose(1, 2).float(),
            log_decay.transpose(1, 2).float(),
        )
        gate = gate.unflatten(-1, (heads, -1))
        norm = layer.norm if hasattr(layer, "norm") else layer.o_norm
        project = layer.out_proj if hasattr(layer, "out_proj") else layer.o_proj

        def apply_output(mixed: Tensor) -> Tensor:
            return project(norm(mixed.transpose(1, 2).to(joined.dtype), gate).flatten(2))

        applied = value.unflatten(-1, (heads, -1)).transpose(1, 2).float()
        return MixingCall(operator, applied, apply_output=apply_output, whole=True)


Projected = tuple[Tensor, Tensor, Tensor, Tensor]
"""Concatenated q, k, v before the short convolution, then output gate, write strength β and log-decay."""


def _by_token(layer: Any, inner: InnerCalls) -> Projected:
    if hasattr(layer, "in_proj_qkvz"):  # Qwen3-Next interleaves the heads
        parts = (output_of(inner, name) for name in ("in_proj_qkvz", "in_proj_ba"))
        *projected, gate, b, a = layer.fix_query_key_value_ordering(*parts)
        joined, gate = torch.cat([tensor.flatten(2) for tensor in projected], -1), gate.flatten(2)
    elif hasattr(layer, "in_proj_qkv"):
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        joined, gate, b, a = (output_of(inner, name) for name in names)
    else:
        joined = _joined(inner)
        gate, b, a = (output_of(inner, name) for name in ("g_proj", "b_proj", "a_proj"))
    beta = b.sigmoid()
    if getattr(layer, "allow_neg_eigval", False):
        beta = beta * 2.0
    rate = -layer.A_log.detach().float().exp()
    return joined, gate, beta, rate * F.softplus(a.float() + layer.dt_bias.detach())


def _by_feature(layer: Any, inner: InnerCalls) -> Projected:
    gate = output_of(inner, "g_b_proj" if hasattr(layer, "g_b_proj") else "g_proj")
    beta, log_decay = torch.sigmoid(output_of(inner, "b_proj")), output_of(inner, "forget_gate")
    return _joined(inner), gate, beta, log_decay


def _joined(inner: InnerCalls) -> Tensor:
    return torch.cat([output_of(inner, name) for name in ("q_proj", "k_proj", "v_proj")], dim=-1)


def _activation(layer: Any) -> Callable[[Tensor], Tensor]:
    from transformers.activations import ACT2FN

    return (lambda x: x) if layer.activation is None else ACT2FN[layer.activation]


def _scaled(x: Tensor) -> Tensor:
    """Return x scaled to norm 1 by rsqrt, which rounds as in layers with a decay per token."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _divided(x: Tensor) -> Tensor:
    """Return x scaled to norm 1 by division by sqrt, which rounds as in layers with a decay per feature."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
