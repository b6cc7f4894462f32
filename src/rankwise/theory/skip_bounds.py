"""What a λ-skip guarantees: the paper's condition, and bounds that follow from the triangle inequality."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from rankwise.errors import RankwiseError

Rows = Float[Tensor, "*batch T D"]
"""Token states or what a mixer gave, one row a token."""
DOUBLINGS, HALVINGS = 30, 40
"""Of a search for the least |λ|: up to 1e9 times its first guess, to 1e-12 of it."""


def paper_condition(scale: float, strength: float, a: float) -> float:
    r"""Left side of the paper's condition on λ; it holds where this is positive.

    Formula: λ² − a(S·C_M + |λ|)² (Eq. 7); for 0 < a < 1 positive just if |λ|(1 − √a) > √a·S·C_M.
    Range: (−∞, λ²). Cost: O(1).
    Source: "Lambda-Skip Connections: the architectural component that prevents Rank Collapse", Eq. 7, as
    corrected by its authors.

    It is half of a hypothesis: alone it guarantees nothing, see `paper_floor`.

    Args:
        scale: λ.
        strength: S·C_M, where ‖C‖_F ≤ S for the value weights and ‖M‖_F ≤ C_M for the mixing matrix.
        a: the part of μ² that is to be kept.

    Raises:
        RankwiseError: if a is not in (0, 1).

    Examples:
        >>> paper_condition(2.0, strength=1.0, a=0.25) > 0
        True
    """
    _check_share(a)
    return scale**2 - a * (strength + abs(scale)) ** 2


def paper_scale(strength: float, a: float) -> float:
    r"""The least |λ| for the paper's condition on λ; it holds above it.

    Formula: √a·S·C_M/(1 − √a). Range: [0, ∞). Cost: O(1).
    Source: as `paper_condition`.

    Args:
        strength: S·C_M.
        a: the part of μ² that is to be kept.

    Raises:
        RankwiseError: if a is not in (0, 1).

    Examples:
        >>> paper_scale(strength=3.0, a=0.25)
        3.0
    """
    _check_share(a)
    return math.sqrt(a) * strength / (1 - math.sqrt(a))


def paper_floor(scale: float, strength: float, a: float, tokens: int, width: int) -> float:
    r"""The b of the paper's theorem: it speaks of states with μ² ≥ b.

    Formula: b = 2|λ| T D S C_M/(λ² − a(S C_M + |λ|)²), infinite where Eq. 7 does not hold.
    Range: [0, ∞]. On the sphere of LayerNorm μ² ≤ T·D, so where b > T·D no state is spoken of: that is so
    unless λ² − a(S C_M + |λ|)² ≥ 2|λ|S C_M, which needs |λ| > 2 S C_M whatever a is. Cost: O(1).
    Source: as `paper_condition`, Theorem 4.1.

    Args:
        scale: λ.
        strength: S·C_M.
        a: the part of μ² that is to be kept.
        tokens: T.
        width: D.

    Raises:
        RankwiseError: if a is not in (0, 1).

    Examples:
        >>> paper_floor(8.0, strength=1.0, a=0.5, tokens=2, width=4)
        5.446808510638298
    """
    room = paper_condition(scale, strength, a)
    return 2 * abs(scale) * tokens * width * strength / room if room > 0 else math.inf


def paper_scale_with_floor(strength: float, a: float, tokens: int, width: int, collapse: float) -> float:
    r"""The least |λ| for which the paper's theorem speaks of states with this μ: Eq. 7 and μ² ≥ b.

    Formula: the larger root of (1 − a)μ²·λ² − 2S C_M(a μ² + T D)·λ − a(S C_M)²μ² = 0.
    Range: [0, ∞], infinite for μ = 0. Cost: O(1).
    Source: as `paper_condition`, Theorem 4.1 solved for λ.

    Args:
        strength: S·C_M.
        a: the part of μ² that is to be kept.
        tokens: T.
        width: D.
        collapse: μ of the states.

    Raises:
        RankwiseError: if a is not in (0, 1).

    Examples:
        >>> least = paper_scale_with_floor(1.0, a=0.5, tokens=2, width=4, collapse=2.0)
        >>> round(paper_floor(least, 1.0, 0.5, 2, 4), 9)
        4.0
    """
    _check_share(a)
    energy = collapse**2
    if energy == 0:
        return math.inf if strength > 0 else 0.0
    half = strength * (a * energy + tokens * width)
    root = math.sqrt(half**2 + (1 - a) * a * (strength * energy) ** 2)
    return (half + root) / ((1 - a) * energy)


def spread(rows: Rows, mask: Bool[Tensor, "*batch T"] | None = None) -> Float64[Tensor, "*batch"]:
    """μ of rows: the norm of what tells them from their mean.

    Formula: ‖Y − 1ȳᵀ‖_F over the rows of the mask. Range: [0, ‖Y‖_F]. Cost: O(T D).

    Args:
        rows: the rows.
        mask: which count; all, by default.

    Examples:
        >>> import torch
        >>> spread(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])).item() ** 2
        2.0000000000000004
    """
    rows, real = _counted(rows, mask)
    mean = rows.sum(-2, keepdim=True) / real.sum(-1).clamp(min=1)[..., None, None]
    return torch.linalg.vector_norm((rows - mean) * real[..., None], dim=(-2, -1))


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
        >>> round(sum_bound(y, -y, 3.0).item() / spread(y).item(), 9)
        2.0
    """
    size = torch.as_tensor(scale, dtype=torch.float64).abs()
    return (size * spread(residual, mask) - spread(branch, mask)).clamp(min=0)


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
    Range: [√a, ∞], infinite for μ(Y) = 0; for ``relative`` from 0. It holds for every larger |λ| too, for
    the same Y and B. Cost: O(T D).
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
    _check_share(a)
    ratio = _over(spread(branch, mask), spread(residual, mask))
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

    Formula: with P the centring of each row (LayerNorm) or nothing (RMSNorm), y_i and m_i the rows of YP and
    BP, u_i = y_i/‖y_i‖, φ_i = arcsin(‖m_i‖/(|λ|‖y_i‖)), or π where that is not below 1:

        μ(N(λY + B)) ≥ √D·μ(U) − ‖(e_i)_i‖₂, or 0,   e_i = min(2√D sin(φ_i/2) + √D − r_i, 2√D),

    r_i = √D·s_i/√(s_i² + Dε), s_i = |λ|‖y_i‖ − ‖m_i‖: the least length that N gives row i, √D for ε = 0.
    Where Y lies on the sphere of N, √D·μ(U) is μ(Y). A gain γ multiplies the bound by min|γ|; a bias leaves
    it as it is.
    Range: [0, √(T·D)]. It grows with |λ|. Cost: O(T D).
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
    return _kept(polar, torch.as_tensor(scale, dtype=torch.float64), eps).clamp(min=0)


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
    Range: (0, ∞], infinite where the directions of Y do not differ. Cost: O(T D), and O(T) some 70 times.
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
    _check_share(a)
    polar = _polar(residual, branch, mask, centre)
    wanted = math.sqrt(a) * polar.spread
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
    lengths: Tensor
    """‖y_i‖ of each row."""
    moves: Tensor
    """‖m_i‖."""
    real: Tensor
    spread: Tensor
    """√D·μ(U), U the directions of the rows."""
    radius: float
    """√D."""


def _kept(polar: _Polar, scale: Tensor, eps: float) -> Tensor:
    """The bound before it is cut off at 0."""
    size = scale.abs()[..., None] * polar.lengths
    ratio = _over(polar.moves, size)
    chords = torch.where(ratio < 1, 2 * torch.sin(torch.asin(ratio.clamp(max=1)) / 2), 2.0)
    least = (size - polar.moves).clamp(min=0)
    short = 1 - _over(least, (least.square() + polar.radius**2 * eps).sqrt())
    lost = polar.radius * (chords + short).clamp(max=2) * polar.real
    return polar.spread - torch.linalg.vector_norm(lost, dim=-1)


def _polar(residual: Rows, branch: Rows, mask: Tensor | None, centre: bool) -> _Polar:
    """Directions and lengths of the rows of Y, and how far B moves each of them."""
    y, real = _counted(residual, mask)
    m, _ = _counted(branch, mask)
    if centre:
        y, m = y - y.mean(-1, keepdim=True), m - m.mean(-1, keepdim=True)
    lengths, moves = torch.linalg.vector_norm(y, dim=-1), torch.linalg.vector_norm(m, dim=-1)
    radius = math.sqrt(residual.shape[-1])
    return _Polar(lengths, moves, real, radius * spread(_over(y, lengths[..., None], 0.0), mask), radius)


def _counted(rows: Rows, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = rows.detach().double()
    real = rows.new_ones(rows.shape[:-1], dtype=torch.bool) if mask is None else mask
    return rows.masked_fill(~real[..., None], 0), real


def _size(rows: Rows, mask: Tensor | None) -> Tensor:
    return torch.linalg.vector_norm(_counted(rows, mask)[0], dim=(-2, -1))


def _over(part: Tensor, whole: Tensor, of_zero: float = math.inf) -> Tensor:
    """Divide; 0/0 = 0, and anything else by 0 what is said."""
    filled = torch.where(part > 0, of_zero, 0.0).to(part)
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1.0), filled)


def _check_share(a: float) -> None:
    if not 0 < a < 1:
        raise RankwiseError(
            "`a`", wanted="a number between 0 and 1", got=repr(a), fix="0.5 keeps half of μ² in each layer."
        )
