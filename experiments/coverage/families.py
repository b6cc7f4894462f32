"""Capture sees every mixer of these model families, and sees it exactly.

Each family is built tiny and with random float64 weights (no download) and runs one batch. Compared are

- outputs with and without capture, bit by bit;
- the captured matrix times the values, with the product of the model's own attention;
- the captured matrix, with `output_attentions` of the eager twin;
- the captured states, with `output_hidden_states`.

State-space families and hybrids are float32 with padding; their layers are computed again from M V, and from
the whole path as one operator.

It takes fifteen seconds on one core. Expected: every mixer and every state, bit-identical outputs, M V within
1e-12 of the model's own; matrices and states of the fused model within 1e-4 of its eager twin, which
computes some softmaxes in float32.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import rankwise as rw
from experiments.rank.gated_path import from_path, gated_paths
from experiments.render import markdown_table
from experiments.study import Report, Study
from experiments.zoo.state_space import STATE_SPACE, tiny
from experiments.zoo.transformers import FAMILIES, Batch, Family, text_inputs
from rankwise._internals.records import grouped

DTYPE = torch.float64
HEADINGS = (
    "family", "attention", "mixers", "states", "operator", "error of the layer's output", "error of M",
    "error of states", "outputs bit-identical",
)  # fmt: skip
STATE_SPACE_HEADINGS = (
    "family", "operators", "mixers", "states", "error of the layer's output, from M V",
    "error of the layer's output, from the whole path", "outputs bit-identical",
    "effective rank of M, of the whole path",
)  # fmt: skip


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return (
        [one for value in values for one in tensors(value)] if isinstance(output, dict | tuple | list) else []
    )


def difference(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference; infinity if shapes differ."""
    return float((one - other).abs().max()) if one.shape == other.shape else math.inf


# --- attention -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """One family compared with itself; NaN if the model does not report what would be compared."""

    family: Family
    implementation: str
    trace: rw.Trace
    identical: bool
    product_error: float
    attention_error: float
    state_error: float

    @property
    def complete(self) -> bool:
        """Return if every mixer and every state was captured."""
        found = len(self.trace.mixers), len(self.trace.states)
        return found == (self.family.mixers, self.family.states) and not self.trace.uncaptured

    @property
    def cells(self) -> list[str]:
        """Return its row of the table."""
        family, trace = self.family, self.trace
        attention = "fused" if self.implementation == "sdpa" else "softmax written out"
        errors = (self.product_error, self.attention_error, self.state_error)
        return [
            family.name,
            attention if family.replay is None else "PyTorch's own layer",
            f"{len(trace.mixers)} of {family.mixers}",
            f"{len(trace.states)} of {family.states}",
            operators(trace),
            *map(shown, errors),
            "yes" if self.identical else "no",
        ]


def operators(trace: rw.Trace) -> str:
    return ", ".join(dict.fromkeys(f"`{type(site.operator).__name__}`" for site in trace.mixers))


def shown(error: float) -> str:
    """Return a difference as the tables show it."""
    return "not offered" if math.isnan(error) else f"{error:.0e}" if error else "0"


@torch.no_grad()
def check(family: Family, implementation: str) -> Checked:
    """Capture one family and compare it with itself."""
    model, batch = prepared(family, implementation)
    alone = tensors(model(**batch))
    with rw.capture(model, values=True) as trace:
        watched = tensors(model(**batch))
    matrices, states = reported(family)
    return Checked(
        family,
        implementation,
        trace,
        len(alone) == len(watched) and all(map(torch.equal, alone, watched)),
        product_error(family, model, trace),
        max((difference(trace.mixers[at].operator.dense(), m) for at, m in matrices), default=math.nan),
        max(state_errors(family, trace, states, model), default=math.nan),
    )


def prepared(family: Family, implementation: str) -> tuple[nn.Module, Batch]:
    batch = {
        name: value.to(DTYPE) if value.is_floating_point() else value
        for name, value in family.inputs().items()
    }
    return family.build(implementation).to(DTYPE), batch


def applied(site: rw.tracing.CapturedMixer) -> Tensor:
    """Return M V in float64 from the dense matrix, with one value head per head."""
    assert site.values is not None
    groups = site.operator.shape[1] // site.values.shape[1]
    return site.operator.dense(DTYPE) @ site.values.to(DTYPE).repeat_interleave(groups, dim=1)


def product_error(family: Family, model: nn.Module, trace: rw.Trace) -> float:
    """Return the largest difference between M V and the attention's own output, or the states after it."""
    if family.replay is None:
        return max(
            math.inf if site.output is None else difference(applied(site), site.output)
            for site in trace.mixers
        )
    states = {(state.stack, state.layer): state for state in trace.states}
    errors = []
    for (stack, layer), state in states.items():
        if layer > 0:
            products = [applied(m) for m in trace.mixers if (m.stack, m.layer) == (stack, layer - 1)]
            block = model.get_submodule(state.name)
            replayed = family.replay(block, states[stack, layer - 1].tokens, products)
            errors.append(difference(replayed, state.tokens))
    return max(errors, default=math.inf)


def reported(family: Family) -> tuple[list[tuple[int, Tensor]], dict[str, tuple[Tensor, ...]]]:
    """Return attention matrices by mixer, and hidden states by stack, as the eager twin reports them."""
    model, batch = prepared(family, "eager")
    if not hasattr(model, "config"):
        return [], {}
    output = model(**batch, output_attentions=True, output_hidden_states=True)
    if "encoder_attentions" in output:
        pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
        matrices = [*output.encoder_attentions, *(matrix for pair in pairs for matrix in pair)]
        states = {"encoder": output.encoder_hidden_states, "decoder": output.decoder_hidden_states}
        return list(enumerate(matrices)), states
    if len(output.attentions) != family.mixers:  # Swin reports the last block of each stage
        each = family.mixers // len(output.attentions)
        return [(each * (at + 1) - 1, matrix) for at, matrix in enumerate(output.attentions)], {}
    return list(enumerate(output.attentions)), {"": output.hidden_states}


def state_errors(
    family: Family, trace: rw.Trace, stacks: dict[str, tuple[Tensor, ...]], model: nn.Module
) -> Iterator[float]:
    """Yield the differences of captured states from the hidden states of the same stack."""
    for prefix, hidden in stacks.items():
        states = [state.tokens for state in trace.states if state.stack.startswith(prefix)]
        if family.final_norm:
            norm = ".".join(part for part in (prefix, family.final_norm) if part)
            states[-1] = model.get_submodule(norm)(states[-1])
        yield from (difference(one, other) for one, other in zip(states, hidden, strict=True))


# --- state spaces ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedStateSpace:
    """One state-space family; errors are relative to the largest entry of a layer's output."""

    name: str
    trace: rw.Trace
    identical: bool
    mixer_error: float
    path_error: float | None
    """None if the layer is the scan alone, or has a norm before its gate."""
    ranks: str
    """Mean effective ranks of the scans and of the whole paths."""

    @property
    def complete(self) -> bool:
        """Return if every mixer and every state was captured."""
        family = STATE_SPACE[self.name]
        kinds = tuple(site.kind for site in self.trace.mixers)
        return kinds == family.kinds and len(self.trace.states) == family.states and not self.trace.uncaptured

    @property
    def cells(self) -> list[str]:
        """Return its row of the table."""
        family = STATE_SPACE[self.name]
        return [
            self.name,
            operators(self.trace),
            f"{len(self.trace.mixers)} of {len(family.kinds)}",
            f"{len(self.trace.states)} of {family.states}",
            f"{self.mixer_error:.0e}",
            "–" if self.path_error is None else f"{self.path_error:.0e}",
            "yes" if self.identical else "no",
            self.ranks,
        ]


@torch.no_grad()
def check_state_space(name: str) -> CheckedStateSpace:
    """Capture one family, in float32 with padding, and compare it with itself."""
    model, batch = tiny(name), text_inputs()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :4] = batch["attention_mask"][1, 9:] = 0
    alone = model(**batch)[0]
    with rw.tracing.record_calls(model, lambda *_: True) as calls, rw.capture(model, values=True) as trace:
        watched = model(**batch)[0]
    mixer, whole, ranks = [], [], []
    for site, call, path in gated_paths(trace, calls):
        own = call.output if site.output is None else site.output
        mixer.append(_relative(from_mixer(site), own))
        if path is not None:
            whole.append(_relative(from_path(path), own))
            ranks.append([rw.measures.effective_rank(one.operator).mean().item() for one in (site, path)])
    words = "{:.1f}, {:.1f}".format(*map(fmean, zip(*ranks, strict=True))) if ranks else "–"
    return CheckedStateSpace(
        name, trace, torch.equal(alone, watched), max(mixer), max(whole, default=None), words
    )


def from_mixer(site: rw.tracing.CapturedMixer) -> Tensor:
    """Return the output of a layer whose scan is M V; M V itself if the layer is the scan alone."""
    assert site.values is not None
    mixed = (site.operator @ site.values.double()).float()
    return mixed if site.apply_output is None else site.apply_output(mixed)


def _relative(one: Tensor, other: Any) -> float:
    return float((one - other).abs().max() / other.abs().max())


def measure() -> Report:
    """Check every family in each of its implementations, and keep the rows of the tables."""
    attention = [check(family, how).cells for family in FAMILIES for how in family.implementations]
    return {"attention": attention, "state_space": [check_state_space(name).cells for name in STATE_SPACE]}


def tables(report: Report) -> dict[str, str]:
    """Return both tables; a cell has what the implementations of a family have, in their order."""
    families = grouped(report["attention"], itemgetter(0)).values()
    joined = [[", ".join(dict.fromkeys(cells)) for cells in zip(*rows, strict=True)] for rows in families]
    return {
        "table": markdown_table(HEADINGS, joined),
        "state_space": markdown_table(STATE_SPACE_HEADINGS, report["state_space"]),
    }


STUDY = Study("families", lambda data: measure(), "reference/models", tables)
