"""Half-lives of decayed statistics, and the running sums they define."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from rankwise.errors import InputError

BLOCK = 64


def half_lives(
    heads: int, shortest: float | int = 4, longest: float | int = 1024, infinite: int = 0
) -> Float[Tensor, " H"]:
    """A ladder of half-lives, one a head, evenly spaced on a logarithmic scale.

    ``h_i = shortest · (longest/shortest)^(i/(n-1))``; the last ``infinite`` heads forget nothing, which is
    literal causal TSSA. A statistic of half-life h weighs a token u tokens back by 2^(-u/h), so it looks at
    about 1.44·h tokens.

    Args:
        heads: H.
        shortest: half-life of the first head, in tokens.
        longest: half-life of the last head that forgets.
        infinite: how many heads at the end never forget.

    Returns:
        Half-lives in tokens, float64; `tssa` takes them as ``half_life``.

    Raises:
        InputError: if the ladder is empty, descends or has a half-life that is not positive.

    Examples:
        >>> half_lives(4, shortest=2, longest=16).round(decimals=6).tolist()
        [2.0, 4.0, 8.0, 16.0]
    """
    falling = heads - infinite
    if heads < 1 or falling < 0 or infinite < 0 or not 0 < shortest <= longest < math.inf:
        raise InputError(
            "`half_lives`",
            expected="heads ≥ 1, 0 ≤ infinite ≤ heads and 0 < shortest ≤ longest < ∞",
            got=f"heads={heads}, shortest={shortest}, longest={longest}, infinite={infinite}",
            fix="Give the ladder from its shortest to its longest half-life, in tokens.",
        )
    steps = torch.arange(falling, dtype=torch.float64) / max(falling - 1, 1)
    ladder = shortest * (longest / shortest) ** steps
    return torch.cat([ladder, torch.full((infinite,), torch.inf, dtype=torch.float64)])


def rates(half_life: Float[Tensor, " H"], device: torch.device) -> Float[Tensor, " H"]:
    """λ = 2^(-1/h), in float64: in float32 a half-life of a million tokens would be off by a tenth.

    Args:
        half_life: in tokens; infinity gives exactly 1.
        device: where the sums are.

    Returns:
        What a sum is multiplied by when a token passes; there, or on the CPU where that has no float64.

    Examples:
        >>> import torch
        >>> rates(torch.tensor([1.0, float("inf")]), torch.device("cpu")).tolist()
        [0.5, 1.0]
    """
    home = torch.device("cpu") if device.type == "mps" else device
    return torch.exp2(-1 / half_life.detach().to(home).double())


def running_sum(
    x: Float[Tensor, "B T H N"],
    start: Float[Tensor, "B H N"],
    rate: Float[Tensor, " H"] | None,
    valid: Tensor | None,
) -> Float[Tensor, "B T H N"]:
    """S_t = λ_h S_{t-1} + x_t from S_0 = ``start``; where a token is not valid, S_t = S_{t-1}.

    Without a rate it is a cumulative sum; with one, blocks of `BLOCK` tokens are multiplied by the triangle
    of the powers of λ and the blocks' ends are carried on. What is not finite is summed by itself: in that
    product 0 · NaN would take it to the tokens before. Cost O(T·BLOCK) a channel.

    Args:
        x: what is added at each token; zero where a token is not valid.
        start: S_0.
        rate: λ of each head in float64, on any device, or None for λ = 1.
        valid: real tokens, (B, T), or None for all.

    Returns:
        S_1 … S_T.
    """
    if rate is None:
        return x.cumsum(1) + start[:, None]
    batch, tokens = x.shape[:2]
    ages = torch.ones(batch, tokens, device=rate.device) if valid is None else valid.to(rate.device)
    age = ages.double().cumsum(1)  # how many decays have happened
    endless = x.masked_fill(x.isfinite(), 0.0)
    x = x.masked_fill(~x.isfinite(), 0.0)
    pieces, before, base = [], torch.zeros_like(age[:, :1]), start
    for low in range(0, tokens, BLOCK):
        here = age[:, low : low + BLOCK] - before
        power = rate ** here[..., None]  # (B, n, H)
        gap = (here[:, :, None] - here[:, None]).clamp(min=0)
        triangle = (rate ** gap[..., None]).to(x) * x.new_ones(gap.shape[1:]).tril()[..., None]
        piece = torch.einsum("btuh,buhn->bthn", triangle, x[:, low : low + BLOCK])
        piece = piece + power.to(x)[..., None] * base[:, None]
        pieces.append(piece)
        before, base = age[:, low : low + BLOCK][:, -1:], piece[:, -1]
    return torch.cat(pieces, 1) + endless.cumsum(1)
