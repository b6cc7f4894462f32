"""Half-lives of the decaying sums of causal TSSA: numbers of tokens after which a token counts half."""

import math
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rankwise._internals.linalg import float64_device
from rankwise.errors import InputError


def half_lives(
    heads: int, shortest: float | int = 4, longest: float | int = 1024, infinite: int = 0
) -> Float64[Tensor, " H"]:
    """Return one half-life per head in tokens, on the CPU, for the argument ``half_life`` of `tssa`.

    The first n = heads − infinite heads have ``h_i = shortest · (longest/shortest)^(i/(n−1))``. The last
    ``infinite`` heads do not decay, as in the published causal TSSA. With half-life h, a token that is u
    tokens old has the weight 2^(−u/h) in a sum, so that a sum effectively covers 1.44·h tokens.

    Raises:
        InputError: if ``heads`` or ``infinite`` is out of range, or not 0 < shortest ≤ longest < ∞.

    Examples:
        >>> half_lives(4, shortest=2, longest=16).round(decimals=6).tolist()
        [2.0, 4.0, 8.0, 16.0]
    """
    decaying = heads - infinite
    if heads < 1 or decaying < 0 or infinite < 0 or not 0 < shortest <= longest < math.inf:
        raise InputError(
            "`half_lives`",
            expected="heads ≥ 1, 0 ≤ infinite ≤ heads and 0 < shortest ≤ longest < ∞",
            got=f"heads={heads}, shortest={shortest}, longest={longest}, infinite={infinite}",
            fix="Pass half-lives in tokens, the shortest first.",
        )
    on_cpu: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # even while a model is built on meta
    steps = torch.arange(decaying, **on_cpu) / max(decaying - 1, 1)
    ladder = shortest * (longest / shortest) ** steps
    return torch.cat([ladder, torch.full((infinite,), torch.inf, **on_cpu)])


def decay_rates(half_life: Float[Tensor, " H"], device: torch.device) -> Float64[Tensor, " H"]:
    """Return λ = 2^(−1/h) for half-life h: the factor by which sums decay per token; exactly 1 for h = ∞.

    λ is float64, because float32 would change a half-life of a million tokens by 3 %. λ is on the CPU if the
    device does not support float64.

    Examples:
        >>> import torch
        >>> decay_rates(torch.tensor([1.0, float("inf")]), torch.device("cpu")).tolist()
        [0.5, 1.0]
    """
    return torch.exp2(-1 / half_life.detach().to(float64_device(device)).double())
