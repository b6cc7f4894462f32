"""One call of TSSA, checked and in the dtypes of the sums: what every implementation is handed."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sums(NamedTuple):
    """The differentiable part of a state, for N sequences.

    Attributes:
        energy: (N, H, K).
        assigned: (N, H, K).
        mass: (N, H).
    """

    energy: Tensor
    assigned: Tensor
    mass: Tensor


class Problem(NamedTuple):
    """What is to be computed; every tensor but w is in the dtype of the sums.

    Attributes:
        w: (B, T, H, K), in its own dtype.
        temperature: (H,), or None for uniform memberships.
        offset: what the bias adds to the score, (B, T, H), or None.
        mask: real tokens, (B, T), or None for all.
        start: sums before the first token of a causal call; None for zeros, and where it is bidirectional.
        rate: λ, (H,) in float64, or None for λ = 1.
        bounds: where each of the N sequences packed in one row begins, and where the last ends, (N + 1,);
            None where each row is a sequence.
        causal: which of the two operations.
    """

    w: Tensor
    temperature: Tensor | None
    offset: Tensor | None
    mask: Tensor | None
    start: Sums | None
    rate: Tensor | None
    bounds: Tensor | None
    causal: bool

    @property
    def sequences(self) -> int:
        """N."""
        return self.w.shape[0] if self.bounds is None else self.bounds.shape[0] - 1

    def first(self) -> Sums:
        """The sums before the first token."""
        if self.start is not None:
            return self.start
        heads, width = self.w.shape[2:]
        energy = self.w.new_zeros((self.sequences, heads, width), dtype=exact(self.w.dtype))
        return Sums(energy, energy.clone(), energy.new_zeros((self.sequences, heads)))


class Solution(NamedTuple):
    """Output (B,T,H,K) in the dtype of w, memberships (B,T,H), the sums after the last token if causal."""

    output: Tensor
    membership: Tensor
    end: Sums | None


def exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sums: float64 for a w of float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of that dtype: itself where it can be, as asking torch takes 40 µs in a cold cache."""
    return x if x.dtype == dtype else x.to(dtype)
