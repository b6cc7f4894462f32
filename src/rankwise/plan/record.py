"""Records of a plan for the query/key width of heads; this module does not import torch."""

from typing import Any, Literal

from pydantic import Field

from rankwise._internals.records import Number, Record, SavedRecord
from rankwise.tracing.head_id import HeadId


class QKCost(Record):
    """Cost of the queries and keys of one attention layer at one width, for the present number of heads."""

    head_dim: int
    """Query/key width K."""
    rank_share: Number
    """Mean rank/T of a head with random weights, interpolated between widths tried; NaN outside of them."""
    parameters: int
    """Number of parameters of W_q and W_k, without biases."""
    flops: int
    """Multiplications and additions of both projections and of the scores, for one sequence of T tokens."""
    cache_bytes: int
    """Bytes of the cached keys per token, at 2 bytes per number."""


class TrainedWidth(Record):
    """Query/key width that one head of a trained model requires, measured on sample tokens."""

    head: HeadId
    width: int
    """Query/key width K of the head."""
    required: Number
    """Smallest width that keeps the attention within the tolerance in nats; NaN if inputs are not finite."""


_CURVE = ("head_dim", "interval", "saturated", "fall")
_REMOVED = (
    "block", "fixed_width", "latency_tokens", "law", "layers", "options", "reason", "recommended",
    "value_dim",
)  # fmt: skip


def upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """Convert schema version 1: keep the curve of the layer with the largest K*, and drop removed fields.

    Damaged content is returned unchanged, so that validation names its first wrong field.
    """
    if content.get("schema_version") != 1:
        return content
    try:
        layers, trained = content["layers"], content.get("trained") or []
        layer = max(layers, key=lambda layer: layer["head_dim"])
        plan = {name: value for name, value in content.items() if name not in _REMOVED}
        plan |= {name: layer[name] for name in _CURVE} | {"schema_version": 2, "curve": layer["points"]}
        plan["saturated"] = all(layer["saturated"] for layer in layers)
        plan["trained"] = [
            {
                "head": {name: head[name] for name in ("stack", "layer", "head")},
                "width": head["width"],
                "required": head["needed"],
            }
            for head in trained
        ]
        notes = list(content.get("notes") or [])
        if len(layers) > 1:
            notes.append(f"Curve of layer {layer['layer']} of {len(layers)}, the layer with the largest K*.")
        if trained:
            notes.append("The widths of trained heads were measured by KL divergence (schema version 1).")
        return plan | {"notes": notes}
    except (KeyError, TypeError, ValueError, AttributeError):
        return content


class HeadDimPlan(SavedRecord):
    """Plan with K*, the query/key width beyond which wider heads with random weights gain almost no rank."""

    _upgraded = staticmethod(upgraded)

    format: Literal["rankwise-plan"] = "rankwise-plan"
    schema_version: Literal[2] = 2
    complete: bool = True
    """False if the plan was interrupted before all trials were done."""
    tokens: int
    """Number of tokens T per sequence."""
    mask: str
    inputs: str
    """Source of the token states: "orthonormal", "given" (passed by the user), or a description."""
    positions: str = "none"
    temperature: float = 0.0
    """Softmax temperature in units of √K; 0 is hardmax."""
    delta: float = 1e-2
    """Threshold δ: at temperatures above 0, the rank counts singular values ≥ δ."""
    tolerance: float
    """Mean gain in rank/T per unit of width, from K to 2K, that K* and wider heads stay below."""
    trials: int
    seed: int = 0
    curve: list[tuple[int, Number, Number]] = Field(min_length=1)
    """Points (K, mean rank/T, standard deviation of rank/T over trials), with the width K ascending."""
    barrier: Number
    """Expected rank (not divided by T) of one-hot rows at random: `rankwise.theory.rank_barrier`."""
    head_dim: int
    """K*: from this width on, gains stay below the tolerance; the widest width tried if not ``saturated``."""
    interval: tuple[int, int]
    """95 % bootstrap interval of K*, by resampling the trials."""
    saturated: bool
    """True if gains stay below the tolerance from K* on; False if rank/T still grows at the widest width."""
    fall: tuple[int, int, Number] | None = None
    """(K, K', lost rank/T): largest significant fall of mean rank/T, from K to K'; None if there is none."""
    heads: int | None = None
    kv_heads: int | None = None
    width: int | None = None
    """Model width D."""
    costs: list[QKCost] = Field(default_factory=list)
    """Costs at the present width, at K* and at the upper end of the interval of K*; empty without heads."""
    trained: list[TrainedWidth] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    about: dict[str, str] = Field(default_factory=dict)
    """Command, time, versions and machine that produced the plan."""
