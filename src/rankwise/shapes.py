"""Letters for tensor axes in the whole package, and tensor types that use these letters.

=======  =====================================================================
letter   axis
=======  =====================================================================
B        batch: sequences
H        heads
T        tokens (queries: rows of a mixing matrix)
S        source tokens (keys: columns of a mixing matrix)
D        model width
K        head width (the papers' d_h)
V        columns of the values that a mixing matrix multiplies
L        layers
N        single axis of a vector, of any length
=======  =====================================================================

``...`` means any number of leading axes. The types are checked only under pytest.
"""

from jaxtyping import Bool, Float
from torch import Tensor

Matrices = Float[Tensor, "*batch T S"]
"""Mixing matrices of T rows and S columns, with any number of leading axes."""

Tokens = Float[Tensor, "B T D"]
"""Token states: one vector of the model width per token."""

TokenMask = Bool[Tensor, "B T"]
"""True for real tokens, False for padding."""
