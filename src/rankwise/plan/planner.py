"""Find K*, the query/key width beyond which wider heads with random weights gain almost no rank."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from rankwise._internals.forward import Progress
from rankwise.errors import ShapeError, in_range, one_of, whole_number
from rankwise.plan.ranks import POSITIONS, RandomHead
from rankwise.plan.records import HeadDimCost, HeadDimPlan
from rankwise.theory import rank_barrier
from rankwise.theory.barrier import MASKS

DENSE_WIDTHS = tuple(range(1, 257))
"""Query/key widths to try without rotary positions. All of them cost as much as the widest alone."""
SPARSE_WIDTHS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Query/key widths to try with rotary positions, where each width has its own cost."""
MAX_TOKENS = 131_072
"""Largest number of tokens; at this length, one trial takes about half an hour on one core."""
RESAMPLES = 2000
"""Number of bootstrap resamples of the trials for the interval of K*."""


def plan_head_dim(
    tokens: int,
    mask: str = "full",
    positions: str = "none",
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    hidden_size: int | None = None,
    least_gain: float = 0.01,
    trials: int = 10,
    seed: int = 0,
    on_progress: Progress = lambda step, done: None,
) -> HeadDimPlan:
    """Find K*, the least query/key width beyond which one more channel adds less than `least_gain` to rank/T.

    The rank is the rank of the mixing matrix M (T tokens by T tokens) of one hardmax head with random
    weights on orthonormal tokens. Trained heads can require more: an audit measures `required_head_dim`.

    Formula: the least K such that (r(2K') − r(K'))/K' < least_gain for all K' ≥ K. r(K) is the mean of
    rank(M)/T over draws of Wq and Wk with independent Gaussian entries. rank(M) is the number of different
    winners (tokens with the largest score of a row).
    Range of ``head_dim``: the widths tried, 1 to 256. ``saturated`` is False if rank/T still grows at 256.
    Cost: O(trials·T²·K_max); about 0.5 s per trial at T = 2,048, K_max = 256 on one core. With rotary
    positions, each width takes about this time.
    Source: "On the Limitation and Redundancy of Transformers: A Rank Perspective": "check the saturation
    situation of attention ranks before training". The paper states a gain of about 0.01, but not per
    which step of the width. This project chose the gain per channel, averaged over a doubling of the width.

    Args:
        tokens: number of tokens T per sequence.
        mask: "full" or "causal".
        positions: "none" or "rope" (rotary; even widths only).
        heads: number of heads of the present model, for the costs; K* does not depend on this number.
        kv_heads: number of key heads of the present model; `heads` by default.
        head_dim: query/key width of the present model; hidden_size / heads by default.
        hidden_size: model width D, for the costs.
        least_gain: gain in rank/T per added channel that K* and wider heads stay below, in (0, 1).
        trials: number of draws of the weights, at least 2.
        seed: random seed for the weights.
        on_progress: function called with each trial's text and the finished share of the trials.

    Returns:
        Plan with the curve of rank/T, K* and its interval. If Ctrl-C stops the trials after two or more, the
        plan is computed from the finished trials, and ``complete`` is False.

    Raises:
        InputError: if a number or name is out of range.
        ShapeError: if the sizes of the present model do not fit together.

    Examples:
        >>> plan = plan_head_dim(128, heads=8, hidden_size=256, trials=4)
        >>> plan.head_dim < 16, plan.costs[0].head_dim, plan.costs[0].cache_bytes
        (True, 32, 512)
    """
    whole_number("`tokens`", tokens, 2, MAX_TOKENS, fix="Time grows as T²; one token has rank 1.")
    one_of("`mask`", mask, MASKS)
    one_of("`positions`", positions, POSITIONS)
    in_range("`least_gain`", least_gain, "(0, 1)", fix="0.01 is usual.")
    whole_number("`trials`", trials, 2, fix="The interval is computed from the spread over trials.")
    whole_number("`seed`", seed, 0)
    present = present_head_dim(positions, heads, kv_heads, head_dim, hidden_size)
    widths = DENSE_WIDTHS if positions == "none" else SPARSE_WIDTHS
    head = RandomHead(tokens, mask, positions, seed)
    ranks: list[Float[np.ndarray, " W"]] = []
    try:
        for trial in range(trials):
            on_progress(f"random head {trial + 1} of {trials}", trial / trials)
            ranks.append(head.trial(widths, trial))
    except KeyboardInterrupt:
        if len(ranks) < 2:  # one trial has no standard deviation
            raise
    shares = np.stack(ranks)
    mean, std = shares.mean(0), shares.std(0, ddof=1)
    place, interval = saturation(widths, shares, least_gain, seed)
    complete = len(ranks) == trials
    plan = HeadDimPlan(
        complete=complete,
        tokens=tokens,
        mask=mask,
        positions=positions,
        least_gain=least_gain,
        trials=len(ranks),
        seed=seed,
        curve=[(k, float(m), float(s)) for k, m, s in zip(widths, mean, std, strict=True)],
        one_hot_rank=rank_barrier(tokens, mask),
        head_dim=widths[place],
        interval=interval,
        saturated=place >= 0,
        heads=heads,
        kv_heads=None if heads is None else kv_heads or heads,
        hidden_size=hidden_size,
        notes=[] if complete else [f"Interrupted after {len(ranks)} of {trials} trials."],
    )
    if present is None:
        return plan
    star = [plan.head_dim] if plan.saturated else []
    return plan.model_copy(update={"costs": [_cost(plan, k) for k in dict.fromkeys([present, *star])]})


def present_head_dim(
    positions: str, heads: int | None, kv_heads: int | None, head_dim: int | None, hidden_size: int | None
) -> int | None:
    """Return the query/key width of the present model. Return None if no size is given.

    Raises:
        ShapeError: if the sizes do not fit together.
    """
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "hidden_size": hidden_size}
    given = {f"`{name}`": size for name, size in sizes.items() if size is not None}
    for name, size in given.items():
        whole_number(name, size, error=ShapeError)
    if not given:
        return None
    if heads is None or hidden_size is None:
        missing = "`heads`" if heads is None else "`hidden_size`"
        expected, got = "both `heads` and `hidden_size`, which costs require", f"no {missing}"
        raise ShapeError(" and ".join(given), expected=expected, got=got, fix=f"Add {missing}.")
    if heads % (kv_heads or heads):
        expected = f"a divisor of {heads} heads"
        raise ShapeError("`kv_heads`", expected=expected, got=str(kv_heads), fix="Change it.")
    if head_dim is None and hidden_size % heads:
        expected = f"a divisor of the hidden size {hidden_size}"
        raise ShapeError("`heads`", expected=expected, got=str(heads), fix="Change it, or pass `head_dim`.")
    present = head_dim or hidden_size // heads
    if positions == "rope" and present % 2:
        expected = "an even query/key width for rotary positions"
        raise ShapeError("present heads", expected=expected, got=str(present), fix="Change `heads`.")
    return present


def gains(
    head_dims: Sequence[int], rank_shares: Float[np.ndarray, "*batch W"]
) -> Float[np.ndarray, "*batch J"]:
    """Return (r(2K) − r(K))/K, the mean gain of r = rank/T per unit of width, for each width K ≤ widest/2.

    ``head_dims`` must be ascending and contain 2K for each of these widths K.

    Examples:
        >>> gains((1, 2, 4), np.array([0.1, 0.2, 0.3])).round(3).tolist()
        [0.1, 0.05]
    """
    places = {width: place for place, width in enumerate(head_dims)}
    judged = [width for width in head_dims if 2 * width <= head_dims[-1]]
    doubled = rank_shares[..., [places[2 * width] for width in judged]]
    return (doubled - rank_shares[..., : len(judged)]) / np.array(judged)


def saturation_index(
    head_dims: Sequence[int], rank_shares: Float[np.ndarray, "*batch W"], least_gain: float
) -> Int[np.ndarray, "*batch"]:
    """Return the index of K* in `head_dims`, or −1 if rank/T still grows at the widest width.

    K* is the width after the last large gain, not the first width with a small gain: for long sequences,
    rank/T starts flat and rises later.
    """
    steep = gains(head_dims, rank_shares) >= least_gain
    after = np.where(steep.any(-1), steep.shape[-1] - steep[..., ::-1].argmax(-1), 0)
    return np.where(after < steep.shape[-1], after, -1)


def saturation(
    head_dims: Sequence[int], trials: Float[np.ndarray, "N W"], least_gain: float, seed: int
) -> tuple[int, tuple[int, int]]:
    """Return the index of K* for the mean curve (−1: not saturated) and the 95 % bootstrap interval of K*."""
    draws = np.random.default_rng(seed).integers(len(trials), size=(RESAMPLES, len(trials)))
    counts = np.stack([(draws == trial).sum(1) for trial in range(len(trials))], axis=1)
    places = saturation_index(head_dims, counts @ trials / len(trials), least_gain)
    place = int(saturation_index(head_dims, trials.mean(0), least_gain))
    ordered = np.sort(np.array(head_dims)[places])  # index −1 (not saturated) selects the widest width
    low, high = ordered[[int(0.025 * RESAMPLES), int(0.975 * RESAMPLES) - 1]]
    return place, (int(min(low, head_dims[place])), int(max(high, head_dims[place])))


def _cost(plan: HeadDimPlan, head_dim: int) -> HeadDimCost:
    """Return parameters and cache bytes for queries and keys of one layer at one width."""
    heads, kv_heads, hidden_size = plan.heads or 0, plan.kv_heads or 0, plan.hidden_size or 0
    widths, shares, _ = zip(*plan.curve, strict=True)
    return HeadDimCost(
        head_dim=head_dim,
        rank_share=float(np.interp(head_dim, widths, shares, left=math.nan, right=math.nan)),
        parameters=hidden_size * head_dim * (heads + kv_heads),
        cache_bytes=2 * kv_heads * head_dim,
    )
