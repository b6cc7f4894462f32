"""Forward passes with a gate (a factor ξ = 1) on every head and block, gradients of gates, and removal."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, no_type_check

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rankwise._internals.batches import batch_size
from rankwise._internals.forward import Progress, out_of_memory
from rankwise._internals.linalg import as_float64
from rankwise.errors import InputError, RankwiseError, first_line
from rankwise.importance.losses import IGNORE_INDEX, Loss, LossBatch, SequenceLosses
from rankwise.importance.records import MORE_TRIES
from rankwise.importance.restarts import Restarts
from rankwise.importance.settings import ImportanceSettings
from rankwise.tracing import (
    Address,
    BlockOutput,
    CallId,
    CapturedMixer,
    HeadOutputs,
    Intervention,
    capture,
)

NO_BACKWARD = "WarnNotImplemented"
"""Name of the autograd node of an operation without a backward pass, such as an int8 product."""
Floats = NDArray[np.float64]


class NotDifferentiableError(InputError):
    """Raised if no gradient flows from the loss of a model to its heads."""

    def __init__(self, model: nn.Module, why: str) -> None:
        fix = (
            'Pass importance="exact" (or --importance exact), which removes heads one by one and needs '
            "no gradients; or load it unquantized, without torch.inference_mode or torch.no_grad inside, "
            "call outside of torch.inference_mode, and turn off gradient checkpointing: `model.eval()`."
        )
        super().__init__(
            f"importance of {type(model).__name__}",
            expected="a model through which gradients flow from its loss to its heads", got=why, fix=fix,
        )  # fmt: skip


def quoted(sites: Sequence[str]) -> str:
    """Return up to three names in quotes, and the number of further names."""
    shown = ", ".join(repr(name) for name in sites[:3])
    return shown if len(sites) <= 3 else f"{shown} and {len(sites) - 3} more"


class UnitGate(torch.autograd.Function):
    """Autograd function ξ·gated + (values − gated) at ξ = 1: the forward pass returns the values bit by bit.

    The gradient of ξ is the sum of (gradient · gated) over the axes that ξ does not have.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, values: Tensor, gated: Tensor) -> Tensor:
        """Return a copy of the values."""
        ctx.save_for_backward(gated)
        ctx.axes = gate.dim()
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of ξ and of the values."""
        (gated,), (gradient,) = ctx.saved_tensors, gradients
        wide = torch.promote_types(gradient.dtype, torch.float32)
        product = gradient.to(wide) * gated.to(wide)
        return product.flatten(ctx.axes).sum(-1), gradient, None


class Gates(Intervention):
    """Intervention that puts gates on tokens of heads' outputs, (B, H, T), and on blocks' updates, (B,)."""

    def __init__(self, blocks: Iterable[str], sequences: int) -> None:
        self.blocks, self._sequences = frozenset(blocks), sequences
        self.of_heads: dict[CallId, Tensor] = {}
        self.of_blocks: dict[CallId, Tensor] = {}

    def on_heads(self, heads: HeadOutputs) -> Tensor:
        """Return the outputs of the heads, unchanged but with gates in the autograd graph."""
        values = heads.values
        gate = _ones(values, values.shape[:3])
        self.of_heads[heads.call_id] = gate
        return UnitGate.apply(gate, values, values.detach())

    def on_block(self, block: BlockOutput) -> Tensor:
        """Return the block's output, unchanged but with a gate on the update (output minus input)."""
        output = block.output
        # the batch may be axis 0 or 1; if neither has the size of the batch, the block gets one gate
        axes = (axis for axis in (0, 1) if output.dim() > 2 and output.shape[axis] == self._sequences)
        axis = next(axes, None)
        gate = _ones(output, (1 if axis is None else self._sequences,))
        self.of_blocks[block.call_id] = gate
        update = (output - block.input).detach()
        if axis is None:
            return UnitGate.apply(gate, output[None], update[None])[0]
        return UnitGate.apply(gate, output.movedim(axis, 0), update.movedim(axis, 0)).movedim(0, axis)


def _ones(like: Tensor, shape: Iterable[int]) -> Tensor:
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.ones(tuple(shape), dtype=wide, device=like.device, requires_grad=True)


class Removal(Intervention):
    """Intervention that replaces head outputs by zero, and block outputs by inputs."""

    def __init__(self, heads: Mapping[CallId, Iterable[int]], blocks: Iterable[str]) -> None:
        self.blocks = frozenset(blocks)
        self._heads = {key: frozenset(chosen) for key, chosen in heads.items()}

    def on_heads(self, heads: HeadOutputs) -> Tensor | None:
        """Return the outputs with zeros for removed heads. Return None if no head of this call is removed."""
        chosen = self._heads.get(heads.call_id)
        if not chosen:
            return None
        values = heads.values
        removed = torch.tensor([head in chosen for head in range(values.shape[1])])[:, None, None]
        return torch.where(removed.to(values.device), 0.0, values)

    def on_block(self, block: BlockOutput) -> Tensor:
        """Return the block's input, so that the block does nothing."""
        return block.input


def incomplete_gates(nodes: Iterable[Any], gates: Iterable[Tensor]) -> set[int]:
    """Return the `id`s of gates with incomplete gradients: an operation after the gate has no backward pass.

    Such a gate gets only the part of its gradient that flows on other paths, such as the residual stream.
    """
    after = graph_nodes(*(node for node in nodes if NO_BACKWARD in node.name()))
    leaves = {id(getattr(node, "variable", None)) for node in after}
    return {id(gate) for gate in gates if id(gate) in leaves}


@no_type_check  # runtime type checks of thousands of nodes are slow
def graph_nodes(*starts, around=None):
    """Return all autograd nodes that a backward pass from ``starts`` reaches without the node ``around``."""
    seen = set()
    todo = [node for node in starts if node is not None]
    while todo:
        node = todo.pop()
        if node not in seen and node is not around:
            seen.add(node)
            todo += [after for after, _ in node.next_functions if after is not None]
    return seen


class GateSums:
    """Sums over sequences for each gate: gradients, squared gradients, and squared gradients of projections.

    A projection (probe) multiplies the output by a random vector. The gradient of a head adds up gradients of
    gates per token.
    """

    def __init__(self, gates: int) -> None:
        # (2, gates): sums over all sequences, and over the sequences that choose a removable set
        self.gradient, self.squares, self.curvature, self.tokens = np.zeros((4, 2, gates))
        self.unreached = False
        """True if no gradient or an incomplete gradient reached the gates."""

    def add(self, rows: Floats, choosing: Floats, share: float = 1.0, probes: int = 0) -> None:
        """Add gradients of the losses, or of one of ``probes`` random projections of outputs.

        Rows (2, B, gates) are gradients, and sums of squared gradients per token. ``share`` is the share of
        the sums of ``choosing`` that counts.
        """
        for part, ((gradients, tokens), weight) in enumerate(((rows, 1.0), (choosing, share))):
            squares = weight * np.square(gradients).sum(0)
            if probes:
                self.curvature[part] += squares / probes
                self.tokens[part] += weight * tokens.sum(0) / probes
            else:
                self.gradient[part] += weight * gradients.sum(0)
                self.squares[part] += squares

    def shared_curvature(self, part: int) -> Floats:
        """Return squared gradients per token, scaled to the sum of the squared gradients of all gates.

        Tokens act together: squares of sums exceed sums of squares. This factor varies less between heads of
        one layer than between random projections of a few sequences.
        """
        tokens, total = self.tokens[part], self.tokens[part].sum()
        return tokens * (self.curvature[part].sum() / total) if total else tokens


class GatedPasses:
    """Forward passes of a model over all batches: with gates (`whole`), or without heads and blocks.

    `capturing`: keyword arguments for `rankwise.capture`. `on_progress`: called when a pass begins.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[LossBatch],
        loss: Loss,
        settings: ImportanceSettings,
        capturing: Mapping[str, Any],
        on_progress: Progress,
    ) -> None:
        self.model, self.batches, self.loss, self._on_progress = model, batches, loss, on_progress
        self._done = 1
        self.probes = settings.probes if loss.half else 0
        self.settings, self._capturing = settings, dict(capturing)
        # per sequence with a finite loss: summed loss, number of tokens, and sum that divides costs
        self.losses, self.counts, self._references = np.zeros((3, 0))
        self.choosing = slice(None, None, 2 if settings.hold_out else 1)
        """Sequences on which a removable set is chosen: every second one, in whatever batches they come."""
        self.sequences = self.nonfinite_sequences = self.empty = self.forward = self.backward = 0
        self.mixers: dict[CallId, tuple[Address, int]] = {}
        """Address and number of heads of each mixer call with gates. Repeated runs share addresses."""
        self.ungated: dict[tuple[Address, int], None] = {}
        self.heads: dict[Address, GateSums] = {}
        self.blocks: dict[str, GateSums] = {}
        self.draws = False
        """True if the model draws random numbers."""
        self.removals = 0
        """Number of heads and blocks."""
        self.restarts = Restarts(model)
        self._whole: list[SequenceLosses] = []
        # per sequence: variance of the last losses, or of their changes, as only some tokens are read
        self.variances, self.value_error = np.zeros(0), math.nan

    def say(self, what: str) -> None:
        """Report that a pass begins: of one batch with gates, or of all batches without heads or blocks."""
        self._done += 1
        searched = 0 if self.settings.tolerance is None else self.removals.bit_length() + MORE_TRIES
        planned = 1 + len(self.batches) + (self.removals if self.settings.exact else 0) + searched
        planned = max(planned, self._done)
        self._on_progress(f"pass {self._done} of about {planned}: {what}", (self._done - 1) / planned)

    def whole(self, blocks: Iterable[str] = (), *, gradients: bool = False) -> None:
        """Run every batch once with gates; with ``gradients``, also backward from loss and projections.

        Raise `NotDifferentiableError` if no gradient reaches the gates, `InputError` if no loss is finite.
        """
        if gradients and torch.is_inference_mode_enabled():
            raise NotDifferentiableError(self.model, "torch.inference_mode around the call")
        generator = torch.Generator().manual_seed(self.settings.seed)
        for number, batch in enumerate(self.batches):
            self.say(f"{'gradients' if gradients else 'loss'} of batch {number + 1} of {len(self.batches)}")
            self._run_gated(batch, blocks, generator, gradients)
        self.value_error = self.standard_error()
        if not self.losses.size:
            got, fix = "nothing to predict", f"Use longer sequences, or labels other than {IGNORE_INDEX}."
            if self.nonfinite_sequences:
                got = f"{self.nonfinite_sequences} that are not finite"
                fix = "Look for NaN in the outputs of the model: float16 overflows, float32 may not."
            expected = "a finite number for at least one sequence"
            raise InputError(f"loss {self.loss.name!r}", expected=expected, got=got, fix=fix)
        if not gradients:
            return
        for mixer, sums in self.heads.items():
            # if all gradients are exactly 0, they are valid only if removal does not change the loss
            if not (sums.unreached or sums.squares.any() or sums.curvature.any()):
                removed = self.by_call(mixer.at(head) for head in range(sums.gradient.shape[-1]))
                sums.unreached = bool((self.without(removed) != self.losses).any())
        unreached = [mixer.site for mixer, sums in self.heads.items() if sums.unreached]
        if unreached and len(unreached) == len(self.heads):
            raise NotDifferentiableError(self.model, f"none that reaches {quoted(unreached)}")

    def _run_gated(
        self, batch: LossBatch, blocks: Iterable[str], generator: torch.Generator, gradients: bool
    ) -> None:
        """Run one batch with gates, and add its losses, gradients and mixers to the sums."""
        gates = Gates(blocks, batch_size(batch.batch))
        recorded = frozenset(blocks if self.settings.exact else ())
        mixers: dict[CallId, tuple[Address, int]] = {}

        def note(site: CapturedMixer) -> None:
            mixers[site.call_id] = site.address(), site.operator.shape[-3]

        try:
            whole = None
            if gradients and recorded:  # kernels with and without gradients may round differently
                with torch.no_grad():
                    with self.restarts.recording(batch.number, recorded):
                        output = self._run(batch, Removal({}, ()))
                    batch.reference_output = self.loss.keep(output, batch)
                    whole, recorded = self.loss.read(output, batch), frozenset()
            with torch.set_grad_enabled(gradients):  # overrides torch.no_grad around the call
                with self.restarts.recording(batch.number, recorded):
                    output = self._run(batch, gates, note)
                for key, mixer in mixers.items():
                    gate = gates.of_heads.get(key)
                    if gate is None or gate.shape[1] != mixer[1]:
                        self.ungated[mixer] = None
                    else:
                        self.mixers.setdefault(key, mixer)
                if whole is None:
                    batch.reference_output = self.loss.keep(output, batch)
                losses = self.loss.read(output, batch)
                if gradients:
                    self._backward(gates, output, losses, batch, generator)
        except RuntimeError as error:
            if not gradients or isinstance(error, RankwiseError) or out_of_memory(error):
                raise
            raise NotDifferentiableError(self.model, first_line(error)) from error
        losses = whole or losses
        total, finite = losses.total.detach(), losses.finite
        reference = total if losses.reference is None else losses.reference
        self.sequences += len(finite)
        self.nonfinite_sequences += int((~total.isfinite()).sum())
        self.empty += int((losses.count == 0).sum())
        self._whole.append(replace(losses, total=total))
        self.variances = np.append(self.variances, _numbers(losses.variance(), finite))
        self.losses = np.append(self.losses, _numbers(total, finite))
        self.counts = np.append(self.counts, _numbers(losses.count, finite))
        self._references = np.append(self._references, _numbers(reference, finite))

    def mean(self, losses: Floats, part: slice = slice(None)) -> float:
        """Return the mean per token of the losses of sequences, of all of them or of a part."""
        return float(losses[part].sum() / self.counts[part].sum())

    def standard_error(self, part: slice = slice(None)) -> float:
        """Return the standard error of the mean of the last run's losses or changes, from sampled tokens."""
        return float(np.sqrt(self.variances[part].sum()) / max(self.counts[part].sum(), 1))

    def reference(self, part: slice = slice(None)) -> float:
        """Return the number by which costs are divided, of all sequences or of a part."""
        return abs(self.mean(self._references, part))

    def _backward(
        self, gates: Gates, output: Any, losses: SequenceLosses, batch: LossBatch, generator: torch.Generator
    ) -> None:
        """Run backward from the loss of a batch and from random projections, and add the gates' gradients.

        If a module runs several times in a pass, its gates count as one gate: their gradients are added.
        """
        finite, step = losses.finite, self.choosing.step
        first = -len(self.losses) % step  # the next sequence of the choosing half
        gated = {key: gate for key, gate in gates.of_heads.items() if key in self.mixers}
        every = [*gated.values(), *gates.of_blocks.values()]
        if not every or not bool(finite.any()):
            return
        for probe in range(int(self.loss.compares_outputs), 1 + self.probes):  # 0 is the loss itself
            scalar = (self.loss.probe(output, batch, generator) if probe else losses.total)[finite].sum()
            if not scalar.requires_grad:
                raise NotDifferentiableError(self.model, "its loss has no gradient")
            incomplete = incomplete_gates(graph_nodes(scalar.grad_fn), every)
            gradients = torch.autograd.grad(scalar, every, retain_graph=True, allow_unused=True)
            self.backward += 1
            owners = [
                self.heads.setdefault(self.mixers[key][0], GateSums(gate.shape[1]))
                for key, gate in gated.items()
            ]
            owners += [self.blocks.setdefault(key.module, GateSums(1)) for key in gates.of_blocks]
            rows: dict[GateSums, Floats] = {}
            for sums, gate, gradient in zip(owners, every, gradients, strict=True):
                if gradient is None or id(gate) in incomplete:
                    sums.unreached = True
                else:
                    rows[sums] = rows.get(sums, 0.0) + _by_sequence(gradient, finite)
            number, probes = int(finite.sum()), self.probes if probe else 0
            for sums, summed in rows.items():
                if summed.shape[1] == number:
                    sums.add(summed, summed[:, first::step], probes=probes)
                else:  # a sum over sequences cannot be taken apart: the choosing half gets its share
                    sums.add(summed, summed, len(range(first, number, step)) / number, probes)

    def estimates(self, sums: GateSums | None, gates: int, part: int = 0) -> list[dict[str, float]]:
        """Return the estimates per gate as fields of `HeadImportance`. Without gradients, dicts are empty.

        ``part`` is 0 for all sequences, and 1 for the sequences on which a removable set is chosen.
        """
        if sums is None or sums.unreached:
            return [{} for _ in range(gates)]
        count = self.counts[self.choosing if part else slice(None)].sum()
        if self.probes:
            curvature = self.loss.half * sums.shared_curvature(part) / count
        elif self.loss.compares_outputs:
            curvature = np.full(gates, math.nan)
        else:
            curvature = 0.5 * sums.squares[part] / count
        estimate = curvature - sums.gradient[part] / count
        return [
            {"curvature": float(curvature[gate]), "estimate": float(estimate[gate])} for gate in range(gates)
        ]

    def by_call(self, heads: Iterable[Address]) -> dict[CallId, list[int]]:
        """Return head indices by mixer call. Raise `InputError` if a head is unknown or has no gate."""
        counts, calls = dict(self.mixers.values()), dict[Address, list[CallId]]()
        for key, (mixer, _) in self.mixers.items():
            calls.setdefault(mixer, []).append(key)
        chosen: dict[CallId, list[int]] = {}
        for head in heads:
            if head.head is None or head.head >= counts.get(head.at(None), 0):
                raise InputError(
                    f"head {head.head} of {head.site!r}", expected="a head of the model that can be gated",
                    got="none",
                    fix=f"Mixers with gates: {', '.join(mixer.site for mixer in calls) or 'none'}.",
                )  # fmt: skip
            for key in calls[head.at(None)]:
                chosen.setdefault(key, []).append(head.head)
        return chosen

    def without(self, heads: Mapping[CallId, Iterable[int]], blocks: Iterable[str] = ()) -> Floats:
        """Return the summed loss of each sequence, by the model without some heads and blocks.

        Each pass restarts at the first block that changes, if it can. Sequences whose loss is not finite in
        the whole model are left out.
        """
        totals, variances = list[Floats](), list[Floats]()
        changed = {*blocks, *(call.module for call in heads)}
        for batch, whole in zip(self.batches, self._whole, strict=True):
            with torch.no_grad(), self.restarts.skipping(batch.number, changed):
                losses = self.loss.read(self._run(batch, Removal(heads, blocks)), batch)
            totals.append(_numbers(losses.total, whole.finite))
            variances.append(_numbers(losses.variance(whole), whole.finite))
        self.variances = np.concatenate(variances)
        return np.concatenate(totals)

    def check_restarts(self) -> list[str]:
        """Check that passes that restart reproduce all losses. Return notes if they do not."""
        restarts, batches = self.restarts, {batch.number: batch for batch in self.batches}
        every = {call: range(count) for call, (_, count) in self.mixers.items()}
        with torch.no_grad():
            self._run(self.batches[0], Removal(every, ()))  # leaves wrong values where blocks share them
            last = restarts.check(
                {call.module for call in self.mixers},
                lambda number: self._run(batches[number], Removal({}, ())),
            )
        try:
            if last and not restarts.why_not and (self.without({CallId(last, 0): ()}) != self.losses).any():
                restarts.why_not = f"losses differ if all blocks before {last!r} are skipped"
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            restarts.why_not = f"the model fails if all blocks before {last!r} are skipped"
        if restarts.why_not:
            return [f"each exact cost took a pass of the whole model: {restarts.why_not}"]
        if restarts.left_out:
            some = f"{restarts.left_out} of {len(batches)} batches"
            return [f"each exact cost took a pass of the whole model for {some}: memory for states is short"]
        return []

    def noise(self) -> float:
        """Return by how much the loss of the first batch changes if the model draws other random numbers."""
        batch, finite, losses = self.batches[0], self._whole[0].finite, list[float]()
        for seed in (0, 1):
            with torch.no_grad():
                read = self.loss.read(self._run(batch, Removal({}, ()), seed=seed), batch)
            losses.append(float(read.total[finite].sum() / read.count[finite].sum()))
        return abs(losses[1] - losses[0])

    def _run(
        self,
        batch: LossBatch,
        intervention: Intervention,
        on_mixer: Callable[[CapturedMixer], None] = lambda site: None,
        seed: int = 0,
    ) -> Any:
        self.forward += 1
        options = self._capturing | {"intervention": intervention, "on_mixer": on_mixer}
        with capture(self.model, on_state=lambda state: None, **options):
            return self.loss.run(self.model, batch, seed)


def _numbers(values: Tensor, finite: Tensor) -> Floats:
    return as_float64(values.detach())[finite].cpu().numpy()


def _by_sequence(gradient: Tensor, finite: Tensor) -> Floats:
    """Return gradients and squared gradients per token, summed over tokens: (2, B, gates).

    Only sequences with a finite loss count. Without a batch axis, B is 1.
    """
    tokens = as_float64(gradient.detach()).reshape(*gradient.shape, *[1] * (3 - gradient.dim()))
    rows = torch.stack((tokens.sum(2), tokens.square().sum(2)))
    if rows.shape[1] % len(finite) == 0:  # add up windows, which are adjacent rows
        return rows.unflatten(1, (len(finite), -1)).sum(2)[:, finite.to(rows.device)].cpu().numpy()
    return rows.sum(1, keepdim=True).cpu().numpy()
