"""Theory: what randomness would give, and what is proved. It looks at no model and no data."""

from rankwise.theory.barrier import rank_barrier, rank_barrier_of_rows
from rankwise.theory.hardmax import hardmax_rank
from rankwise.theory.null import interpolated_null_rank, null_rank
from rankwise.theory.random_heads import NullRank
from rankwise.theory.theorem1 import almost_orthonormal, theorem1_bound, theorem1_epsilon, theorem1_rank

__all__ = [
    "NullRank",
    "almost_orthonormal",
    "hardmax_rank",
    "interpolated_null_rank",
    "null_rank",
    "rank_barrier",
    "rank_barrier_of_rows",
    "theorem1_bound",
    "theorem1_epsilon",
    "theorem1_rank",
]
