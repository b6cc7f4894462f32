"""What a λ-skip is sure to keep, whatever its mixer gives: bounds proved in docs/proofs/skip-bound.md."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from rankwise._internals.linalg import mean_distance, norm
from rankwise.errors import ShapeError
from rankwise.theory.paper_skip import check_share

Rows = Float[Tensor, "*batch T D"]
"""Token states or what a mixer gave, one row a token."""
DOUBLINGS, HALVINGS = 30, 40
"""Of a search for the least |λ|: up to 1e9 times its first guess, to 1e-12 of it."""


def distance_from_mean(rows: Rows, mask: Bool[Tensor, "*batch T"] | None = None) -> Float64[Tensor, "*batch"]:
    """Distance of rows from their mean: μ, of which every bound here speaks.

    Formula: ‖Y − 1ȳᵀ‖_F over the rows of the mask. Range: [0, ‖Y‖_F]; 0 = all rows the same. NaN with NaN or
    infinity in a row that counts. Cost: O(T D).
    `rankwise.measures.token_spread` with ``normalized=False`` is the same number.

    Args:
        rows: the rows.
        mask: which count; all, by default.

    Raises:
        ShapeError: if the rows are no floating-point (…, T, D), or the mask is not Bool (…, T).

    Examples:
        >>> import torch
        >>> distance_from_mean(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])).item() ** 2
        2.0000000000000004
    """
    return mean_distance(*_counted(rows, mask))


def sum_bound(
    residual: Rows, branch: Rows, scale: float | Tensor, mask: Bool[Tensor, "*batch T"] | None = None
) -> Float64[Tensor, "*batch"]:
    r"""Lower bound of μ after the sum λ·Y + B, whatever way the branch B points.

    Formula: μ(λY + B) ≥ |λ|·μ(Y) − μ(B), or 0: μ is a seminorm.
    Range: [0, |λ|μ(Y)]; attained for B = −c·Y. It speaks of the sum itself, so of the state of a pre-norm
    block. Cost: O(T D).
    Source: own; proof in docs/proofs/skip-bound.md.

    Args:
        residual: Y.
        branch: B, what the mixer gave (M V and its output projection).
        scale: λ.
        mask: which tokens are real.

    Examples:
        >>> import torch
        >>> y = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> round(sum_bound(y, -y, 3.0).item() / distance_from_mean(y).item(), 9)
        2.0
    """
    size = torch.as_tensor(scale, dtype=torch.float64).abs()
    return (size * distance_from_mean(residual, mask) - distance_from_mean(branch, mask)).clamp(min=0)


def sum_scale(
    residual: Rows,
    branch: Rows,
    a: float,
    mask: Bool[Tensor, "*batch T"] | None = None,
    relative: bool = False,
) -> Float64[Tensor, "*batch"]:
    r"""The least |λ| for which μ² after the sum λ·Y + B is at least a·μ(Y)², whatever way B points.

    Formula: √a + μ(B)/μ(Y). With ``relative``, for the share μ/‖·‖_F in place of μ, which a large λ does
    not raise by growing the states: (μ(B)/μ(Y) + √a·‖B‖_F/‖Y‖_F)/(1 − √a).
    Range: [√a, ∞], infinite for μ(Y) = 0 < μ(B) and √a for both 0; for ``relative`` from 0. It holds for
    every larger |λ| too, for the same Y and B. Cost: O(T D).
    Source: own; proof in docs/proofs/skip-bound.md.

    Args:
        residual: Y.
        branch: B.
        a: the part of μ² that is to be kept.
        mask: which tokens are real.
        relative: whether to keep the share of the norm.

    Raises:
        RankwiseError: if a is not in (0, 1).

    Examples:
        >>> import torch
        >>> y = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> round(sum_scale(y, 0.5 * y, a=0.25).item(), 9)
        1.0
    """
    check_share(a)
    ratio = _over(distance_from_mean(branch, mask), distance_from_mean(residual, mask))
    if not relative:
        return math.sqrt(a) + ratio
    sizes = _over(_size(branch, mask), _size(residual, mask))
    return (ratio + math.sqrt(a) * sizes) / (1 - math.sqrt(a))


def norm_bound(
    residual: Rows,
    branch: Rows,
    scale: float | Tensor,
    mask: Bool[Tensor, "*batch T"] | None = None,
    centre: bool = True,
    eps: float = 0.0,
) -> Float64[Tensor, "*batch"]:
    r"""Lower bound of μ after LayerNorm or RMSNorm of λ·Y + B, before its gain and bias.

    Formula: the larger of two, with P the centring of each row (LayerNorm) or nothing (RMSNorm), y_i and m_i
    the rows of YP and BP, u_i = y_i/‖y_i‖, ū their mean, and φ_i = arcsin(‖m_i‖/(|λ|‖y_i‖)), or π where that
    is not below 1:

        μ(N(λY + B)) ≥ √D·μ(U) − ‖(e_i)_i‖₂,             e_i = min(2√D sin(φ_i/2) + √D − r_i, 2√D),
        μ(N(λY + B))² ≥ Σ_i r_i² − T·(√D‖ū‖ + ē)²,       ē the mean of the e_i,

    or 0; r_i = √D·s_i/√(s_i² + Dε), s_i = |λ|‖y_i‖ − ‖m_i‖, or 0: the least length that N gives row i, √D for
    ε = 0. Where y_i = 0, u_i = r_i = 0 and e_i = √D, or 0 if m_i = 0 too. The first bound adds up what each
    row can lose; the second, what the mean row can gain, which is less where rows are turned by much.
    Where Y lies on the sphere of N, √D·μ(U) is μ(Y). A gain γ multiplies the bound by min|γ|; a bias leaves
    it as it is.
    Range: [0, √D·μ(U)]. It grows with |λ|. Cost: O(T D).
    Source: own; proof in docs/proofs/skip-bound.md.

    Args:
        residual: Y.
        branch: B, what the mixer gave.
        scale: λ.
        mask: which tokens are real.
        centre: whether N centres each row, as LayerNorm does.
        eps: ε of N.

    Examples:
        >>> import torch
        >>> y = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> before = norm_bound(y, 0 * y, 1.0, centre=False)
        >>> after = norm_bound(y, 0.5 * y, 1.0, centre=False)
        >>> before.item() > after.item() > 0
        True
    """
    polar = _polar(residual, branch, mask, centre)
    return _kept(polar, torch.as_tensor(scale, dtype=torch.float64), eps)


def norm_scale(
    residual: Rows,
    branch: Rows,
    a: float,
    mask: Bool[Tensor, "*batch T"] | None = None,
    centre: bool = True,
    eps: float = 0.0,
) -> Float64[Tensor, "*batch"]:
    r"""The least |λ| for which `norm_bound` promises √a of the μ of the directions of Y.

    Formula: by bisection, for the bound grows with |λ|; from above. What is kept is
    √D·μ(U), which is μ(Y) where Y lies on the sphere of the norm.
    Range: (0, ∞], infinite where the directions of Y do not differ, or where B moves rows of zeros too far.
    Cost: O(T D), and O(T) some 70 times.
    Source: own; proof in docs/proofs/skip-bound.md.

    Args:
        residual: Y.
        branch: B.
        a: the part of μ² that is to be kept.
        mask: which tokens are real.
        centre: whether the norm centres each row.
        eps: ε of the norm.

    Raises:
        RankwiseError: if a is not in (0, 1).

    Examples:
        >>> import torch
        >>> y = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> least = norm_scale(y, 0.5 * y, a=0.25, centre=False)
        >>> after, before = (norm_bound(y, b, least, centre=False) for b in (0.5 * y, 0 * y))
        >>> (after / before).item() >= 0.5
        True
    """
    check_share(a)
    polar = _polar(residual, branch, mask, centre)
    wanted = math.sqrt(a) * polar.radius * polar.collapse
    low = torch.zeros_like(wanted)
    high = 1 + _over(polar.moves, polar.lengths, 0.0).amax(-1)
    for _ in range(DOUBLINGS):
        high = torch.where(_kept(polar, high, eps) >= wanted, high, 2 * high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        good = _kept(polar, middle, eps) >= wanted
        low, high = torch.where(good, low, middle), torch.where(good, middle, high)
    return torch.where((_kept(polar, high, eps) >= wanted) & (wanted > 0), high, math.inf)


class _Polar(NamedTuple):
    """Rows in units of √D, the radius of the sphere of the norm."""

    lengths: Tensor
    """‖y_i‖ of each row."""
    moves: Tensor
    """‖m_i‖."""
    real: Tensor
    collapse: Tensor
    """μ(U), U the directions of the rows."""
    mean: Tensor
    """‖ū‖."""
    radius: float
    """√D."""


def _kept(polar: _Polar, scale: Tensor, eps: float) -> Tensor:
    """The bound."""
    size = scale.abs()[..., None] * polar.lengths
    ratio = _over(polar.moves, size)
    chords = torch.where(ratio < 1, 2 * torch.sin(torch.asin(ratio.clamp(max=1)) / 2), 2.0)
    least = (size - polar.moves).clamp(min=0)
    length = _over(least, torch.hypot(least, torch.full_like(least, math.sqrt(eps))))
    exists = polar.lengths > 0
    lost = torch.where(exists, (chords + 1 - length).clamp(max=2), (polar.moves > 0).double())
    by_rows = polar.collapse - torch.linalg.vector_norm(lost, dim=-1)
    # Σ r_i² − T(‖ū‖ + ē)², with μ(U)² = Σ‖u_i‖² − T‖ū‖² taken out: where tokens are alike, the difference of
    # the two sums would be rounding.
    shorter = torch.where(exists, 1 - length.square(), 0.0).sum(-1)
    number = polar.real.sum(-1).clamp(min=1)
    moved = lost.sum(-1) / number
    square = polar.collapse.square() - shorter - number * moved * (2 * polar.mean + moved)
    return polar.radius * torch.maximum(by_rows, square.clamp(min=0).sqrt())


def _polar(residual: Rows, branch: Rows, mask: Tensor | None, centre: bool) -> _Polar:
    """Directions and lengths of the rows of Y, and how far B moves each of them."""
    y, real = _counted(residual, mask)
    m, _ = _counted(branch, mask)
    unclear = torch.zeros_like(real)
    if centre:
        unclear = _lost_in_rounding(y)
        y, m = _centred(y).masked_fill(unclear[..., None], 0), _centred(m)
    radius = math.sqrt(residual.shape[-1])
    lengths, moves = (norm(rows, (-1,)) / radius for rows in (y, m))
    moves = moves.masked_fill(unclear, math.inf)  # its direction is not known: it may lie anywhere
    directions = _over(y, radius * lengths[..., None], 0.0)
    mean = directions.sum(-2) / real.sum(-1).clamp(min=1)[..., None]
    size = torch.linalg.vector_norm(mean, dim=-1)
    return _Polar(lengths, moves, real, distance_from_mean(directions, mask), size, radius)


def _counted(rows: Rows, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if not isinstance(rows, Tensor) or rows.dim() < 2 or not rows.is_floating_point():
        got = f"{tuple(rows.shape)}, {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
        fix = "Give token states, one row a token; integers become some with .float()."
        raise ShapeError("rows", expected="floating-point numbers of shape (…, T, D)", got=got, fix=fix)
    if mask is not None and (mask.dtype != torch.bool or mask.shape != rows.shape[:-1]):
        raise ShapeError(
            "mask of rows",
            expected=f"torch.bool of shape {tuple(rows.shape[:-1])}, True where a row counts",
            got=f"{mask.dtype} of shape {tuple(mask.shape)}",
            fix="A tokenizer's attention_mask becomes one with .bool().",
        )
    rows = rows.detach().double()
    real = rows.new_ones(rows.shape[:-1], dtype=torch.bool) if mask is None else mask
    return rows.masked_fill(~real[..., None], 0), real


def _centred(rows: Tensor) -> Tensor:
    """Each row without its mean: exactly 0 for a row of equal numbers, where a difference is rounding."""
    return (rows - rows.mean(-1, keepdim=True)).masked_fill(_constant(rows)[..., None], 0)


def _constant(rows: Tensor) -> Tensor:
    return rows.amax(-1) == rows.amin(-1)


def _lost_in_rounding(rows: Tensor) -> Tensor:
    """Rows of numbers that differ by no more than what the rounding of their mean may be."""
    rounding = rows.shape[-1] * torch.finfo(rows.dtype).eps
    largest = (rows - rows.mean(-1, keepdim=True)).abs().amax(-1)
    return (largest <= rounding * rows.abs().amax(-1)) & ~_constant(rows)


def _size(rows: Rows, mask: Tensor | None) -> Tensor:
    return torch.linalg.vector_norm(_counted(rows, mask)[0], dim=(-2, -1))


def _over(part: Tensor, whole: Tensor, of_zero: float = math.inf) -> Tensor:
    """Divide; 0/0 = 0, and anything else by 0 what is said."""
    filled = torch.where(part > 0, of_zero, 0.0).to(part)
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1.0), filled)
