"""Token statistics self-attention (TSSA) in plain torch, the reference with which tests compare kernels.

The docstring of `rankwise.ops.tssa` contains the formulas. w: projections of tokens to heads; energy: Σ w²
over tokens; membership Π: softmax over heads of temperature · score; assigned: Σ Π w²; mass: Σ Π.
"""

from contextlib import nullcontext

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from rankwise.ops.arguments import Call, Outputs, Sums, sum_dtype

NORM_EPS = 1e-12
"""Lower bound of the norm of a channel over all tokens, in bidirectional TSSA."""
ENERGY_EPS = 1e-12
"""Lower bound of the running energy (sum of w²) of a channel, in causal TSSA."""
MASS_EPS = 1e-8
"""Constant added to the mass Σ Π, by which Σ Π w² is divided, to avoid a division by 0."""
BLOCK = 64
"""Number of tokens that one matrix product adds to a decaying sum."""


def solve(call: Call) -> Outputs:
    """Return output, memberships and final sums of a call.

    Entries of w that are not finite are replaced by 0, and NaN is added as a constant to all results that
    depend on these entries. Otherwise the backward pass would multiply NaN by gradients of 0, and NaN would
    reach the gradients of earlier tokens.
    """
    w, mask = call.w.to(sum_dtype(call.w.dtype)), call.mask
    if mask is not None:
        w = w.masked_fill(~mask[..., None, None], 0.0)
    wrong = ~w.detach().square().isfinite()
    w = w.masked_fill(wrong, 0.0)
    device = w.device.type
    has_autocast = torch.amp.autocast_mode.is_autocast_available(device)
    with torch.autocast(device, enabled=False) if has_autocast else nullcontext():
        if call.causal:
            start = call.initial_sums()
            output, membership, end = causal(w, call.temperature, call.offset, mask, start, call.rate)
            seen = wrong.cumsum(1) > 0
        else:
            output, membership = bidirectional(w, call.temperature, mask)
            seen, end = wrong.any(1, keepdim=True), None
    spread = _nan_where(seen.flatten(2).any(-1), w)[..., None, None]
    if end is not None:
        last = spread[:, -1]
        end = Sums(end.energy + _nan_where(seen, w)[:, -1], end.assigned + last, end.mass + last[..., 0])
    if mask is not None:
        spread = spread.masked_fill(~mask[..., None, None], 0.0)
    return Outputs((output + spread).to(call.w.dtype), membership + spread[..., 0], end)


def _nan_where(condition: Tensor, like: Tensor) -> Tensor:
    """Return a constant tensor that is NaN where ``condition`` is True and 0 elsewhere."""
    return torch.zeros_like(condition, dtype=like.dtype).masked_fill(condition, torch.nan)


def bidirectional(
    w: Float[Tensor, "B T H K"], temperature: Float[Tensor, " H"], mask: Bool[Tensor, "B T"] | None
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H"]]:
    """Return output and memberships of bidirectional TSSA in O(B T H K) time; w must be 0 at padding."""
    energy = w.square()
    total = energy.sum(1, keepdim=True).clamp(min=NORM_EPS**2)
    membership = _membership((energy / total).sum(-1), temperature, mask)
    mass = membership.sum(1) + MASS_EPS
    moment = (membership[..., None] * energy).sum(1) / mass[..., None]
    return -w * membership[..., None] / (1 + moment[:, None]), membership


def causal(
    w: Float[Tensor, "B T H K"],
    temperature: Float[Tensor, " H"],
    offset: Float[Tensor, "B T H"] | None,
    mask: Bool[Tensor, "B T"] | None,
    start: Sums,
    rate: Float64[Tensor, " H"] | None,
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T H"], Sums]:
    """Return output, memberships and final sums of causal TSSA in O(B T H K) time; w must be 0 at padding."""
    energy = w.square()
    total = running_sum(energy, start.energy, rate, mask)
    score = (energy / total.clamp(min=ENERGY_EPS)).sum(-1)
    if offset is not None:
        score = score + offset
    membership = _membership(score, temperature, mask)
    mass = running_sum(membership[..., None], start.mass[..., None], rate, mask)
    assigned = running_sum(membership[..., None] * energy, start.assigned, rate, mask)
    output = -w * membership[..., None] / (1 + assigned / (mass + MASS_EPS))
    return output, membership, Sums(total[:, -1], assigned[:, -1], mass[:, -1, :, 0])


def _membership(score: Tensor, temperature: Tensor, mask: Tensor | None) -> Tensor:
    membership = (temperature * score).softmax(-1)
    return membership if mask is None else membership.masked_fill(~mask[..., None], 0.0)


def running_sum(
    x: Float[Tensor, "B T H N"],
    start: Float[Tensor, "B H N"],
    rate: Float64[Tensor, " H"] | None,
    mask: Bool[Tensor, "B T"] | None,
) -> Float[Tensor, "B T H N"]:
    """Return the running sums S_t = λ_h S_{t−1} + x_t from S_0 = ``start``, with decay λ (``rate``) per head.

    At padding, where x must be 0, S_t = S_{t−1}. If ``rate`` is None, λ is 1, and S is a cumulative sum. With
    decay, blocks of `BLOCK` tokens are multiplied by a triangular matrix of powers of λ, and the last sum of
    a block is the start of the next block. Time O(T · BLOCK). ``rate`` is float64 and may be on the CPU.
    """
    if rate is None:
        return x.cumsum(1) + start[:, None]
    batch, tokens = x.shape[:2]
    real = rate.new_ones(batch, tokens) if mask is None else mask.to(rate)
    age = real.cumsum(1)  # number of real tokens up to each token, which is the number of decays
    sums, before, base = [], torch.zeros_like(age[:, :1]), start
    for low in range(0, tokens, BLOCK):
        here = age[:, low : low + BLOCK] - before
        power = rate ** here[..., None]  # (B, tokens of this block, H)
        gap = (here[:, :, None] - here[:, None]).clamp(min=0)
        triangle = (rate ** gap[..., None]).to(x) * x.new_ones(gap.shape[1:]).tril()[..., None]
        block = torch.einsum("btuh,buhn->bthn", triangle, x[:, low : low + BLOCK])
        block = block + power.to(x)[..., None] * base[:, None]
        sums.append(block)
        before, base = age[:, low : low + BLOCK][:, -1:], block[:, -1]
    return torch.cat(sums, 1)
