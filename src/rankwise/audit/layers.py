"""From captured token states to numbers: collapse through depth, padding left out."""

import numpy as np
import torch

from rankwise import measures
from rankwise.audit.accumulate import RunningMoments
from rankwise.audit.records import LayerRecord
from rankwise.capture import StateSite

LAYER_MEASURES = ("tokens", "norm", "collapse", "relative_collapse", "mean_cosine", "effective_rank")


class LayerTable:
    """Takes token states as they are captured and keeps running numbers of every layer."""

    def __init__(self) -> None:
        self._layers: dict[tuple[str, int], tuple[StateSite, int, RunningMoments, list[int]]] = {}

    def add(self, state: StateSite) -> None:
        """Measure every sequence of one captured state."""
        key = (state.stack, state.layer)
        if key not in self._layers:
            empty = state.tokens.new_zeros(0, 0, 0)
            bare = StateSite(state.name, state.layer, empty, None, state.stack, state.run)
            self._layers[key] = bare, state.tokens.shape[-1], RunningMoments((len(LAYER_MEASURES),)), [0]
        _, _, moments, nonfinite = self._layers[key]
        for values in _measure(state):
            broken = bool(np.isnan(values[LAYER_MEASURES.index("norm")]))
            nonfinite[0] += broken
            moments.add(np.full_like(values, np.nan) if broken else values)

    def records(self) -> list[LayerRecord]:
        """One record a layer, in the order of the model."""
        out = []
        for state, width, moments, nonfinite in self._layers.values():
            mean, spread = moments.mean, moments.spread
            out.append(
                LayerRecord(
                    stack=state.stack,
                    site=state.name,
                    layer=state.layer,
                    sequences=int(moments.count[LAYER_MEASURES.index("norm")]),
                    nonfinite=nonfinite[0],
                    width=width,
                    spread={name: float(spread[at]) for at, name in enumerate(LAYER_MEASURES) if at},
                    **{name: float(mean[at]) for at, name in enumerate(LAYER_MEASURES)},
                )
            )
        return out


def _measure(state: StateSite) -> list[np.ndarray]:
    tokens, mask = state.tokens, state.mask
    real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask is None else mask
    measured = (
        real.sum(-1).double(),
        measures.token_norm(tokens, mask),
        measures.token_collapse(tokens, mask, normalized=False),
        measures.token_collapse(tokens, mask, normalized=True),
        measures.mean_cosine(tokens, mask),
        measures.state_effective_rank(tokens, mask),
    )
    return list(torch.stack([column.cpu() for column in measured], dim=-1).numpy())
