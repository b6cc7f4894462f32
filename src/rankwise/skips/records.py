"""Records of λ-skip certificates and of choices of λ. This module does not import torch."""

from typing import Literal

from pydantic import ConfigDict, Field

from rankwise._internals.files import SavedRecord
from rankwise._internals.records import Number, Record

MOST_LAMBDA = 1000
"""Largest |λ| that is stated as a number. Larger |λ| suppress all mixers."""


class _Numbers(Record):
    model_config = ConfigDict(ser_json_inf_nan="strings")  # ∞ is a valid bound: no λ is large enough


class LayerCertificate(_Numbers):
    """Certificate of one λ-skip: how much absolute token spread μ it keeps, and the least |λ| proved.

    μ(Y) = ‖Y − 1ȳᵀ‖_F is the distance of the token states Y from their mean ȳ. If a norm reads the sum, μ is
    measured after the norm, before its gain and bias. Numbers are of the worst sequence unless stated
    otherwise. A number is None if it is unknown or does not apply.
    """

    site: str
    lambda_value: float
    """λ; if each channel has its own λ, the λ with the least magnitude."""
    norm: str
    """Norm layer that reads the sum: "none", "LayerNorm", "RMSNorm", or "unknown" (nothing is proved)."""
    absolute_spread_ratio: float | None = None
    """Measured ratio of μ after the skip connection to μ before it: the least ratio of all sequences."""
    absolute_spread_ratio_bound: float | None = None
    """Lower bound of the ratio at the current λ, proved for this batch."""
    min_lambda_proved: float | None = None
    """Least |λ| at and above which the ratio is proved to be at least `keep_spread` on this batch.

    With one λ per channel, each |λ| must reach this value. None if a norm reads the sum and λ differs between
    channels, because no such number exists.
    """
    min_lambda_proved_relative: float | None = None
    """Like ``min_lambda_proved``, but for the token spread μ/‖Y‖_F. None if a norm reads the sum."""
    mixing_share: float
    """Mean over sequences of ‖f(x)‖/‖λx + f(x)‖. Near 0, the mixer no longer matters."""
    largest_token_share: float | None = None
    """Largest share that one token has in μ² after the skip connection: max_i ‖y_i − ȳ‖²/μ². Above one half,
    μ describes this token. None if μ is unknown or 0."""


class SkipCertificate(SavedRecord, _Numbers):
    """Absolute token spread μ that λ-skips keep in each layer on one batch, measured and proved."""

    format: Literal["rankwise-certificate"] = "rankwise-certificate"
    schema_version: Literal[5] = 5
    keep_spread: float
    """Share of the absolute token spread μ that each layer should keep."""
    sequences: int
    layers: list[LayerCertificate]
    notes: list[str] = Field(default_factory=list)


def lambda_words(least: float) -> str:
    """Return a least |λ| as text."""
    return f"|λ| ≥ {least:.3g}" if least <= MOST_LAMBDA else f"none below {MOST_LAMBDA:,}"


class LambdaChoice(Record):
    """λ chosen for one stack of blocks, by trials and by a proof. Neither shows if training works with λ."""

    stack: str
    sites: list[str]
    """Names of the λ-skips or residual connections in the stack. Empty if none was found."""
    value: float | None
    """Least tried |λ| with which tokens stay apart. None if there is no such |λ|, or if a mixer would be
    reported as INACTIVE_BLOCK with this λ."""
    removes_collapse: bool
    """True if the last |λ| of `tried` keeps tokens apart: a direction spread of at least 0.1."""
    tried: list[tuple[float, Number]]
    """Pairs (|λ|, lowest direction spread after a block of the stack), in the order of the trials."""
    proved: float | None
    """Least |λ| at and above which each layer is proved to keep √½ of the μ of its input on this batch (√½ of
    μ/‖Y‖ if no norm follows the sum). None if this |λ| is unknown or infinite."""
    mixing_share: Number
    """Mean of ‖f(x)‖/‖λx + f(x)‖ in the stack at the best |λ| tried. Near 0, mixers no longer matter."""
    summary: str = ""
    """Text on the tried λ, the proved λ, and training with λ."""
    advice: str = ""
    """Advice if no λ is named."""
