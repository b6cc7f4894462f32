"""Proved bounds for a λ-skip, λx + f(x): a skip connection x with weight λ around a mixer f."""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from rankwise._internals.linalg import as_float64, mean_distance
from rankwise._internals.linalg import norm as vector_norm
from rankwise.errors import InputError, ShapeError, in_range, one_of

Rows = Float[Tensor, "*batch T D"]
"""Token states or outputs of a mixer, one row per token."""
Norm = Literal["none", "layer", "rms"]
DOUBLINGS, HALVINGS = 30, 40
"""Steps of the search for the smallest |λ|: doublings reach 2^30 ≈ 1e9 times the first guess, and halvings
then locate |λ| to 2^−40 ≈ 1e-12 of that range."""


def skip_bound(
    x: Rows,
    branch: Rows,
    lam: float | Tensor,
    mask: Bool[Tensor, "*batch T"] | None = None,
    norm: Norm = "none",
    eps: float = 0.0,
) -> Float64[Tensor, "*batch"]:
    r"""Return a proved lower bound of the absolute token spread μ(λx + f(x)), or of μ after a norm.

    μ(Y) = ‖Y − 1ȳᵀ‖_F is the distance of tokens (rows) from their mean ȳ (`rankwise.measures.spread`).

    - "none": max(|λ|·μ(x) − μ(f(x)), 0), because μ is a seminorm. The bound is attained for f(x) = −c·x.
    - "layer" and "rms": the larger of the two bounds below, or 0 if both are negative. They hold before gain
      and bias of the norm. y_i and m_i are the rows of x and f(x), centered for LayerNorm. The directions
      u_i = y_i/‖y_i‖ are the rows of U, with mean ū. f(x) turns row i by at most
      φ_i = arcsin(‖m_i‖/(|λ|‖y_i‖)), or by π if ‖m_i‖ ≥ |λ|‖y_i‖:

        μ ≥ √D·μ(U) − ‖(e_i)_i‖₂,             e_i = min(2√D sin(φ_i/2) + √D − r_i, 2√D),
        μ² ≥ Σ_i r_i² − T·(√D‖ū‖ + ē)²,       ē the mean of the e_i.

      After the norm, row i differs from √D·u_i by at most e_i, and its length is at least r_i =
      √D·s_i/√(s_i² + Dε), where s_i = max(|λ|‖y_i‖ − ‖m_i‖, 0). If y_i = 0, then u_i = r_i = 0. In this
      case, e_i = √D if m_i ≠ 0, and e_i = 0 if m_i = 0. The first bound subtracts the differences of all
      rows. The second bound uses a bound of the mean row and is better if rows turn far.

    Range: [0, |λ|μ(x)] without a norm; [0, √D·μ(U)] with a norm, which is [0, μ(x)] if the rows y_i have norm
    √D. The bound grows with |λ|. A gain γ after the norm multiplies the bound by min|γ|, and a bias does not
    change the bound. Without a norm, the bound depends on μ(f(x)). With a norm, it depends only on the
    lengths of the (centered) rows of f(x), not on their directions. Cost: O(T D) time.
    Source: this project; proof in docs/explanation/skip-bound.md.

    Args:
        x: states x that the skip connection carries.
        branch: f(x), output of the mixer including its output projection.
        lam: λ, the weight of the skip connection.
        mask: True for real tokens, False for padding; by default all tokens are real.
        norm: norm applied to the sum.
        eps: ε of the norm.

    Raises:
        ShapeError: if the rows are not floating-point (…, T, D), or the mask is not Bool (…, T).
        InputError: if the name of the norm is unknown.

    Examples:
        >>> import torch
        >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> round(skip_bound(x, -x, 3.0).item() / skip_bound(x, 0 * x, 1.0).item(), 9)
        2.0
        >>> bounds = [skip_bound(x, share * x, 1.0, norm="rms").item() for share in (0, 0.5)]
        >>> bounds[0] > bounds[1] > 0
        True
    """
    scale = torch.as_tensor(lam, dtype=torch.float64)
    if one_of("`norm`", norm, ("none", "layer", "rms")) == "none":
        carried, lost = (mean_distance(*_real_rows(rows, mask)) for rows in (x, branch))
        return (scale.abs() * carried - lost).clamp(min=0)
    return bound_at(_directions(x, branch, mask, norm), scale, eps)


def min_lambda_for_spread(
    x: Rows,
    branch: Rows,
    keep_spread: float,
    mask: Bool[Tensor, "*batch T"] | None = None,
    norm: Norm = "none",
    eps: float = 0.0,
    relative: bool = False,
) -> Float64[Tensor, "*batch"]:
    r"""Return the smallest |λ| from which `skip_bound` is always at least a given share of μ(x).

    Formula without a norm: r + μ(f(x))/μ(x), where r = ``keep_spread``. If ``relative``, μ is replaced by
    μ/‖·‖_F, which does not grow with the length of the states: (μ(f(x))/μ(x) + r·‖f(x)‖_F/‖x‖_F)/(1 − r).
    With a norm, |λ| is found by bisection, and √D·μ(U) replaces μ(x), with the directions U of `skip_bound`.
    Both are equal if the rows of x have norm √D.
    Range without a norm: [r, ∞]; infinite if μ(x) = 0 < μ(f(x)), and r if both are 0. Range if ``relative``:
    [0, ∞]. Range with a norm: (0, ∞]; infinite if all rows of x have the same direction, or if f(x) moves
    rows of zeros too far.
    Cost: O(T D) time; with a norm, the search adds about 70 evaluations of the bound in O(T) time each.
    Source: this project; proof in docs/explanation/skip-bound.md.

    Args:
        x: states x that the skip connection carries.
        branch: f(x), output of the mixer including its output projection.
        keep_spread: share of μ that the layer must keep, in (0, 1).
        mask: True for real tokens, False for padding; by default all tokens are real.
        norm: norm applied to the sum.
        eps: ε of the norm.
        relative: True to bound μ divided by the norm of the states; not allowed with a norm.

    Raises:
        ShapeError: if the rows are not floating-point (…, T, D), or the mask is not Bool (…, T).
        InputError: if ``keep_spread`` is not in (0, 1), the norm is unknown, or ``relative`` is combined with
            a norm.

    Examples:
        >>> import torch
        >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> round(min_lambda_for_spread(x, 0.5 * x, keep_spread=0.5).item(), 9)
        1.0
        >>> least = min_lambda_for_spread(x, 0.5 * x, keep_spread=0.5, norm="rms")
        >>> after, before = (skip_bound(x, b, least, norm="rms") for b in (0.5 * x, 0 * x))
        >>> (after / before).item() >= 0.5
        True
    """
    check_keep_spread(keep_spread)
    if one_of("`norm`", norm, ("none", "layer", "rms")) == "none":
        y, b = (_real_rows(rows, mask) for rows in (x, branch))
        ratio = safe_divide(mean_distance(*b), mean_distance(*y))
        if not relative:
            return keep_spread + ratio
        sizes = safe_divide(*(torch.linalg.vector_norm(rows, dim=(-2, -1)) for rows, _ in (b, y)))
        return (ratio + keep_spread * sizes) / (1 - keep_spread)
    if relative:
        raise InputError(
            "`relative`", expected="no norm after the sum", got=repr(norm), fix="A norm fixes the lengths."
        )
    directions = _directions(x, branch, mask, norm)
    wanted = keep_spread * directions.radius * directions.spread
    low = torch.zeros_like(wanted)
    high = 1 + safe_divide(directions.moves, directions.lengths, 0.0).amax(-1)
    for _ in range(DOUBLINGS):
        high = torch.where(bound_at(directions, high, eps) >= wanted, high, 2 * high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        good = bound_at(directions, middle, eps) >= wanted
        low, high = torch.where(good, low, middle), torch.where(good, middle, high)
    return torch.where((bound_at(directions, high, eps) >= wanted) & (wanted > 0), high, math.inf)


def check_keep_spread(keep_spread: float) -> float:
    """Return the share of μ that a layer must keep; raise if it is not in (0, 1)."""
    return in_range("`keep_spread`", keep_spread, "(0, 1)", fix="0.5 keeps half of μ in each layer.")


class Directions(NamedTuple):
    """Lengths and directions of the rows y_i of x and m_i of f(x); lengths are divided by √D."""

    lengths: Tensor
    """‖y_i‖/√D, the length of each row of x."""
    moves: Tensor
    """‖m_i‖/√D, the length of each row of f(x)."""
    real: Tensor
    spread: Tensor
    """μ(U), the spread of the directions y_i/‖y_i‖, which are the rows of U."""
    mean: Tensor
    """‖ū‖, the norm of the mean ū of the directions."""
    radius: float
    """√D, the norm of each row after LayerNorm or RMSNorm with ε = 0."""


def bound_at(directions: Directions, scale: Tensor, eps: float) -> Tensor:
    """Return the lower bound of the spread μ after a norm, as in `skip_bound`, for λ = ``scale``."""
    size = scale.abs()[..., None] * directions.lengths
    ratio = safe_divide(directions.moves, size)
    chords = torch.where(ratio < 1, 2 * torch.sin(torch.asin(ratio.clamp(max=1)) / 2), 2.0)
    least = (size - directions.moves).clamp(min=0)
    length = safe_divide(least, torch.hypot(least, torch.full_like(least, math.sqrt(eps))))
    exists = directions.lengths > 0
    lost = torch.where(exists, (chords + 1 - length).clamp(max=2), (directions.moves > 0).double())
    by_rows = directions.spread - torch.linalg.vector_norm(lost, dim=-1)
    # Σ r_i² − T(‖ū‖ + ē)², rewritten with μ(U)² = Σ‖u_i‖² − T‖ū‖²: for nearly equal tokens, the difference of
    # the two large terms would be only rounding errors.
    shorter = torch.where(exists, 1 - length.square(), 0.0).sum(-1)
    number = directions.real.sum(-1).clamp(min=1)
    moved = lost.sum(-1) / number
    square = directions.spread.square() - shorter - number * moved * (2 * directions.mean + moved)
    return directions.radius * torch.maximum(by_rows, square.clamp(min=0).sqrt())


def _directions(x: Rows, branch: Rows, mask: Tensor | None, kind: Norm) -> Directions:
    """Return lengths and directions of rows of x, and lengths of rows of f(x), all centered for LayerNorm."""
    y, real = _real_rows(x, mask)
    m, _ = _real_rows(branch, mask)
    unknown = torch.zeros_like(real)
    if kind == "layer":
        unknown = direction_unknown(y)
        y, m = _centered(y).masked_fill(unknown[..., None], 0), _centered(m)
    radius = math.sqrt(x.shape[-1])
    lengths, moves = (vector_norm(rows, (-1,)) / radius for rows in (y, m))
    moves = moves.masked_fill(unknown, math.inf)  # rounding hides these directions: any turn is possible
    units = safe_divide(y, radius * lengths[..., None], 0.0)
    mean = units.sum(-2) / real.sum(-1).clamp(min=1)[..., None]
    size = torch.linalg.vector_norm(mean, dim=-1)
    return Directions(lengths, moves, real, mean_distance(*_real_rows(units, mask)), size, radius)


def _real_rows(rows: Rows, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return rows in float64 with padding set to 0, and a mask of real rows; raise if shapes do not match."""
    if not (isinstance(rows, Tensor) and rows.is_floating_point() and rows.ndim >= 2):
        got = f"{tuple(rows.shape)}, {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
        fix = "Pass token states, one row per token; cast integers with .float()."
        raise ShapeError("rows", expected="floating-point numbers of shape (…, T, D)", got=got, fix=fix)
    if mask is not None and (mask.dtype != torch.bool or mask.shape != rows.shape[:-1]):
        raise ShapeError(
            "mask of rows",
            expected=f"torch.bool of shape {tuple(rows.shape[:-1])}, True for real tokens",
            got=f"{mask.dtype} of shape {tuple(mask.shape)}",
            fix="Cast the attention_mask of a tokenizer with .bool().",
        )
    rows = as_float64(rows.detach())
    real = rows.new_ones(rows.shape[:-1], dtype=torch.bool) if mask is None else mask.to(rows.device)
    return rows.masked_fill(~real[..., None], 0), real


def _centered(rows: Tensor) -> Tensor:
    """Return each row minus the mean of its entries; exactly 0 if all entries of the row are equal."""
    return (rows - rows.mean(-1, keepdim=True)).masked_fill(_constant(rows)[..., None], 0)


def _constant(rows: Tensor) -> Tensor:
    return rows.amax(-1) == rows.amin(-1)


def direction_unknown(rows: Tensor) -> Tensor:
    """Return True for rows whose centered direction is unknown, because entries differ only by rounding."""
    rounding = rows.shape[-1] * torch.finfo(rows.dtype).eps
    largest = (rows - rows.mean(-1, keepdim=True)).abs().amax(-1)
    return (largest <= rounding * rows.abs().amax(-1)) & ~_constant(rows)


def safe_divide(dividend: Tensor, divisor: Tensor, of_zero: float = math.inf) -> Tensor:
    """Return dividend/divisor, where 0/0 = 0, and a positive dividend divided by 0 is ``of_zero``."""
    filled = torch.where(dividend > 0, of_zero, 0.0).to(dividend)
    return torch.where(divisor > 0, dividend / torch.where(divisor > 0, divisor, 1.0), filled)
