"""What an audit says: plain records, no torch, safe to save and to read years later."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rankwise._internals.records import Count, Number, Record, Size, format_number
from rankwise.auditing.baseline_records import Baseline, BaselineRecord
from rankwise.auditing.importance_records import HeadImportance, ImportanceRecord
from rankwise.auditing.matrix_picture import MatrixPicture
from rankwise.auditing.measures import NULLS, HeadMeasures, LayerMeasures
from rankwise.auditing.merge_records import Merging

SCHEMA_VERSION = 3
"""Raised whenever a field changes its meaning; `Audit.load` refuses what it does not know."""

Severity = Literal["info", "warning", "error"]
PEAK_MASS = 0.5
"""Share of all weight from which a token is said to be where rows look: the others share less than it has."""

SEVERITY_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}


class RankAt(Record):
    """The ranks of a head and of its nulls at one threshold: means over the sequences."""

    delta: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    numerical_rank: Number
    """NaN where an estimate can only bound it."""
    rank_low: Number
    rank_high: Number
    hardmax_rank: Number
    random_rank: Number
    uniform_rank: Number

    @property
    def nulls(self) -> dict[str, float]:
        """Those that are known, by their names."""
        named = {name: getattr(self, name) for name in NULLS}
        return {name: null for name, null in named.items() if not math.isnan(null)}


class HeadOrigin(Record):
    """Which head it is, and of what it was measured."""

    stack: str
    """The blocks it belongs to, such as ``encoder.block``."""
    site: str
    """The module that mixed, such as ``encoder.layer.0.attention.self``."""
    layer: Count
    """Block of the stack, from 0: it reads state ``layer`` and writes state ``layer + 1``."""
    head: Count
    kind: str
    mask: Literal["full", "causal", "window", "other"]
    """Which tokens a row may see: sets the nulls."""
    cross: bool = False
    sequences: Count
    """Sequences (or windows of images) that gave finite numbers."""
    nonfinite: Count = 0
    """Sequences whose operator held NaN or infinity; left out of every mean."""
    estimated: Count = 0
    """Sequences whose ranks were estimated without the matrix; of the others they are exact."""
    fallbacks: Count = 0
    """Sequences in which a singular value lay too close to a threshold for the fast count, and the SVD
    decided."""
    tokens: Size
    """Rows T without padding, mean over sequences."""
    sources: Size
    """Columns S without padding, mean over sequences."""
    full_rank: Size = math.nan
    """min(T, S), mean over sequences: it may be less than that of the means."""
    width: Count | None = None
    """K of its queries and keys; None where the mixer has none, or the model formed the matrix itself."""

    @property
    def smaller(self) -> float:
        """min(T, S), mean over sequences; in records before version 2 that of the means."""
        return min(self.tokens, self.sources) if math.isnan(self.full_rank) else self.full_rank


class HeadRecord(HeadMeasures, HeadOrigin):
    """One head of one layer: means over the sequences of the audit, with their spread.

    Its measures are the rows of `rankwise.auditing.measures.HeadMeasures`, as `docs/measures.md` lists them.
    Ranks are of the operator without padded rows and columns, in float64.
    """

    rank_low: Number = math.nan
    """Mean lower end of the 95 % interval of the numerical rank; the rank itself where it is exact."""
    rank_high: Number = math.nan
    """Mean upper end of it."""
    hardmax_rank: Number
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
    membership_map: list[Number] = Field(default_factory=list)
    """Π of each token of the first sequence, as many as 1,024; of TSSA, empty elsewhere."""
    membership_grid: tuple[Count, Count] | None = None
    """Rows and columns in which these tokens lie, where they are patches of a picture."""
    nearest_head: Count | None = None
    """The head of the same site that mixes most alike."""
    spread: dict[str, Number] = Field(default_factory=dict)
    """Standard deviation over sequences, under the name of each measure."""
    stderr: dict[str, Number] = Field(default_factory=dict)
    """Of estimated measures: the mean standard error over sequences; empty where all is exact.

    The random vectors of an estimate are the same for all sequences: errors do not average out.
    """
    max_token: str = ""
    """The token with the largest mean share of a row, by what most sequences have in common: its text, where
    a tokenizer was given, and its place. That share is ``max_token_mass``: where it is small, other tokens
    have nearly as much, and single rows may look elsewhere (`named_peak`)."""
    max_token_sequences: Count = 0
    """How many sequences have it there."""
    picture: MatrixPicture | None = None
    """The matrix on the first sequence, where it was asked for."""
    second_picture: MatrixPicture | None = None
    """On the second sequence, where there is one."""
    spectrum: list[Number] = Field(default_factory=list)
    """Singular values σ_1 ≥ σ_2 ≥ … of the first sequence, at most 64 of them, evenly taken by index.

    Empty where they were not computed.
    """
    importance: HeadImportance | None = None
    """What the model loses without it, in the unit of the audit's worth; None where nobody asked."""
    baseline: Baseline | None = None
    """The same head at fresh weights, on the same data; None where nobody asked."""
    merging: Merging | None = None
    """What `Audit.merge` needs beside the means; None in older files."""

    def __repr__(self) -> str:
        ranks = f"numerical rank {format_number(self.numerical_rank)} of {format_number(self.smaller)}"
        return (
            f"HeadRecord({self.site!r}, layer {self.layer}, head {self.head}: {_word(self.kind)}, {ranks}, "
            f"effective {format_number(self.effective_rank)}, stable {format_number(self.stable_rank)})"
        )

    __str__ = __repr__

    @model_validator(mode="after")
    def _grid_holds_the_map(self) -> "HeadRecord":
        grid = self.membership_grid
        if grid is not None and grid[0] * grid[1] != len(self.membership_map):
            raise ValueError(f"membership_grid {grid} should hold {len(self.membership_map)} tokens")
        return self

    @property
    def named_peak(self) -> str:
        """``max_token`` where it gets at least half of all weight, `PEAK_MASS`: no other token has more.

        Below that there may be no token that rows look at most: of a head that looks at the token before, the
        largest mean share is little above 1/S.
        """
        return self.max_token if self.max_token_mass >= PEAK_MASS else ""

    @property
    def least_rank(self) -> float:
        """What the numerical rank is at least: ``rank_low``, or the rank itself where no interval is kept."""
        return self.numerical_rank if math.isnan(self.rank_low) else self.rank_low

    @property
    def most_rank(self) -> float:
        """What the numerical rank is at most."""
        return self.numerical_rank if math.isnan(self.rank_high) else self.rank_high


class LayerOrigin(Record):
    """Which state it is, and of what it was measured."""

    stack: str
    site: str
    """The block that wrote the state; for layer 0 the block that reads it."""
    layer: Count
    """Blocks of the stack that have run before it."""
    sequences: Count
    nonfinite: Count = 0
    tokens: Number
    """Without padding, mean over sequences."""
    width: Count

    @property
    def smaller(self) -> float:
        """min(T, D)."""
        return min(self.tokens, float(self.width))


class LayerRecord(LayerMeasures, LayerOrigin):
    """The token states after ``layer`` blocks of a stack (0 = what the first block reads).

    Its measures are the rows of `rankwise.auditing.measures.LayerMeasures`: means over the sequences.
    """

    spread: dict[str, Number] = Field(default_factory=dict)
    """Standard deviation over sequences, under the name of each measure."""
    known: dict[str, Count] = Field(default_factory=dict)
    """Of how many sequences a measure is the mean, where not of all."""
    baseline: Baseline | None = None
    """The same state of the model at fresh weights, on the same data; None where nobody asked."""

    def __repr__(self) -> str:
        return (
            f"LayerRecord({self.stack!r}, layer {self.layer}: μ/‖Y‖ {format_number(self.relative_spread)}, "
            f"mean cosine {format_number(self.mean_cosine)}, "
            f"effective rank {format_number(self.effective_rank)})"
        )

    __str__ = __repr__


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
    heads: list[Count] = Field(default_factory=list)
    """All heads of the site that it speaks of, where it speaks of several; ``where.head`` is one of them."""

    def __repr__(self) -> str:
        return f"Finding({_word(self.code)}, {self.severity}, {str(self.where)!r}: {self.meaning!r})"

    __str__ = __repr__


class Action(Record):
    """Next step for the reader of an audit."""

    text: str
    """The step in words, with its commands in backticks."""
    shell: str = ""
    """Shell command; empty if the step has none."""
    python: str = ""
    """Line of Python; empty if the step has none."""


class Verdict(Record):
    """What follows from the findings of an audit."""

    sentence: str
    actions: tuple[Action, ...] = ()
    """At most three actions, the most urgent first."""


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
    method_asked: str = ""
    """``exact``, ``estimate`` or ``auto``; empty in older files."""
    device: str = ""
    batches: Count = 0
    sequences: Count = 0
    audits: Annotated[int, Field(ge=1)] = 1
    """How many audits were merged into this audit."""
    parts: list[str] = Field(default_factory=list)
    """A digest of the data of each audit that was merged into this audit, or of its own."""
    weights: str = ""
    """A digest of the weights; empty where they could not be looked at."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Of a job of a sweep, digests of the local files it reads."""
    created: str = ""
    """UTC, ISO 8601."""
    command: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    advised: bool = False
    """True if `rankwise.skips.recommend` has examined the skip connections."""
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
    uncaptured: list[Unseen] = Field(default_factory=list)
    texts: dict[str, list[str]] = Field(default_factory=dict)
    """Tokens of the sequences that pictures of matrices are of, by the name of the input."""
    importance: ImportanceRecord | None = None
    """What was lost without heads and blocks; None where that was not asked for."""
    baseline: BaselineRecord | None = None
    """How the copies at fresh weights were made that heads and layers are held against."""


def _word(text: str) -> str:
    """A name on one line, whatever is in it."""
    return repr(text)[1:-1]
