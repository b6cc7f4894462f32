"""The axis letters of the whole package, and the tensor types written with them.

=======  =====================================================================
letter   axis
=======  =====================================================================
B        batch: sequences
H        heads
T        tokens (queries: the rows of a mixing operator)
S        source tokens (keys: its columns)
D        model width
K        head width (the papers' d_h)
V        columns of whatever an operator is applied to
L        layers
N        any one axis of a list of numbers
=======  =====================================================================

``...`` stands for any number of leading axes. The types are checked under pytest only.
"""

from jaxtyping import Bool, Float
from torch import Tensor

Matrices = Float[Tensor, "*batch T S"]
"""Mixing matrices, any number of leading axes."""

Tokens = Float[Tensor, "B T D"]
"""Token states."""

TokenMask = Bool[Tensor, "B T"]
"""True where a token is real, False where it is padding."""
