"""Find K*, the query/key width beyond which wider heads with random weights gain almost no rank."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from rankwise.errors import ShapeError, in_range, instance_of, one_of, whole_number
from rankwise.plan.ranks import POSITIONS, RandomHead
from rankwise.plan.record import HeadDimPlan, QKCost
from rankwise.theory import rank_barrier
from rankwise.theory.barrier import MASKS
from rankwise.theory.random_rank import MAX_ENTRIES

DENSE_WIDTHS = tuple(range(1, 257))
"""Query/key widths to try for hardmax without rotary positions: together they cost as much as the widest."""
SPARSE_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Query/key widths to try for softmax or with rotary positions, where each width has its own cost."""
MAX_TOKENS = 131_072
"""Largest number of tokens; at this length, one trial takes about half an hour on one core."""
RESAMPLES = 2000
"""Number of bootstrap resamples of the trials for the interval of K*."""
SIGNIFICANT = 4.0
"""Number of standard errors that a fall of rank/T must exceed: large, because many pairs are compared."""


def plan_head_dim(
    tokens: int | Float[Tensor, "*batch T D"],
    mask: str = "full",
    tolerance: float = 0.01,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    width: int | None = None,
    head_dims: Sequence[int] | None = None,
    positions: str = "none",
    temperature: float = 0.0,
    delta: float = 1e-2,
    trials: int = 10,
    seed: int = 0,
    on_trial: Callable[[int], None] | None = None,
) -> HeadDimPlan:
    """Find K*, the least query/key width beyond which one more channel adds less than `tolerance` to rank/T.

    The rank is the rank of the mixing matrix M (T tokens by T tokens) of one head with random weights.
    Trained heads can use more or less rank: `rankwise.plan.trained_widths` measures the width they require.

    Formula: the least K such that (r(2K') − r(K'))/K' < tolerance for all K' ≥ K. r(K) is the mean of
    rank(M)/T over draws of Wq and Wk with independent Gaussian entries. At temperature 0, rank(M) is the
    number of different winners of hardmax (tokens with the largest score of a row). At other temperatures, it
    is the number of singular values ≥ δ of softmax(QKᵀ/(temperature·√K)).
    Range of ``head_dim``: the widths tried. ``saturated`` is False if rank/T still grows at the widest width.
    Cost: O(trials·T²·K_max) at temperature 0; about 0.5 s per trial at T = 2,048, K_max = 256 on one core.
    With rotary positions, each width takes such a time. Temperatures above 0 take an O(T³) factorization per
    width and trial.
    Source: "On the Limitation and Redundancy of Transformers: A Rank Perspective": "check the saturation
    situation of attention ranks before training". The paper states a tolerance of about 0.01, but no step of
    the width. This project chose a step of one unit, averaged over a doubling of the width.

    Args:
        tokens: number of tokens T, for orthonormal token states; or token states (T, D) or (B, T, D). Trial i
            reads sequence i mod B, after LayerNorm.
        mask: "full" or "causal".
        tolerance: gain in rank/T per unit of width that K* and wider heads stay below, in (0, 1).
        heads: number of heads of the present model, for the costs.
        kv_heads: number of key heads of the present model; `heads` by default.
        head_dim: query/key width of the present model; D // heads by default.
        width: model width D, for the costs; by default the width of the token states.
        head_dims: widths K to try, in addition to their doubles up to the widest: a gain is from K to 2K. By
            default 1 to 256, or fewer if each width has its own cost.
        positions: "none" or "rope" (even widths only).
        temperature: softmax temperature in units of √K; 0 is hardmax, 1 the usual softmax.
        delta: threshold δ; at temperatures above 0, the rank counts singular values ≥ δ.
        trials: number of draws of the weights, at least 2.
        seed: random seed for the weights.
        on_trial: function called after each trial with the number of trials done.

    Returns:
        Plan with the curve of rank/T, K* and its interval. If Ctrl-C stops the trials after two or more, the
        plan is computed from the finished trials, and ``complete`` is False.

    Raises:
        InputError: if a number or name is out of range.
        ShapeError: if token states, widths and heads do not fit together.

    Examples:
        >>> plan = plan_head_dim(128, heads=8, width=256, trials=4)
        >>> plan.head_dim < 16, plan.costs[0].head_dim, plan.costs[0].cache_bytes
        (True, 32, 512)
    """
    states = _token_states(tokens)
    count = tokens if states is None else states.shape[1]
    assert isinstance(count, int)
    check_arguments(
        count, mask, tolerance, positions=positions, temperature=temperature, delta=delta, trials=trials,
        seed=seed,
    )  # fmt: skip
    if states is not None and heads is not None and width not in (None, states.shape[-1]):
        raise ShapeError(
            "`width`", expected=f"{states.shape[-1]}, as the token states", got=str(width), fix="Omit it."
        )
    width = states.shape[-1] if states is not None and heads is not None else width
    present = present_head_dim(heads, kv_heads, head_dim, width, positions)
    widths = _widths(head_dims, positions, temperature)
    head = RandomHead(count, states, mask, positions, float(temperature), float(delta), seed)
    ranks: list[Float[np.ndarray, " W"]] = []
    try:
        for trial in range(trials):
            ranks.append(head.trial(widths, trial))
            if on_trial is not None:
                on_trial(len(ranks))
    except KeyboardInterrupt:
        if len(ranks) < 2:  # one trial has no standard deviation
            raise
    shares = np.stack(ranks)
    mean, std = shares.mean(0), shares.std(0, ddof=1)
    found, interval = saturation(widths, shares, tolerance, seed)
    fall = largest_fall(widths, shares, tolerance)
    notes = []
    if len(ranks) < trials:
        notes.append(f"Interrupted after {len(ranks)} of {trials} trials.")
    if fall is not None:
        notes.append(
            f"The curve is not monotone: rank/T falls by {fall[2]:.3f} from K = {fall[0]} to {fall[1]}. "
            "K* is where it rises for the last time."
        )
    if temperature > 0 and mask == "causal":
        notes.append("A causal softmax matrix is triangular: its rank is the number of singular values ≥ δ.")
    star = widths[found]
    plan = HeadDimPlan(
        complete=len(ranks) == trials, tokens=count, mask=mask,
        inputs="orthonormal" if states is None else "given", positions=positions,
        temperature=float(temperature), delta=float(delta), tolerance=tolerance, trials=len(ranks), seed=seed,
        curve=[(k, float(m), float(s)) for k, m, s in zip(widths, mean, std, strict=True)],
        barrier=rank_barrier(count, mask), head_dim=star, interval=interval, saturated=found >= 0, fall=fall,
        heads=heads, kv_heads=None if heads is None else kv_heads or heads, width=width, notes=notes,
    )  # fmt: skip
    if present is None:
        return plan
    if head_dim is None and present * (heads or 1) != width:
        notes.append(f"{heads} heads do not divide D = {width}: the present K is taken as {present}.")
    other = (star, interval[1]) if plan.saturated else ()
    costs = [_cost(plan, k) for k in dict.fromkeys((present, *other))]
    return plan.model_copy(update={"costs": costs, "notes": notes})


def _token_states(tokens: int | Tensor) -> Float[Tensor, "B T D"] | None:
    """Return token states as (B, T, D), or None for a number of tokens; raise if the states are invalid."""
    if isinstance(tokens, int):
        return None
    got = type(tokens).__name__
    if isinstance(tokens, Tensor):
        states = tokens.detach().cpu()
        states = states[None] if states.ndim == 2 else states
        got = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        if states.is_floating_point() and not bool(states.isfinite().all()):
            got += " with NaN or infinity"
        elif states.is_floating_point() and states.ndim == 3 and states.numel():
            if bool((states.flatten(1).abs().amax(1) > 0).all()):
                return states
            got = "a sequence of zeros"
    expected = "an int, or finite token states (T, D) or (B, T, D), not empty, no sequence all zeros"
    raise ShapeError("`tokens`", expected=expected, got=got, fix="Pass embeddings, not token ids.")


def check_arguments(
    tokens: int, mask: str, tolerance: float, *, positions: str, temperature: float, delta: float,
    trials: int, seed: int,
) -> None:  # fmt: skip
    """Raise if an argument is out of range; this check needs neither token states nor a model."""
    whole_number("`tokens`", tokens, 2, MAX_TOKENS, fix="Time grows as T²; one token has rank 1.")
    one_of("`mask`", mask, MASKS)
    one_of("`positions`", positions, POSITIONS)
    in_range("`tolerance`", tolerance, "(0, 1)", fix="0.01 is usual.")
    in_range("`temperature`", temperature, "[0, inf)", fix="0 is hardmax, 1 the usual softmax.")
    in_range("`delta`", delta, "(0, inf)", fix="0.01 is usual.")
    whole_number("`trials`", trials, 2, fix="The interval is computed from the spread over trials.")
    whole_number("`seed`", seed, 0)
    if temperature > 0:
        most = math.isqrt(MAX_ENTRIES)
        whole_number("`tokens`", tokens, 2, most, fix="Use temperature 0, which needs no singular values.")


def present_head_dim(
    heads: int | None, kv_heads: int | None, head_dim: int | None, width: int | None, positions: str
) -> int | None:
    """Return the present query/key width, or None without any size; raise if the sizes do not fit."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "width": width}
    for name, size in sizes.items():
        if size is not None:
            whole_number(f"`{name}`", size, error=ShapeError)
    passed = [name for name, size in sizes.items() if size is not None]
    if not passed:
        return None
    if heads is None or width is None:
        raise ShapeError(
            " and ".join(f"`{name}`" for name in passed),
            expected="both `heads` and `width`: costs need both",
            got=f"heads={heads}, width={width}",
            fix=f"Add {'`heads`' if heads is None else '`width`'}, or omit the others.",
        )
    if heads % (kv_heads or heads):
        raise ShapeError(
            "`kv_heads`", expected=f"a divisor of {heads} heads", got=str(kv_heads), fix="Change it."
        )
    step = 2 if positions == "rope" else 1  # rotary positions rotate pairs of channels
    found = width // heads // step * step if head_dim is None else head_dim
    if found < 1 or found % step:
        even = ", an even number for rotary positions" if step == 2 else ""
        got = f"{heads} heads at D = {width}" if head_dim is None else f"head_dim={head_dim}"
        raise ShapeError(
            "present heads", expected=f"channels in each head{even}", got=got, fix="Change `heads`."
        )
    return found


def _widths(head_dims: Sequence[int] | None, positions: str, temperature: float) -> tuple[int, ...]:
    step = 2 if positions == "rope" else 1
    if head_dims is None:
        known = DENSE_WIDTHS if step == 1 and temperature == 0 else SPARSE_WIDTHS
        return tuple(width for width in known if width % step == 0)
    fix = "Omit it, or pass for example [4, 8, 16, 32, 64]."
    instance_of("`head_dims`", head_dims, Iterable, "a list of widths", fix=fix)
    given = {whole_number("`head_dims`", width, fix=fix, error=ShapeError) for width in head_dims}
    if not given or 2 * min(given) > max(given) or any(width % step for width in given):
        even = ", all even for rotary positions" if step == 2 else ""
        raise ShapeError(
            "`head_dims`",
            expected=f"widths that double at least once{even}: a gain is from K to 2K",
            got=str(sorted(given)),
            fix=fix,
        )
    # K* of a grid with gaps would be invented: inside a gap, rank/T can rise anywhere.
    top = max(given)
    return tuple(sorted({width << n for width in given for n in range((top // width).bit_length())}))


def gains(
    head_dims: Sequence[int], rank_shares: Float[np.ndarray, "*batch W"]
) -> Float[np.ndarray, "*batch J"]:
    """Return (r(2K) − r(K))/K, the mean gain of r = rank/T per unit of width, for each width K ≤ widest/2.

    The widths are ascending, with the double of each returned width among them.

    Examples:
        >>> gains((1, 2, 4), np.array([0.1, 0.2, 0.3])).round(3).tolist()
        [0.1, 0.05]
    """
    places = {width: at for at, width in enumerate(head_dims)}
    judged = [width for width in head_dims if 2 * width <= head_dims[-1]]
    doubled = rank_shares[..., [places[2 * width] for width in judged]]
    return (doubled - rank_shares[..., : len(judged)]) / np.array(judged)


def saturation_index(
    head_dims: Sequence[int], rank_shares: Float[np.ndarray, "*batch W"], tolerance: float
) -> Int[np.ndarray, "*batch"]:
    """Return the index of K* in `head_dims`; −1 if rank/T still grows at the widest width.

    K* is the width after the last large gain, not the first width with a small gain: for long sequences,
    rank/T starts flat and rises later.
    """
    steep = gains(head_dims, rank_shares) >= tolerance
    after = np.where(steep.any(-1), steep.shape[-1] - steep[..., ::-1].argmax(-1), 0)
    return np.where(after < steep.shape[-1], after, -1)


def saturation(
    head_dims: Sequence[int], trials: Float[np.ndarray, "N W"], tolerance: float, seed: int
) -> tuple[int, tuple[int, int]]:
    """Return the index of K* for the mean curve (−1: not saturated) and the 95 % bootstrap interval of K*."""
    draws = np.random.default_rng(seed).integers(len(trials), size=(RESAMPLES, len(trials)))
    counts = np.stack([(draws == at).sum(1) for at in range(len(trials))], axis=1)
    places = saturation_index(head_dims, counts @ trials / len(trials), tolerance)
    found = int(saturation_index(head_dims, trials.mean(0), tolerance))
    ordered = np.sort(np.array(head_dims)[places])  # index −1 (not saturated) selects the widest width
    low, high = ordered[[int(0.025 * RESAMPLES), int(0.975 * RESAMPLES) - 1]]
    return found, (int(min(low, head_dims[found])), int(max(high, head_dims[found])))


def largest_fall(
    head_dims: Sequence[int], trials: Float[np.ndarray, "N W"], tolerance: float
) -> tuple[int, int, float] | None:
    """Return (K, K', lost rank/T) for the largest significant fall of mean rank/T; None if there is none."""
    mean = trials.mean(0)
    error = math.sqrt(2 / len(trials)) * trials.std(0, ddof=1).max()
    lost = np.triu(mean[:, None] - mean, 1)  # lost[a, b]: decrease of rank/T from width a to width b
    lost = np.where(lost > max(tolerance, SIGNIFICANT * error), lost, 0.0)
    a, b = (int(at) for at in np.unravel_index(lost.argmax(), lost.shape))
    return (head_dims[a], head_dims[b], float(lost[a, b])) if lost[a, b] > 0 else None


def _cost(plan: HeadDimPlan, head_dim: int) -> QKCost:
    """Return parameters, operations and cache bytes for queries and keys of one layer at one width."""
    heads, key_heads, width = plan.heads or 0, plan.kv_heads or 0, plan.width or 0
    parameters = width * head_dim * (heads + key_heads)
    pairs = plan.tokens * (plan.tokens + 1) // 2 if plan.mask == "causal" else plan.tokens**2
    widths, shares = ([point[at] for point in plan.curve] for at in (0, 1))
    return QKCost(
        head_dim=head_dim,
        rank_share=float(np.interp(head_dim, widths, shares, left=math.nan, right=math.nan)),
        parameters=parameters,
        flops=2 * plan.tokens * parameters + 2 * pairs * heads * head_dim,
        cache_bytes=2 * key_heads * head_dim,
    )
