"""The table of measures: each row is a field of a record, with all that is known of it.

Audits take what it names, records hold it, comparisons and reports show it by what stands here, and
`docs/measures.md` lists it. A row needs a function that measures and no other place. No torch inside: reports
read it where there is none.
"""

import math
from dataclasses import replace
from typing import Annotated, Any

from rankwise.audit.fields import HeadMeasure, LayerMeasure, Measure, Number, Record

NULLS = {
    "null_rank": "random winners",
    "random_rank": "random queries and keys",
    "uniform_rank": "equal weights",
}
"""What numerical ranks are held against: the fields of the record, and what a reader is told."""


def _unit(_: Any) -> tuple[float, float]:
    return 0.0, 1.0


def _to_full_rank(record: Any) -> tuple[float, float]:
    return 1.0, record.smaller


def _entropy(head: Any) -> tuple[float, float]:
    return 0.0, math.log(head.sources) if head.sources > 1 else math.nan


class HeadMeasures(Record):
    """The measures of a head, in the order in which they are shown: means over the sequences of the audit."""

    numerical_rank: Annotated[
        Number,
        HeadMeasure(
            title="Numerical rank share",
            short="Rank share",
            formula="#{i : σ_i ≥ δ}, δ absolute; NaN where an estimate can only bound it",
            range="[0, min(T, S)]",
            low="no direction",
            high="full rank",
            digits=2,
            cost="¼ of an SVD",
            bounds=lambda head: (0.0, head.smaller),
            share=True,
            nulls=tuple(NULLS),
            bad="null",
            meaning="Singular values at or above δ, as a share of min(T, S). The null is the share that "
            "chance gives: every row picks one token at random under the same mask. Orange heads mix in "
            "fewer directions than chance, blue ones in more.",
            take=lambda heads: heads.ranks["numerical_rank"],
        ),
    ]
    effective_rank: Annotated[
        Number,
        HeadMeasure(
            title="Effective rank",
            formula="exp(−Σ p_i log p_i), p = σ/Σσ",
            range="[1, min(T, S)]",
            low="few directions",
            high="many directions",
            digits=1,
            cost="one SVD, in `rank_summary` less than half",
            bounds=_to_full_rank,
            to_the_largest=True,
            bad="low",
            meaning="The exponential of the entropy of the singular values: how many directions carry "
            "weight. Low is worrying.",
            console="effective\nrank",
            take=lambda heads: heads.ranks["effective_rank"],
        ),
    ]
    stable_rank: Annotated[
        Number,
        HeadMeasure(
            title="Stable rank",
            formula="‖M‖_F²/σ_1²",
            range="[1, min(T, S)]",
            low="all rows alike",
            high="rows differ",
            digits=1,
            cost="less than half an SVD",
            bounds=_to_full_rank,
            to_the_largest=True,
            bad="low",
            meaning="‖M‖² over the largest singular value squared. 1 is worrying: every token gets the same "
            "mixture.",
            console="stable\nrank",
            take=lambda heads: heads.ranks["stable_rank"],
        ),
    ]
    row_entropy: Annotated[
        Number,
        HeadMeasure(
            title="Row entropy",
            formula="mean over rows of −Σ_j p_j log p_j",
            range="[0, log S] nats",
            low="picks one token",
            high="averages all",
            digits=2,
            cost="O(T S)",
            bounds=_entropy,
            meaning="How widely a row spreads its weight, in nats. Neither end is bad in itself: 0 picks a "
            "single token, log S averages over all.",
            take=lambda heads: heads.rows.row_entropy,
        ),
    ]
    sink_mass: Annotated[
        Number,
        HeadMeasure(
            title="Sink mass",
            formula="mean share of a row on the first token",
            range="[0, 1]",
            low="none of it",
            high="all of it",
            digits=2,
            cost="O(T S)",
            bounds=_unit,
            bad="high",
            meaning="The mean share of a row that is spent on the first token. High is worrying: the head is "
            "parked there.",
            console="sink\nmass",
            take=lambda heads: heads.rows.sink_mass,
        ),
    ]
    peak_mass: Annotated[
        Number,
        HeadMeasure(
            title="Peak mass",
            formula="largest mean share of a row on any one token",
            range="[1/S, 1]",
            low="spread out",
            high="all on one token",
            digits=2,
            cost="O(T S)",
            bounds=_unit,
            bad="high",
            meaning="The largest mean share of a row that one token gets. High is worrying: the head passes "
            "on little else.",
            take=lambda heads: heads.rows.peak_mass,
        ),
    ] = math.nan
    row_distance: Annotated[
        Number,
        HeadMeasure(
            title="Row distance",
            formula="‖M − 1m̄ᵀ‖_F/‖M‖_F",
            range="[0, 1]",
            low="constant",
            high="rows differ",
            digits=2,
            cost="O(T S)",
            bounds=_unit,
            bad="low",
            meaning="The distance to the nearest matrix with equal rows. 0 is worrying: every token gets the "
            "same mixture.",
            take=lambda heads: heads.rows.row_distance,
        ),
    ]
    identity_distance: Annotated[
        Number,
        HeadMeasure(
            title="Identity distance",
            formula="‖M − I‖_F/√(‖M‖_F² + T); NaN where T ≠ S",
            range="[0, 1] for M ≥ 0",
            low="no mixing",
            high="far from it",
            digits=2,
            cost="O(T S)",
            bounds=_unit,
            bad="low",
            meaning="The distance to the identity. 0 is worrying: every token keeps to itself and nothing is "
            "mixed.",
            take=lambda heads: heads.rows.identity_distance,
        ),
    ]
    nearest_distance: Annotated[
        Number,
        HeadMeasure(
            title="Distance to nearest head",
            short="Nearest distance",
            formula="least ‖M − M'‖_F/√(‖M‖_F² + ‖M'‖_F²) to a head of the same site",
            range="[0, 1] for M, M' ≥ 0",
            low="a twin",
            high="unlike any",
            digits=2,
            cost="O(H² T S)",
            bounds=_unit,
            bad="low",
            meaning="The distance to the head of the same layer that mixes most alike. 0 is worrying: the "
            "two are twins.",
            take=None,  # the nearest on average over the sequences
        ),
    ] = math.nan
    sigma_max: Annotated[
        Number,
        HeadMeasure(
            title="Largest singular value",
            short="σ max",
            symbol="σ_max",
            formula="σ_1",
            range="[0, ∞)",
            low="smallest here",
            high="largest here",
            digits=2,
            cost="less than half an SVD",
            meaning="How much the head can stretch its input. 1 for a matrix that averages evenly; neither "
            "end is bad in itself.",
            take=lambda heads: heads.ranks["sigma_max"],
        ),
    ]
    membership: Annotated[
        Number,
        HeadMeasure(
            title="Mean membership",
            formula="mean over tokens of Π in the head; of TSSA, NaN elsewhere",
            range="[0, 1]",
            low="no token's",
            high="all tokens'; 1/H in every head is no grouping on average",
            digits=2,
            cost="O(T)",
            bounds=_unit,
            console="mean\nΠ",
            take=lambda heads: heads.membership,
        ),
    ] = math.nan
    coding_rate: Annotated[
        Number,
        HeadMeasure(
            title="Share in R_c^var",
            symbol="R_c^var",
            formula="½ (n_h/n) Σ_k log(1 + m_hk); of TSSA, NaN elsewhere",
            range="[0, ∞) nats",
            low="each group lies near few axes of its head",
            high="the groups fill their heads",
            digits=2,
            cost="O(T K)",
            console="R_c^var",
            summed=True,
            take=lambda heads: heads.coding_rate,
        ),
    ] = math.nan


class LayerMeasures(Record):
    """The measures of token states, in the order in which they are shown."""

    norm: Annotated[
        Number,
        LayerMeasure(
            title="Norm",
            symbol="‖Y‖",
            formula="‖Y‖_F",
            range="[0, ∞)",
            low="all zero",
            high="large",
            digits=1,
            cost="O(T D)",
            take=lambda states: states.measure("token_norm"),
        ),
    ]
    collapse: Annotated[
        Number,
        LayerMeasure(
            title="Collapse μ",
            symbol="μ",
            formula="‖Y − 1ȳᵀ‖_F",
            range="[0, ‖Y‖_F]",
            low="all tokens the same",
            high="the mean token is 0",
            digits=3,
            cost="O(T D)",
            take=lambda states: states.measure("token_collapse", normalized=False),
        ),
    ]
    relative_collapse: Annotated[
        Number,
        LayerMeasure(
            title="Distance from collapse, μ/‖Y‖",
            symbol="μ/‖Y‖",
            formula="‖Y − 1ȳᵀ‖_F/‖Y‖_F",
            range="[0, 1]",
            low="all tokens the same",
            high="the mean token is 0",
            digits=3,
            cost="O(T D)",
            bounds=_unit,
            meaning="How far the tokens are from being all the same. Falling to 0 is bad.",
            console="μ/‖Y‖",
            take=lambda states: states.measure("token_collapse"),
        ),
    ]
    mean_cosine: Annotated[
        Number,
        LayerMeasure(
            title="Mean cosine of two tokens",
            formula="mean cosine of two different tokens",
            range="[−1/(T−1), 1]",
            low="tokens point apart",
            high="all tokens parallel",
            digits=3,
            cost="O(T D)",
            bounds=lambda _: (-1.0, 1.0),
            meaning="How parallel the tokens are. Rising to 1 is bad.",
            console="mean\ncosine",
            take=lambda states: states.measure("mean_cosine"),
        ),
    ]
    effective_rank: Annotated[
        Number,
        LayerMeasure(
            title="Effective rank of the states",
            formula="exp(−Σ p_i log p_i), p = σ/Σσ, of the T×D states",
            range="[1, min(T, D)]",
            low="one direction only",
            high="many directions",
            digits=1,
            cost="one SVD",
            bounds=_to_full_rank,
            to_the_largest=True,
            meaning="How many directions the tokens span. Falling to 1 is bad.",
            console="effective\nrank",
            take=lambda states: states.measure("state_effective_rank"),
        ),
    ]
    turn: Annotated[
        Number,
        LayerMeasure(
            title="Turn",
            formula="min_c ‖Y − cY'‖_F/‖Y‖_F, Y' the state before; NaN for layer 0",
            range="[0, 1]",
            low="the block only scales what it reads",
            high="nothing is left of it",
            digits=3,
            cost="O(T D)",
            bounds=_unit,
            take=lambda states: states.turn(),
        ),
    ] = math.nan


def _rows(of: type[Record]) -> list[Any]:
    """The rows of a table, with their names."""
    return [
        replace(row, name=name)
        for name, field in of.model_fields.items()
        for row in field.metadata
        if isinstance(row, Measure)
    ]


HEAD_MEASURES: tuple[HeadMeasure, ...] = tuple(_rows(HeadMeasures))
LAYER_MEASURES: tuple[LayerMeasure, ...] = tuple(_rows(LayerMeasures))

PICTURED = tuple(measure for measure in HEAD_MEASURES if measure.meaning)
"""The measures of heads that have a heat map, in the order they are offered; the first is shown at first."""
DRAWN = tuple(measure for measure in LAYER_MEASURES if measure.meaning)
"""The measures of token states that have a curve through depth."""
