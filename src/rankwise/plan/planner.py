"""The head-width planner: where the rank of random heads saturates."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rankwise.errors import ShapeError
from rankwise.plan.checks import check_drawn, check_fit, check_names, check_numbers, check_sizes, given_states
from rankwise.plan.ranks import trial_ranks
from rankwise.plan.records import HeadDimPlan
from rankwise.plan.saturation import layer_curve
from rankwise.plan.states import Setting
from rankwise.theory import rank_barrier

EVERY = tuple(range(1, 257))
"""Widths tried where all cost what the widest does: layer 1 at temperature 0 without rotary positions."""
FEW = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Widths tried where each costs its own."""


def plan_head_dim(
    tokens: int | Float[Tensor, "*batch T D"],
    mask: str = "full",
    tolerance: float = 0.01,
    *,
    head_dims: tuple[int, ...] | list[int] | None = None,
    inputs: str | None = None,
    width: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    positions: str = "none",
    layers: int = 1,
    block: str | None = None,
    temperature: float = 0.0,
    delta: float = 1e-2,
    trials: int = 10,
    seed: int = 0,
    on_trial: Callable[[int], None] | None = None,
) -> HeadDimPlan:
    """Head width from which on a wider head at random weights has hardly more rank.

    Formula: K* = the least K such that (r(2K') − r(K'))/K' < tolerance for all K' ≥ K, where r(K) is the mean
    of rank(M)/T over draws of Wq and Wk with independent Gaussian entries: the rank/T that a unit of width
    adds, averaged from K' to 2K'. At temperature 0 rank is the number of different winners of hardmax, a
    count without decomposition; at others the singular values ≥ δ of softmax(QKᵀ/(temperature·√K)).
    It is a statement about random weights. Trained heads can use more or less: `trained_widths` measures.

    Range of ``head_dim``: the widths tried; ``saturated`` is False where the widest still gains.
    Cost: O(trials·T²·K_max) at temperature 0 in layer 1, about 0.5 s a trial at T = 2,048, K_max = 256 on one
    core. Rotary positions cost that for each width; temperatures above 0 an O(T³) factorisation for each
    width and trial; layers beyond the first the run of random blocks of all H heads.
    Source: "On the Limitation and Redundancy of Transformers: A Rank Perspective": "check the saturation
    situation of attention ranks before training". The paper gives a tolerance of about 0.01 and no step for
    the gain; the unit of width and the average over a doubling are this project's choice.

    Args:
        tokens: T, or token states of your own (T, D) or (B, T, D); trial i reads sequence i mod B.
        mask: "full" or "causal".
        tolerance: least rank/T that a unit of width must add to be worth it, in (0, 1).
        head_dims: widths K to try; 1 … 256, fewer of them where each costs its own.
        inputs: "orthonormal" (the paper's theorem) or "gaussian" where ``tokens`` is a number; by default
            orthonormal where D does not matter, else gaussian.
        width: D; for drawn states only needed with ``layers`` or learned positions.
        heads: H where D ≠ H·K; by default D // K, so that D = H·K. Only layers beyond the first know it.
        kv_heads: key heads shared by groups of the H heads.
        value_dim: width of values where it is not K.
        positions: "none", "rope" or "learned" (a Gaussian row for each place).
        layers: how many layers; those beyond the first read what random blocks made of the states.
        block: "pre", "post" or "attention" (no skip, norm or MLP; reads states as they are). By default
            "pre" for states of your own and for several layers, else "attention".
        temperature: of the ranked matrix in units of √K; 0 is hardmax. Blocks mix at 1.
        delta: singular values from here on count.
        trials: draws of the weights, at least 2.
        seed: of generators of its own.
        on_trial: called with the number of trials done, after each.

    Returns:
        The plan: ``head_dim``, ``interval``, ``curve``, ``barrier``, ``layers``. Interrupted by Ctrl-C after
        two trials or more it rests on those done, and ``complete`` is False.

    Raises:
        RankwiseError: if a number or name has no meaning.
        ShapeError: if states, widths and heads do not fit together.

    Examples:
        >>> plan = plan_head_dim(128, trials=4)
        >>> plan.head_dim < 16, plan.curve[-1][1] < plan.barrier / 128 + 0.05
        (True, True)
    """
    given = given_states(tokens)
    count = given.shape[1] if given is not None else tokens
    check_names(mask, inputs, positions, block)
    check_drawn(inputs, given)
    check_numbers(count, tolerance, temperature, delta, trials, seed)
    deep = layers is not None and layers != 1
    sized = {
        "width": width, "heads": heads, "kv_heads": kv_heads, "value_dim": value_dim, "layers": layers
    }  # fmt: skip
    check_sizes(sized)
    assert isinstance(count, int)
    drawn = inputs or ("gaussian" if deep or positions == "learned" else "orthonormal")
    setting = Setting(
        tokens=count,
        mask=mask,
        inputs="given" if given is not None else drawn,
        given=given,
        width=given.shape[-1] if given is not None else width,
        heads=heads,
        kv_heads=kv_heads,
        value_dim=value_dim,
        positions=positions,
        block=block or ("pre" if deep or given is not None else "attention"),
        layers=layers,
        temperature=float(temperature),
        delta=float(delta),
        seed=seed,
    )
    widths = _widths(head_dims, setting)
    check_fit(setting, widths, width)
    ranks, stopped = _drawn(setting, widths, trials, on_trial)
    return _plan(setting, widths, ranks, tolerance, stopped, trials)


def _drawn(
    setting: Setting, widths: tuple[int, ...], trials: int, on_trial: Callable[[int], None] | None
) -> tuple[Float[np.ndarray, "N L W"], bool]:
    found: list[np.ndarray] = []
    try:
        for trial in range(trials):
            found.append(trial_ranks(setting, widths, trial))
            if on_trial is not None:
                on_trial(len(found))
    except KeyboardInterrupt:
        if len(found) < 2:  # no spread, nothing to keep
            raise
        return np.stack(found), True
    return np.stack(found), False


def _plan(
    setting: Setting,
    widths: tuple[int, ...],
    ranks: Float[np.ndarray, "N L W"],
    tolerance: float,
    stopped: bool,
    trials: int,
) -> HeadDimPlan:
    curves = [
        layer_curve(at + 1, widths, ranks[:, at], tolerance, setting.seed) for at in range(setting.layers)
    ]
    notes = ["A statement about random weights, not about a trained model."]
    if stopped:
        notes.append(f"Stopped after {len(ranks)} of {trials} trials.")
    for curve in curves:
        if not curve.saturated:
            notes.append(
                f"Layer {curve.layer} still gains {tolerance:g} or more at {widths[-1]}, the widest tried: "
                "K* lies above it."
            )
        if curve.fall is not None:
            a, b, lost = curve.fall
            notes.append(
                f"Layer {curve.layer} is not monotone: rank/T falls by {lost:.3f} from K = {a} to {b}. "
                "K* is where it rises for the last time."
            )
    if setting.temperature > 0 and setting.mask == "causal":
        notes.append("A causal softmax matrix is triangular: its rank means the δ it was counted at.")
    return HeadDimPlan(
        complete=not stopped,
        tokens=setting.tokens,
        mask=setting.mask,
        tolerance=tolerance,
        barrier=rank_barrier(setting.tokens, setting.mask),
        inputs=setting.inputs,
        width=setting.width,
        heads=setting.heads,
        kv_heads=setting.kv_heads,
        value_dim=setting.value_dim,
        positions=setting.positions,
        block=setting.block,
        temperature=setting.temperature,
        delta=setting.delta,
        trials=len(ranks),
        seed=setting.seed,
        layers=curves,
        notes=notes,
    )


def _widths(head_dims: tuple[int, ...] | list[int] | None, setting: Setting) -> tuple[int, ...]:
    rope = setting.positions == "rope"
    if head_dims is None:
        cheap = setting.layers == 1 and setting.temperature == 0 and not rope
        most = setting.dim if setting.layers > 1 and setting.heads is None else max(EVERY)
        return tuple(k for k in (EVERY if cheap else FEW) if k <= most and not (rope and k % 2))
    widths = tuple(sorted(set(head_dims)))
    whole = all(isinstance(k, int) and not isinstance(k, bool) and k >= 1 for k in widths)
    if len(widths) < 2 or not whole or (rope and any(k % 2 for k in widths)):
        raise ShapeError(
            "`head_dims`",
            expected="two widths or more, whole numbers from 1"
            + (", even for rotary positions" if rope else ""),
            got=str(list(head_dims)),
            fix="Leave it out, or give for example [4, 8, 16, 32, 64].",
        )
    if 2 * widths[0] > widths[-1]:
        raise ShapeError(
            "`head_dims`",
            expected="widths that double at least once: the gain is from K to 2K",
            got=str(list(head_dims)),
            fix=f"Add {2 * widths[0]} or more.",
        )
    return widths


def embedded(ids: Tensor, width: int, seed: int = 0) -> Float[Tensor, "*batch T D"]:
    """Token states of ids through a random embedding: independent N(0, 1) rows, one for each id.

    Examples:
        >>> embedded(torch.tensor([[3, 5, 3]]), 4).shape
        torch.Size([1, 3, 4])
    """
    known, places = ids.unique(return_inverse=True)
    return torch.randn(len(known), width, generator=torch.Generator().manual_seed(seed))[places]
