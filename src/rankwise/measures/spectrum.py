"""Exact singular values."""

from jaxtyping import Float64
from torch import Tensor

from rankwise.measures.exact import scaled_svd
from rankwise.measures.inputs import Mixing, measured_in_parts


def singular_values(op: Mixing) -> Float64[Tensor, "*batch N"]:
    """Singular values σ_1 ≥ σ_2 ≥ … of each matrix, N = min(T, S) of them.

    Range: [0, ‖M‖_F]; NaN throughout where a matrix holds NaN or infinity. An error of about 1e-16·σ_1 is
    the best float64 gives, so smaller values mean zero.
    Cost: a dense decomposition, O(T S min(T, S)) time and O(T S) memory for each matrix.

    Args:
        op: an operator, or a tensor (..., T, S).

    Raises:
        ShapeError: if it is not (..., T, S) with T, S ≥ 1.

    Examples:
        >>> import torch
        >>> singular_values(torch.tensor([[0.0, 2.0], [1.0, 0.0]])).tolist()
        [2.0, 1.0]
    """
    sigma, scale = scaled_spectrum(op, "`singular_values`")
    return sigma * scale[..., None]


def scaled_spectrum(
    op: Mixing, subject: str
) -> tuple[Float64[Tensor, "*batch N"], Float64[Tensor, "*batch"]]:
    """Singular values in units of a power of two, and that power: their ratios keep all digits.

    Args:
        op: an operator, or a tensor (..., T, S).
        subject: what an error calls it.
    """
    sigma, scale = measured_in_parts(op, subject, scaled_svd)
    return sigma, scale
