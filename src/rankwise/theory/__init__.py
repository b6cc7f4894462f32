"""Theory without models or data: ranks expected by chance, and proved bounds for λ-skips."""

from rankwise.theory.barrier import rank_barrier, rank_barrier_of_rows
from rankwise.theory.paper_bound import min_lambda_paper, mixing_strength
from rankwise.theory.random_heads import SimulatedRank, hardmax_rank
from rankwise.theory.random_rank import random_head_rank
from rankwise.theory.skip_bounds import min_lambda, skip_bound
from rankwise.theory.uniform import uniform_rank

__all__ = [
    "SimulatedRank",
    "hardmax_rank",
    "min_lambda",
    "min_lambda_paper",
    "mixing_strength",
    "random_head_rank",
    "rank_barrier",
    "rank_barrier_of_rows",
    "skip_bound",
    "uniform_rank",
]
