"""Records of an audit: heads, token states, findings, origin. Plain data in JSON; torch is not imported."""

import base64
import math
import re
import zlib
from collections.abc import Iterable
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from rankwise._internals.records import Address as Address
from rankwise._internals.records import Count, Number, Record, Size, format_number
from rankwise._internals.records import UncapturedModule as UncapturedModule
from rankwise._internals.statistics import Floats
from rankwise.auditing.measure_table import HeadMeasures, StateMeasures
from rankwise.errors import strip_control
from rankwise.importance.records import HeadImportance

Severity = Literal["info", "warning", "error"]
SEVERITIES: dict[Severity, tuple[str, str]] = {
    "error": ("error", "errors"),
    "warning": ("warning", "warnings"),
    "info": ("note", "notes"),
}
"""Severities of findings, the most severe first, with their names in singular and plural."""
SEVERITY_ORDER = {severity: order for order, severity in enumerate(SEVERITIES)}
MaskName = Literal["full", "causal", "window", "other"]
PEAK_MASS = 0.5
"""Smallest mean attention weight at which a token is named as the peak. No other token can then have more
weight. If each row attends to its previous token, the largest mean weight is only about 1/S."""
MAP_SIDE = 128
"""Maximum number of rows and of columns of an attention map."""


class AtInit(Record):
    """Measures of the same head or layer in untrained copies of the model, on the same data."""

    seeds: Count
    """Number of copies of the model at initialization (one per seed) that have finite measures."""
    mean: dict[str, Number]
    """Mean of each measure over sequences and then over seeds, by name of the measure."""
    seed_std: dict[str, Number]
    """Standard deviation of each measure over seeds; NaN for one seed."""
    spectrum: list[Number] = Field(default_factory=list)
    """For heads: singular values of the first sequence, averaged over seeds; see `HeadRecord.spectrum`."""


class InitialModels(Record):
    """Seeds and method with which an audit built copies of the model at initialization."""

    seeds: list[Count]
    """Random seeds of the audited copies."""
    built: str
    """Description of how the copies were initialized, such as "from its configuration"."""

    def __str__(self) -> str:
        seeds = ", ".join(map(str, self.seeds))
        name = "seeds" if len(self.seeds) > 1 else "seed"
        built = strip_control(self.built)
        return f"the same architecture at initialization, built {built}, on the same data, {name} {seeds}"


class AttentionMap(Record):
    """Mixing matrix of a head on one sequence, without padding; averaged block by block beyond 128 tokens."""

    rows: Annotated[int, Field(gt=0, le=MAP_SIDE)]
    columns: Annotated[int, Field(gt=0, le=MAP_SIDE)]
    tokens: Annotated[int, Field(gt=0, lt=2**53)]
    sources: Annotated[int, Field(gt=0, lt=2**53)]
    """Number of columns S of the matrix (``tokens``: rows T). Matrix row t is in map row t·rows//tokens."""
    largest: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Largest finite magnitude in the map; stored values are divided by it."""
    values: str
    """Map divided by ``largest``: little-endian float16, row by row, compressed by zlib, in base64."""
    row_tokens: str = ""
    column_tokens: str = ""
    """Key in `Audit.texts` of the tokens of the columns. ``row_tokens`` is the key for the rows. The key of
    unknown tokens is empty."""

    @classmethod
    def of(
        cls,
        matrix: NDArray[np.float32],
        tokens: int,
        sources: int,
        row_tokens: str = "",
        column_tokens: str = "",
    ) -> "AttentionMap":
        """Return the map of a matrix as compressed bytes.

        The map may be smaller than the attention matrix, which has ``tokens`` rows and ``sources`` columns.
        """
        largest = float(np.abs(matrix, where=np.isfinite(matrix), out=np.zeros_like(matrix)).max())
        with np.errstate(over="ignore", invalid="ignore"):
            shares = (matrix / (largest or 1.0)).astype("<f2")
        rows, columns = matrix.shape
        values = base64.b64encode(zlib.compress(shares.tobytes())).decode()
        return cls(
            rows=rows, columns=columns, tokens=tokens, sources=sources, largest=largest, values=values,
            row_tokens=row_tokens, column_tokens=column_tokens,
        )  # fmt: skip

    def matrix(self) -> NDArray[np.float32]:
        """Return the decompressed map (rows, columns), accurate to 3 digits of the largest value.

        Raise `ValueError` if ``values`` is damaged.
        """
        size = 2 * self.rows * self.columns
        try:
            packed = base64.b64decode(self.values, validate=True)
            content = zlib.decompressobj().decompress(packed, size + 1)  # the bound stops zip bombs
        except (ValueError, zlib.error) as error:
            raise ValueError(f"values should be float16 in zlib in base64: {error}") from None
        if len(content) != size:
            raise ValueError(f"values should hold {self.rows}×{self.columns} numbers")
        shares = np.frombuffer(content, dtype="<f2").reshape(self.rows, self.columns)
        return shares.astype(np.float32) * np.float32(self.largest)

    @model_validator(mode="after")
    def _holds_its_numbers(self) -> "AttentionMap":
        self.matrix()
        return self


class Rows(Record):
    """Rows of float64 numbers as text: little-endian, row by row, in base64."""

    width: Annotated[int, Field(gt=0)]
    values: str

    @classmethod
    def of(cls, rows: Floats) -> "Rows":
        """Return rows (N, width) as text."""
        return cls(width=rows.shape[-1], values=base64.b64encode(rows.astype("<f8").tobytes()).decode())

    def array(self) -> Floats:
        """Return the rows (N, width). Raise `ValueError` if ``values`` is damaged."""
        numbers = np.frombuffer(base64.b64decode(self.values, validate=True), dtype="<f8")
        return numbers.reshape(-1, self.width).astype(np.float64)

    @model_validator(mode="after")
    def _holds_its_numbers(self) -> "Rows":
        self.array()
        return self


class MergeData(Record):
    """Data of a head that `Audit.merge` needs in addition to the means in the record."""

    longest: Count = 0
    """Number of tokens of the longest sequence, from which the head's mask is taken."""
    distances: list[Number] = Field(default_factory=list)
    """Mean distance from this head to each head of the mixer, in head order; NaN for the head itself. Empty
    if no distance is known."""
    pairs: list[Count] = Field(default_factory=list)
    """Number of sequences averaged in each distance."""
    named: Count = 0
    """Number of sequences in which the most attended token has a name."""
    names: dict[str, Count] = Field(default_factory=dict)
    """Number of sequences by name of the most attended token, for the most frequent names."""
    moments: dict[str, Rows] = Field(default_factory=dict)
    """Second moments (K, K) of keys and of values over all sequences, and their number as a last row, by
    measure. The first head of each key head has them if the audit was made with ``keep_moments``."""


class HeadOrigin(Record):
    """Address of a head, and the sequences on which it was measured."""

    stack: str
    """Stack of blocks, such as ``encoder.block``."""
    site: str
    """Module that mixes tokens, such as ``encoder.layer.0.attention.self``."""
    layer: Count
    """Index of the block in its stack, from 0. It reads state ``layer`` and writes state ``layer + 1``."""
    call: Count = 0
    """Index of the call of the module within its layer, from 0."""
    head: Count
    kind: str
    mask: MaskName
    """Columns to which rows may attend; reference ranks are computed under the same mask."""
    cross: bool = False
    sequences: Count
    """Number of sequences with tokens and a finite operator; means are over these sequences."""
    nonfinite_sequences: Count = 0
    """Number of sequences whose operator contains NaN or infinity; they are excluded from all means."""
    estimated_sequences: Count = 0
    """Number of sequences whose ranks were estimated without forming the matrix."""
    tokens: Size
    """Number of rows T without padding, mean over sequences."""
    sources: Size
    """Number of columns S without padding, mean over sequences."""
    full_rank: Size
    """Mean of min(T, S) over sequences; it can be smaller than the minimum of the two means."""
    head_dim: Count | None = None
    """Width K of the queries and keys of a head. None if the mixer has no queries and keys, or if the model
    formed the matrix itself."""
    heads_per_group: Annotated[int, Field(ge=1)] = 1
    """Number of query heads that share the key head."""

    @property
    def id(self) -> Address:
        """Address of the head: stack, layer, site, call and head index."""
        return Address(self.stack, self.layer, self.site, self.call, self.head)


class HeadRecord(HeadMeasures, HeadOrigin):
    """Measures of one head of one layer: means over the sequences of the audit, with standard deviations.

    `docs/reference/measures.md` lists the measures. Ranks are computed in float64,
    without padded rows and columns.
    """

    rank_low: Number
    """Mean lower end of the 95 % interval of the numerical rank; equal to the rank if the rank is exact."""
    rank_high: Number
    """Mean upper end of the 95 % interval of the numerical rank."""
    one_hot_rank: Number
    """Expected rank of one-hot rows under the same mask: each row selects one allowed column at random. NaN
    for mixers whose rows are not averages over tokens (state-space, diagonal), and for δ > 1, because a
    column that one row selects has singular value 1."""
    random_rank: Number = math.nan
    """Numerical rank of softmax attention with random queries and keys: same length, head dim, mask, scale.
    NaN if the head dim is unknown (the model formed the matrix itself), `rankwise.theory` does not cover the
    mask, or T is large."""
    uniform_rank: Number = math.nan
    """Numerical rank of equal weights on all columns that the mask allows (attention that ignores the
    tokens). NaN for masks that `rankwise.theory` does not cover, and for windows above 4,096 tokens."""
    membership_map: list[Number] = Field(default_factory=list)
    """For TSSA: membership Π (weight in the head) of the first 1,024 tokens of the first sequence."""
    nearest_head: Count | None = None
    """Index of the head of the same site whose mixing matrix is nearest."""
    std: dict[str, Number] = Field(default_factory=dict)
    """Standard deviation over sequences, by name of the measure."""
    stderr: dict[str, Number] = Field(default_factory=dict)
    """Standard error of each estimated measure, mean over sequences; empty if all measures are exact.
    All sequences share the random vectors of the estimate, so errors do not average out."""
    counts: dict[str, Count] = Field(default_factory=dict)
    """Number of sequences in the mean, for measures that are undefined in some sequences."""
    max_token: str = ""
    """Name of the token with the largest mean weight in a row (``max_token_mass``): text, position or both,
    whichever most sequences share. Empty if no name is shared by half of the sequences. If the weight is
    small, rows may attend to other tokens (see `named_peak`)."""
    max_token_sequences: Count = 0
    """Number of sequences in which ``max_token`` names the token with the largest weight."""
    attention_map: AttentionMap | None = None
    """Attention map of the first sequence; None if no map of this head was kept."""
    spectrum: list[Number] = Field(default_factory=list)
    """At most 64 singular values of the first sequence, evenly spaced by index; empty for estimated ranks."""
    importance: HeadImportance | None = None
    """Change of the loss if the head is removed; None if importance was not requested."""
    at_init: AtInit | None = None
    """Measures of the same head at initialization, on the same data; None if not requested."""
    merging: MergeData = MergeData()

    def __repr__(self) -> str:
        ranks = f"numerical rank {format_number(self.numerical_rank)} of {format_number(self.full_rank)}"
        kind = strip_control(self.kind)
        return (
            f"HeadRecord({self.site!r}, layer {self.layer}, head {self.head}: {kind}, {ranks}, "
            f"effective {format_number(self.effective_rank)}, stable {format_number(self.stable_rank)})"
        )

    @property
    def transformer_lens(self) -> str:
        """Name of the head's layer of attention maps in TransformerLens, such as blocks.3.attn.hook_pattern.

        Its maps have the axes (batch, head, row, column). T5 has stacks; other models have one.
        """
        part = self.stack.split(".")[0] if self.stack in ("encoder.block", "decoder.block") else "blocks"
        return f"{part}.{self.layer}.{'cross_attn' if self.cross else 'attn'}.hook_pattern"

    @property
    def nnsight(self) -> str:
        """Path of the head's module in nnsight and Python, such as ``model.layers[3].self_attn``."""
        return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", self.site)

    @property
    def named_peak(self) -> str:
        """``max_token`` if the mean weight is at least `PEAK_MASS` (one half), otherwise an empty string."""
        return self.max_token if self.max_token_mass >= PEAK_MASS else ""


class StateOrigin(Record):
    """Address of token states in a stack of blocks, and the sequences on which they were measured."""

    stack: str
    site: str
    """Name of the block that wrote the states; for the input of the first block, the name of that block."""
    blocks: Count
    """Number of blocks of the stack that the states have passed; 0 for the input of the first block."""
    sequences: Count
    nonfinite_sequences: Count = 0
    """Number of sequences whose states contain NaN or infinity; they are excluded from all means."""
    tokens: Number
    """Number of tokens T without padding, mean over sequences."""
    hidden_size: Count
    """Number of channels D of a token state."""

    @property
    def id(self) -> Address:
        """Address of the block that wrote the states, or of the stack for the input of the first block."""
        return Address(self.stack, self.blocks - 1, self.site) if self.blocks else Address(self.stack)

    @property
    def full_rank(self) -> float:
        """min(T, D), where T is the mean number of tokens."""
        return min(self.tokens, float(self.hidden_size))


class StateRecord(StateMeasures, StateOrigin):
    """Measures of the token states after ``blocks`` blocks of a stack: means over the sequences."""

    std: dict[str, Number] = Field(default_factory=dict)
    """Standard deviation over sequences, by name of the measure."""
    counts: dict[str, Count] = Field(default_factory=dict)
    """Number of sequences in the mean, for measures that are undefined in some sequences."""
    largest_at: dict[int, Count] = Field(default_factory=dict)
    """Number of sequences by position of the token of largest norm, for the most frequent positions. Padding
    does not count in positions."""
    at_init: AtInit | None = None
    """Measures of the same states at initialization, on the same data; None if not requested."""
    pooled: dict[str, Rows] = Field(default_factory=dict)
    """Mean tokens of all sequences, or fewer rows with the same singular values, by measure. Empty unless the
    audit was made with ``keep_moments``."""

    @property
    def largest_position(self) -> int | None:
        """Position of the token of largest norm in most sequences. None if no position has more than half."""
        position = max(self.largest_at, key=lambda place: self.largest_at[place], default=None)
        return position if position is not None and 2 * self.largest_at[position] > self.sequences else None

    def __repr__(self) -> str:
        return (
            f"StateRecord({self.stack!r}, after {self.blocks} blocks: "
            f"direction spread {format_number(self.direction_spread)}, "
            f"mean cosine {format_number(self.mean_cosine)}, "
            f"effective rank {format_number(self.effective_rank)})"
        )


def last_states(states: Iterable[StateRecord]) -> list[StateRecord]:
    """Return the token states after the last block of each stack."""
    return list({state.stack: state for state in sorted(states, key=lambda state: state.blocks)}.values())


class Remedy(Record):
    """Suggested action as text, with a command and Python code for it; `remedy_text` renders it."""

    words: str = ""
    """Text of the action, printed before the code."""
    verb: Literal["", "audit", "compress", "skip"] = ""
    """Command of ``rankwise`` for the action, shown if a command made the audit. Empty if no command fits."""
    options: list[Annotated[list[str], Field(min_length=1)]] = Field(default_factory=list)
    """Options of the command, in addition to the model and data of the audit: [option, value] or [flag]."""
    out: str = ""
    """Last part of the name of the folder that the command writes; empty if the command writes no folder."""
    code: str = ""
    """Python code for the action, with the names ``rw``, ``model``, ``batches`` and ``batch``."""
    saves: Number = math.nan
    """Share of the model's parameters that the action saves; NaN if unknown."""
    costs: Number = math.nan
    """Relative increase of the loss after the action; NaN if unknown."""
    condition: str = ""
    """Condition under which the action is possible; empty if the action is always possible."""
    no_action: str = ""
    """Reason why no action is recommended; empty if the action is recommended."""
    then: list["Remedy"] = Field(default_factory=list)
    """Further steps, or alternatives, in order."""


class Finding(Record):
    """Problem or notable property of a model that an audit found."""

    code: str
    severity: Severity
    where: Address
    evidence: dict[str, Number]
    """Numbers from which the finding follows, by name of the measure."""
    meaning: str
    """One sentence that explains the finding."""
    remedy: Remedy | None = None
    heads: list[Count] = Field(default_factory=list)
    """Indices of all heads that a finding about a mixer concerns, ``where.head`` included. Empty for other
    findings."""

    @property
    def place(self) -> str:
        """Address of the finding as text, such as "encoder.layer layer 3 head 7"."""
        return str(self.where)

    def __repr__(self) -> str:
        return f"Finding({strip_control(self.code)}, {self.severity}, {self.place!r}: {self.meaning!r})"


class Verdict(Record):
    """Summary of an audit or of a plan: one sentence and suggested actions."""

    sentence: str
    actions: tuple[str, ...] = ()
    """Remedies of at most three findings, most urgent first, with commands in backticks."""
    no_action: str = ""
    """Sentence on an action that is not recommended, and why; empty if there is nothing to say."""


class Provenance(Record):
    """Origin of an audit: model, weights, data, settings, package versions and command."""

    model: str
    model_class: str = ""
    revision: str = ""
    parameters: Count = 0
    data: str = ""
    delta: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    model_dtype: str = ""
    rank_method: str = "exact"
    device: str = ""
    batches: Count = 0
    sequences: Count = 0
    data_digests: list[str] = Field(default_factory=list)
    """Digest of the data of this audit, or of each audit that was merged into it."""
    weights_digest: str = ""
    """Digest of the weights of the model; empty if the weights cannot be read."""
    part: str = ""
    """Name of the audited part, such as text_model, if the command named a model with several parts."""
    random_weights: list[str] = Field(default_factory=list)
    """Names of weights in blocks and embeddings that are not in the checkpoint, and therefore random."""
    file_digests: dict[str, str] = Field(default_factory=dict)
    """Digests of the local files that the audit read, by option, from which ``--resume`` detects changes.
    Empty for audits that ``--resume`` cannot keep."""
    seconds: Number = math.nan
    """Duration of all measurements in seconds, without loading the model. Merging adds the durations."""
    created: str = ""
    """Date and time at the end of the audit: UTC, ISO 8601."""
    command: str = ""
    arguments: list[Annotated[list[str], Field(min_length=1)]] = Field(default_factory=list)
    """Arguments of ``rankwise audit``, which commands of remedies repeat: [model], then [option, value] or
    [flag]. Empty if Python code made the audit."""
    versions: dict[str, str] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    """Circumstances that affect the numbers, such as active dropout or a compiled model run uncompiled."""
