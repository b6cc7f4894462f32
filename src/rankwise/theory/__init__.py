"""Theory without models or data: ranks expected by chance, and proved bounds for λ-skips."""

from rankwise.theory.barrier import rank_barrier, rank_barrier_of_rows
from rankwise.theory.paper_bound import min_lambda_paper
from rankwise.theory.random_heads import SimulatedRank, hardmax_rank
from rankwise.theory.random_rank import random_head_rank
from rankwise.theory.skip_bounds import min_lambda_for_spread, skip_bound
from rankwise.theory.uniform import uniform_rank

__all__ = [
    "SimulatedRank",
    "hardmax_rank",
    "min_lambda_for_spread",
    "min_lambda_paper",
    "random_head_rank",
    "rank_barrier",
    "rank_barrier_of_rows",
    "skip_bound",
    "uniform_rank",
]
