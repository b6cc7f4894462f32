"""One state-space family, captured and compared with what its own layers gave."""

from dataclasses import dataclass

import torch
from torch import Tensor

import rankwise as rw
from experiments.rank.gated_path import from_path, gated_paths
from experiments.state_space_models import STATE_SPACE, tiny
from experiments.tiny_models import text_inputs

STATE_SPACE_HEADINGS = (
    "family",
    "operators",
    "mixers",
    "states",
    "max \\|from M V on − layer's output\\|",
    "max \\|from the whole path on − layer's output\\|",
    "outputs bit-identical",
)


@dataclass(frozen=True)
class StateSpaceRow:
    """What one family showed; errors are relative to the largest entry of a layer's output."""

    name: str
    trace: rw.Trace
    identical: bool
    mixer_error: float
    path_error: float | None
    """None where the layer is the scan alone, or a norm stands before its gate."""

    @property
    def complete(self) -> bool:
        """Whether every mixer and every state there is was captured."""
        family = STATE_SPACE[self.name]
        kinds = tuple(site.kind for site in self.trace.mixers)
        return kinds == family.kinds and len(self.trace.states) == family.states and not self.trace.uncaptured

    @property
    def cells(self) -> tuple[str, ...]:
        """Return its cells of the table."""
        family = STATE_SPACE[self.name]
        operators = list(dict.fromkeys(type(site.operator).__name__ for site in self.trace.mixers))
        return (
            self.name,
            ", ".join(f"`{operator}`" for operator in operators),
            f"{len(self.trace.mixers)} of {len(family.kinds)}",
            f"{len(self.trace.states)} of {family.states}",
            f"{self.mixer_error:.0e}",
            "no path beside it" if self.path_error is None else f"{self.path_error:.0e}",
            "yes" if self.identical else "no",
        )


@torch.no_grad()
def check_state_space(name: str) -> StateSpaceRow:
    """Capture one family, in float32 with padding, and compare it with itself."""
    model, batch = tiny(name), text_inputs()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :4] = batch["attention_mask"][1, 9:] = 0
    alone = model(**batch)[0]
    with rw.tracing.record_calls(model, lambda *_: True) as calls, rw.capture(model, values=True) as trace:
        watched = model(**batch)[0]
    found = gated_paths(trace, calls)
    mixer = max(_off(from_mixer(site), _own(site, call)) for site, call, _ in found)
    paths = [_off(from_path(path), _own(site, call)) for site, call, path in found if path is not None]
    return StateSpaceRow(name, trace, torch.equal(alone, watched), mixer, max(paths, default=None))


def from_mixer(site: rw.tracing.MixerSite) -> Tensor:
    """What the layer gives if its scan is M V; M V itself where the layer is the scan alone."""
    assert site.values is not None
    mixed = (site.operator @ site.values.double()).float()
    return mixed if site.apply_output is None else site.apply_output(mixed)


def _own(site: rw.tracing.MixerSite, call: rw.tracing.RecordedCall) -> Tensor:
    own = call.output if site.output is None else site.output
    assert isinstance(own, Tensor)
    return own


def _off(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())
