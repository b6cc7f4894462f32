"""What an audit says: plain records, no torch, safe to save and to read years later."""

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

SCHEMA_VERSION = 2
"""Raised whenever a field changes its meaning; `Audit.load` refuses what it does not know."""


def _nan_from_null(value: object) -> object:
    return math.nan if value is None else value


Number = Annotated[float, BeforeValidator(_nan_from_null)]
"""A float that JSON writes as null where it is not finite."""


def _positive(value: float) -> float:
    if value <= 0:
        raise ValueError("Input should be above 0, or null")
    return value


Size = Annotated[Number, AfterValidator(_positive)]
"""A mean number of rows or columns; NaN where no sequence had any."""

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""A number of things, or the number of one of them from 0; JSON knows no larger whole numbers exactly."""

Severity = Literal["info", "warning", "error"]


class Record(BaseModel):
    """Base of all records: frozen, no unknown fields, null for what is not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")


class RankAt(Record):
    """The ranks of a head and of its nulls at one threshold: means over the sequences."""

    delta: float
    numerical_rank: Number
    """NaN where an estimate can only bound it."""
    rank_low: Number
    rank_high: Number
    null_rank: Number
    random_rank: Number
    uniform_rank: Number

    @property
    def nulls(self) -> dict[str, float]:
        """Those that are known, by their names."""
        named = {name: getattr(self, name) for name in ("null_rank", "random_rank", "uniform_rank")}
        return {name: null for name, null in named.items() if not math.isnan(null)}


class HeadRecord(Record):
    """One head of one layer: means over the sequences of the audit, with their spread.

    Ranks are of the operator without padded rows and columns, in float64.
    ``spread`` holds the standard deviation over sequences under the name of each measure.
    """

    stack: str
    """The blocks it belongs to, such as ``encoder.block``."""
    site: str
    """The module that mixed, such as ``encoder.layer.0.attention.self``."""
    layer: Count
    """Block of the stack, from 0: it reads state ``layer`` and writes state ``layer + 1``."""
    head: Count
    kind: str
    mask: Literal["full", "causal", "window", "other"]
    """Which tokens a row may see: sets the null."""
    cross: bool = False
    sequences: Count
    """Sequences (or windows of images) that gave finite numbers."""
    nonfinite: Count = 0
    """Sequences whose operator held NaN or infinity; left out of every mean."""
    estimated: Count = 0
    """Sequences whose ranks were estimated without the matrix; of the others they are exact."""
    fallbacks: Count = 0
    """Sequences in which a singular value lay too close to δ for the fast count, and the SVD decided."""
    tokens: Size
    """Rows without padding, mean over sequences."""
    sources: Size
    """Columns without padding, mean over sequences."""
    numerical_rank: Number
    """Singular values ≥ δ (absolute), in [0, min(T, S)].

    NaN where an estimate can only bound it: then ``rank_low`` and ``rank_high`` are the answer.
    """
    rank_low: Number = math.nan
    """Mean lower end of the 95 % interval of the numerical rank; the rank itself where it is exact."""
    rank_high: Number = math.nan
    """Mean upper end of it."""
    effective_rank: Number
    """Exponential of the entropy of the normalised singular values, in [1, min(T, S)]."""
    stable_rank: Number
    """‖M‖_F² / σ_max², in [1, min(T, S)]; 1 = all rows alike."""
    sigma_max: Number
    row_entropy: Number
    """Mean entropy of a row in nats, in [0, log S]; 0 = every row picks one token."""
    sink_mass: Number
    """Mean share of a row spent on the first token, in [0, 1]."""
    peak_mass: Number = math.nan
    """Largest mean share of a row that one token gets, in [1/S, 1]; the first token's is the sink mass."""
    row_distance: Number
    """‖M − 1m̄ᵀ‖_F / ‖M‖_F, the distance to the nearest matrix with equal rows, in [0, 1]; 0 = constant."""
    identity_distance: Number
    """‖M − I‖_F / √(‖M‖_F² + T), in [0, 1]; 0 = every token keeps to itself; NaN where T ≠ S."""
    null_rank: Number
    """Expected rank of a hardmax matrix with uniform winners under the same mask.

    NaN for mixers that are no mean over tokens (state-space, diagonal): it says nothing of them; and for
    δ > 1, which a column that wins a single row does not reach.
    """
    random_rank: Number = math.nan
    """Numerical rank that random queries and keys of each sequence's length, width, mask and scale give.

    NaN where the width is not known (a matrix the model formed itself), the mask has no name, or T is large.
    """
    uniform_rank: Number = math.nan
    """Numerical rank of equal weights on all that a row may see, at each sequence's length: of attention that
    looks at nothing. NaN where the mask has no name, or is a window of more than 4,096 tokens.
    """
    band: list[RankAt] = Field(default_factory=list)
    """The same at five thresholds from δ/√10 to √10 δ, from the same spectra: what holds at all of them
    does not hang on the choice of δ. Empty in records before version 2.
    """
    membership: Number = math.nan
    """Mean membership Π of a token in the head, in [0, 1]; of TSSA, NaN elsewhere."""
    coding_rate: Number = math.nan
    """The head's share in R_c^var, the rate of the tokens grouped by their memberships, in nats; of TSSA."""
    membership_map: list[Number] = Field(default_factory=list)
    """Π of each token of the first sequence, as many as 1,024; of TSSA, empty elsewhere."""
    membership_grid: tuple[Count, Count] | None = None
    """Rows and columns in which these tokens lie, where they are patches of a picture."""
    nearest_head: Count | None = None
    """The head of the same site that mixes most alike."""
    nearest_distance: Number = math.nan
    """‖M − M'‖_F / √(‖M‖_F² + ‖M'‖_F²) to that head, in [0, 1]; 0 = the same."""
    spread: dict[str, Number] = Field(default_factory=dict)
    stderr: dict[str, Number] = Field(default_factory=dict)
    """Of estimated measures: the mean standard error over sequences; empty where all is exact.

    The random vectors of an estimate are the same for all sequences: errors do not average out.
    """
    spectrum: list[Number] = Field(default_factory=list)
    """Singular values σ_1 ≥ σ_2 ≥ … of the first sequence, at most 64 of them, evenly taken by index.

    Empty where they were not computed.
    """

    @model_validator(mode="after")
    def _grid_holds_the_map(self) -> "HeadRecord":
        grid = self.membership_grid
        if grid is not None and grid[0] * grid[1] != len(self.membership_map):
            raise ValueError(f"membership_grid {grid} should hold {len(self.membership_map)} tokens")
        return self

    @property
    def least_rank(self) -> float:
        """What the numerical rank is at least: ``rank_low``, or the rank itself where no interval is kept."""
        return self.numerical_rank if math.isnan(self.rank_low) else self.rank_low

    @property
    def most_rank(self) -> float:
        """What the numerical rank is at most."""
        return self.numerical_rank if math.isnan(self.rank_high) else self.rank_high


class LayerRecord(Record):
    """The token states after ``layer`` blocks of a stack (0 = what the first block reads)."""

    stack: str
    site: str
    """The block that wrote the state; for layer 0 the block that reads it."""
    layer: Count
    sequences: Count
    nonfinite: Count = 0
    tokens: Number
    width: Count
    norm: Number
    """‖Y‖_F."""
    collapse: Number
    """μ(Y) = ‖Y − 1ȳᵀ‖_F; 0 = all tokens the same."""
    relative_collapse: Number
    """μ(Y)/‖Y‖_F, in [0, 1]; 0 = all tokens the same."""
    mean_cosine: Number
    """Mean cosine of two different tokens, in [−1, 1]; 1 = all tokens parallel."""
    effective_rank: Number
    """Of the T×D states, in [1, min(T, D)]."""
    turn: Number = math.nan
    """min_c ‖Y − cY'‖/‖Y‖ against the state Y' before it, in [0, 1]; 0 = the block only scaled it.

    NaN for layer 0, and where the block changes the shape.
    """
    spread: dict[str, Number] = Field(default_factory=dict)


class Place(Record):
    """Where a finding is: a stack, and as far as it goes the layer, the site and the head."""

    stack: str = ""
    layer: Count | None = None
    site: str = ""
    head: Count | None = None

    def __str__(self) -> str:
        parts = [self.stack] if self.stack else []
        if self.layer is not None:
            parts.append(f"layer {self.layer}")
        if self.head is not None:
            parts.append(f"head {self.head}")
        return " ".join(parts) or self.site or "model"


class Finding(Record):
    """Something the audit thinks its reader should know."""

    code: str
    severity: Severity
    where: Place
    evidence: dict[str, Number]
    """The numbers it rests on, under the names of the measures."""
    meaning: str
    """One plain sentence."""
    remedy: str
    """A command or a call."""


class Unseen(Record):
    """A module that looks like a mixer and was not captured."""

    name: str
    type: str
    reason: str


class Provenance(Record):
    """What was audited, on what, with what, by which command."""

    model: str
    model_class: str = ""
    revision: str = ""
    parameters: Count = 0
    data: str = ""
    delta: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    model_dtype: str = ""
    measure_dtype: str = "float64"
    method: str = "exact"
    device: str = ""
    batches: Count = 0
    sequences: Count = 0
    created: str = ""
    """UTC, ISO 8601."""
    command: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    """What a reader must know about how the numbers came about: dropout on, compiled model run eagerly, …"""


class AuditRecord(Record):
    """Everything an audit found, as it is written to disk."""

    format: Literal["rankwise-audit"] = "rankwise-audit"
    schema_version: int = SCHEMA_VERSION
    complete: bool = True
    provenance: Provenance
    heads: list[HeadRecord]
    layers: list[LayerRecord]
    findings: list[Finding]
    unseen: list[Unseen] = Field(default_factory=list)
