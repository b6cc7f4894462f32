"""How many nats a sequence of tokens takes."""

import math

import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from rankwise.errors import RankwiseError
from rankwise.measures._inputs import as_tokens
from rankwise.measures.spectrum import singular_values
from rankwise.shapes import TokenMask


def coding_rate(
    tokens: Shaped[Tensor, "B T D"], eps: float = 0.5, mask: TokenMask | None = None
) -> Float64[Tensor, " B"]:
    """Rate needed to code the tokens up to a distortion ε: the volume they fill.

    Formula: R(Z) = ½ logdet(I + D/(n ε²)·Z Zᵀ) = ½ Σ_i log(1 + D/(n ε²)·σ_i²), Z the D×n matrix of the n real
    tokens, σ_i its singular values; natural logarithm. Tokens are neither centred nor normalised: do so
    before, if lengths should not count (the paper puts each on the unit sphere).
    Range: [0, ∞); 0 = all tokens zero. Grows with the scale and, at a given ‖Z‖_F, with the number of
    directions used. NaN for a sequence without a real token, or with NaN or infinity in one.
    Cost: a dense decomposition, O(T D min(T, D)).
    Numerics: singular values and log1p instead of a Cholesky factor, which loses the small directions, and at
    last fails, once σ_1² D/(n ε²) nears 1e16.
    Source: Yu et al., "Learning Diverse and Discriminative Representations via the Principle of Maximal
    Coding Rate Reduction", NeurIPS 2020, Section 2. Code published with it calls ε² ``eps``.

    Args:
        tokens: token states.
        eps: distortion ε.
        mask: True where a token is real; all are, by default.

    Raises:
        ShapeError: if tokens or mask are of the wrong shape or kind.
        RankwiseError: if ``eps`` is not finite and positive.

    Examples:
        >>> import torch
        >>> rate = coding_rate(torch.eye(2)[None], eps=1.0)  # σ = (1, 1), D/n = 1: log 2
        >>> round(rate.item(), 6)
        0.693147
    """
    if not (math.isfinite(eps) and eps > 0):
        raise RankwiseError(
            "`eps`",
            wanted="a finite number above 0",
            got=str(eps),
            fix="It is the distortion allowed, such as 0.5.",
        )
    states, valid, usable = as_tokens(tokens, mask, "`coding_rate`")
    count = valid.sum(1, dtype=torch.float64).clamp(min=1)
    scaled = singular_values(states) * ((states.shape[-1] / count).sqrt() / eps)[:, None]
    return (_log1p_square(scaled).sum(-1) / 2).masked_fill(~usable, math.nan)


def _log1p_square(x: Tensor) -> Tensor:
    """log(1 + x²) for x ≥ 0, also where x² overflows."""
    large = x > 1e100
    return torch.where(large, 2 * x.clamp(min=1).log(), torch.where(large, 0.0, x).square().log1p())
