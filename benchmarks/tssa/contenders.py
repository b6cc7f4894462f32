"""Who runs: ours, the plain formulas, softmax attention, a linear-attention kernel, and the limit."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

from rankwise.ops import tssa
from rankwise.ops.reference import ENERGY_EPS, MASS_EPS

OURS, REFERENCE, EAGER, SDPA = "rankwise", "reference", "eager", "sdpa"
FLA = {"fla chunk": "chunk_linear_attn", "fla fused chunk": "fused_chunk_linear_attn"}
"""Kernels of flash-linear-attention, by what they are called here."""
COPY, CLONE = "copy", "clone"


class Inputs(NamedTuple):
    """One size: tokens for TSSA, and queries, keys and values of the same shape for the others."""

    w: Tensor
    temperature: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool


def inputs(
    tokens: int,
    causal: bool,
    device: str,
    dtype: torch.dtype,
    heads: int = 12,
    width: int = 64,
    batch: int = 1,
) -> Inputs:
    """Gaussian numbers.

    Args:
        tokens: T.
        causal: which operation.
        device: where.
        dtype: of all but the temperature.
        heads: H.
        width: K.
        batch: B.

    Returns:
        Inputs.
    """
    g = torch.Generator().manual_seed(tokens)

    def normal() -> Tensor:
        return torch.randn(batch, tokens, heads, width, generator=g).to(device, dtype)

    return Inputs(normal(), torch.ones(heads, device=device), normal(), normal(), normal(), causal)


def contenders(x: Inputs) -> dict[str, Callable[[], Tensor]]:
    """Forward passes, by name. Where a kernel cannot run it is not among them; `missing` says why.

    Args:
        x: what they compute on.

    Returns:
        Name → run.
    """
    room = torch.empty_like(x.w)

    def attend() -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in (x.query, x.key, x.value))
        return scaled_dot_product_attention(query, key, value, is_causal=x.causal).transpose(1, 2)

    named: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: tssa(x.w, x.temperature, x.causal).output,
        REFERENCE: lambda: tssa(x.w, x.temperature, x.causal, impl="reference").output,
        EAGER: lambda: (eager_causal if x.causal else eager_bidirectional)(x.w, x.temperature),
        SDPA: attend,
        COPY: lambda: room.copy_(x.w.detach()),
        CLONE: lambda: x.w.detach().clone(),
    }
    if missing(x.w.device.type, x.causal) is None:
        for name, function in FLA.items():
            linear = getattr(import_module("fla.ops.linear_attn"), function)
            named[name] = partial(_linear, linear, x)
    return named


def _linear(kernel: Callable[..., tuple[Tensor, Tensor | None]], x: Inputs) -> Tensor:
    return kernel(x.query, x.key, x.value, normalize=False)[0]


def eager_bidirectional(w: Tensor, temperature: Tensor) -> Tensor:
    """The formulation that a released module computes, operation by operation, in the layout (B, H, T, K).

    Args:
        w: (B, T, H, K).
        temperature: (H,).

    Returns:
        (B, T, H, K), a view.
    """
    w = w.transpose(1, 2)
    share = normalize(w, dim=-2) ** 2
    membership = (share.sum(-1) * temperature[:, None]).softmax(1)
    weight = membership / (membership.sum(-1, keepdim=True) + MASS_EPS)
    moment = weight[:, :, None] @ w**2
    return -(w * membership[..., None] * (1 / (1 + moment))).transpose(1, 2)


def eager_causal(w: Tensor, temperature: Tensor) -> Tensor:
    """The same for the causal operation, without a bias.

    Args:
        w: (B, T, H, K).
        temperature: (H,).

    Returns:
        (B, T, H, K), a view.
    """
    w = w.transpose(1, 2)
    energy = w**2
    share = energy / energy.cumsum(-2).clamp(min=ENERGY_EPS)
    membership = (share.sum(-1) * temperature[:, None]).softmax(1)
    mass = membership.cumsum(-1)[..., None] + MASS_EPS
    moment = (energy * membership[..., None]).cumsum(-2) / mass
    return -(w * membership[..., None] * (1 / (1 + moment))).transpose(1, 2)


def missing(device: str, causal: bool) -> str | None:
    """Why flash-linear-attention does not take part, or None.

    Args:
        device: where the benchmark runs.
        causal: which operation.

    Returns:
        A reason.
    """
    if not causal:
        return "flash-linear-attention has causal kernels only"
    if device != "cuda":
        return "flash-linear-attention runs on a GPU only"
    try:
        import_module("fla.ops.linear_attn")
    except ImportError as error:
        return f"flash-linear-attention cannot be imported: {error}"
    return None
