"""Where a curve saturates, whether it falls, and the law of K* in ln T."""

import math
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from rankwise.plan.ranks import trial_ranks
from rankwise.plan.records import LayerCurve, LogLaw
from rankwise.plan.states import Setting
from rankwise.theory import rank_barrier

RESAMPLES = 2000
SIGNIFICANT = 4.0
"""Standard errors, those of the noisiest width, from which a fall counts: many pairs are looked at."""
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def gains(head_dims: tuple[int, ...], shares: Float[np.ndarray, "*batch W"]) -> Float[np.ndarray, "*batch J"]:
    """Rank/T that a unit of width adds, on average between K and 2K: (r(2K) − r(K))/K.

    Between the widths tried r is linear. Widths above half the widest cannot be judged and are left out.

    Args:
        head_dims: widths, ascending.
        shares: rank/T at each.

    Examples:
        >>> gains((1, 2, 4), np.array([0.1, 0.2, 0.3])).round(3).tolist()
        [0.1, 0.05]
    """
    widths = np.array(head_dims, dtype=float)
    judged = widths[2 * widths <= widths[-1]]
    at = np.searchsorted(widths, 2 * judged)
    low, high = at - 1, at
    weight = (2 * judged - widths[low]) / (widths[high] - widths[low])
    doubled = shares[..., low] * (1 - weight) + shares[..., high] * weight
    return (doubled - shares[..., : len(judged)]) / judged


def saturation(
    head_dims: tuple[int, ...], shares: Float[np.ndarray, "*batch W"], tolerance: float
) -> np.ndarray:
    """Index of K*: the least width from which on no unit of width adds the tolerance; −1: none.

    "From which on", not "the first": at long T the curve starts flat, below any tolerance, and rises later.
    """
    steep = gains(head_dims, shares) >= tolerance
    after = np.where(steep.any(-1), steep.shape[-1] - steep[..., ::-1].argmax(-1), 0)
    return np.where(after < steep.shape[-1], after, -1)


def layer_curve(
    layer: int, head_dims: tuple[int, ...], trials: Float[np.ndarray, "N W"], tolerance: float, seed: int = 0
) -> LayerCurve:
    """Mean, spread, K* with its bootstrap interval over trials, and the fall of one layer's curve.

    Args:
        layer: its number.
        head_dims: widths.
        trials: rank/T of each trial at each width, two trials or more.
        tolerance: of the gain.
        seed: of the bootstrap.
    """
    mean, std = trials.mean(0), trials.std(0, ddof=1)
    draws = np.random.default_rng(seed).integers(len(trials), size=(RESAMPLES, len(trials)))
    counts = np.stack([(draws == at).sum(1) for at in range(len(trials))], axis=1)
    places = saturation(head_dims, counts @ trials / len(trials), tolerance)
    widths = np.array(head_dims)
    spread = np.sort(widths[places])  # −1, not saturated, is the widest
    found = int(saturation(head_dims, mean, tolerance))
    ends = spread[[int(0.025 * RESAMPLES), int(0.975 * RESAMPLES) - 1]]
    return LayerCurve(
        layer=layer,
        points=[(width, float(m), float(s)) for width, m, s in zip(head_dims, mean, std, strict=True)],
        head_dim=head_dims[found],
        interval=(int(min(ends[0], head_dims[found])), int(max(ends[1], head_dims[found]))),
        saturated=found >= 0,
        fall=_fall(head_dims, trials, tolerance),
    )


def _fall(
    head_dims: tuple[int, ...], trials: Float[np.ndarray, "N W"], tolerance: float
) -> tuple[int, int, float] | None:
    """The largest fall of the mean above the tolerance that chance does not explain."""
    mean = trials.mean(0)
    error = math.sqrt(2 / len(trials)) * trials.std(0, ddof=1).max()
    lost = np.triu(mean[:, None] - mean, 1)  # [a, b]: from width a to width b
    lost = np.where(lost > max(tolerance, SIGNIFICANT * error), lost, 0.0)
    a, b = np.unravel_index(lost.argmax(), lost.shape)
    return (head_dims[a], head_dims[b], float(lost[a, b])) if lost[a, b] > 0 else None


def fit_log_law(
    mask: str = "full",
    tolerance: float = 0.01,
    lengths: tuple[int, ...] = LENGTHS,
    trials: int = 10,
    seed: int = 0,
) -> LogLaw:
    """Fit K* = a + b·ln T over lengths, for hardmax heads on orthonormal tokens.

    A fit over the lengths asked for, not a proof: the residuals say how far it holds. At long T curves grow
    flat below the tolerance, so by this rule K* grows ever more slowly; ``half``, the width that reaches
    half of the barrier, grows faster than ln T.
    Cost: O(trials·T² K) for each length; short lengths get up to ten times the trials, from
    T = 2,048 on fewer, at least 3. About 15 s on one core.
    Source: "On the Limitation and Redundancy of Transformers: A Rank Perspective" states K* = Ω(log T).

    Args:
        mask: "full" or "causal".
        tolerance: of the gain.
        lengths: T.
        trials: at each length.
        seed: of the weights.
    """
    found, missing, half = [], [], []
    for tokens in lengths:
        setting = Setting(tokens, mask, seed=seed)
        count = max(3, min(10 * trials, trials * 1024 // tokens))
        curve = None
        for widest in (64, 128, 256):
            widths = tuple(range(1, widest + 1))
            drawn = np.concatenate([trial_ranks(setting, widths, trial) for trial in range(count)])
            curve = layer_curve(1, widths, drawn, tolerance, seed)
            if curve.saturated:
                break
        if curve is not None and curve.saturated:
            found.append((tokens, curve.head_dim, *curve.interval))
            means = [mean for _, mean, _ in curve.points]
            middle = rank_barrier(tokens, mask) / tokens / 2
            half.append(float(np.interp(middle, means, widths)) if means[-1] > middle else math.nan)
        else:
            missing.append(tokens)
    return _fitted(found, missing).model_copy(update={"half": half, "notes": falls(found)})


def falls(points: list[tuple[int, int, int, int]]) -> list[str]:
    """Say where K* falls from a length to the next, and what its intervals say of that fall.

    Args:
        points: (T, K*, lower and upper end of its interval), T ascending.

    Examples:
        >>> falls([(64, 8, 7, 9), (128, 9, 8, 10)])
        []
    """
    said = []
    for (short, before, low, high), (long, after, down, up) in pairwise(points):
        if after >= before:
            continue
        where = (
            f"K* is not monotone: {before} ({low} to {high}) at T = {short:,}, {after} ({down} to {up}) at "
            f"{long:,}. "
        )
        said.append(
            where
            + (
                "The 95 % bootstrap intervals overlap: the few trials do not show that K* itself falls."
                if up >= low
                else "The 95 % bootstrap intervals do not overlap: their spread does not explain the fall."
            )
        )
    return said


def _fitted(points: list[tuple[int, int, int, int]], missing: list[int]) -> LogLaw:
    if len(points) < 3:
        nan = math.nan
        return LogLaw(
            points=points, intercept=nan, slope=nan, residuals=[], explained=nan, unsaturated=missing
        )
    log, width = np.log([point[0] for point in points]), np.array([point[1] for point in points], float)
    slope, intercept = np.polyfit(log, width, 1)
    residuals = width - (intercept + slope * log)
    total = float(((width - width.mean()) ** 2).sum())
    explained = 1 - float((residuals**2).sum()) / total if total > 0 else math.nan
    return LogLaw(
        points=points,
        intercept=float(intercept),
        slope=float(slope),
        residuals=[float(residual) for residual in residuals],
        explained=explained,
        unsaturated=missing,
    )
