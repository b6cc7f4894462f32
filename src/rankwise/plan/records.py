"""Records of a plan for the query/key width of heads; this module does not import torch."""

from typing import Literal

from pydantic import Field

from rankwise._internals.files import SavedRecord
from rankwise._internals.records import Number, Record


class HeadDimCost(Record):
    """Cost of the queries and keys of one attention layer at one width, for the present number of heads."""

    head_dim: int
    """Query/key width K."""
    rank_share: Number
    """Mean rank/T of a head with random weights, interpolated between widths tried. NaN beyond these."""
    parameters: int
    """Number of parameters of W_q and W_k, without biases."""
    cache_bytes: int
    """Bytes of the cached keys per token, at 2 bytes per number."""


class HeadDimPlan(SavedRecord):
    """Plan with K*, the query/key width beyond which wider heads with random weights gain almost no rank."""

    format: Literal["rankwise-plan"] = "rankwise-plan"
    schema_version: Literal[5] = 5
    complete: bool = True
    """False if the plan was interrupted before all trials were done."""
    tokens: int
    """Number of tokens T per sequence; their states are orthonormal."""
    mask: str
    positions: str = "none"
    least_gain: float
    """Gain in rank/T per added channel, from K to 2K, that K* and wider heads stay below."""
    trials: int
    seed: int = 0
    curve: list[tuple[int, Number, Number]] = Field(min_length=1)
    """Points (K, mean rank/T, standard deviation of rank/T over trials), with the width K ascending."""
    one_hot_rank: Number
    """Expected rank (not divided by T) of one-hot rows at random: `rankwise.theory.rank_barrier`."""
    head_dim: int
    """K*: from this width on, gains stay below `least_gain`. If not `saturated`, the widest width tried."""
    interval: tuple[int, int]
    """95 % bootstrap interval of K*, by resampling the trials."""
    saturated: bool
    """False if rank/T still grows at the widest width tried."""
    heads: int | None = None
    kv_heads: int | None = None
    hidden_size: int | None = None
    """Model width D."""
    costs: list[HeadDimCost] = Field(default_factory=list)
    """Costs at the present width and at K*; empty if the number of heads is unknown."""
    notes: list[str] = Field(default_factory=list)
    about: dict[str, str] = Field(default_factory=dict)
    """Command, time, versions and machine that produced the plan."""
