"""Records of a plan for the query/key width of heads; this module does not import torch."""

from typing import Literal

from pydantic import Field

from rankwise._internals.records import Address, Number, Record, SavedRecord


class QKCost(Record):
    """Cost of the queries and keys of one attention layer at one width, for the present number of heads."""

    head_dim: int
    """Query/key width K."""
    rank_share: Number
    """Mean rank/T of a head with random weights, interpolated between widths tried; NaN outside of them."""
    parameters: int
    """Number of parameters of W_q and W_k, without biases."""
    flops: int
    """Multiplications and additions of both projections and of the scores, for one sequence of T tokens."""
    cache_bytes: int
    """Bytes of the cached keys per token, at 2 bytes per number."""


class TrainedWidth(Record):
    """Query/key width that one head of a trained model requires, measured on sample tokens."""

    head: Address
    width: int
    """Query/key width K of the head."""
    required: Number
    """Smallest width that keeps the attention within the tolerance in nats; NaN if inputs are not finite."""


class HeadDimPlan(SavedRecord):
    """Plan with K*, the query/key width beyond which wider heads with random weights gain almost no rank."""

    format: Literal["rankwise-plan"] = "rankwise-plan"
    schema_version: Literal[3] = 3
    complete: bool = True
    """False if the plan was interrupted before all trials were done."""
    tokens: int
    """Number of tokens T per sequence."""
    mask: str
    inputs: str
    """Source of the token states: "orthonormal", "given" (passed by the user), or a description."""
    positions: str = "none"
    temperature: float = 0.0
    """Softmax temperature in units of √K; 0 is hardmax."""
    delta: float = 1e-2
    """Threshold δ: at temperatures above 0, the rank counts singular values ≥ δ."""
    tolerance: float
    """Mean gain in rank/T per unit of width, from K to 2K, that K* and wider heads stay below."""
    trials: int
    seed: int = 0
    curve: list[tuple[int, Number, Number]] = Field(min_length=1)
    """Points (K, mean rank/T, standard deviation of rank/T over trials), with the width K ascending."""
    barrier: Number
    """Expected rank (not divided by T) of one-hot rows at random: `rankwise.theory.rank_barrier`."""
    head_dim: int
    """K*: from this width on, gains stay below the tolerance; the widest width tried if not ``saturated``."""
    interval: tuple[int, int]
    """95 % bootstrap interval of K*, by resampling the trials."""
    saturated: bool
    """True if gains stay below the tolerance from K* on; False if rank/T still grows at the widest width."""
    fall: tuple[int, int, Number] | None = None
    """(K, K', lost rank/T): largest significant fall of mean rank/T, from K to K'; None if there is none."""
    heads: int | None = None
    kv_heads: int | None = None
    width: int | None = None
    """Model width D."""
    costs: list[QKCost] = Field(default_factory=list)
    """Costs at the present width, at K* and at the upper end of the interval of K*; empty without heads."""
    trained: list[TrainedWidth] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    about: dict[str, str] = Field(default_factory=dict)
    """Command, time, versions and machine that produced the plan."""
