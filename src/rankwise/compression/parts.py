"""The parts of a model that can be compressed: a new part is a function, and a line in `parts`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rankwise.compression.record import BudgetCurve, HeadWidth, LatentRank


@dataclass
class Job:
    """What a part is asked to do."""

    model: nn.Module
    """In evaluation mode."""
    batches: list[Any]
    """Calibration data."""
    figures: list[Any]
    """Data that prices are measured on: held-out batches, or the calibration data where there are none."""
    keep: float | int | None = None
    """Share of the part to keep, in its own unit, 0 < keep < 1."""
    tolerance: float | int | None = None
    """Attention KL that it may cost, nats; one of ``keep`` and ``tolerance`` is given."""
    calibrate: int = 0
    """Steps of Adam for each layer."""
    seed: int = 0
    on_step: Callable[[str], None] = lambda what: None
    """Told what is under way."""


@dataclass
class PartResult:
    """What a part did; the model is changed when the part returns it."""

    heads: list[HeadWidth] = field(default_factory=list)
    kl: dict[str, float] = field(default_factory=dict)
    """Attention KL of each layer on the figures' data, by site."""
    curves: list[BudgetCurve] = field(default_factory=list)
    tokens: int = 0
    """Real tokens of the calibration data."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Layers that could not be done, with the reason."""
    notes: list[str] = field(default_factory=list)
    complete: bool = True
    """False where Ctrl-C or want of memory stopped calibration."""
    undo: Callable[[], None] = lambda: None
    """Take the change out of the model, for a while or for good."""
    redo: Callable[[], None] = lambda: None
    """Put it in again."""
    latents: list[LatentRank] = field(default_factory=list)


Part = Callable[[Job], PartResult]
"""Changes the model as the job says."""


def parts() -> dict[str, Part]:
    """All parts by name, in the order they are done."""
    from rankwise.compression.heads_solve import remove_heads
    from rankwise.compression.kv_solve import factor_keys_values
    from rankwise.compression.qk_solve import narrow_query_keys
    from rankwise.compression.rotary_solve import narrow_rotary

    return {
        "heads": remove_heads,
        "qk": narrow_query_keys,
        "rotary": narrow_rotary,
        "kv": factor_keys_values,
    }
