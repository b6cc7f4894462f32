"""The table of measures: a row is a field of a record, with its formula, range and words for readers.

Audits evaluate the functions that rows name, records hold the values, and comparisons, reports and
`docs/reference/measures.md` read the rows. A new measure is a function of `rankwise.measures` and a row.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, TypeVar

from rankwise._internals.records import MISSING, Number, Record, format_number
from rankwise._internals.statistics import mean

REFERENCES = {
    "one_hot_rank": "one-hot rows",
    "random_rank": "random heads",
    "uniform_rank": "equal weights",
}
"""Fields that hold the reference ranks of a numerical rank, and their names for readers."""


class MixerKind(NamedTuple):
    """Properties of all matrices of a kind of operator; the defaults describe state-space mixers."""

    rows_are_means: bool = False
    """True if every row is a mean over tokens, so that reference ranks apply."""
    scale_is_known: bool = False
    """True if entries are shares of a row, so that δ means the same in every layer; False if signed."""
    mixes_tokens: bool = True
    """False if each row weighs only its own token (diagonal): row measures then carry no information."""
    state_space: bool = True
    """True for mixers with a matrix per channel. Audits measure a sample of their thousands of matrices."""


_ATTENTION = MixerKind(rows_are_means=True, scale_is_known=True, state_space=False)
MIXER_KINDS = {
    "softmax": _ATTENTION,
    "dense": _ATTENTION,
    "linear": _ATTENTION,
    "diagonal": MixerKind(scale_is_known=True, mixes_tokens=False, state_space=False),
}
"""Properties by `MixingOperator.kind`; all other kinds are state-space mixers, with the defaults."""


def mixer_kind(kind: str) -> MixerKind:
    """Return the properties of a kind of operator."""
    return MIXER_KINDS.get(kind, MixerKind())


class Range(NamedTuple):
    """Range of a measure, as text and as numbers."""

    text: str
    low: float = math.nan
    high: float | Callable[[Any], float] = math.nan
    """Upper end, or a function that returns the upper end for a record; NaN if the range has no upper end."""
    wide: bool = False
    """True if values are usually far below the upper end, so that a color scale ends at the largest value."""


_full_rank = attrgetter("full_rank")
UNIT = Range("[0, 1]", 0.0, 1.0)
RANK = Range("[0, min(T, S)]", 0.0, _full_rank)
DIRECTIONS = Range("[1, min(T, S)]", 1.0, _full_rank, wide=True)
WIDTH = Range("[0, K]", 0.0, lambda head: math.nan if head.head_dim is None else float(head.head_dim))
NATS = Range("[0, log S] nats", 0.0, lambda head: math.log(head.sources) if head.sources > 1 else math.nan)
POSITIVE = Range("[0, ∞)")
HALF = Range("[0, T/2]", 0.0, lambda state: float(state.tokens) / 2, wide=True)
POOLED_RANK = Range("[1, min(N, D)]", 1.0, lambda state: float(min(state.sequences, state.hidden_size)))


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A measure of heads or of token states."""

    name: str = ""
    title: str
    formula: str
    range: Range
    low: str
    high: str
    """Meaning of a value at the upper end of the range. ``low`` is the meaning at the lower end."""
    function: str = ""
    """Name of the function in `MEASURES`; empty if the field is filled in another way."""
    digits: int
    cost: str
    short: str = ""
    """Shorter title for a narrow column; empty if `title` is short enough."""
    symbol: str = ""
    """Name of the measure in texts, such as ``token spread``; empty if texts use the name of the field."""
    meaning: str
    """Definition as text, shown next to the measure's map or curve and in the reference."""
    drawn: bool = True
    """False if the measure has no map and no curve."""
    console: str = ""
    """Title of the measure's column on the console; empty if it has no column there."""
    summed: bool = False
    """True if the value of a layer is the sum over its heads, not the mean."""
    late: bool = False
    """True if the value is computed from all sequences together, not from one sequence alone."""
    maximum: bool = False
    """True if a record has the maximum over sequences and a layer the maximum over heads, not the means."""
    share: bool = False
    """True if the value is shown divided by min(T, S)."""
    if_signed: str = ""
    """Field shown instead of this measure for matrices with signed entries, whose scale differs by layer."""
    known_only: bool = False
    """True if tables leave the measure out when no record has a value."""
    references: Sequence[str] = ()
    """Names of the fields that hold reference values of the measure."""
    of_mixing: bool = False
    """True if the measure is informative only for mixers that mix tokens."""

    @property
    def head(self) -> str:
        """Title for a narrow column: `short`, or `title` if `short` is empty."""
        return self.short or self.title

    @property
    def label(self) -> str:
        """Name in texts: `symbol`, or else the name of the field with spaces."""
        return self.symbol or self.name.replace("_", " ")

    def over_heads(self, values: Iterable[float]) -> float:
        """Return the value of a layer: maximum, sum or mean of finite values; NaN if there is none."""
        finite = [value for value in values if math.isfinite(value)]
        if self.maximum or self.summed:
            return (max(finite) if self.maximum else sum(finite)) if finite else math.nan
        return mean(finite)

    def applies_to(self, head: Any) -> bool:
        """Return True if the measure is informative for the kind of mixer of a head."""
        return not self.of_mixing or mixer_kind(head.kind).mixes_tokens

    def value(self, record: Any) -> float:
        """Return the number to show, as a share of min(T, S) if `share`. A share without tokens is NaN."""
        number: float = getattr(record, self.shown_field(record))
        return share(number, record) if self.share else number

    def shown_field(self, record: Any) -> str:
        """Return the field that `value` reads: `if_signed` for signed entries with a value, or `name`."""
        if not self.if_signed or mixer_kind(record.kind).scale_is_known:
            return self.name
        return self.name if math.isnan(getattr(record, self.if_signed)) else self.if_signed

    def formatted(self, record: Any) -> str:
        """Return `value` as text: with ≈ if estimated, or as an interval if an estimate only bounds it."""
        value = self.value(record)
        estimated = self.name in getattr(record, "stderr", ())
        if estimated and not math.isfinite(value) and self.shown_field(record) == "numerical_rank":
            ends = [
                format_number(share(rank, record), self.digits)
                for rank in (record.rank_low, record.rank_high)
            ]
            return MISSING if MISSING in ends else "–".join(ends)
        return f"{'≈' if estimated and math.isfinite(value) else ''}{format_number(value, self.digits)}"

    def known_in(self, records: Sequence[Any]) -> bool:
        """Return True if tables of these records should show the measure; see `known_only`."""
        return not self.known_only or any(math.isfinite(self.value(record)) for record in records)

    def ends(self, record: Any) -> tuple[float, float]:
        """Return the lower and upper end of the range of `value`; NaN for an end that does not exist."""
        return (0.0, 1.0) if self.share else (self.range.low, self._high(record))

    def span(self, record: Any) -> float:
        """Return the largest possible difference of two values; NaN if the range has no upper end."""
        return self._high(record) - min(self.range.low, 0.0)

    def _high(self, record: Any) -> float:
        high = self.range.high
        return high(record) if callable(high) else high


@dataclass(frozen=True, kw_only=True)
class HeadMeasure(Measure):
    """A measure of heads, that is, of mixing matrices."""

    kinds: Sequence[str] = ()
    """Kinds of mixers that have the measure; empty if all kinds have it."""


@dataclass(frozen=True, kw_only=True)
class StateMeasure(Measure):
    """A measure of token states."""


def share(rank: float, record: Any) -> float:
    """Return a rank divided by min(T, S), or NaN if there are no tokens."""
    return rank / record.full_rank if record.full_rank > 0 else math.nan


# fmt: off
class HeadMeasures(Record):
    """The measures of a head, in the order in which they are shown: means over the sequences of the audit."""

    numerical_rank: Annotated[Number, HeadMeasure(
        title="Numerical rank share", short="Rank share", range=RANK, share=True,
        formula="#{i : σ_i ≥ δ}, δ absolute; NaN if an estimate only bounds it", low="no direction",
        high="full rank", digits=2, cost="less than half an SVD", of_mixing=True,
        references=tuple(REFERENCES), if_signed="scale_free_rank",
        meaning="Number of singular values at or above δ; pages show it as a share of min(T, S). It says in "
        "how many directions a head mixes, not how important it is. δ is absolute: if rows sum to 1 and T = "
        "S, σ₁ ≥ 1. Pages show the relative rank of matrices with signs, whose scale is arbitrary.",
    )]
    scale_free_rank: Annotated[Number, HeadMeasure(
        title="Relative rank share", short="Relative share", range=RANK, share=True,
        formula="#{i : σ_i ≥ δ σ_1}: the numerical rank of M/σ_1; NaN if an estimate only bounds it",
        low="no direction", high="full rank", digits=2, cost="included in the numerical rank", drawn=False,
        meaning="Number of singular values at or above δ times the largest; it does not depend on the scale.",
    )] = math.nan
    effective_rank: Annotated[Number, HeadMeasure(
        title="Effective rank", formula="exp(−Σ p_i log p_i), p = σ/Σσ", range=DIRECTIONS,
        low="few directions", high="many directions", digits=1,
        cost="one SVD, in `rank_summary` less than half", console="effective\nrank",
        meaning="Number of directions over which the spectrum is spread: exp of the entropy of σ/Σσ.",
    )]
    stable_rank: Annotated[Number, HeadMeasure(
        title="Stable rank", formula="‖M‖_F²/σ_1²", range=DIRECTIONS, low="σ₁ dominates",
        high="many of equal size", digits=1, cost="less than half an SVD", console="stable\nrank",
        meaning="Sum of the squared singular values, divided by the largest square. Near 1 a single singular "
        "value dominates. Rows can still differ in size; the row distance compares rows.",
    )]
    row_entropy: Annotated[Number, HeadMeasure(
        title="Row entropy", formula="mean over rows of −Σ_j p_j log p_j", range=NATS, low="picks one token",
        high="averages all", digits=2, cost="O(T S)", of_mixing=True, function="row_entropy",
        meaning="How widely a row spreads its weight, in nats: 0 if every row picks a single token, log S if "
        "every row averages over all tokens.",
    )]
    first_token_mass: Annotated[Number, HeadMeasure(
        title="First-token mass", formula="mean over rows of |m_i1|/Σ_j|m_ij|", range=UNIT, low="none of it",
        high="all of it", digits=2, cost="O(T S)", console="first\ntoken", of_mixing=True,
        function="first_token_mass",
        meaning="Share of the weight of a row that is on the first token, as a mean over rows.",
    )]
    max_token_mass: Annotated[Number, HeadMeasure(
        title="Largest token mass", formula="max_j of the mean over rows of |m_ij|/Σ_k|m_ik|",
        range=UNIT._replace(text="[1/S, 1]"), low="spread out", high="all on one token", digits=2,
        cost="O(T S)", of_mixing=True, function="max_token_mass",
        meaning="Mean share of the token with the most weight. Near 1 the head passes on little else.",
    )] = math.nan
    row_spread: Annotated[Number, HeadMeasure(
        title="Row distance", formula="‖M − 1m̄ᵀ‖_F/‖M‖_F", range=UNIT, low="equal rows", high="rows differ",
        digits=2, cost="O(T S)", of_mixing=True, function="row_spread",
        meaning="Distance to the nearest matrix with equal rows: 0 if all tokens receive the same mixture.",
    )]
    identity_distance: Annotated[Number, HeadMeasure(
        title="Identity distance", formula="‖M − I‖_F/√(‖M‖_F² + T); NaN if T ≠ S",
        range=UNIT._replace(text="[0, 1] for M ≥ 0"), low="no mixing", high="far from it", digits=2,
        cost="O(T S)", function="identity_distance",
        meaning="Distance to the identity: 0 if every token receives only itself, so that nothing is mixed.",
    )]
    nearest_head_distance: Annotated[Number, HeadMeasure(
        title="Distance to nearest head", short="Nearest distance",
        formula="minimum over the other heads M' of the site of ‖M − M'‖_F/√(‖M‖_F² + ‖M'‖_F²)",
        range=UNIT._replace(text="[0, 1] for M, M' ≥ 0"), low="a duplicate", high="unlike any", digits=2,
        cost="O(H² T S)", late=True,  # the nearest head is found by mean distances over all sequences
        meaning="Distance to the most similar head of the same layer: 0 if both have the same matrix.",
    )] = math.nan
    required_head_dim: Annotated[Number, HeadMeasure(
        title="Required query/key width", short="Required width",
        formula="least r with ½ Σ_{i>r} σ_i² ≤ 0.01, σ_i the singular values of P^½ S^½, P and S the second "
        "moments of scaled queries and centered keys over all sequences; NaN if these are unknown",
        range=WIDTH, low="equal weights", high="all channels", digits=1, cost="O((T + S) K²)",
        kinds=("softmax",), known_only=True, console="required\nwidth", late=True,
        meaning="Smallest query/key width that changes the attention by at most 0.01 nats (KL to second "
        "order, equal weight for all rows). It holds for these sequences: others can need more.",
    )] = math.nan
    largest_logit: Annotated[Number, HeadMeasure(
        title="Largest logit", formula="max z_ij over all sequences and unmasked pairs i, j; M = softmax(z)",
        range=Range("(−∞, ∞)"), low="smallest in the audit", high="largest in the audit", digits=1,
        cost="included in a pass over the rows", kinds=("softmax",), known_only=True, maximum=True,
        function="largest_logit",
        meaning="Largest number of which the softmax is taken, after scale, bias and soft cap; the maximum "
        "over sequences, and over the heads of a layer. If it grows, training can become unstable; training "
        "frameworks act at 100.",
    )] = math.nan
    query_norm: Annotated[Number, HeadMeasure(
        title="Norm of queries", formula="mean of ‖q_i‖ over the queries that enter the product q_i·k_j",
        range=POSITIVE, low="all zero", high="large", digits=1, cost="O(T K)", kinds=("softmax",),
        known_only=True, drawn=False,
        meaning="Mean norm of queries, after norms and rotation and before the factor of the logits; NaN if "
        "the attention is not fused.",
    )] = math.nan
    key_norm: Annotated[Number, HeadMeasure(
        title="Norm of keys", formula="mean of ‖k_j‖ over the keys that enter the product q_i·k_j",
        range=POSITIVE, low="all zero", high="large", digits=1, cost="O(S K)", kinds=("softmax",),
        known_only=True, drawn=False,
        meaning="Mean norm of keys, after norms and rotation; NaN if the attention is not fused.",
    )] = math.nan
    key_effective_rank: Annotated[Number, HeadMeasure(
        title="Effective rank of keys", short="Rank of keys",
        formula="exp(−Σ p_i log p_i), p = σ/Σσ, of the keys of all tokens of all sequences, an N×K matrix",
        range=WIDTH._replace(text="[1, min(N, K)]", low=1.0), low="one direction only",
        high="all channels alike", digits=1, cost="O(S K²)", kinds=("softmax",), known_only=True,
        drawn=False, late=True,
        meaning="Number of directions that the cached keys of a head fill over all sequences, after norms "
        "and rotation. If it is low, few latents can replace the keys. NaN if the attention is not fused.",
    )] = math.nan
    value_effective_rank: Annotated[Number, HeadMeasure(
        title="Effective rank of values", short="Rank of values",
        formula="exp(−Σ p_i log p_i), p = σ/Σσ, of the values of all tokens of all sequences",
        range=Range("[1, min(N, V)]", 1.0), low="one direction only", high="all channels alike", digits=1,
        cost="O(S V²)", kinds=("softmax",), known_only=True, drawn=False, late=True,
        meaning="Number of directions that the values of a head fill over all sequences. If it is low, few "
        "latents can replace the cached values.",
    )] = math.nan
    sigma_max: Annotated[Number, HeadMeasure(
        title="Largest singular value", short="σ max", symbol="σ_max", formula="σ_1", range=POSITIVE,
        low="smallest in the audit", high="largest in the audit", digits=2, cost="less than half an SVD",
        meaning="Largest factor by which the head can stretch its input: 1 if all rows average evenly.",
    )]
    membership: Annotated[Number, HeadMeasure(
        title="Mean membership", formula="mean over tokens of Π in the head, for TSSA; else NaN", range=UNIT,
        low="no token belongs", high="all tokens belong", digits=2, cost="O(T)", console="mean\nΠ",
        kinds=("diagonal",), drawn=False,
        meaning="Mean membership of tokens in the head. If it is 1/H in all heads, it shows no grouping.",
    )] = math.nan
    variational_rate: Annotated[Number, HeadMeasure(
        title="Coding rate", symbol="R_c^var", formula="½ (n_h/n) Σ_k log(1 + m_hk), for TSSA; else NaN",
        range=POSITIVE._replace(text="[0, ∞) nats"), low="each group is near few axes of its head",
        high="the groups fill their heads", digits=2, cost="O(T K)", console="R_c^var", summed=True,
        kinds=("diagonal",), drawn=False,
        meaning="The head's term of R_c^var, the variational coding rate of tokens that are grouped by "
        "membership. A layer shows the sum over its heads.",
    )] = math.nan
    removal_cost: Annotated[Number, HeadMeasure(
        title="Cost of removal",
        formula="L without the head − L. Exact: by a run without it. Estimate: curvature − ∂L/∂ξ, of second "
        "order, for a gate ξ = 1 on M V. NaN without importance",
        range=Range("(−∞, ∞) in the unit of the loss"),
        low="costs least of all heads", high="costs most of all heads", digits=4,
        cost="estimate: a forward and five backward passes for all heads; exact: half a forward pass each",
        console="cost of\nremoval", known_only=True, late=True,
        meaning="How much the loss rises without the head, in the unit of the loss. Below 0 the model is "
        "better without it. An estimate sorts heads and can fall far short of large costs.",
    )] = math.nan


class StateMeasures(Record):
    """The measures of token states, in the order in which they are shown."""

    norm: Annotated[Number, StateMeasure(
        title="Norm", symbol="‖Y‖", formula="‖Y‖_F", range=POSITIVE, low="all zero", high="large", digits=1,
        cost="O(T D)", function="token_norm", drawn=False,
        meaning="Size of all token states of a sequence together.",
    )]
    absolute_spread: Annotated[Number, StateMeasure(
        title="Absolute token spread μ", symbol="absolute token spread", formula="‖Y − 1ȳᵀ‖_F",
        range=POSITIVE._replace(text="[0, ‖Y‖_F]"), low="all tokens the same", high="the mean token is 0",
        digits=3, cost="O(T D)", drawn=False, function="absolute_spread",
        meaning="Distance μ of the tokens from their mean ȳ: 0 if all tokens are the same.",
    )]
    spread: Annotated[Number, StateMeasure(
        title="Token spread μ/‖Y‖", symbol="token spread", formula="‖Y − 1ȳᵀ‖_F/‖Y‖_F", range=UNIT,
        low="all tokens the same", high="the mean token is 0", digits=3, cost="O(T D)",
        drawn=False, function="spread",
        meaning="Distance μ of tokens from their mean, divided by their norm: 0 if all tokens are the same.",
    )]
    direction_spread: Annotated[Number, StateMeasure(
        title="Direction spread", formula="median over i of sin ∠(y_i, c), c: direction of most tokens",
        range=UNIT, low="most tokens have one direction", high="tokens point apart", digits=3, cost="O(T D)",
        console="direction\nspread", function="direction_spread",
        meaning="Angle between the middle token and most tokens: 0 if more than half have one direction.",
    )]
    mean_cosine: Annotated[Number, StateMeasure(
        title="Mean cosine of two tokens", formula="mean cosine of two different tokens",
        range=Range("[−1/(T−1), 1]", -1.0, 1.0), low="tokens point apart", high="all tokens parallel",
        digits=3, cost="O(T D)", console="mean\ncosine", function="mean_cosine",
        meaning="How parallel the tokens are: 1 if all point in the same direction.",
    )]
    effective_rank: Annotated[Number, StateMeasure(
        title="Effective rank of the states", formula="exp(−Σ p_i log p_i), p = σ/Σσ, of the T×D states",
        range=DIRECTIONS._replace(text="[1, min(T, D)]"), low="one direction only", high="many directions",
        digits=1, cost="one SVD", console="effective\nrank", function="state_effective_rank",
        meaning="How many directions the tokens span: 1 if they are on one line.",
    )]
    effective_rank_without_massive: Annotated[Number, StateMeasure(
        title="Effective rank without massive tokens", short="Rank without massive",
        formula="effective rank of the tokens with ‖y_i‖ ≤ 10 · median_j ‖y_j‖",
        range=DIRECTIONS._replace(text="[1, min(T, D)]"), low="one direction only", high="many directions",
        digits=1, cost="one more SVD if a token is massive", drawn=False,
        function="effective_rank_without_massive",
        meaning="How many directions the tokens span if the tokens of huge norm are left out.",
    )] = math.nan
    massive_tokens: Annotated[Number, StateMeasure(
        title="Number of massive tokens", short="Massive tokens", formula="#{i: ‖y_i‖ > 10 · median_j ‖y_j‖}",
        range=HALF, low="norms are alike", high="many tokens of huge norm",
        digits=1, cost="O(T D)", drawn=False, function="massive_tokens",
        meaning="Number of tokens whose norm is above ten times the median norm of the sequence.",
    )] = math.nan
    largest_norm_ratio: Annotated[Number, StateMeasure(
        title="Largest norm over median norm", short="Norm ratio", formula="max_i ‖y_i‖ / median_j ‖y_j‖",
        range=POSITIVE._replace(text="[1, ∞)", low=1.0), low="norms are alike", high="one huge token",
        digits=1, cost="O(T D)", drawn=False, function="largest_norm_ratio",
        meaning="Norm of the largest token in units of the median norm; often above 10 in decoders.",
    )] = math.nan
    largest_norm_share: Annotated[Number, StateMeasure(
        title="Share of the largest token in ‖Y‖²", short="Norm share", formula="max_i ‖y_i‖²/‖Y‖²",
        range=UNIT._replace(text="[1/T, 1]"), low="norms are alike", high="one token is all of ‖Y‖",
        digits=2, cost="O(T D)", drawn=False, function="largest_norm_share",
        meaning="Above one half, token spread and effective rank describe one token rather than all.",
    )] = math.nan
    pooled_effective_rank: Annotated[Number, StateMeasure(
        title="Effective rank of pooled states", short="Pooled rank",
        formula="exp(−Σ p_i log p_i), p = σ/Σσ, of the N×D matrix of the mean tokens of N sequences",
        range=POOLED_RANK,
        low="all sequences alike", high="sequences point apart", digits=1, cost="O(N D min(N, D))",
        drawn=False, late=True, known_only=True,
        meaning="How many directions the mean states of all sequences fill: 1 if they are on one line. It is "
        "at most the number of sequences, so compare audits of as many sequences.",
    )] = math.nan
    pooled_effective_rank_without_massive: Annotated[Number, StateMeasure(
        title="Effective rank of pooled states without massive tokens", short="Pooled rank without massive",
        formula="effective rank of the means of tokens with ‖y_i‖ ≤ 10 · median_j ‖y_j‖",
        range=POOLED_RANK,
        low="all sequences alike", high="sequences point apart", digits=1, cost="O(N D min(N, D))",
        drawn=False, late=True, known_only=True,
        meaning="How many directions the mean states fill if tokens of huge norm, which are much the same in "
        "every sequence, are left out of the means.",
    )] = math.nan
    relative_update: Annotated[Number, StateMeasure(
        title="Relative update", formula="min_c ‖Y − cY'‖_F/‖Y‖_F, Y' the state before; NaN for layer 0",
        range=UNIT, low="the block only scales its input", high="nothing of the input is left", digits=3,
        cost="O(T D)", drawn=False,  # no `function`, because two consecutive states are needed
        meaning="How much a block changes its input, apart from scaling: 0 if the block only scales it.",
    )] = math.nan
# fmt: on


M = TypeVar("M", bound=Measure)


def _rows(of: type[Record], kind: type[M]) -> tuple[M, ...]:
    """Return the rows of a table, with `name` set to the name of the field."""
    return tuple(
        replace(row, name=name)
        for name, field in of.model_fields.items()
        for row in field.metadata
        if isinstance(row, kind)
    )


HEAD_MEASURES = _rows(HeadMeasures, HeadMeasure)
STATE_MEASURES = _rows(StateMeasures, StateMeasure)
PICTURED = tuple(measure for measure in HEAD_MEASURES if measure.drawn)
"""Measures of heads that have a map; the first is shown first."""
DRAWN = tuple(measure for measure in STATE_MEASURES if measure.drawn)
"""Measures of token states that have a curve through depth."""
