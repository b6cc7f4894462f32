"""Gated delta rules as transformers computes them: Gated DeltaNet and Kimi Delta Attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.operators import GatedDeltaMixing
from rankwise.tracing.adapters.base import (
    PACKED,
    Adapter,
    CallsInside,
    call_of,
    check_on_device,
    named,
    why_not_from_scratch,
)
from rankwise.tracing.adapters.short_conv import convolved
from rankwise.tracing.mixing_calls import MixingCall
from rankwise.tracing.module_calls import ModuleCall

NORM_EPS = 1e-6
"""What transformers adds to the squared norm of queries and keys."""


@dataclass(frozen=True)
class _Projected:
    """What a layer's projections gave, (B, T, …)."""

    inner: Tensor
    """Queries, keys and values of all heads side by side, before the short convolution."""
    gate: Tensor
    beta: Tensor
    log_decay: Tensor


class GatedDeltaAdapter(Adapter):
    """One operator for each value head, from what the layer's projections gave and its short convolution.

    Queries and keys are brought to norm 1 and everything to float32, as the layer does. Values are the heads
    after the short convolution and its activation; the norm, its gate and the output projection come after.
    """

    watched = (
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
    by_feature = frozenset(
        {"BailingHybridDeltaAttention", "Glm5NextTextLinearAttention", "KimiLinearDeltaAttention"}
    )

    def reads(self, module: nn.Module) -> bool:
        """Whether it is such a layer of transformers."""
        return named(module, self.by_token | self.by_feature)

    def why_not(self, call: ModuleCall) -> str | None:
        """It goes on from earlier tokens, or holds several sequences in a row."""
        packed = call.kwargs.get("cu_seq_lens_q") is not None
        return PACKED if packed else why_not_from_scratch(call)

    def output_projection(self, module: nn.Module) -> tuple[str, int] | None:
        """Its heads, after the norm and its gate."""
        layer: Any = module
        name = "out_proj" if hasattr(layer, "out_proj") else "o_proj"
        width = layer.head_dim if named(layer, self.by_feature) else layer.head_v_dim
        return name, getattr(layer, name).in_features // width

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """The delta rule over a whole sequence."""
        layer: Any = call.module
        check_on_device(layer.conv1d.weight, layer.conv1d.bias, getattr(layer, "A_log", None))
        by_feature = named(layer, self.by_feature)
        projected = _by_feature(layer, inside) if by_feature else _by_token(layer, inside)
        heads = projected.beta.shape[-1]
        width = layer.head_dim if by_feature else layer.head_k_dim
        keys = projected.inner.shape[-1] - projected.gate.flatten(2).shape[-1]
        inner = convolved(layer.conv1d, projected.inner, _activation(layer))
        query, key, value = inner.split([keys // 2, keys // 2, inner.shape[-1] - keys], dim=-1)
        normed = _divided if by_feature else _scaled
        query, key = (  # contiguous as in the layer: strides change how a norm is summed
            normed(part.unflatten(-1, (-1, width)).transpose(1, 2).contiguous().float())
            for part in (query, key)
        )
        groups = heads // key.shape[1]
        operator = GatedDeltaMixing(
            (query * width**-0.5).repeat_interleave(groups, 1),
            key.repeat_interleave(groups, 1),
            projected.beta.transpose(1, 2).float(),
            projected.log_decay.transpose(1, 2).float(),
        )
        if not values:
            return MixingCall(operator, whole=True)
        applied = value.unflatten(-1, (heads, -1)).transpose(1, 2).float()
        finish = _finish(layer, projected.gate.unflatten(-1, (heads, -1)), projected.inner.dtype)
        return MixingCall(operator, applied, apply_output=finish, whole=True)


def _by_token(layer: Any, inside: CallsInside) -> _Projected:
    """Of layers with one decay a head and token."""
    if hasattr(layer, "in_proj_qkvz"):  # Qwen3-Next interleaves the heads
        parts = (call_of(inside, name).gave for name in ("in_proj_qkvz", "in_proj_ba"))
        *inner, gate, b, a = layer.fix_query_key_value_ordering(*parts)
        projected, gate = torch.cat([part.flatten(2) for part in inner], -1), gate.flatten(2)
    elif hasattr(layer, "in_proj_qkv"):
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        projected, gate, b, a = (call_of(inside, name).gave for name in names)
    else:
        projected = _side_by_side(inside)
        gate, b, a = (call_of(inside, name).gave for name in ("g_proj", "b_proj", "a_proj"))
    beta = b.sigmoid()
    if getattr(layer, "allow_neg_eigval", False):
        beta = beta * 2.0
    rate = -layer.A_log.detach().float().exp()
    return _Projected(projected, gate, beta, rate * F.softplus(a.float() + layer.dt_bias.detach()))


def _by_feature(layer: Any, inside: CallsInside) -> _Projected:
    """Of layers with one decay a head, token and feature."""
    gate = call_of(inside, "g_b_proj" if hasattr(layer, "g_b_proj") else "g_proj").gave
    beta, log_decay = torch.sigmoid(call_of(inside, "b_proj").gave), call_of(inside, "forget_gate").gave
    return _Projected(_side_by_side(inside), gate, beta, log_decay)


def _side_by_side(inside: CallsInside) -> Tensor:
    return torch.cat([call_of(inside, name).gave for name in ("q_proj", "k_proj", "v_proj")], dim=-1)


def _activation(layer: Any) -> Callable[[Tensor], Tensor]:
    from transformers.activations import ACT2FN

    return (lambda x: x) if layer.activation is None else ACT2FN[layer.activation]


def _scaled(x: Tensor) -> Tensor:
    """At norm 1, as the layers with one decay a token do it."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _divided(x: Tensor) -> Tensor:
    """At norm 1, as the layers with one decay a feature do it."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _finish(layer: Any, gate: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    norm = layer.norm if hasattr(layer, "norm") else layer.o_norm
    project = layer.out_proj if hasattr(layer, "out_proj") else layer.o_proj
    return lambda mixed: project(norm(mixed.transpose(1, 2).to(dtype), gate).flatten(2))
