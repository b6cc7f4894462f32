"""Theorem of the λ-skip paper: the smallest |λ| of a skip connection λx that provably keeps tokens apart."""

import math

from rankwise.errors import in_range


def mixing_strength(product: float, eps: float = 0.0, size: float = 1.0, shortest: float = 1.0) -> float:
    r"""Return the value that replaces S·C_M in `min_lambda_paper` for states of any length and any ε.

    Formula: √((S·C_M·q)² + ε)/ℓ, which is S·C_M if each state has norm √D and ε = 0, as the theorem assumes.
    With it, Theorem 4.1 holds for all states if μ² (μ: absolute token spread) is replaced by D·μ(U)², where U
    are the states divided by their lengths.
    Range: [0, ∞]. Cost: O(1) time.
    Source: this project; proof in docs/explanation/skip-bound.md.

    Args:
        product: S·C_M, with ‖C‖_F ≤ S for the value weights C and ‖M‖_F ≤ C_M for the mixing matrix M.
        eps: ε of the norm (LayerNorm or RMSNorm) after the sum.
        size: q = ‖Y‖_F/√(T D), the root mean square of the states Y; 1 if each state has norm √D.
        shortest: ℓ = min_i ‖y_i‖/√D over states y_i, which are centered if the norm centers them.

    Examples:
        >>> mixing_strength(0.5), round(mixing_strength(0.5, eps=1e-2, shortest=0.99), 4)
        (0.5, 0.5151)
    """
    strength = math.hypot(product * size, math.sqrt(eps))
    return strength / shortest if shortest > 0 else math.inf


def min_lambda_paper(strength: float, a: float, tokens: int, width: int, spread: float) -> float:
    r"""Return the smallest |λ| that satisfies both hypotheses of Theorem 4.1 of the λ-skip paper.

    The hypotheses are Eq. 7, λ² − a(S·C_M + |λ|)² > 0, and μ² ≥ b = 2|λ|·T·D·S·C_M/(λ² − a(S·C_M + |λ|)²).
    If both hold, the squared spread of the states after the norm is at least a·μ², where μ is the spread
    before the layer. Eq. 7 alone guarantees nothing.
    Formula: the larger root λ of (1 − a)μ²·λ² − 2S·C_M(a·μ² + T·D)·λ − a(S·C_M)²μ² = 0. For μ = ∞ it is the
    smallest |λ| that satisfies Eq. 7, √a·S·C_M/(1 − √a).
    Range: [0, ∞]; infinite for μ = 0; above 2·S·C_M for any a, if each state has norm √D. Cost: O(1) time.
    Source: "Lambda-Skip Connections: the architectural component that prevents Rank Collapse", Theorem 4.1
    and Eq. 7 as corrected by its authors; proof in docs/explanation/skip-bound.md.

    Args:
        strength: S·C_M as in `mixing_strength`, or the result of `mixing_strength`.
        a: fraction of μ² that a layer must keep, in (0, 1).
        tokens: number of tokens T.
        width: width D of the states.
        spread: μ, the distance of the states from their mean.

    Raises:
        InputError: if a is not in (0, 1).

    Examples:
        >>> round(min_lambda_paper(1.0, a=0.5, tokens=2, width=4, spread=2.0), 6)
        10.09902
        >>> round(min_lambda_paper(3.0, a=0.25, tokens=2, width=4, spread=math.inf), 9)
        3.0
    """
    check_share(a)
    energy = spread**2
    if energy == 0:
        return math.inf if strength > 0 else 0.0
    if math.isinf(energy):
        return math.sqrt(a) * strength / (1 - math.sqrt(a))
    half = strength * (a * energy + tokens * width)
    root = math.sqrt(half**2 + (1 - a) * a * (strength * energy) ** 2)
    return (half + root) / ((1 - a) * energy)


def check_share(a: float) -> float:
    """Return ``a``, the fraction of μ² (μ: token spread) that a layer must keep; raise if not in (0, 1)."""
    return in_range("`a`", a, "(0, 1)", fix="0.5 keeps half of μ² in each layer.")
