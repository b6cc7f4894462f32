"""What causal TSSA remembers of the tokens it has seen: two numbers a channel, one a head."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class TSSAState(NamedTuple):
    """The running statistics after a token, for each of N sequences.

    Its size is the same after one token and after a million. With a half-life every sum decays by λ a token.
    Sums are float32, or float64 for float64 inputs. Every call rounds them once, so n calls put them off by
    n·2^-24 of themselves at worst, with a half-life of h tokens by 1.44·h·2^-24 however many; a sum of 2^24
    times what a call adds stands still. That matters token by token over millions of tokens without
    half-lives: float64 inputs then carry float64 sums.

    Attributes:
        energy: Σ_u w²[u,h,k], (N, H, K).
        assigned: Σ_u Π[u,h]·w²[u,h,k], (N, H, K).
        mass: Σ_u Π[u,h], (N, H).
        seen: real tokens so far, (N,); the position at which a learned bias is read next.

    Examples:
        >>> state = TSSAState.zeros(1, heads=2, width=3)
        >>> tuple(state.energy.shape), state.seen.tolist()
        ((1, 2, 3), [0])
    """

    energy: Float[Tensor, "N H K"]
    assigned: Float[Tensor, "N H K"]
    mass: Float[Tensor, "N H"]
    seen: Int[Tensor, " N"]

    @classmethod
    def zeros(
        cls,
        sequences: int,
        heads: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "TSSAState":
        """The state before the first token.

        Args:
            sequences: N.
            heads: H.
            width: K.
            dtype: of the sums.
            device: where they lie.

        Returns:
            A state of zeros.
        """
        sums = torch.zeros(sequences, heads, width, dtype=dtype, device=device)
        mass = torch.zeros(sequences, heads, dtype=dtype, device=device)
        seen = torch.zeros(sequences, dtype=torch.int64, device=device)
        return cls(sums, sums.clone(), mass, seen)

    def select(self, index: Int[Tensor, " M"]) -> "TSSAState":
        """The states of some of the sequences, in a new order, as beam search needs them.

        Args:
            index: which sequences; one may come twice.

        Returns:
            Their states.
        """
        return TSSAState(*(part.index_select(0, index) for part in self))

    def detach(self) -> "TSSAState":
        """The same numbers, cut from the graph: for training on long texts piece by piece."""
        return TSSAState(*(part.detach() for part in self))


torch.serialization.add_safe_globals([TSSAState])  # tensors, no code: torch.load may make one
