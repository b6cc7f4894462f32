"""Records of λ-skip certificates and of choices of λ; this module does not import torch."""

from typing import Literal

from pydantic import ConfigDict, Field

from rankwise._internals.records import Number, Record, SavedRecord

MOST_LAMBDA = 1000
"""Larger |λ| suppress all mixers: they are not told apart in words."""


class _Numbers(Record):
    model_config = ConfigDict(ser_json_inf_nan="strings")  # ∞ is a valid bound: no λ is large enough


class LayerCertificate(_Numbers):
    """Certificate of one λ-skip: the absolute token spread μ of its tokens, and the least |λ| of each bound.

    μ(Y) = ‖Y − 1ȳᵀ‖_F is the distance of the token states Y from their mean ȳ. Numbers are of the worst
    sequence unless stated otherwise. A number is None if it is unknown or does not apply.
    """

    site: str
    lambda_value: float
    """λ; if each channel has its own λ, the λ with the least magnitude."""
    norm: str
    """Norm layer that reads the sum: "none", "LayerNorm", "RMSNorm", or "unknown" (nothing is proved).
    With a norm, spreads and bounds are about the output of the norm before gain and bias."""
    norm_gain: float | None = None
    """Least gain |γ| of the norm; the bound times this number is a bound after the gain. 1 without a norm."""
    absolute_spread_in: float
    """Mean over sequences of μ of the states x; with a norm, of the normalized states."""
    absolute_spread_out: float | None = None
    """Mean over sequences of μ of the sum λx + f(x), after the norm if there is one."""
    kept: float | None = None
    """Least measured μ_out/μ_in (μ after and before the skip connection) of a sequence."""
    spread_in: float
    """Mean over sequences of μ/‖x‖_F of the states x."""
    spread_out: float
    """Mean over sequences of μ/‖λx + f(x)‖_F of the sum, before a norm."""
    mixing_share: float
    """Mean over sequences of ‖f(x)‖/‖λx + f(x)‖; near 0, the mixer no longer matters."""
    mixing_norm: float | None = None
    """C_M: ‖M‖_F of the mixing matrices M of all heads together, the largest of a sequence."""
    value_norm: float | None = None
    """S: ‖C‖_F of the value and output weights C of all heads together. None if the output projection does
    not write f(x); then ``min_lambda_paper`` and ``min_lambda_any_mixing`` are None as well."""
    kept_lower_bound: float | None = None
    """Lower bound of μ_out/μ_in at the current λ, proved for this batch."""
    min_lambda_proved: float | None = None
    """Least |λ| from which on √a of μ is kept, proved for this batch. With one λ per channel, each |λ| must
    reach it; None if a norm reads the sum and channels differ, because no such number exists."""
    min_lambda_proved_relative: float | None = None
    """Like ``min_lambda_proved``, but for μ/‖Y‖_F; None with a norm, because both numbers are equal."""
    min_lambda_any_mixing: float | None = None
    """Like ``min_lambda_proved``, but for any attention weights over the same tokens."""
    min_lambda_paper: float | None = None
    """Least |λ| for both hypotheses (Eq. 7 and μ² ≥ b) of the paper's Theorem 4.1. None if the theorem does
    not apply: it requires a norm after the sum, states of norm √D, and no bias of values or output."""
    paper_guaranteed: bool | None = None
    """True if the theorem guarantees that every sequence keeps √a of μ at the current λ."""


class StackCertificate(_Numbers):
    """Certificate of a stack of layers, from the input of its first λ-skip to the sum of its last λ-skip."""

    stack: str
    layers: int
    kept: float | None = None
    """Ratio of μ/‖Y‖ at the end to μ/‖Y‖ at the start, mean over sequences; None if all are left out."""
    kept_mu: float | None = None
    """Like ``kept``, but for μ alone; without a norm, a large λ increases it by making states longer."""
    left_out: int
    """Number of sequences left out because their tokens are equal at the start: no spread to keep."""
    min_lambda_proved: float | None = None
    """Largest ``min_lambda_proved`` of the layers; it holds for each single layer, not for the stack."""
    min_lambda_any_mixing: float | None = None
    min_lambda_paper: float | None = None


class SkipCertificate(SavedRecord, _Numbers):
    """Absolute token spread μ that λ-skips keep on one batch, measured and proved, by layer and by stack."""

    format: Literal["rankwise-certificate"] = "rankwise-certificate"
    schema_version: Literal[3] = 3
    a: float
    """Fraction of μ² (squared absolute token spread) that each layer should keep."""
    sequences: int
    layers: list[LayerCertificate]
    stacks: list[StackCertificate]
    notes: list[str] = Field(default_factory=list)


def lambda_words(least: float) -> str:
    """Return a least |λ| in words."""
    return f"|λ| ≥ {least:.3g}" if least <= MOST_LAMBDA else f"none below {MOST_LAMBDA:,}"


class LambdaChoice(Record):
    """λ chosen for one stack of blocks, by trials and by a proof; neither shows if training works with λ."""

    stack: str
    sites: list[str]
    """Names of the λ-skips or residual connections in the stack; empty if none was found."""
    value: float | None
    """Least |λ| tried with which tokens stay apart. None without one, or if with it a mixer would be
    reported as INACTIVE_BLOCK: then no λ is named."""
    removes_collapse: bool
    """True if the last |λ| of `tried` keeps tokens apart: a token spread of at least 0.1, above COLLAPSE."""
    tried: list[tuple[float, Number]]
    """Pairs (|λ|, lowest token spread after a block of the stack), in the order of the trials."""
    proved: float | None
    """|λ| from which on each layer is proved to keep half of the μ² of its input on this batch (half of
    μ²/‖Y‖² if no norm follows the sum). None if it is unknown or infinite."""
    mixing_share: Number
    """Mean of ‖f(x)‖/‖λx + f(x)‖ in the stack at the best |λ| tried; near 0, the mixers no longer matter."""
    statement: str = ""
    """What was tried, what is proved, and what is known about training, in words."""
    instead: str = ""
    """What to do if no λ is named: pre-norm, or nothing that was tried helps."""
