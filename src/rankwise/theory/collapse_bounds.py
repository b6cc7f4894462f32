"""How fast tokens become alike without a skip connection: upper bounds, from weights alone."""

import math
from collections.abc import Sequence

from rankwise.errors import ShapeError


def diameter_of(collapse: float) -> float:
    """The most by which two tokens can differ, given μ.

    Formula: max_ij ‖y_i − y_j‖ ≤ √2·μ. Range: [0, ∞). Cost: O(1).

    Args:
        collapse: μ(Y).

    Examples:
        >>> round(diameter_of(1.0), 6)
        1.414214
    """
    return math.sqrt(2) * collapse


def collapse_of(diameter: float, tokens: int) -> float:
    """The most that μ can be, given by how much two tokens differ at most.

    Formula: μ² = Σ_ij ‖y_i − y_j‖²/(2T) ≤ (T − 1)·d²/2. Range: [0, ∞). Cost: O(1).

    Args:
        diameter: d = max_ij ‖y_i − y_j‖.
        tokens: T.

    Examples:
        >>> round(collapse_of(2.0, tokens=3), 6)
        2.0
    """
    return diameter * math.sqrt((tokens - 1) / 2)


def attention_decay(
    diameter: float, score_norms: Sequence[float], value_norms: Sequence[float]
) -> list[float]:
    r"""Upper bound of how far tokens lie apart, through layers of softmax attention without skip.

    Formula, d the largest distance of two tokens, layer Y ← softmax(Y A Yᵀ)·Y·C without mask:

        d_k ≤ ‖C_k‖₂ · tanh(‖A_k‖₂·d²_{k−1}/4) · d_{k−1}.

    Two rows of scores differ, up to a constant that softmax does not see, by at most ‖A‖₂d² in range;
    softmaxes of scores that differ by a range r have total variation at most tanh(r/4); and rows of M that
    differ by τ in total variation give tokens that differ by at most τ·d. Once d is small this is cubic:
    doubly exponential in depth. For H heads side by side add their ‖C‖₂ up, with the largest ‖A‖₂.
    Range: [0, ∞); vacuous while ‖C‖₂ > 1 and ‖A‖₂d² is large. A causal mask breaks it: rows then see
    different tokens. `collapse_of` turns it into μ. Cost: O(L).
    Source: own, sharper and without the small-norm assumption of Dong, Cordonnier and Loukas, "Attention is
    not all you need: pure attention loses rank doubly exponentially with depth", 2021, Theorem 2.2.

    Args:
        diameter: largest distance of two tokens of the input; `diameter_of` bounds it by μ.
        score_norms: ‖A_k‖₂ of each layer, A = W_Q W_Kᵀ/√K.
        value_norms: ‖C_k‖₂ of each layer, C = W_V W_O.

    Returns:
        The bound after each layer, the input first.

    Raises:
        ShapeError: if the layers differ in number, or a norm is negative or not finite.

    Examples:
        >>> [float(f"{d:.1e}") for d in attention_decay(1.0, [1.0] * 3, [1.0] * 3)]
        [1.0, 0.24, 0.0037, 1.2e-08]
    """
    _check(diameter, score_norms, value_norms)
    found = [diameter]
    for score, value in zip(score_norms, value_norms, strict=True):
        found.append(value * math.tanh(_product(score, found[-1], found[-1]) / 4) * found[-1])
    return found


def linear_decay(norm: float, operator_norms: Sequence[float], value_norms: Sequence[float]) -> list[float]:
    r"""Upper bound of μ through linear time-invariant layers without skip: it knows the weights alone.

    Formula, layer Y ← M_k Y C_k with M_k the same for every input (S4, convolutions):

        μ(Y_k) ≤ ‖Y_k‖_F ≤ ‖M_k‖₂·‖C_k‖₂·‖Y_{k−1}‖_F.

    Exponential at most, and where the product of norms is above 1 no input is sure to collapse. Where all
    rows of M_k have the same sum, ‖(I − 11ᵀ/T)M_k(I − 11ᵀ/T)‖₂ may stand for ‖M_k‖₂, and μ for ‖Y‖_F.
    Range: [0, ∞). Cost: O(L).
    Source: own; the LTI case of the paper on λ-skip connections, with spectral in place of Frobenius norms.

    Args:
        norm: ‖Y_0‖_F.
        operator_norms: ‖M_k‖₂ of each layer.
        value_norms: ‖C_k‖₂ of each layer.

    Returns:
        The bound after each layer, the input first.

    Raises:
        ShapeError: if the layers differ in number, or a norm is negative or not finite.

    Examples:
        >>> linear_decay(8.0, [0.5, 0.5], [1.0, 0.5])
        [8.0, 4.0, 1.0]
    """
    _check(norm, operator_norms, value_norms)
    found = [norm]
    for operator, value in zip(operator_norms, value_norms, strict=True):
        found.append(operator * value * found[-1])
    return found


def selective_decay(
    norm: float, gate_norms: Sequence[float], value_norms: Sequence[float], step: float = 1.0
) -> list[float]:
    r"""Upper bound of μ through selective state-space layers without skip: it knows the input's size too.

    Formula, layer Y ← M(Y) Y C with M_ij = Δ_j·c_iᵀ(Π decays)b_j for j ≤ i, c_i = W_C y_i, b_j = W_B y_j,
    decays in [0, 1], 0 ≤ Δ ≤ step (Mamba-2):

        |M_ij| ≤ step·‖W_C‖₂‖W_B‖₂·‖y_i‖‖y_j‖,   so   ‖M‖_F ≤ step·‖W_C‖₂‖W_B‖₂·‖Y‖_F²,
        μ(Y_k) ≤ ‖Y_k‖_F ≤ step·‖W_C‖₂‖W_B‖₂·‖C‖₂·‖Y_{k−1}‖_F³.

    Doubly exponential once step·‖W_C‖‖W_B‖‖C‖·‖Y‖² < 1, which a small enough input always makes true: here
    the input decides. Range: [0, ∞]. Cost: O(L).
    Source: own; the selective case of the paper on λ-skip connections.

    Args:
        norm: ‖Y_0‖_F.
        gate_norms: ‖W_C‖₂·‖W_B‖₂ of each layer.
        value_norms: ‖C_k‖₂ of each layer, all of its linear maps around M together.
        step: the largest Δ.

    Returns:
        The bound after each layer, the input first.

    Raises:
        ShapeError: if the layers differ in number, or a norm is negative or not finite.

    Examples:
        >>> selective_decay(0.5, [1.0, 1.0], [1.0, 1.0])
        [0.5, 0.125, 0.001953125]
    """
    _check(norm, gate_norms, value_norms, step)
    found = [norm]
    for gate, value in zip(gate_norms, value_norms, strict=True):
        found.append(_product(step * gate * value, found[-1], found[-1], found[-1]))
    return found


def _product(*factors: float) -> float:
    """Multiply; past the largest float it is infinite, not an error; 0 of anything is 0."""
    return 0.0 if 0 in factors else math.prod(factors)


def _check(size: float, first: Sequence[float], other: Sequence[float], *more: float) -> None:
    if len(first) != len(other):
        raise ShapeError(
            "norms of the layers",
            expected="as many of one kind as of the other",
            got=f"{len(first)} and {len(other)}",
            fix="Give one number for each layer.",
        )
    for value in (size, *first, *other, *more):
        if not (math.isfinite(value) and value >= 0):
            raise ShapeError(
                "a norm", expected="a finite number, at least 0", got=repr(value), fix="Check it."
            )
