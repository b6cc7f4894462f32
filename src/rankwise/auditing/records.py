"""What an audit says: plain records that can be saved and read years later; no torch."""

import base64
import math
import zlib
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rankwise._internals.records import Count, Number, Record, Size, format_number
from rankwise.auditing.measure_table import NULLS, HeadMeasures, LayerMeasures
from rankwise.importance.records import HeadImportance
from rankwise.tracing.head_id import HeadId as HeadId

SCHEMA_VERSION = 3
"""Raised whenever a field changes its meaning; `Audit.load` refuses newer versions."""

BAND = (10**-0.5, 10**-0.25, 1.0, 10**0.25, 10**0.5)
"""Thresholds at which ranks are counted, as multiples of δ: one decade, from δ/√10 to √10 δ.

That δ is 0.01 and not 0.02 or 0.005 is a convention, on which no statement must depend. A wider band reaches
where rank says nothing: at T = 512 and K = 32, random queries and keys have rank 0.996 T at δ = 1e-4 and
0.07 T at 1e-1. Ranks and reference ranks fall as δ grows; neighbors of the band are at most 1.8 times apart.
"""

Severity = Literal["info", "warning", "error"]
SEVERITY_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}
PEAK_MASS = 0.5
"""Share of all weight from which rows are said to look at one token: no other token has more."""
MAP_SIDE = 128
"""Most rows and columns of an attention map."""


def thresholds(delta: float) -> tuple[float, ...]:
    """Return the thresholds of the band around δ, which is one of them.

    Examples:
        >>> [round(threshold, 4) for threshold in thresholds(0.01)]
        [0.0032, 0.0056, 0.01, 0.0178, 0.0316]
    """
    return tuple(delta * factor for factor in BAND)


class RankAt(Record):
    """The ranks of a head and its reference ranks at one threshold: means over the sequences."""

    delta: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    numerical_rank: Number
    """NaN if an estimate can only bound it."""
    rank_low: Number
    rank_high: Number
    hardmax_rank: Number
    random_rank: Number
    uniform_rank: Number

    @property
    def nulls(self) -> dict[str, float]:
        """Reference ranks that are known, by name."""
        named = {name: getattr(self, name) for name in NULLS}
        return {name: null for name, null in named.items() if not math.isnan(null)}


class BaselineAt(Record):
    """The rank of a head at initialization at one threshold, and its difference from the rank of the model.

    Differences are the rank of the model minus the rank at initialization, for one sequence and one seed at a
    time: effects of the length and content of sequences on both cancel.
    """

    delta: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    rank_low: Number
    """Mean over seeds and sequences; with ``rank_high`` an interval if ranks are estimated."""
    rank_high: Number
    seed_std: Number
    """Standard deviation over seeds of the mean over sequences; NaN for one seed."""
    difference_low: Number
    """Mean difference at the near ends of the intervals, the least that it can be …"""
    difference_high: Number
    """… and the most."""
    margin: Number
    """t·s, where s is the standard deviation of the differences over all pairs of a sequence and a seed and
    t the 97.5 % quantile of Student's t: a random pair is within it of the mean difference. NaN below three
    pairs or two seeds."""
    pairs: Count


class Baseline(Record):
    """The same measures of the same architecture at initialization, on the same data."""

    seeds: Count
    """Copies with finite numbers."""
    mean: dict[str, Number]
    """Mean over seeds of means over sequences, under the name of each measure."""
    seed_std: dict[str, Number]
    """Standard deviation over seeds; NaN for one seed."""
    std: dict[str, Number]
    """Standard deviation over sequences, mean over seeds."""
    band: list[BaselineAt] = Field(default_factory=list)
    """For heads: at the thresholds of the head's own ``band``."""
    spectrum: list[Number] = Field(default_factory=list)
    """For heads: singular values of the first sequence, at the indices of the head's own ``spectrum``; means
    over seeds."""

    @property
    def judged(self) -> bool:
        """True if its margins are known, so that a head can be above or below it."""
        return bool(self.band) and all(math.isfinite(point.margin) for point in self.band)


class BaselineRecord(Record):
    """How the baseline of an audit was made."""

    seeds: list[Count]
    """Seeds of the copies that were audited."""
    built: str
    """How the copies were initialized."""

    def __str__(self) -> str:
        seeds = ", ".join(map(str, self.seeds))
        name = "seeds" if len(self.seeds) > 1 else "seed"
        return f"the same architecture at fresh weights, built {self.built}, on the same data, {name} {seeds}"


class AttentionMap(Record):
    """The matrix of a head on one sequence, without padding; beyond 128 tokens, means over blocks of it."""

    rows: Annotated[int, Field(gt=0, le=MAP_SIDE)]
    columns: Annotated[int, Field(gt=0, le=MAP_SIDE)]
    """Size of the map."""
    tokens: Annotated[int, Field(gt=0, lt=2**53)]
    sources: Annotated[int, Field(gt=0, lt=2**53)]
    """Rows T and columns S of the matrix. Row t of it is in row t·rows//tokens of the map."""
    largest: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Largest finite magnitude of the map, of which the values are shares."""
    values: str
    """Shares in float16, little-endian, row by row; zlib, base64."""
    row_tokens: str = ""
    column_tokens: str = ""
    """Names of the audit's ``texts`` that hold the tokens of rows and columns; empty if it has none."""

    @classmethod
    def of(
        cls,
        matrix: NDArray[np.float32],
        tokens: int,
        sources: int,
        row_tokens: str = "",
        column_tokens: str = "",
    ) -> "AttentionMap":
        """Pack a map.

        Args:
            matrix: the map (rows, columns).
            tokens: rows of the matrix that it shows.
            sources: columns of that matrix.
            row_tokens: name of the text with the tokens of the rows.
            column_tokens: name of the text with the tokens of the columns.
        """
        largest = float(np.abs(matrix, where=np.isfinite(matrix), out=np.zeros_like(matrix)).max())
        with np.errstate(over="ignore", invalid="ignore"):
            shares = (matrix / (largest or 1.0)).astype("<f2")
        rows, columns = matrix.shape
        return cls(
            rows=rows,
            columns=columns,
            tokens=tokens,
            sources=sources,
            largest=largest,
            values=base64.b64encode(zlib.compress(shares.tobytes())).decode(),
            row_tokens=row_tokens,
            column_tokens=column_tokens,
        )

    def matrix(self) -> NDArray[np.float32]:
        """Return the map as numbers (rows, columns), to 3 significant digits of the largest."""
        shares = np.frombuffer(self._unpacked(), dtype="<f2").reshape(self.rows, self.columns)
        return shares.astype(np.float32) * np.float32(self.largest)

    def _unpacked(self) -> bytes:
        """Unpack no more bytes than the map may have."""
        size = 2 * self.rows * self.columns
        try:
            packed = base64.b64decode(self.values, validate=True)
            shares = zlib.decompressobj().decompress(packed, size + 1)
        except (ValueError, zlib.error) as error:
            raise ValueError(f"values should be float16 in zlib in base64: {error}") from None
        if len(shares) != size:
            raise ValueError(f"values should hold {self.rows}×{self.columns} numbers")
        return shares

    @model_validator(mode="after")
    def _holds_its_numbers(self) -> "AttentionMap":
        self._unpacked()
        return self


class MergeData(Record):
    """What merging needs of a head next to its means."""

    longest: Count
    """Tokens of the longest sequence: the head's mask is that of it."""
    distances: list[Number]
    """Mean distance to each head of the mixer, in their order; NaN to itself."""
    pairs: list[Count]
    """Sequences over which each distance is a mean."""
    named: Count
    """Sequences whose token at the peak has a name."""
    names: list[dict[str, Count]]
    """How many of them share each name: the 16 most frequent of each kind of name."""


class HeadOrigin(Record):
    """Which head it is, and on what it was measured."""

    stack: str
    """Stack of blocks, such as ``encoder.block``."""
    site: str
    """Module that mixes tokens, such as ``encoder.layer.0.attention.self``."""
    layer: Count
    """Block of the stack, from 0: it reads state ``layer`` and writes state ``layer + 1``."""
    call: Count = 0
    """Call of the module within its layer, from 0."""
    head: Count
    kind: str
    mask: Literal["full", "causal", "window", "other"]
    """Which tokens a row may see; reference ranks are of the same mask."""
    cross: bool = False
    sequences: Count
    """Sequences (or windows of images) with finite numbers."""
    nonfinite: Count = 0
    """Sequences whose operator holds NaN or infinity; they are not in any mean."""
    estimated: Count = 0
    """Sequences whose ranks were estimated without the matrix; all others are exact."""
    fallbacks: Count = 0
    """Sequences in which a singular value was too close to a threshold for the fast count, so that the SVD
    decided."""
    tokens: Size
    """Rows T without padding, mean over sequences."""
    sources: Size
    """Columns S without padding, mean over sequences."""
    full_rank: Size = math.nan
    """min(T, S), mean over sequences: it may be less than the minimum of the means."""
    width: Count | None = None
    """K of queries and keys; None if the mixer has none, or if the model formed the matrix itself."""

    @property
    def id(self) -> HeadId:
        """Address of the head."""
        return HeadId(self.stack, self.layer, self.site, self.call, self.head)

    @property
    def smaller(self) -> float:
        """min(T, S), mean over sequences; in records of version 1 that of the means."""
        return min(self.tokens, self.sources) if math.isnan(self.full_rank) else self.full_rank


class HeadRecord(HeadMeasures, HeadOrigin):
    """One head of one layer: means over the sequences of the audit, with standard deviations.

    Its measures are the rows of `rankwise.auditing.measure_table.HeadMeasures`, listed in `docs/measures.md`.
    Ranks are of the operator without padded rows and columns, in float64.
    """

    rank_low: Number = math.nan
    """Mean lower end of the 95 % interval of the numerical rank; the rank itself if it is exact."""
    rank_high: Number = math.nan
    """Mean upper end of the interval."""
    hardmax_rank: Number
    """Expected rank of a hardmax matrix with uniform winners under the same mask.

    NaN for mixers whose rows are not means over tokens (state-space, diagonal), and for δ > 1, which a column
    that wins a single row does not reach.
    """
    random_rank: Number = math.nan
    """Numerical rank for random queries and keys of each sequence's length, width, mask and scale.

    NaN if the width is unknown (the model formed the matrix itself), the mask has no name, or T is large.
    """
    uniform_rank: Number = math.nan
    """Numerical rank of equal weights on all that a row may see, at each sequence's length: attention that
    does not distinguish tokens. NaN if the mask has no name, or is a window of more than 4,096 tokens.
    """
    band: list[RankAt] = Field(default_factory=list)
    """Ranks at five thresholds from δ/√10 to √10 δ, from the same spectra: a statement that holds at all of
    them does not depend on the choice of δ. Empty in records of version 1.
    """
    membership_map: list[Number] = Field(default_factory=list)
    """For TSSA, Π of each token of the first sequence, of at most 1,024; empty elsewhere."""
    membership_grid: tuple[Count, Count] | None = None
    """Rows and columns of these tokens if they are patches of an image."""
    nearest_head: Count | None = None
    """Head of the same site with the nearest matrix."""
    std: dict[str, Number] = Field(default_factory=dict)
    """Standard deviation over sequences, under the name of each measure."""
    stderr: dict[str, Number] = Field(default_factory=dict)
    """Mean standard error over sequences of estimated measures; empty if all are exact.

    The random vectors of an estimate are the same for all sequences: errors do not average out.
    """
    counts: dict[str, Count] = Field(default_factory=dict)
    """Sequences over which a number is a mean, for numbers that some finite sequences do not have."""
    max_token: str = ""
    """The token with the largest mean share of a row, by what most sequences have in common: its text, if
    there is a tokenizer, and its place. Its share is ``max_token_mass``: if it is small, other tokens have
    nearly as much, and single rows may look elsewhere (`named_peak`)."""
    max_token_sequences: Count = 0
    """Sequences in which this is the token."""
    attention_map: AttentionMap | None = None
    """The matrix on the first sequence, if it was requested."""
    second_attention_map: AttentionMap | None = None
    """The matrix on the second sequence, if there is one."""
    spectrum: list[Number] = Field(default_factory=list)
    """Singular values σ_1 ≥ σ_2 ≥ … of the first sequence, at most 64, evenly spaced by index.

    Empty if they were not computed.
    """
    importance: HeadImportance | None = None
    """Loss without the head, in the unit of the audit's importance; None if it was not requested."""
    baseline: Baseline | None = None
    """The same head at initialization, on the same data; None if it was not requested."""
    merging: MergeData | None = None
    """What `Audit.merge` needs next to the means; None in older files."""

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
        """``max_token`` if it has at least half of all weight, `PEAK_MASS`: no other token has more.

        Below that there may be no token that rows look at most: for a head that looks at the previous token,
        the largest mean share is little above 1/S.
        """
        return self.max_token if self.max_token_mass >= PEAK_MASS else ""

    @property
    def least_rank(self) -> float:
        """Lower bound of the numerical rank: ``rank_low``, or the rank itself if no interval is kept."""
        return self.numerical_rank if math.isnan(self.rank_low) else self.rank_low

    @property
    def most_rank(self) -> float:
        """Upper bound of the numerical rank."""
        return self.numerical_rank if math.isnan(self.rank_high) else self.rank_high


class LayerOrigin(Record):
    """Which token states they are, and on what they were measured."""

    stack: str
    site: str
    """Block that wrote the states; for layer 0 the block that reads them."""
    layer: Count
    """Blocks of the stack that ran before."""
    sequences: Count
    nonfinite: Count = 0
    tokens: Number
    """Tokens without padding, mean over sequences."""
    width: Count

    @property
    def smaller(self) -> float:
        """min(T, D)."""
        return min(self.tokens, float(self.width))


class LayerRecord(LayerMeasures, LayerOrigin):
    """The token states after ``layer`` blocks of a stack (0 = what the first block reads).

    Its measures are the rows of `rankwise.auditing.measure_table.LayerMeasures`: means over the sequences.
    """

    std: dict[str, Number] = Field(default_factory=dict)
    """Standard deviation over sequences, under the name of each measure."""
    counts: dict[str, Count] = Field(default_factory=dict)
    """Sequences over which a number is a mean, for numbers that some finite sequences do not have."""
    baseline: Baseline | None = None
    """The same states at initialization, on the same data; None if it was not requested."""

    def __repr__(self) -> str:
        return (
            f"LayerRecord({self.stack!r}, layer {self.layer}: μ/‖Y‖ {format_number(self.relative_spread)}, "
            f"mean cosine {format_number(self.mean_cosine)}, "
            f"effective rank {format_number(self.effective_rank)})"
        )

    __str__ = __repr__


class Finding(Record):
    """A problem or a remarkable fact that an audit found."""

    code: str
    severity: Severity
    where: HeadId
    evidence: dict[str, Number]
    """The numbers that it rests on, under the names of the measures."""
    meaning: str
    """One plain sentence."""
    remedy: str
    """A command or a call."""
    heads: list[Count] = Field(default_factory=list)
    """All heads of the site that it is about if there are several; ``where.head`` is one of them."""

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
    """What was audited, on which data, with which versions, by which command."""

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
    """Number of audits that were merged into this audit."""
    parts: list[str] = Field(default_factory=list)
    """A digest of the data of each audit that was merged into this audit, or of its own."""
    weights: str = ""
    """A digest of the weights; empty if they cannot be read."""
    sources: dict[str, str] = Field(default_factory=dict)
    """For a job of a sweep, digests of the local files that it reads."""
    created: str = ""
    """UTC, ISO 8601."""
    command: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    advised: bool = False
    """True if `rankwise.skips.recommend` has examined the skip connections."""
    notes: list[str] = Field(default_factory=list)
    """What a reader must know about how the numbers came about: dropout on, compiled model run eagerly, …"""


def _word(text: str) -> str:
    """Return a name on one line, whatever is in it."""
    return repr(text)[1:-1]
