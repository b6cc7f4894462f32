"""Compute operators of PyTorch's attention layers from inputs and weights, even on the fast path."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.operators import SoftmaxMixing
from rankwise.tracing.axes import padded
from rankwise.tracing.module_calls import ModuleCall
from rankwise.tracing.read_operators import MixingCall

ATTRIBUTES = (
    *("num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "add_zero_attn"),
    *("q_proj_weight", "k_proj_weight", "v_proj_weight"),
)
"""Arguments of `multi_head_attention_forward` that are attributes of `nn.MultiheadAttention`."""
LAYERS = nn.MultiheadAttention, nn.TransformerEncoderLayer
FAST_PATH = *LAYERS, nn.TransformerEncoder
"""PyTorch's layers that may run on the fast path. `nn.TransformerEncoder` decides before its layers run."""


def is_torch_layer(module: nn.Module, kinds: tuple[type[nn.Module], ...] = LAYERS) -> bool:
    """Return True if a module is a PyTorch layer of ``kinds`` whose ``forward`` no subclass has replaced."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


def why_not_known(module: nn.Module, called_inside: bool) -> str | None:
    """Return why the operator of a finished call cannot be computed from inputs. Return None if it can."""
    if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
        return "its `forward` was replaced on the module itself; name it in `sites=` to capture it"
    attention = module.self_attn if isinstance(module, nn.TransformerEncoderLayer) else module
    if any(parameter.is_meta for parameter in attention.parameters()):
        return "its weights are offloaded again once it has run; capture it with all weights on a device"
    if isinstance(module, nn.TransformerEncoderLayer) and called_inside:
        return "it left PyTorch's fast path for an attention of its own; name that in `sites=` to capture it"
    return None


def modules_in_torch_layers(model: nn.Module) -> set[nn.Module]:
    """Return PyTorch's own layers and all modules inside them, which must not have hooks."""
    return {inner for module in model.modules() if is_torch_layer(module) for inner in module.modules()}


def layer_mixing(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outer: ModuleCall | None
) -> MixingCall:
    """Return the operator of a finished call of one of PyTorch's layers, from its arguments."""
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    if isinstance(module, nn.MultiheadAttention):
        return from_attention(module, given, outer)
    assert isinstance(module, nn.TransformerEncoderLayer)
    source = given["src"]
    if module.norm_first:
        norm, items = module.norm1, source.unbind() if source.is_nested else [source]
        settings = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        normed = [F.layer_norm(item, *settings) for item in items]
        source = torch.nested.nested_tensor(normed) if source.is_nested else normed[0]
    masks = {"attn_mask": given.get("src_mask"), "key_padding_mask": given.get("src_key_padding_mask")}
    return from_attention(module.self_attn, {"query": source, "key": source, "value": source} | masks, outer)


def functional_mixing(args: tuple[Any, ...], kwargs: dict[str, Any], outer: ModuleCall) -> MixingCall | None:
    """Return the operator of `multi_head_attention_forward`. Return None for projected keys or values."""
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
    if given.get("static_k") is not None or given.get("static_v") is not None:
        return None
    attributes = {name: given.get(name) for name in ATTRIBUTES}
    if given.get("use_separate_proj_weight", False):
        attributes["in_proj_weight"] = None
    return from_attention(SimpleNamespace(batch_first=False, **attributes), given, outer)


def attention_by_heads(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor | None]
) -> Any:
    """Run `multi_head_attention_forward` and replace its head outputs (B, H, T, V) by ``change(heads)``.

    PyTorch's function also applies the output projection. Here the projection is the identity, which does not
    change finite numbers. The model's own projection is applied after the replacement. If ``change`` returns
    None, the heads are kept.
    """
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
    weight, bias, heads = given["out_proj_weight"], given["out_proj_bias"], given["num_heads"]
    given |= {"out_proj_weight": torch.eye(weight.shape[1]).to(weight), "out_proj_bias": None}
    joined, weights = F.multi_head_attention_forward(**given)  # shape (T, B, D) or (T, D)
    batched = joined.reshape(joined.shape[0], -1, joined.shape[-1])
    changed = change(batched.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3))
    if changed is not None:
        joined = changed.permute(2, 0, 1, 3).reshape(joined.shape)
    projected = F.linear(joined.reshape(-1, joined.shape[-1]), weight, bias)
    return projected.reshape(*joined.shape[:-1], -1), weights


def from_attention(attention: Any, given: dict[str, Any], outer: ModuleCall | None) -> MixingCall:
    """Return the operator of `nn.MultiheadAttention`, or of an object with its attributes, for arguments."""
    query, key, value = given["query"], given["key"], given["value"]
    attn_mask, key_padding_mask = given.get("attn_mask"), given.get("key_padding_mask")
    cross = _is_cross(query, key, outer)
    lengths = None
    if query.is_nested:
        query, lengths = padded(query)
        key, value = query, query
        key_padding_mask = None if lengths is None else ~lengths
    batched = (tensor.unsqueeze(0) if tensor.dim() == 2 else tensor for tensor in (query, key, value))
    first = attention.batch_first or query.dim() == 2
    query, key, value = (tensor if first else tensor.transpose(0, 1) for tensor in batched)
    if lengths is None and not cross and key_padding_mask is not None:
        hidden = key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask.isneginf()
        lengths = ~hidden.reshape(-1, hidden.shape[-1])
    projected = _projections(attention, query, key, value)
    q, k, v = (tensor.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for tensor in projected)
    # If is_causal=True, key_padding_mask=None and need_weights=False, PyTorch uses its own causal mask. This
    # mask hides the column that bias_k or add_zero_attn appends. The given mask would show the column.
    added = attention.bias_k is not None or attention.add_zero_attn
    hinted = given.get("is_causal", False) and given.get("key_padding_mask") is None
    causal = bool(added and hinted and not given.get("need_weights", True))
    mask = None if causal else _joint_mask(attn_mask, key_padding_mask, q, k)
    if attention.add_zero_attn:
        k, v = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (k, v))
        mask = None if mask is None else F.pad(mask, (0, 1))
    return MixingCall(SoftmaxMixing(q, k, mask, causal), v, cross=cross, lengths=lengths, whole=True)


def _is_cross(query: Tensor, key: Tensor, outer: ModuleCall | None) -> bool:
    """Return True for cross-attention, in which keys come from another sequence than queries.

    The sequences differ if their shapes differ. They also differ if query and key are different tensors, and
    the outer module received several streams or does not exist.
    """
    if query is key or query.is_nested:
        return False
    if query.shape != key.shape:
        return True
    streams = [t for t in outer.tensors if t.is_floating_point() and t.dim() == query.dim()] if outer else []
    return query.data_ptr() != key.data_ptr() and (outer is None or len(streams) > 1)


def _projections(attention: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
    if attention.in_proj_weight is not None:
        weights = attention.in_proj_weight.chunk(3)
    biases = (None,) * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(tensor, weight, bias)
        for tensor, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    if attention.bias_k is not None and attention.bias_v is not None:
        k = torch.cat([k, attention.bias_k.expand(k.shape[0], 1, -1)], dim=1)
        v = torch.cat([v, attention.bias_v.expand(v.shape[0], 1, -1)], dim=1)
    return q, k, v


def _joint_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor
) -> Tensor | None:
    """Merge both masks into one bias (B or 1, H or 1, T, S), as PyTorch does. Return None without masks."""
    batch, heads, tokens, _ = q.shape
    biases = []
    if attn_mask is not None:
        shape = (1, 1, *attn_mask.shape) if attn_mask.dim() == 2 else (batch, heads, tokens, -1)
        biases.append(_as_bias(attn_mask, q.dtype).reshape(shape))
    if key_padding_mask is not None:
        sources = key_padding_mask.shape[-1]
        biases.append(_as_bias(key_padding_mask, q.dtype).reshape(-1, 1, 1, sources))
    if not biases:
        return None
    joint = biases[0] if len(biases) == 1 else biases[0] + biases[1]
    missing = k.shape[-2] - joint.shape[-1]  # padded by 0: every row sees columns that bias_k adds
    return F.pad(joint, (0, max(missing, 0)))


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
