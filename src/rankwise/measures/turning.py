"""What a block does to its tokens beyond scaling them."""

import math

import torch
from jaxtyping import Float64

from rankwise.errors import ShapeError
from rankwise.measures._inputs import as_tokens, norm, ratio, unit_scale
from rankwise.shapes import TokenMask, Tokens


def state_turn(before: Tokens, after: Tokens, mask: TokenMask | None = None) -> Float64[torch.Tensor, " B"]:
    """How far the states after a block point away from those before it.

    Formula: min_c ‖Z − cY‖_F/‖Z‖_F = √(1 − ⟨Y, Z⟩²/(‖Y‖²‖Z‖²)), Y before and Z after; 0 where Z is 0.
    Range: [0, 1]; 0 = the block gives back what it reads, at another scale: it is switched off, or its skip
    drowns it. Scale and sign of either do not matter. NaN where a state is not finite or no token is real.
    Cost: O(T D).
    Numerics: the remainder Z − cY itself is summed: 1 − cos² would lose all digits below 1e-8.

    Args:
        before: what the block reads.
        after: what it gives.
        mask: True where a token is real.

    Raises:
        ShapeError: if the two are not (B, T, D) alike, or the mask is not Bool (B, T).

    Examples:
        >>> import torch
        >>> y = torch.randn(1, 5, 3)
        >>> bool(state_turn(y, -2 * y) < 1e-7)
        True
        >>> state_turn(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 3.0]]])).item()
        1.0
    """
    if before.shape != after.shape:
        raise ShapeError(
            "`state_turn`",
            wanted="states of one shape before and after",
            got=f"{tuple(before.shape)} and {tuple(after.shape)}",
            fix="Compare states of one stack, layer by layer.",
        )
    y, valid, usable = as_tokens(before, mask, "`state_turn`")
    z, _, also = as_tokens(after, mask, "`state_turn`")
    usable = usable & also & valid.any(-1)
    y, z = (one / unit_scale(one, (-2, -1)) for one in (y, z))
    along = ratio((y * z).sum((-2, -1)), y.square().sum((-2, -1)))
    rest = norm(z - along[:, None, None] * y, (-2, -1))
    turn = ratio(rest, norm(z, (-2, -1))).clamp(max=1)
    return turn.masked_fill(~usable, math.nan)
