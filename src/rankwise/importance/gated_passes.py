"""Passes of a model with a gate ξ = 1 on every head and block, their gradients, and passes without heads."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rankwise._internals.forward import Batch, batch_size, device_of, run_model, to_device
from rankwise.errors import InputError, RankwiseError, first_line
from rankwise.importance.losses import Loss, LossBatch, ProbedLoss, SequenceLosses
from rankwise.tracing import (
    BlockOutput,
    CallId,
    HeadId,
    HeadOutputs,
    Intervention,
    MixerSite,
    StateSite,
    capture,
)

NO_BACKWARD = "WarnNotImplemented"
"""Name of the graph node of an operation without a backward pass, such as an int8 product."""
Floats = NDArray[np.float64]


class NotDifferentiableError(InputError):
    """No gradient flows from the loss of a model to its heads."""


def not_differentiable(model: nn.Module, why: str) -> NotDifferentiableError:
    """Return the error for a model whose heads get no gradient."""
    return NotDifferentiableError(
        f"importance of {type(model).__name__}",
        expected="a model through which gradients flow from its loss to its heads",
        got=(why.strip().splitlines() or ["none"])[0],
        fix='Pass importance="exact" (or --importance exact), which removes heads one by one and needs no '
        "gradients; or load it unquantized, without torch.inference_mode or torch.no_grad inside, and call "
        "outside of torch.inference_mode.",
    )


def quoted(sites: Sequence[str]) -> str:
    """Return the first three names in quotes, and the number of the others."""
    shown = ", ".join(repr(name) for name in sites[:3])
    return shown if len(sites) <= 3 else f"{shown} and {len(sites) - 3} more"


# --- interventions -----------------------------------------------------------------------------------------


class UnitGate(torch.autograd.Function):
    """``ξ · part + rest`` at ξ = 1: the forward pass multiplies nothing and keeps every bit.

    The gradient of ξ is the sum of gradient · part over the axes that ξ does not have.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, values: Tensor, part: Tensor) -> Tensor:
        """Return a copy of the values."""
        ctx.save_for_backward(part)
        ctx.axes = gate.dim()
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of ξ and of the values."""
        (part,), (gradient,) = ctx.saved_tensors, gradients
        wide = torch.promote_types(gradient.dtype, torch.float32)
        product = gradient.to(wide) * part.to(wide)
        return product.flatten(ctx.axes).sum(-1), gradient, None


class Gates(Intervention):
    """Put a gate on the output of every head, (B, H), and on the update of every block, (B,).

    Args:
        blocks: names of the blocks.
        sequences: number of sequences in the batch.
        means: outputs (H, V) of each call at ξ = 0; zero by default.
    """

    def __init__(
        self, blocks: Iterable[str], sequences: int, means: Mapping[CallId, Tensor] | None = None
    ) -> None:
        self.blocks = frozenset(blocks)
        self._sequences, self._means = sequences, means
        self.of_heads: dict[CallId, Tensor] = {}
        self.of_blocks: dict[CallId, Tensor] = {}

    def on_heads(self, heads: HeadOutputs) -> Tensor:
        """Return the gated outputs."""
        values = heads.values
        gate = _ones(values, values.shape[:2])
        self.of_heads[heads.call_id] = gate
        part = values.detach()
        if self._means is not None:
            part = part - self._means[heads.call_id].to(part)[:, None]
        return UnitGate.apply(gate, values, part)

    def on_block(self, block: BlockOutput) -> Tensor:
        """Return the block's output with a gate on its update."""
        output = block.output
        # tokens may be the first axis; if neither axis counts the sequences, the block gets one gate
        axis = next((at for at in (0, 1) if output.dim() > 2 and output.shape[at] == self._sequences), None)
        gate = _ones(output, (1 if axis is None else self._sequences,))
        self.of_blocks[block.call_id] = gate
        update = (output - block.input).detach()
        if axis is None:
            return UnitGate.apply(gate, output[None], update[None])[0]
        return UnitGate.apply(gate, output.movedim(axis, 0), update.movedim(axis, 0)).movedim(0, axis)


def _ones(like: Tensor, shape: Iterable[int]) -> Tensor:
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.ones(tuple(shape), dtype=wide, device=like.device, requires_grad=True)


class MeanRecorder(Intervention):
    """Sum the outputs of every head over real tokens into `sums`: (H, V) and number of tokens per call."""

    def __init__(self, sums: dict[CallId, tuple[Tensor, int]]) -> None:
        self._sums = sums

    def on_heads(self, heads: HeadOutputs) -> None:
        """Add the outputs of one call."""
        summed = torch.where(heads.valid_tokens[:, None, :, None], heads.values, 0).double().sum((0, 2))
        before, tokens = self._sums.get(heads.call_id, (torch.zeros_like(summed), 0))
        self._sums[heads.call_id] = before + summed, tokens + int(heads.valid_tokens.sum())


class Removal(Intervention):
    """Replace the outputs of some heads by zero or their means, and let blocks return their input.

    Args:
        heads: numbers of the heads of each call.
        means: mean outputs (H, V) of each call; zero by default.
        blocks: names of blocks.
    """

    def __init__(
        self,
        heads: Mapping[CallId, Iterable[int]],
        means: Mapping[CallId, Tensor] | None,
        blocks: Iterable[str],
    ) -> None:
        self.blocks = frozenset(blocks)
        self._heads = {key: sorted(chosen) for key, chosen in heads.items()}
        self._means = means

    def on_heads(self, heads: HeadOutputs) -> Tensor | None:
        """Return the outputs without the chosen heads of this call, if any."""
        chosen = self._heads.get(heads.call_id)
        if not chosen:
            return None
        values = heads.values.clone()
        values[:, chosen] = 0
        if self._means is not None:
            values[:, chosen] += self._means[heads.call_id][chosen].to(values)[:, None]
        return values

    def on_block(self, block: BlockOutput) -> Tensor:
        """Return the block's input."""
        return block.input


def incomplete_gates(scalar: Tensor, gates: Iterable[Tensor]) -> set[int]:
    """Return ids of gates whose gradient is incomplete: an operation on their path has no backward.

    The residual stream passes a part of the gradient around such an operation.
    """
    after = _graph_nodes(node for node in _graph_nodes([scalar.grad_fn]) if NO_BACKWARD in node.name())
    leaves = {id(getattr(node, "variable", None)) for node in after}
    return {id(gate) for gate in gates if id(gate) in leaves}


def _graph_nodes(starts: Iterable[Any]) -> set[Any]:
    """Return all nodes that a backward pass reaches."""
    seen: set[Any] = set()
    open_nodes = [node for node in starts if node is not None]
    while open_nodes:
        node = open_nodes.pop()
        if node not in seen:
            seen.add(node)
            open_nodes += [following for following, _ in node.next_functions if following is not None]
    return seen


# --- passes ------------------------------------------------------------------------------------------------


class GatedMixer(NamedTuple):
    """Address, kind and number of heads of a mixer call."""

    mixer: HeadId
    kind: str
    heads: int


class Estimates(NamedTuple):
    """Numbers of `HeadImportance` for several gates, (gates,) each; NaN if unknown."""

    gradient: Floats
    first_order: Floats
    fisher: Floats
    curvature: Floats
    estimate: Floats

    @classmethod
    def unknown(cls, gates: int) -> "Estimates":
        """Return estimates of which nothing is known."""
        return cls(*(np.full(gates, math.nan) for _ in range(5)))

    def fields(self, gate: int) -> dict[str, float]:
        """Return the numbers of one gate as fields of a record."""
        return {name: float(values[gate]) for name, values in self._asdict().items()}


@dataclass
class GateSums:
    """Sums over sequences of gradients, absolute values, squares and squares of probes, (gates,) each."""

    gates: int
    gradient: Floats = field(init=False)
    absolute: Floats = field(init=False)
    squares: Floats = field(init=False)
    curvature: Floats = field(init=False)
    unreached: bool = False
    """True if no gradient, or only a part of it, reached the gates."""

    def __post_init__(self) -> None:
        self.gradient, self.absolute, self.squares, self.curvature = (np.zeros(self.gates) for _ in range(4))

    def add(self, rows: Floats) -> None:
        """Add gradients of the sequences' totals (B, gates)."""
        self.gradient += rows.sum(0)
        self.absolute += np.abs(rows).sum(0)
        self.squares += np.square(rows).sum(0)

    def add_probe(self, rows: Floats, probes: int) -> None:
        """Add gradients of one of several random projections (B, gates)."""
        self.curvature += np.square(rows).sum(0) / probes

    @property
    def all_zero(self) -> bool:
        """True if all gradients were exactly 0."""
        return not (self.absolute.any() or self.curvature.any())

    def estimates(self, loss: Loss, count: float, probes: int) -> Estimates:
        """Return estimates per counted token."""
        unknown = Estimates.unknown(self.gates)
        if self.unreached:
            return unknown
        gradient, fisher = self.gradient / count, 0.5 * self.squares / count
        first_order, curvature = self.absolute / count, unknown.curvature
        if isinstance(loss, ProbedLoss) and probes:
            curvature = loss.half * self.curvature / count
        if loss.compares_outputs:  # the loss has its minimum, 0, at ξ = 1
            gradient, first_order, fisher = np.zeros(self.gates), unknown.first_order, unknown.fisher
        second = fisher if curvature is unknown.curvature else curvature
        return Estimates(gradient, first_order, fisher, curvature, second - gradient)


class GatedPasses:
    """A model, its batches and its loss: passes with gates, and passes without heads and blocks.

    Args:
        model: the model.
        batches: batches of the loss.
        loss: loss of its outputs.
        mean: replace removed heads by their means instead of zero.
        capturing: keyword arguments for `rankwise.capture`.
        say: called with a description of each pass.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[LossBatch],
        loss: Loss,
        mean: bool,
        capturing: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self.model, self.batches, self.loss, self.say = model, batches, loss, say
        self._capturing = dict(capturing)
        self.value = self.reference = math.nan
        self.count = 0.0
        self.sequences = self.nonfinite = self.forward = self.backward = 0
        self.mixers: dict[CallId, GatedMixer] = {}
        """Mixer calls with gates."""
        self.ungated: dict[GatedMixer, None] = {}
        self.heads: dict[CallId, GateSums] = {}
        self.blocks: dict[CallId, GateSums] = {}
        self._reference_sum = 0.0
        self._finite: list[Tensor] = []
        self._device = device_of(model)
        self._means: dict[CallId, Tensor] | None = self._find_means() if mean else None

    def _find_means(self) -> dict[CallId, Tensor]:
        """Run every batch for the mean outputs of each head over real tokens, (H, V)."""
        sums: dict[CallId, tuple[Tensor, int]] = {}
        for number, batch in enumerate(self.batches):
            self.say(f"means of batch {number + 1} of {len(self.batches)}")
            with torch.no_grad():
                self._run(to_device(batch.batch, self._device), MeanRecorder(sums), _ignore)
        return {key: summed / max(tokens, 1) for key, (summed, tokens) in sums.items()}

    def whole(self, blocks: Iterable[str], probes: int, seed: int, *, gradients: bool) -> None:
        """Run every batch once with gates, and backward from the loss and from random projections.

        Raises:
            NotDifferentiableError: if no gradient reaches the gates.
            InputError: if no sequence has a finite loss.
        """
        if gradients and torch.is_inference_mode_enabled():
            raise not_differentiable(self.model, "torch.inference_mode around the call")
        generator, total = torch.Generator().manual_seed(seed), 0.0
        for number, batch in enumerate(self.batches):
            self.say(f"gradients of batch {number + 1} of {len(self.batches)}")
            gates = Gates(blocks, batch_size(batch.batch), self._means)
            total += self._gated(batch, gates, self.probes_of(probes), generator, gradients)
        if not self.count:
            raise InputError(
                f"loss, {self.loss.name}", expected="a finite number for at least one sequence",
                got=f"{self.nonfinite} that are not finite" if self.nonfinite else "nothing to predict",
                fix="Look for NaN in the outputs of the model (float16 overflows; float32 may not), or "
                "for sequences of a single token.",
            )  # fmt: skip
        self.value = total / self.count
        own = self.loss.reference == Loss.reference
        self.reference = abs(self.value) if own else self._reference_sum / self.count
        if gradients:
            self._check_reached()

    def _check_reached(self) -> None:
        """Gradients that are all exactly 0 are no estimates if the loss changes without the heads."""
        for key, sums in self.heads.items():
            if not sums.unreached and sums.all_zero:
                sums.unreached = self.without({key: range(sums.gates)})[0] != self.value
        unreached = [key.module for key, sums in self.heads.items() if sums.unreached]
        if unreached and len(unreached) == len(self.heads):
            raise not_differentiable(self.model, f"none that reaches {quoted(unreached)}")

    def probes_of(self, wanted: int) -> int:
        """Return the number of random projections per batch; 0 for losses without them."""
        return wanted if isinstance(self.loss, ProbedLoss) else 0

    def _gated(
        self, batch: LossBatch, gates: Gates, probes: int, generator: torch.Generator, gradients: bool
    ) -> float:
        found: dict[CallId, GatedMixer] = {}

        def note(site: MixerSite) -> None:
            found[site.call_id] = GatedMixer(site.head_id(), site.kind, site.operator.shape[-3])

        try:
            with torch.set_grad_enabled(gradients):  # whatever surrounds the call
                output = self._run(to_device(batch.batch, self._device), gates, note)
                losses = self.loss.read(output, batch)
                batch.reference_output = self.loss.keep(output, batch)
                finite = losses.total.detach().isfinite() & (losses.count > 0)
                if gradients:
                    self._backward(gates, output, losses, batch, finite, probes, generator)
        except RuntimeError as error:
            if not gradients or isinstance(error, torch.OutOfMemoryError | RankwiseError):
                raise
            raise not_differentiable(self.model, first_line(error)) from error
        for key, mixer in found.items():
            gate = gates.of_heads.get(key)
            if gate is None or gate.shape[1] != mixer.heads:
                self.ungated[mixer] = None
            else:
                self.mixers.setdefault(key, mixer)
        self.sequences += len(finite)
        self.nonfinite += int((~losses.total.detach().isfinite()).sum())
        self._finite.append(finite)
        self.count += float(losses.count[finite].sum())
        if losses.reference is not None:
            self._reference_sum += float(losses.reference[finite].sum())
        return float(losses.total.detach()[finite].sum())

    def _backward(
        self,
        gates: Gates,
        output: Any,
        losses: SequenceLosses,
        batch: LossBatch,
        finite: Tensor,
        probes: int,
        generator: torch.Generator,
    ) -> None:
        every = [*gates.of_heads.values(), *gates.of_blocks.values()]
        totals = [] if self.loss.compares_outputs else [(losses.total[finite].sum(), 0)]
        probe_of = self.loss.probe if isinstance(self.loss, ProbedLoss) else None
        projected = (probe_of(output, batch, generator)[finite].sum() for _ in range(probes) if probe_of)
        for scalar, probe in chain(totals, ((product, probes) for product in projected)):
            if not (bool(finite.any()) and every):
                return
            if not scalar.requires_grad:
                raise not_differentiable(self.model, "its loss has no gradient")
            incomplete = incomplete_gates(scalar, every)
            gradients = iter(torch.autograd.grad(scalar, every, retain_graph=True, allow_unused=True))
            self.backward += 1
            for of, sums in ((gates.of_heads, self.heads), (gates.of_blocks, self.blocks)):
                for key, gate in of.items():
                    known = sums.setdefault(key, GateSums(gate.shape[1] if gate.dim() > 1 else 1))
                    gradient = next(gradients)
                    if gradient is None or id(gate) in incomplete:
                        known.unreached = True
                        continue
                    rows = _by_sequence(gradient, finite)
                    known.add_probe(rows, probe) if probe else known.add(rows)

    def without(
        self, heads: Mapping[CallId, Iterable[int]], blocks: Iterable[str] = ()
    ) -> tuple[float, float]:
        """Return the loss without heads and blocks, over sequences with a finite loss, and the mean cosine.

        The cosine is between token states without them and with them; NaN if the loss does not compute it.
        """
        total, cosine, sequences = 0.0, 0.0, 0
        for batch, finite in zip(self.batches, self._finite, strict=True):
            with torch.no_grad():
                removal = Removal(heads, self._means, blocks)
                output = self._run(to_device(batch.batch, self._device), removal, _ignore)
                losses = self.loss.read(output, batch)
            total += float(losses.total[finite].sum())
            cosine += math.nan if losses.cosine is None else float(losses.cosine[finite].sum())
            sequences += int(finite.sum())
        return total / self.count, cosine / sequences

    def _run(self, batch: Batch, intervention: Intervention, on_mixer: Callable[[MixerSite], None]) -> Any:
        self.forward += 1
        options = self._capturing | {"intervention": intervention}
        with capture(self.model, on_mixer=on_mixer, on_state=_ignore, **options):
            return run_model(self.model, batch)


def _ignore(site: MixerSite | StateSite) -> None:
    """Ignore a site."""


def _by_sequence(gradient: Tensor, finite: Tensor) -> Floats:
    """Return rows (B, gates) of sequences with a finite loss; one row if gates are not per sequence."""
    rows = gradient.detach().double()
    rows = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
    if rows.shape[0] % len(finite) == 0:  # windows of a sequence follow one another
        rows = rows.unflatten(0, (len(finite), -1)).sum(1)[finite.to(rows.device)]
    else:
        rows = rows.sum(0, keepdim=True)
    return rows.cpu().numpy()
