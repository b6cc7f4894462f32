"""The paper's theorem on λ-skips: its condition on λ, its condition on μ, and the least |λ| of each."""

import math

from rankwise.errors import RankwiseError


def paper_strength(product: float, eps: float = 0.0, size: float = 1.0, shortest: float = 1.0) -> float:
    r"""The strength of a mixer for which the paper's theorem holds where ε > 0 or states are near the sphere.

    Formula: √((S C_M)²·q² + ε)/ℓ. On the sphere and for ε = 0 it is S·C_M. In place of S·C_M it makes the
    theorem hold for any states, with μ² = D·μ(U)² of their directions U. Range: [0, ∞]. Cost: O(1).
    Source: own; proof in docs/proofs/skip-bound.md.

    Args:
        product: S·C_M.
        eps: ε of the norm that reads the sum.
        size: q = ‖Y‖_F/√(T D), 1 on the sphere.
        shortest: ℓ = min_i ‖y_i‖/√D, of rows that are centred if the norm centres them.

    Examples:
        >>> paper_strength(0.5), round(paper_strength(0.5, eps=1e-2, shortest=0.99), 4)
        (0.5, 0.5151)
    """
    strength = math.hypot(product * size, math.sqrt(eps))
    return strength / shortest if shortest > 0 else math.inf


def paper_condition(scale: float, strength: float, a: float) -> float:
    r"""Left side of the paper's condition on λ; it holds where this is positive.

    Formula: λ² − a(S·C_M + |λ|)² (Eq. 7); for 0 < a < 1 positive just if |λ|(1 − √a) > √a·S·C_M.
    Range: (−∞, λ²). Cost: O(1).
    Source: "Lambda-Skip Connections: the architectural component that prevents Rank Collapse", Eq. 7, as
    corrected by its authors.

    It is half of what the theorem asks: alone it guarantees nothing, see `paper_floor`.

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
    check_share(a)
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
    check_share(a)
    return math.sqrt(a) * strength / (1 - math.sqrt(a))


def paper_floor(scale: float, strength: float, a: float, tokens: int, width: int) -> float:
    r"""The b of the paper's theorem: it speaks of states with μ² ≥ b.

    Formula: b = 2|λ| T D S C_M/(λ² − a(S C_M + |λ|)²), infinite where Eq. 7 does not hold.
    Range: [0, ∞]. On the sphere of LayerNorm μ² ≤ T·D, so where b > T·D no state is spoken of: that is so
    unless λ² − a(S C_M + |λ|)² ≥ 2|λ|S C_M, which needs |λ| > 2 S C_M whatever a is. Cost: O(1).
    With both, μ² falls to no less than a·μ² after the norm: proved in docs/proofs/skip-bound.md for states
    on the sphere and a branch M Y C without biases.
    Source: as `paper_condition`, Theorem 4.1.

    Args:
        scale: λ.
        strength: S·C_M, or `paper_strength`.
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
    check_share(a)
    energy = collapse**2
    if energy == 0:
        return math.inf if strength > 0 else 0.0
    half = strength * (a * energy + tokens * width)
    root = math.sqrt(half**2 + (1 - a) * a * (strength * energy) ** 2)
    return (half + root) / ((1 - a) * energy)


def check_share(a: float) -> None:
    """Refuse a part of μ² that no layer can be asked to keep.

    Args:
        a: the part.

    Raises:
        RankwiseError: if it is not in (0, 1).
    """
    if not 0 < a < 1:
        raise RankwiseError(
            "`a`", expected="a number between 0 and 1", got=repr(a), fix="0.5 keeps half of μ² in each layer."
        )
