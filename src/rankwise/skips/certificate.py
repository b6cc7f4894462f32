"""What a certificate of λ-skips says, and how it is written down."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rankwise._internals.files import write_file


class LayerCertificate(BaseModel):
    """One λ-skip: what was measured there, and what each bound asks for.

    Numbers are of the worst sequence of the batch, unless said otherwise: the smallest of what is kept, the
    largest of what is needed. None where something does not apply or is not known.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    site: str
    scale: float
    """λ; of one for each channel, that of least magnitude."""
    norm: str
    """What makes the next state of the sum, told by what it computes. ``none``: the sum is the state, and the
    bounds speak of it; ``LayerNorm`` or ``RMSNorm``: they speak of what that makes of it, before its gain;
    ``unknown``: nothing is promised, and a note says why."""
    norm_gain: float | None = None
    """min|γ| of that norm: μ of the state after it is at least this times the bound. 1 without a norm."""
    collapse_in: float
    """Mean over sequences of μ of what the mixer's block reads; before a norm, of its directions times √D."""
    collapse_out: float | None
    """Mean over sequences of μ after the sum, and after the norm where there is one, without its gain."""
    kept: float | None
    """Least μ_out/μ_in of a sequence."""
    relative_in: float
    """Mean of μ/‖Y‖_F before."""
    relative_out: float
    """Mean of μ/‖Y‖_F after."""
    price: float
    """Mean of ‖B‖/‖λY + B‖, B what the mixer gave: how much mixing the sum holds."""
    gain: float
    """Largest ‖B‖_F/‖Y‖_F of a sequence; at most S·C_M where the mixer is as the paper has it."""
    mixing_norm: float | None
    """C_M on the data: largest ‖M‖_F, of all heads together."""
    mixing_norm_worst: float | None
    """C_M whatever the input: √(H·T) where rows are weights that sum to 1; None where nothing bounds it."""
    value_norm: float | None
    """S: ‖C‖_F of the value and output weights, of all heads together; None if anything stands between the
    output projection and the sum, and with it all of the paper's numbers and `sound_scale_any_mixing`."""
    paper_holds: bool | None
    """Whether Eq. 7 holds at this λ, with S·C_M measured: half of what the paper's theorem asks, and alone no
    guarantee. It and the next five are None where the theorem says nothing: it is about LayerNorm or RMSNorm
    after the sum, a mixer that reads states on their sphere, and no bias of values or output. Those that
    depend on λ are None as well where it differs by channel."""
    paper_guaranteed: bool | None = None
    """Whether the theorem promises √a of μ here: Eq. 7 and μ² ≥ b, in every sequence."""
    paper_scale: float | None
    """Least |λ| for Eq. 7, with S·C_M measured."""
    paper_scale_worst: float | None
    """Likewise, with C_M whatever the input."""
    paper_floor: float | None
    """The theorem's b at this λ; the theorem speaks of states with μ² ≥ b. None likewise."""
    paper_scale_with_floor: float | None
    """Least |λ| for Eq. 7 and μ² ≥ b together."""
    sound_bound: float | None
    """Least share of μ_in that is sure at this λ, whatever way the mixer's rows point. It and the numbers
    below are None where the norm is not known."""
    sound_scale: float | None
    """Least |λ| that is sure to keep √a of μ, given the lengths of the mixer's rows; of one for each channel,
    the least that each must have, or None where a norm reads the sum and they differ: no such number is."""
    sound_scale_relative: float | None
    """Likewise of μ/‖Y‖_F; None after a norm, where it is the same, and where λ differs by channel."""
    sound_scale_any_mixing: float | None
    """Likewise whatever the weights of attention are, given the tokens it reads."""


class StackCertificate(BaseModel):
    """One stack of layers: from what its first λ-skip reads to what its last λ-skip gives."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    stack: str
    layers: int
    kept: float | None
    """Mean over sequences of (μ/‖Y‖)_L/(μ/‖Y‖)_0 at the λ of the model; None if all are left out."""
    target: float
    threshold: float | None
    """Least λ, one for all layers, from which on the stack keeps the target, on this batch, as measured."""
    recommended: float | None = None
    """The λ to give all its layers: the threshold, where the stack now keeps less than the target and some λ
    up to 16 helps. None where nothing needs to be changed, where no λ helps, or where nothing is known."""
    kept_mu: float | None
    """As `kept`, of μ itself: μ_L/μ_0; μ_L after the last norm, without its gain, if one reads the sum.
    Without one a large λ raises it by making the states longer, be they as alike as before."""
    threshold_mu: float | None
    """As `threshold`, of μ itself."""
    left_out: int
    """Sequences whose tokens are all equal where the stack starts: μ_0 = 0, and nothing is there to keep."""
    paper_scale: float | None
    """The largest of its layers; it and the next three are of μ in each single layer, not of the stack."""
    paper_scale_with_floor: float | None
    sound_scale: float | None
    sound_scale_any_mixing: float | None = None


class SkipCertificate(BaseModel):
    """What the λ-skips of a model guarantee on a batch: layer by layer, and for its stacks."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    a: float
    """The part of μ² that each layer is to keep."""
    target: float
    """The part of μ/‖Y‖, or of μ, that a stack is to keep."""
    sequences: int
    layers: list[LayerCertificate]
    stacks: list[StackCertificate]
    notes: list[str] = []

    def save(self, path: str | Path) -> Path:
        """Write it as JSON.

        Args:
            path: the file.

        Raises:
            InputError: if it cannot be written.
        """
        return write_file(Path(path), self.model_dump_json(indent=1), "certificate")

    def rows(self) -> list[dict[str, Any]]:
        """The layers as dicts, for a table."""
        return [layer.model_dump() for layer in self.layers]
