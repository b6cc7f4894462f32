"""Upper bounds of the decay of token differences without a skip connection, from weights alone.

Proofs: docs/explanation/skip-bound.md, section 4. A bound is a list: the input first, then
one number per layer.
Source: own; the selective and LTI cases of the paper on λ-skip connections, with spectral norms.
"""

import math
from collections.abc import Sequence


def diameter_of(spread: float) -> float:
    """Return the largest possible distance of two tokens for a given μ: max_ij ‖y_i − y_j‖ ≤ √2·μ."""
    return math.sqrt(2) * spread


def spread_of(diameter: float, tokens: int) -> float:
    """Return the largest possible μ for a given largest distance d: μ² ≤ (T − 1)·d²/2."""
    return diameter * math.sqrt((tokens - 1) / 2)


def attention_decay(
    diameter: float, score_norms: Sequence[float], value_norms: Sequence[float]
) -> list[float]:
    r"""Bound the largest distance d of two tokens through layers Y ← softmax(Y A Yᵀ)·Y·C without a mask.

    Formula: d_k ≤ ‖C_k‖₂ · tanh(‖A_k‖₂·d²_{k−1}/4) · d_{k−1}, with ‖A_k‖₂ in `score_norms` and ‖C_k‖₂ in
    `value_norms`, A = W_Q W_Kᵀ/√K and C = W_V W_O. Once d is small this is cubic, so doubly exponential in
    depth. For H parallel heads take the sum of their ‖C‖₂ and the largest ‖A‖₂.
    Range: [0, ∞); vacuous while ‖C‖₂ > 1 and ‖A‖₂d² is large. It does not hold for a causal mask, where rows
    see different tokens. `spread_of` converts it into μ.
    Source: own, sharper and without the small-norm assumption of Dong, Cordonnier and Loukas, "Attention is
    not all you need: pure attention loses rank doubly exponentially with depth", 2021, Theorem 2.2.

    Examples:
        >>> [float(f"{d:.1e}") for d in attention_decay(1.0, [1.0] * 3, [1.0] * 3)]
        [1.0, 0.24, 0.0037, 1.2e-08]
    """
    bounds = [diameter]
    for score, value in zip(score_norms, value_norms, strict=True):
        bounds.append(value * math.tanh(_product(score, bounds[-1], bounds[-1]) / 4) * bounds[-1])
    return bounds


def linear_decay(norm: float, operator_norms: Sequence[float], value_norms: Sequence[float]) -> list[float]:
    r"""Bound μ through linear time-invariant layers Y ← M_k Y C_k (S4, convolutions) without a skip.

    Formula: μ(Y_k) ≤ ‖Y_k‖_F ≤ ‖M_k‖₂·‖C_k‖₂·‖Y_{k−1}‖_F; `norm` is ‖Y_0‖_F.
    It is exponential at most, and if the product of norms is above 1 no input must collapse. If all rows of
    M_k have the same sum, ‖(I − 11ᵀ/T)M_k(I − 11ᵀ/T)‖₂ may replace ‖M_k‖₂, and μ may replace ‖Y‖_F.

    Examples:
        >>> linear_decay(8.0, [0.5, 0.5], [1.0, 0.5])
        [8.0, 4.0, 1.0]
    """
    bounds = [norm]
    for operator, value in zip(operator_norms, value_norms, strict=True):
        bounds.append(operator * value * bounds[-1])
    return bounds


def selective_decay(
    norm: float, gate_norms: Sequence[float], value_norms: Sequence[float], step: float = 1.0
) -> list[float]:
    r"""Bound μ through selective state-space layers Y ← M(Y) Y C (Mamba-2) without a skip.

    With M_ij = Δ_j·c_iᵀ(Π decays)b_j for j ≤ i, c_i = W_C y_i, b_j = W_B y_j, decays in [0, 1], 0 ≤ Δ ≤ step:

        |M_ij| ≤ step·‖W_C‖₂‖W_B‖₂·‖y_i‖‖y_j‖,   so   ‖M‖_F ≤ step·‖W_C‖₂‖W_B‖₂·‖Y‖_F²,
        μ(Y_k) ≤ ‖Y_k‖_F ≤ step·‖W_C‖₂‖W_B‖₂·‖C‖₂·‖Y_{k−1}‖_F³.

    `gate_norms` are ‖W_C‖₂·‖W_B‖₂, `value_norms` are ‖C‖₂ of all linear maps around M together. The bound is
    doubly exponential once step·‖W_C‖‖W_B‖‖C‖·‖Y‖² < 1, which holds for every small enough input.

    Examples:
        >>> selective_decay(0.5, [1.0, 1.0], [1.0, 1.0])
        [0.5, 0.125, 0.001953125]
    """
    bounds = [norm]
    for gate, value in zip(gate_norms, value_norms, strict=True):
        bounds.append(_product(step * gate * value, bounds[-1], bounds[-1], bounds[-1]))
    return bounds


def _product(*factors: float) -> float:
    """Multiply: infinite beyond the largest float instead of an error; 0 times anything is 0."""
    return 0.0 if 0 in factors else math.prod(factors)
