"""Records of certificates and of the choice of λ; this module does not import torch."""

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from rankwise._internals.files import write_file
from rankwise._internals.records import Number, Record, load_record

RENAMED = {
    "scale": "lambda_value",
    "collapse_in": "spread_in",
    "collapse_out": "spread_out",
    "relative_in": "relative_spread_in",
    "relative_out": "relative_spread_out",
    "price": "mixing_share",
    "sound_bound": "kept_lower_bound",
    "sound_scale": "min_lambda_proved",
    "sound_scale_relative": "min_lambda_proved_relative",
    "sound_scale_any_mixing": "min_lambda_any_mixing",
    "paper_scale_with_floor": "min_lambda_paper",
}
"""Fields of layers and stacks by their name in files of version 1."""


class _Numbers(Record):
    model_config = ConfigDict(ser_json_inf_nan="strings")  # ∞ is an answer: no λ is large enough


class LayerCertificate(_Numbers):
    """One λ-skip: measured on the batch, and the least |λ| of each bound.

    Numbers are of the worst sequence unless stated otherwise. None if not known or not applicable.
    """

    site: str
    lambda_value: float
    """λ; with one λ per channel, the λ of least magnitude."""
    norm: str
    """Norm that reads the sum: "none", "LayerNorm", "RMSNorm", or "unknown", for which nothing is proved.
    Behind a norm, spreads and bounds are about its output before gain and bias."""
    norm_gain: float | None = None
    """min|γ| of the norm: μ after the gain is at least this times the bound; 1 without a norm."""
    spread_in: float
    """Mean over sequences of μ of the states x; behind a norm, of their directions times √D."""
    spread_out: float | None
    """Mean over sequences of μ after the sum and its norm."""
    kept: float | None
    """Least μ_out/μ_in of a sequence, measured."""
    relative_spread_in: float
    """Mean of μ/‖x‖_F."""
    relative_spread_out: float
    """Mean of μ/‖λx + f(x)‖_F."""
    mixing_share: float
    """Mean of ‖f(x)‖/‖λx + f(x)‖; near 0 the mixer no longer matters."""
    mixing_norm: float | None
    """C_M, measured: largest ‖M‖_F of all heads together."""
    value_norm: float | None
    """S: ‖C‖_F of value and output weights of all heads together. None if the output projection does not
    write f(x); then ``min_lambda_paper`` and ``min_lambda_any_mixing`` are None as well."""
    kept_lower_bound: float | None
    """Proved for this batch: least μ_out/μ_in at the current λ."""
    min_lambda_proved: float | None
    """Proved for this batch: least |λ| from which on √a of μ is kept. With one λ per channel, the least for
    each of them; None if a norm reads the sum and they differ, because no such number exists."""
    min_lambda_proved_relative: float | None
    """As ``min_lambda_proved``, for μ/‖Y‖_F; None behind a norm, because both are equal."""
    min_lambda_any_mixing: float | None
    """As ``min_lambda_proved``, for any attention weights over the same tokens."""
    min_lambda_paper: float | None
    """Least |λ| for both hypotheses of the paper's Theorem 4.1: Eq. 7 and μ² ≥ b. None where it does not
    apply: it requires a norm that reads the sum, states on its sphere, and no bias of values or output."""
    paper_guaranteed: bool | None = None
    """True if the theorem guarantees √a of μ in every sequence at the current λ."""


class StackCertificate(_Numbers):
    """One stack of layers, from the states of its first λ-skip to the sum of its last."""

    stack: str
    layers: int
    kept: float | None
    """Mean over sequences of μ/‖Y‖ at the end over μ/‖Y‖ at the start; None if all sequences are left out."""
    kept_mu: float | None
    """As ``kept``, for μ; without a norm a large λ raises it by making the states longer."""
    left_out: int
    """Sequences whose tokens are equal at the start of the stack, so that there is nothing to keep."""
    min_lambda_proved: float | None
    """Largest ``min_lambda_proved`` of its layers: about each single layer, not about the stack."""
    min_lambda_any_mixing: float | None = None
    min_lambda_paper: float | None


class SkipCertificate(_Numbers):
    """Properties of the skip connections of a model on a batch, by layer and by stack."""

    format: Literal["rankwise-certificate"] = "rankwise-certificate"
    schema_version: Literal[2] = 2
    a: float
    """Fraction of μ² that each layer should keep."""
    sequences: int
    layers: list[LayerCertificate]
    stacks: list[StackCertificate]
    notes: list[str] = Field(default_factory=list)

    @classmethod
    def load(cls, path: str | Path) -> "SkipCertificate":
        """Return a certificate from its file, or from ``certificate.json`` in a folder."""
        return load_record(path, cls, "certificate.json", upgrade=_upgraded, unmarked=True)

    def save(self, path: str | Path) -> Path:
        """Write the certificate as JSON and return the path; raise an `InputError` if that is impossible."""
        return write_file(Path(path), self.model_dump_json(indent=1), "certificate")

    def rows(self) -> list[dict[str, Any]]:
        """Return the layers as dicts, for a table."""
        return [layer.model_dump() for layer in self.layers]


class LambdaChoice(Record):
    """λ for one stack: tried by an audit, and proved. Only training shows if the model trains with it."""

    stack: str
    sites: list[str]
    """Names of the λ-skips or residual connections of the stack; empty if none was found."""
    value: float
    """Least |λ| tried without COLLAPSE; if all have it, the |λ| with the highest lowest μ/‖Y‖."""
    removes_collapse: bool
    """True if an audit of this batch finds no COLLAPSE with every |λ| of the stack at least `value`."""
    tried: list[tuple[float, Number]]
    """(|λ|, lowest μ/‖Y‖ after a block of the stack), in the order of trial."""
    proved: float | None
    """|λ| from which on every layer is proved to keep half of μ² of the states that it read on this batch:
    relative to ‖Y‖² without a norm behind the sum. None if it is unknown or infinite."""
    mixing_share: Number
    """Mean ‖f(x)‖/‖λx + f(x)‖ of the stack at `value`: near 0, the mixers no longer matter."""


def _upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """Return a file of version 1 with the current names, without fields that were removed."""
    if content["schema_version"] == 2:
        return content
    known = {name: content[name] for name in SkipCertificate.model_fields if name in content}
    for part, kind in (("layers", LayerCertificate), ("stacks", StackCertificate)):
        for at, one in enumerate(known[part] if isinstance(known.get(part), list) else ()):
            if isinstance(one, dict):  # anything else stays, for the error about it
                new = {RENAMED.get(name, name): value for name, value in one.items()}
                known[part][at] = {name: value for name, value in new.items() if name in kind.model_fields}
    return known | {"schema_version": 2}
