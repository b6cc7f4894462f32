"""Smallest |λ| for which Theorem 4.1 of the λ-skip paper guarantees a share of the token spread."""

from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rankwise._internals.linalg import as_float64, mean_distance
from rankwise.errors import one_of
from rankwise.theory.skip_bounds import Rows, check_keep_spread, safe_divide


def min_lambda_paper(
    states: Rows,
    mixing: Float[Tensor, "*batch T T"],
    weights: Float[Tensor, "*batch D D"],
    keep_spread: float,
    norm: Literal["layer", "rms"] = "rms",
    eps: float = 0.0,
) -> Float64[Tensor, "*batch"]:
    r"""Return the smallest |λ| for which Theorem 4.1 of the λ-skip paper guarantees a share of the spread.

    The theorem bounds the absolute token spread of N(λY + M Y C), where N is a norm and Y has T rows of width
    D. Let a be the square of ``keep_spread``, μ the spread of Y, S = ‖C‖_F and C_M = ‖M‖_F. The theorem has
    two hypotheses: Eq. 7, λ² − a(S·C_M + |λ|)² > 0, and μ² ≥ 2|λ|·T·D·S·C_M/(λ² − a(S·C_M + |λ|)²). Eq. 7
    alone guarantees nothing.
    Formula: the larger root λ of (1 − a)μ²·λ² − 2s(a·μ² + T·D)·λ − a·s²μ² = 0. The theorem assumes ε = 0 and
    rows of norm √D: then s = S·C_M. For rows y_i of any length (centered for "layer") and any ε,
    s = √((S·C_M·q)² + ε)/ℓ with q = ‖Y‖_F/√(T·D) and ℓ = min_i ‖y_i‖/√D. In this case, μ is the spread of the
    rows after each row is scaled to norm √D.
    Range: [0, ∞]; infinite if s > 0 and all rows have the same direction. Cost: O(T² + T D + D²) time.
    Source: "Lambda-Skip Connections: the architectural component that prevents Rank Collapse", Theorem 4.1
    and Eq. 7 as corrected by its authors; extension and proof in docs/explanation/skip-bound.md.

    Args:
        states: token states Y.
        mixing: mixing matrix M.
        weights: value and output weights C.
        keep_spread: share of μ that the layer must keep, in (0, 1).
        norm: norm N after the sum: "rms", or "layer", which centers each row.
        eps: ε of the norm.

    Raises:
        InputError: if ``keep_spread`` is not in (0, 1), or the norm is unknown.

    Examples:
        >>> y = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> round(min_lambda_paper(y, torch.eye(2), 0.1 * torch.eye(2), keep_spread=0.5).item(), 4)
        1.211
    """
    share = check_keep_spread(keep_spread) ** 2
    rows, tokens, width = as_float64(states), states.shape[-2], states.shape[-1]
    root_mean_square = rows.square().mean((-2, -1)).sqrt()
    if one_of("`norm`", norm, ("layer", "rms")) == "layer":
        rows = rows - rows.mean(-1, keepdim=True)
    lengths = rows.square().mean(-1).sqrt()
    directions = safe_divide(rows, lengths[..., None], 0.0)  # rows of norm √D
    energy = mean_distance(directions).square()
    norms = [torch.linalg.matrix_norm(as_float64(matrix)) for matrix in (mixing, weights)]
    product = norms[0] * norms[1] * root_mean_square
    strength = safe_divide((product.square() + eps).sqrt(), lengths.amin(-1))
    half = strength * (share * energy + tokens * width)
    scaled = torch.where(energy == 0, 0.0, strength * energy)  # ∞ · 0, if all rows are constant
    root = (half.square() + (1 - share) * share * scaled.square()).sqrt()
    return safe_divide(half + root, (1 - share) * energy)
