"""Theory: what randomness would give, and what is proved. It looks at no model and no data."""

from rankwise.theory.barrier import rank_barrier

__all__ = ["rank_barrier"]
