"""The table of measures: each row is a field of a record, with all that is known of it.

Audits evaluate the functions that it names, records hold their values, comparisons and reports show them by
what is written here, and `docs/measures.md` lists them. A row needs a function of `rankwise.measures` and no
other place. The table knows no code and no torch: reports read it without.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import quantiles
from typing import Annotated, Any, NamedTuple

from rankwise._internals.records import MISSING, Number, Record, format_number

Bounds = Callable[[Any], tuple[float, float]]
"""The ends of the range that a measure can have in a record."""

NULLS = {
    "hardmax_rank": "random winners",
    "random_rank": "random queries and keys",
    "uniform_rank": "equal weights",
}
"""What numerical ranks are held against: the fields of the record, and what a reader is told."""
NULL_NOTES = {
    "hardmax_rank": "Every row picks one token at random, under the head's mask: not an untrained model, "
    "whose rows weigh many tokens, and no bound on what a head can have.",
    "random_rank": "Softmax of independent, standard normal queries and keys of the head's width and scale: "
    "not an untrained model, whose queries and keys are smaller and come from the same tokens.",
    "uniform_rank": "Every row weighs all that its mask lets it see alike: the limit of no scores at all, "
    "not the least rank there is.",
}
"""One sentence on each: what it is, and what it is not."""


class MixerKind(NamedTuple):
    """What holds for every matrix of a kind of operator; the default is that of state-space mixers."""

    rows_are_means: bool = False
    """Whether every row is a mean over tokens: random winners under its mask are a null for its rank."""
    scale_is_known: bool = False
    """Whether entries are shares: δ in their unit means the same in every layer. Others have signs."""
    mixes_tokens: bool = True
    """Whether a row has more than its own token: if not, measures of rows follow from the kind alone."""
    state_space: bool = True
    """Whether there may be a matrix for every channel, thousands, alike by the dozen: some are measured."""


_ATTENTION = MixerKind(rows_are_means=True, scale_is_known=True, state_space=False)

MIXER_KINDS = {
    "softmax": _ATTENTION,
    "dense": _ATTENTION,
    "linear": _ATTENTION,
    "diagonal": MixerKind(scale_is_known=True, mixes_tokens=False, state_space=False),
}
"""By `MixingOperator.kind`, which records hold; all others are as the default."""


def mixer_kind(kind: str) -> MixerKind:
    """What holds for a kind of operator.

    Args:
        kind: as a record holds it.

    Examples:
        >>> mixer_kind("softmax").rows_are_means, mixer_kind("selective").rows_are_means
        (True, False)
    """
    return MIXER_KINDS.get(kind, MixerKind())


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measure of heads or of token states."""

    name: str = ""
    """That of the field, filled in from it."""
    title: str
    formula: str
    range: str
    low: str
    """What the low end means …"""
    high: str
    """… and the high one."""
    function: str | None = None
    """Name in `MEASURES`, by default the field's name; "" if an audit fills the field otherwise."""
    digits: int
    """Decimals that are shown."""
    cost: str
    bounds: Bounds | None = None
    """The ends of the range in numbers; None where it has no upper end."""
    to_the_largest: bool = False
    """Whether a scale of colours ends at the largest value there is, and not at that of the range."""
    short: str = ""
    """A title for the head of a narrow column."""
    symbol: str = ""
    """What it is called among numbers, such as ``μ/‖Y‖``; else its name."""
    meaning: str = ""
    """Said beside its picture; a measure without has no picture."""
    console: str = ""
    """The head of its column on the console; a measure without has no column."""
    summed: bool = False
    """Whether a layer has the sum of its heads, and not their mean."""
    share: bool = False
    """Whether it is shown as a share of min(T, S)."""
    if_signed: str = ""
    """The field that is shown in its place where a mixer has signs and a scale of its own."""
    known_only: bool = False
    """Whether it is left out where no record has it."""
    nulls: Sequence[str] = ()
    """Fields that hold what it is compared with."""
    of_mixing: bool = False
    """Whether it says nothing of mixers that mix no tokens: there its value follows from the kind alone."""

    @property
    def head(self) -> str:
        """A title for the head of a narrow column."""
        return self.short or self.title

    @property
    def label(self) -> str:
        """Its name among numbers."""
        return self.symbol or self.name.replace("_", " ")

    def speaks_of(self, head: Any) -> bool:
        """Whether it says something of a head, whatever its weights.

        Args:
            head: its record.
        """
        return not self.of_mixing or mixer_kind(head.kind).mixes_tokens

    def value(self, record: Any) -> float:
        """What is shown of it: a share where it is one, NaN where there are no tokens.

        Args:
            record: of a head or of states.
        """
        number: float = getattr(record, self.shown_field(record))
        return share(number, record) if self.share else number

    def shown_field(self, record: Any) -> str:
        """The field that `value` is from: of a matrix with signs that which divides its scale out.

        Args:
            record: of a head or of states; files of before that field have no number in it.
        """
        if not self.if_signed or mixer_kind(record.kind).scale_is_known:
            return self.name
        return self.name if math.isnan(getattr(record, self.if_signed)) else self.if_signed

    def said(self, record: Any) -> str:
        """`value` in few characters, with ≈ before an estimate, and as a range where that is all it gives.

        Args:
            record: of a head or of states.
        """
        value = self.value(record)
        if self.name not in getattr(record, "stderr", ()):
            return format_number(value, self.digits)
        if math.isfinite(value) or not self.share or self.shown_field(record) != "numerical_rank":
            return f"{'≈' if math.isfinite(value) else ''}{format_number(value, self.digits)}"
        low, high = share(record.least_rank, record), share(record.most_rank, record)
        known = math.isfinite(low) and math.isfinite(high)
        return f"{format_number(low, self.digits)}–{format_number(high, self.digits)}" if known else MISSING

    def known_in(self, records: Sequence[Any]) -> bool:
        """Whether it is to be shown of these records.

        Args:
            records: of heads or of states.
        """
        return not self.known_only or any(math.isfinite(self.value(record)) for record in records)

    def ends(self, record: Any) -> tuple[float, float]:
        """The range of `value`; (NaN, NaN) where it has no upper end.

        Args:
            record: of a head or of states.
        """
        if self.bounds is None:
            return math.nan, math.nan
        return (0.0, 1.0) if self.share else self.bounds(record)

    def span(self, record: Any) -> float:
        """How far two numbers of it can lie apart; NaN where it has no upper end.

        Args:
            record: of a head or of states.
        """
        low, high = (math.nan, math.nan) if self.bounds is None else self.bounds(record)
        return high - min(low, 0.0)

    def limits(self, records: Sequence[Any]) -> tuple[float, float]:
        """Find the ends of a scale of colours: those of the range, or of the values but for far outliers.

        Values beyond ``Q3 + 3 (Q3 − Q1)`` (Tukey's outer fence) do not stretch it: they take its last colour.

        Args:
            records: what is drawn.
        """
        values = [value for record in records if math.isfinite(value := self.value(record))]
        ends = [self.ends(record) for record in records]
        lows = [low for low, _ in ends if math.isfinite(low)] or values
        highs = [high for _, high in ends if math.isfinite(high)]
        if self.to_the_largest or not highs:
            fence = outer_fence(values)
            highs = [value for value in values if value <= fence]
        low, high = min(lows, default=0.0), max(highs, default=1.0)
        return (low, high) if high > low else (low, low + 1.0)


def outer_fence(values: Sequence[float]) -> float:
    """Tukey's outer fence: the third quartile and three times the distance between the quartiles.

    Args:
        values: finite numbers; infinity where there are fewer than four, of which none is an outlier.

    Examples:
        >>> outer_fence([1.0, 2.0, 3.0, 4.0, 100.0])
        10.0
    """
    if len(values) < 4:
        return math.inf
    first, _, third = quantiles(values, n=4, method="inclusive")
    return third + 3 * (third - first)


@dataclass(frozen=True, kw_only=True)
class HeadMeasure(Measure):
    """A measure of heads."""

    kinds: Sequence[str] = ()
    """Kinds of mixers that have it; all of them where none is named."""
    late: bool = False
    """True if a value needs all sequences, and not one alone."""


@dataclass(frozen=True, kw_only=True)
class LayerMeasure(Measure):
    """A measure of token states."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the function."""


def share(rank: float, head: Any) -> float:
    """A rank over min(T, S); NaN where there are no tokens.

    Args:
        rank: of a head, or what a null gives.
        head: its record.
    """
    return rank / head.smaller if head.smaller > 0 else math.nan


def _unit(_: Any) -> tuple[float, float]:
    return 0.0, 1.0


def _to_full_rank(record: Any) -> tuple[float, float]:
    return 1.0, record.smaller


def _to_width(head: Any) -> tuple[float, float]:
    return 0.0, math.nan if head.width is None else float(head.width)


def _entropy(head: Any) -> tuple[float, float]:
    return 0.0, math.log(head.sources) if head.sources > 1 else math.nan


# fmt: off
class HeadMeasures(Record):
    """The measures of a head, in the order in which they are shown: means over the sequences of the audit."""

    numerical_rank: Annotated[Number, HeadMeasure(
        title="Numerical rank share", short="Rank share",
        formula="#{i : σ_i ≥ δ}, δ absolute; NaN where an estimate can only bound it", range="[0, min(T, S)]",
        low="no direction", high="full rank", digits=2, cost="less than half an SVD",
        bounds=lambda head: (0.0, head.smaller), share=True, nulls=tuple(NULLS),
        of_mixing=True, if_signed="relative_rank",
        meaning="Singular values at or above δ, as a share of min(T, S): in how many directions the head "
        "mixes. It says how a head mixes, not what it is worth. δ is absolute: rows that sum to 1 give "
        "σ₁ ≥ 1 where T = S. Matrices with signs (state-space mixers) have a scale of their own, which a "
        "relative δ divides out: of them the relative rank is shown, σ ≥ δ σ₁.",
        function="",
    )]
    relative_rank: Annotated[Number, HeadMeasure(
        title="Relative rank share", short="Relative share",
        formula="#{i : σ_i ≥ δ σ_1}: the numerical rank of M/σ_1; NaN where an estimate can only bound it",
        range="[0, min(T, S)]", low="no direction", high="full rank", digits=2, cost="that of all ranks",
        bounds=lambda head: (0.0, head.smaller), share=True,
        function="",
    )] = math.nan
    init_numerical_rank: Annotated[Number, HeadMeasure(
        title="Rank share at fresh weights", short="Fresh rank share", symbol="rank at fresh weights",
        formula="#{i : σ_i ≥ δ} (of mixers with signs σ_i ≥ δ σ_1) of the same head, mean over copies of the "
        "model at fresh weights; NaN where no baseline was asked for", range="[0, min(T, S)]",
        low="no direction", high="full rank", digits=2, cost="one audit for each seed",
        bounds=lambda head: (0.0, head.smaller), share=True, known_only=True, console="fresh\nshare",
        function="", late=True,  # by audits of their own
    )] = math.nan
    effective_rank: Annotated[Number, HeadMeasure(
        title="Effective rank", formula="exp(−Σ p_i log p_i), p = σ/Σσ", range="[1, min(T, S)]",
        low="few directions", high="many directions", digits=1,
        cost="one SVD, in `rank_summary` less than half", bounds=_to_full_rank, to_the_largest=True,
        console="effective\nrank",
        meaning="The exponential of the entropy of the singular values: over how many directions the "
        "spectrum is spread.",
        function="",
    )]
    init_effective_rank: Annotated[Number, HeadMeasure(
        title="Effective rank at fresh weights", short="Fresh effective rank",
        symbol="effective rank at fresh weights",
        formula="exp(−Σ p_i log p_i), p = σ/Σσ, of the same head, mean over copies of the model at fresh "
        "weights; NaN where no baseline was asked for", range="[1, min(T, S)]",
        low="few directions", high="many directions", digits=1, cost="one audit for each seed",
        bounds=_to_full_rank, to_the_largest=True, known_only=True, console="fresh\neffective",
        function="", late=True,  # by audits of their own
    )] = math.nan
    stable_rank: Annotated[Number, HeadMeasure(
        title="Stable rank", formula="‖M‖_F²/σ_1²", range="[1, min(T, S)]", low="σ₁ dominates",
        high="many as strong", digits=1, cost="less than half an SVD", bounds=_to_full_rank,
        to_the_largest=True, console="stable\nrank",
        meaning="‖M‖_F² over σ₁². Near 1 the largest singular value dominates the Frobenius norm. That does "
        "not make rows alike: those of u vᵀ have different sizes. Whether rows are alike is row distance.",
        function="",
    )]
    row_entropy: Annotated[Number, HeadMeasure(
        title="Row entropy", formula="mean over rows of −Σ_j p_j log p_j", range="[0, log S] nats",
        low="picks one token", high="averages all", digits=2, cost="O(T S)", bounds=_entropy,
        of_mixing=True,
        meaning="How widely a row spreads its weight, in nats: 0 where every row picks a single token, log S "
        "where it averages over all.",
    )]
    first_token_mass: Annotated[Number, HeadMeasure(
        title="Sink mass", formula="mean share of a row on the first token", range="[0, 1]", low="none of it",
        high="all of it", digits=2, cost="O(T S)", bounds=_unit, console="sink\nmass",
        of_mixing=True,
        meaning="The mean share of a row that is spent on the first token.",
    )]
    max_token_mass: Annotated[Number, HeadMeasure(
        title="Peak mass", formula="largest mean share of a row on any one token", range="[1/S, 1]",
        low="spread out", high="all on one token", digits=2, cost="O(T S)", bounds=_unit,
        of_mixing=True,
        meaning="The largest mean share of a row that one token gets: near 1 the head passes on little else.",
    )] = math.nan
    row_distance: Annotated[Number, HeadMeasure(
        title="Row distance", formula="‖M − 1m̄ᵀ‖_F/‖M‖_F", range="[0, 1]", low="constant",
        high="rows differ", digits=2, cost="O(T S)", bounds=_unit,
        of_mixing=True,
        meaning="The distance to the nearest matrix with equal rows: 0 where every token gets the same "
        "mixture.",
    )]
    identity_distance: Annotated[Number, HeadMeasure(
        title="Identity distance", formula="‖M − I‖_F/√(‖M‖_F² + T); NaN where T ≠ S",
        range="[0, 1] for M ≥ 0", low="no mixing", high="far from it", digits=2, cost="O(T S)", bounds=_unit,
        meaning="The distance to the identity: 0 where every token keeps to itself and nothing is mixed.",
    )]
    nearest_distance: Annotated[Number, HeadMeasure(
        title="Distance to nearest head", short="Nearest distance",
        formula="least ‖M − M'‖_F/√(‖M‖_F² + ‖M'‖_F²) to a head of the same site",
        range="[0, 1] for M, M' ≥ 0", low="a twin", high="unlike any", digits=2, cost="O(H² T S)",
        bounds=_unit,
        meaning="The distance to the head of the same layer that mixes most alike: 0 where the two are the "
        "same matrix.",
        function="", late=True,  # the nearest on average over the sequences
    )] = math.nan
    required_head_dim: Annotated[Number, HeadMeasure(
        title="Width needed", formula="least r with ½ Σ_{i>r} σ_i² ≤ 0.01, σ_i the singular values of "
        "P^½ S^½, P and S the second moments of scaled queries and centred keys over all sequences; NaN "
        "where these are not known", range="[0, K]", low="rows weigh all evenly", high="all channels",
        digits=1, cost="O((T + S) K²)", bounds=_to_width, kinds=("softmax",), known_only=True,
        console="width\nneeded",
        meaning="The least query/key width whose best logits keep the attention within 0.01 nats of KL, to "
        "second order and rows weighed evenly. Of these sequences: other text can need more.",
        function="", late=True,  # by moments of all sequences
    )] = math.nan
    sigma_max: Annotated[Number, HeadMeasure(
        title="Largest singular value", short="σ max", symbol="σ_max", formula="σ_1", range="[0, ∞)",
        low="smallest here", high="largest here", digits=2, cost="less than half an SVD",
        meaning="How much the head can stretch its input: 1 for a matrix that averages evenly.",
        function="",
    )]
    membership: Annotated[Number, HeadMeasure(
        title="Mean membership", formula="mean over tokens of Π in the head; of TSSA, NaN elsewhere",
        range="[0, 1]", low="no token's", high="all tokens'; 1/H in every head is no grouping on average",
        digits=2, cost="O(T)", bounds=_unit, console="mean\nΠ", kinds=("diagonal",),
        function="",
    )] = math.nan
    coding_rate: Annotated[Number, HeadMeasure(
        title="Share in R_c^var", symbol="R_c^var",
        formula="½ (n_h/n) Σ_k log(1 + m_hk); of TSSA, NaN elsewhere", range="[0, ∞) nats",
        low="each group lies near few axes of its head", high="the groups fill their heads", digits=2,
        cost="O(T K)", console="R_c^var", summed=True, kinds=("diagonal",),
        function="",
    )] = math.nan
    removal_cost: Annotated[Number, HeadMeasure(
        title="Cost of removal", formula="L without the head − L; exact where it was run, else to second "
        "order curvature − ∂L/∂ξ of a gate ξ = 1 on M V; NaN where worth was not asked for",
        range="(−∞, ∞) of the loss's unit", low="costs least here", high="costs most here",
        digits=4, cost="a forward and a few backward passes for all heads; exact a forward pass each",
        console="cost of\nremoval", known_only=True,
        meaning="What the model loses without the head, in the unit of its loss. Below 0 it is better "
        "without. An estimate sorts heads and can fall far short of large costs.",
        function="", late=True,  # by runs of their own
    )] = math.nan


class LayerMeasures(Record):
    """The measures of token states, in the order in which they are shown."""

    norm: Annotated[Number, LayerMeasure(
        title="Norm", symbol="‖Y‖", formula="‖Y‖_F", range="[0, ∞)", low="all zero", high="large", digits=1,
        cost="O(T D)",
        function="token_norm",
    )]
    token_spread: Annotated[Number, LayerMeasure(
        title="Collapse μ", symbol="μ", formula="‖Y − 1ȳᵀ‖_F", range="[0, ‖Y‖_F]", low="all tokens the same",
        high="the mean token is 0", digits=3, cost="O(T D)",
        function="token_spread", options={"normalized": False},
    )]
    relative_spread: Annotated[Number, LayerMeasure(
        title="Distance from collapse, μ/‖Y‖", symbol="μ/‖Y‖", formula="‖Y − 1ȳᵀ‖_F/‖Y‖_F", range="[0, 1]",
        low="all tokens the same", high="the mean token is 0", digits=3, cost="O(T D)", bounds=_unit,
        console="μ/‖Y‖",
        meaning="How far the tokens are from being all the same: 0 where they are.",
        function="token_spread",
    )]
    mean_cosine: Annotated[Number, LayerMeasure(
        title="Mean cosine of two tokens", formula="mean cosine of two different tokens",
        range="[−1/(T−1), 1]", low="tokens point apart", high="all tokens parallel", digits=3, cost="O(T D)",
        bounds=lambda _: (-1.0, 1.0), console="mean\ncosine",
        meaning="How parallel the tokens are: 1 where all point the same way.",
    )]
    effective_rank: Annotated[Number, LayerMeasure(
        title="Effective rank of the states", formula="exp(−Σ p_i log p_i), p = σ/Σσ, of the T×D states",
        range="[1, min(T, D)]", low="one direction only", high="many directions", digits=1, cost="one SVD",
        bounds=_to_full_rank, to_the_largest=True, console="effective\nrank",
        meaning="How many directions the tokens span: 1 where they lie on a line.",
        function="state_effective_rank",
    )]
    relative_update: Annotated[Number, LayerMeasure(
        title="Turn", formula="min_c ‖Y − cY'‖_F/‖Y‖_F, Y' the state before; NaN for layer 0", range="[0, 1]",
        low="the block only scales what it reads", high="nothing is left of it", digits=3, cost="O(T D)",
        bounds=_unit,
        function="",  # it needs the states before, too
    )] = math.nan

# fmt: on


def _rows(of: type[Record]) -> list[Any]:
    """The rows of a table, with their names."""
    return [
        replace(row, name=name, function=name if row.function is None else row.function)
        for name, known in of.model_fields.items()
        for row in known.metadata
        if isinstance(row, Measure)
    ]


HEAD_MEASURES: tuple[HeadMeasure, ...] = tuple(_rows(HeadMeasures))
LAYER_MEASURES: tuple[LayerMeasure, ...] = tuple(_rows(LayerMeasures))

PICTURED = tuple(measure for measure in HEAD_MEASURES if measure.meaning)
"""The measures of heads that have a heat map, in the order they are offered; the first is shown at first."""

DRAWN = tuple(measure for measure in LAYER_MEASURES if measure.meaning)
"""The measures of token states that have a curve through depth."""
