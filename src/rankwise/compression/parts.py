"""The parts of a model that can be compressed: a new part is a function, and a line in `parts`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import nn

from rankwise.compression.records import BudgetCurve, HeadWidth, LatentCurve, LatentRank


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
    """Attention KL that it may cost, nats; one of ``keep``, ``tolerance`` and ``width`` is given."""
    width: float | int | None = None
    """Mean width of a head."""
    calibrate: int = 0
    """Steps of Adam for each layer."""
    nulls: bool = True
    """Whether to measure curves of other ways beside ours."""
    seed: int = 0
    on_step: Callable[[str], None] = lambda what: None
    """Told what is under way."""


@dataclass
class PartResult:
    """What a part did: the model is changed when it comes back."""

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
    latent_curves: list[LatentCurve] = field(default_factory=list)


@runtime_checkable
class Change(Protocol):
    """A change of the model that can be made and unmade."""

    def apply(self) -> None:
        """Make it."""

    def undo(self) -> None:
        """The model is as it was."""


@dataclass(frozen=True)
class Prepared:
    """A part that has looked at the model: it knows what it would take out at any share."""

    linear: set[str]
    """Names of the linear layers that it makes smaller."""
    change: Callable[[float], Change]
    """What would be left at a share to keep, in closed form, not yet put in; refused where that is too
    little."""
    finish: Callable[[Job], PartResult]
    """Do it as the job says, for good."""


Part = Callable[[Job], Prepared]


def parts() -> dict[str, Part]:
    """All parts by name, in the order they are done."""
    from rankwise.compression.heads import prepare_heads
    from rankwise.compression.kv_solve import prepare as prepare_keys_values
    from rankwise.compression.qk_solve import prepare as prepare_query_keys
    from rankwise.compression.rotary_solve import prepare as prepare_rotary

    return {
        "heads": prepare_heads,
        "qk": prepare_query_keys,
        "rotary": prepare_rotary,
        "kv": prepare_keys_values,
    }
