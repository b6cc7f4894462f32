"""From captured token states to numbers: collapse through depth, padding left out."""

from dataclasses import dataclass, field

import numpy as np
import torch

from rankwise import measures
from rankwise.auditing.heads import RunningMoments
from rankwise.auditing.measures import LAYER_MEASURES
from rankwise.auditing.records import LayerRecord
from rankwise.tracing import StateSite

COLUMNS = ("tokens", *(measure.name for measure in LAYER_MEASURES))
NORM = COLUMNS.index("norm")
"""NaN where a sequence holds NaN or infinity."""


@dataclass
class SiteStates:
    """What is known so far of the states after one block."""

    stack: str
    site: str
    layer: int
    width: int
    moments: RunningMoments = field(default_factory=lambda: RunningMoments((len(COLUMNS),)))
    nonfinite: int = 0

    def add(self, values: np.ndarray) -> None:
        """Take one sequence into the means."""
        broken = bool(np.isnan(values[NORM]))
        self.nonfinite += broken
        self.moments.add(np.full_like(values, np.nan) if broken else values)

    def record(self) -> LayerRecord:
        """What to write down."""
        mean, spread = self.moments.mean, self.moments.spread
        return LayerRecord(
            stack=self.stack,
            site=self.site,
            layer=self.layer,
            sequences=int(self.moments.count[NORM]),
            nonfinite=self.nonfinite,
            width=self.width,
            spread={name: float(spread[at]) for at, name in enumerate(COLUMNS) if at},
            known={
                name: int(known)
                for name, known in zip(COLUMNS, self.moments.count, strict=True)
                if 0 < known < self.moments.count[NORM]
            },
            baseline=None,
            **{name: float(mean[at]) for at, name in enumerate(COLUMNS)},
        )


class LayerTable:
    """Takes token states as they are captured and keeps running numbers of every layer."""

    def __init__(self) -> None:
        self._layers: dict[tuple[str, int], SiteStates] = {}
        self._pending: list[tuple[SiteStates, list[np.ndarray]]] = []
        self._last: dict[str, StateSite] = {}
        """Of each stack the state before, which the next one is compared with."""

    def add(self, state: StateSite) -> None:
        """Measure every sequence of one captured state; `commit` takes the numbers into the means."""
        known = SiteStates(state.stack, state.name, state.layer, state.tokens.shape[-1])
        self._pending.append((known, _measure(state, self._before(state))))

    def commit(self) -> None:
        """A batch is done: take its numbers into the means."""
        for new, numbers in self._pending:
            known = self._layers.setdefault((new.stack, new.layer), new)
            for values in numbers:
                known.add(values)
        self.discard()

    def discard(self) -> None:
        """A batch failed midway: forget its numbers."""
        self._pending.clear()
        self._last.clear()

    def _before(self, state: StateSite) -> StateSite | None:
        """The state that the block read, where it is at hand."""
        last = self._last.get(state.stack)
        self._last[state.stack] = state
        if last is None or (last.forward_pass, last.layer + 1) != (state.forward_pass, state.layer):
            return None
        return last if last.tokens.shape == state.tokens.shape else None

    def records(self) -> list[LayerRecord]:
        """One record a layer, in the order of the model."""
        return [layer.record() for layer in self._layers.values()]


def _measure(state: StateSite, before: StateSite | None) -> list[np.ndarray]:
    tokens, mask = state.tokens, state.mask
    real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask is None else mask
    columns = {
        measure.name: measures.MEASURES[measure.function].function(tokens, mask, **measure.options)
        for measure in LAYER_MEASURES
        if measure.function
    }
    columns["tokens"] = real.sum(-1).double()
    if before is None:
        columns["turn"] = torch.full(tokens.shape[:1], torch.nan, dtype=torch.float64)
    else:
        columns["turn"] = measures.relative_update(before.tokens.to(tokens.device), tokens, mask)
    return list(torch.stack([columns[name].cpu() for name in COLUMNS], dim=-1).numpy())
