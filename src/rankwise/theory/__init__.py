"""Theory: what randomness would give, and what is proved. It looks at no model and no data."""

from rankwise.theory.barrier import rank_barrier, rank_barrier_of_rows
from rankwise.theory.collapse_bounds import (
    attention_decay,
    collapse_of,
    diameter_of,
    linear_decay,
    selective_decay,
)
from rankwise.theory.hardmax import hardmax_rank
from rankwise.theory.null import interpolated_random_rank, random_head_rank
from rankwise.theory.paper_skip import (
    paper_condition,
    paper_floor,
    paper_scale,
    paper_scale_with_floor,
    paper_strength,
)
from rankwise.theory.random_heads import SimulatedRank
from rankwise.theory.skip_bounds import distance_from_mean, norm_bound, norm_scale, sum_bound, sum_scale
from rankwise.theory.theorem1 import almost_orthonormal, theorem1_bound, theorem1_epsilon, theorem1_rank
from rankwise.theory.uniform import uniform_rank

__all__ = [
    "SimulatedRank",
    "almost_orthonormal",
    "attention_decay",
    "collapse_of",
    "diameter_of",
    "distance_from_mean",
    "hardmax_rank",
    "interpolated_random_rank",
    "linear_decay",
    "norm_bound",
    "norm_scale",
    "paper_condition",
    "paper_floor",
    "paper_scale",
    "paper_scale_with_floor",
    "paper_strength",
    "random_head_rank",
    "rank_barrier",
    "rank_barrier_of_rows",
    "selective_decay",
    "sum_bound",
    "sum_scale",
    "theorem1_bound",
    "theorem1_epsilon",
    "theorem1_rank",
    "uniform_rank",
]
