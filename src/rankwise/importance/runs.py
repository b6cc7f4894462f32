"""Runs of a model on its batches: whole with gates, and without some heads."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rankwise._internals.forward import Batch, batch_size, device_of, run_model, to_device
from rankwise.errors import InputError, RankwiseError
from rankwise.importance.gates import Gates, MeanTaker, Without, cut_off
from rankwise.importance.losses import Case, Loss, ProbedLoss, Read
from rankwise.importance.results import Estimates, Floats
from rankwise.tracing import CallId, Intervention, MixerSite, StateSite, capture

Say = Callable[[str], None]
"""Called with what is being done."""


class CalledSite(NamedTuple):
    """Where a mixer stands in the model."""

    stack: str
    layer: int
    site: str
    cross: bool
    occurrence: int
    kind: str
    heads: int


class _Sites:
    """Mixers of one forward pass as they are captured: their places, by call."""

    def __init__(self) -> None:
        self.of_calls: dict[CallId, CalledSite] = {}

    def add(self, site: MixerSite) -> None:
        """One more."""
        place = (site.stack, site.layer, site.name, site.cross, site.call)
        self.of_calls[site.call_id] = CalledSite(*place, site.kind, site.operator.shape[-3])


class NotDifferentiableError(InputError):
    """A model through which no gradient flows from its loss to its heads."""


@dataclass
class Sums:
    """Running sums of the gradients of some gates, one row a sequence."""

    gates: int
    gradient: Floats = field(init=False)
    absolute: Floats = field(init=False)
    squares: Floats = field(init=False)
    curvature: Floats = field(init=False)
    lost: bool = False
    """Whether a gradient did not reach them, or not the whole of it."""

    def __post_init__(self) -> None:
        self.gradient, self.absolute, self.squares, self.curvature = (np.zeros(self.gates) for _ in range(4))

    def add(self, rows: Floats) -> None:
        """Gradients of the sequences' totals (B, gates)."""
        self.gradient += rows.sum(0)
        self.absolute += np.abs(rows).sum(0)
        self.squares += np.square(rows).sum(0)

    def add_probe(self, rows: Floats, probes: int) -> None:
        """Gradients of one of so many random projections (B, gates)."""
        self.curvature += np.square(rows).sum(0) / probes

    @property
    def silent(self) -> bool:
        """Whether all gradients were exactly 0."""
        return not (self.absolute.any() or self.curvature.any())

    def estimates(self, loss: Loss, count: float, probes: int) -> Estimates:
        """Per counted token."""
        unknown = np.full(self.gates, math.nan)
        if self.lost:
            return Estimates(unknown, unknown, unknown, unknown, unknown)
        gradient, fisher = self.gradient / count, 0.5 * self.squares / count
        first_order = self.absolute / count
        curvature = unknown
        if isinstance(loss, ProbedLoss) and probes:
            curvature = loss.half * self.curvature / count
        if loss.moves:  # the loss is at its least, 0, where nothing has moved
            gradient, first_order, fisher = np.zeros(self.gates), unknown, unknown
        removal = (fisher if curvature is unknown else curvature) - gradient
        return Estimates(gradient, first_order, fisher, curvature, removal)


class Runs:
    """A model and its batches, and the loss that is taken of them.

    Args:
        model: the model.
        cases: the batches.
        loss: what is taken of its outputs.
        capturing: keyword arguments for `rankwise.capture`.
        say: told what is being done.
    """

    def __init__(
        self, model: nn.Module, cases: Sequence[Case], loss: Loss, capturing: Mapping[str, Any], say: Say
    ) -> None:
        self.model, self.cases, self.loss = model, cases, loss
        self._capturing, self._say = dict(capturing), say
        self.value = self.reference = math.nan
        self.count = 0.0
        self.sequences = self.nonfinite = self.forward = self.backward = 0
        self.sites: dict[CallId, CalledSite] = {}
        """Where each gated call stands in the model."""
        self.ungated: dict[CalledSite, None] = {}
        self.heads: dict[CallId, Sums] = {}
        self.blocks: dict[CallId, Sums] = {}
        self._referred = 0.0
        self._finite: list[Tensor] = []
        self._sums: dict[CallId, tuple[Tensor, int]] = {}
        self._device = device_of(model)

    # --- the whole model ----------------------------------------------------------------------------------

    def note_means(self) -> None:
        """Run every batch once for what its heads give on average."""
        for number, case in enumerate(self.cases):
            self._say(f"means of batch {number + 1} of {len(self.cases)}")
            with torch.no_grad():
                self._run(to_device(case.batch, self._device), MeanTaker(self._sums), _ignore)

    def whole(
        self, blocks: Iterable[str], probes: int, seed: int, gradients: bool = True, mean: bool = False
    ) -> None:
        """Run every batch once, with gates, and go back from its loss and from random projections.

        Args:
            blocks: names of the blocks that get a gate.
            probes: random projections a batch.
            seed: of these.
            gradients: whether to go back at all.
            mean: whether heads are taken down to their means, which are known then, and not to zero.

        Raises:
            NotDifferentiableError: if no gradient reaches the gates.
            InputError: if no sequence has a finite loss.
        """
        if gradients and torch.is_inference_mode_enabled():
            raise _not_differentiable(self.model, "torch.inference_mode around the call")
        generator = torch.Generator().manual_seed(seed)
        total, means = 0.0, self.means() if mean else None
        for number, case in enumerate(self.cases):
            self._say(f"gradients of batch {number + 1} of {len(self.cases)}")
            gates = Gates(blocks, batch_size(case.batch), means)
            total += self._one(case, gates, self.probes_of(probes), generator, gradients)
        if not self.count:
            raise InputError(
                f"loss, {self.loss.name}", expected="a finite number for at least one sequence",
                got=f"{self.nonfinite} that are not finite" if self.nonfinite else "nothing to predict",
                fix="Look for NaN in the outputs of the model (float16 overflows; float32 may not), or "
                "for sequences of a single token.",
            )  # fmt: skip
        self.value = total / self.count
        own = self.loss.reference == Loss.reference
        self.reference = abs(self.value) if own else self._referred / self.count
        if gradients:
            self._check_reached(mean)

    def _check_reached(self, mean: bool) -> None:
        """Gradients that are all 0 say nothing where the loss changes without the heads."""
        for key, sums in self.heads.items():
            if not sums.lost and sums.silent:
                sums.lost = self.without({key: range(sums.gates)}, mean)[0] != self.value
        lost = [key.module for key, sums in self.heads.items() if sums.lost]
        if lost and len(lost) == len(self.heads):
            raise _not_differentiable(self.model, f"none that reaches {named(lost)}")

    def probes_of(self, asked: int) -> int:
        """Random projections a batch: as many as asked for, of losses that have them.

        Args:
            asked: for how many.
        """
        return asked if isinstance(self.loss, ProbedLoss) else 0

    def _one(
        self, case: Case, gates: Gates, probes: int, generator: torch.Generator, gradients: bool
    ) -> float:
        batch, sites = to_device(case.batch, self._device), _Sites()
        try:
            with torch.set_grad_enabled(gradients):  # whatever holds around the call
                output = self._run(batch, gates, sites.add)
                read = self.loss.read(output, case)
                case.whole = self.loss.keep(output, case)
                finite = read.total.detach().isfinite() & (read.count > 0)
                if gradients:
                    self._back(gates, output, read, case, finite, probes, generator)
        except RuntimeError as error:
            if not gradients or isinstance(error, torch.OutOfMemoryError | RankwiseError):
                raise
            raise _not_differentiable(self.model, str(error)) from error
        self._note_sites(gates, sites.of_calls)
        self.sequences += len(finite)
        self.nonfinite += int((~read.total.detach().isfinite()).sum())
        self._finite.append(finite)
        self.count += float(read.count[finite].sum())
        if read.reference is not None:
            self._referred += float(read.reference[finite].sum())
        return float(read.total.detach()[finite].sum())

    def _back(
        self,
        gates: Gates,
        output: Any,
        read: Read,
        case: Case,
        finite: Tensor,
        probes: int,
        generator: torch.Generator,
    ) -> None:
        every = [*gates.of_heads.values(), *gates.of_blocks.values()]
        rounds = [] if self.loss.moves else [(read.total[finite].sum(), 0)]
        probe_of = self.loss.probe if isinstance(self.loss, ProbedLoss) else None
        projected = (probe_of(output, case, generator)[finite].sum() for _ in range(probes) if probe_of)
        for scalar, probe in chain(rounds, ((product, probes) for product in projected)):
            if not (bool(finite.any()) and every):
                return
            if not scalar.requires_grad:
                raise _not_differentiable(self.model, "its loss has no gradient")
            cut = cut_off(scalar, every)
            gradients = torch.autograd.grad(scalar, every, retain_graph=True, allow_unused=True)
            self.backward += 1
            found = iter(gradients)
            for of, sums in ((gates.of_heads, self.heads), (gates.of_blocks, self.blocks)):
                for key, gate in of.items():
                    known = sums.setdefault(key, Sums(gate.shape[1] if gate.dim() > 1 else 1))
                    gradient = next(found)
                    if gradient is None or id(gate) in cut:
                        known.lost = True
                        continue
                    rows = _by_sequence(gradient, finite)
                    known.add_probe(rows, probe) if probe else known.add(rows)

    def _note_sites(self, gates: Gates, sites: Mapping[CallId, CalledSite]) -> None:
        for key, placed in sites.items():
            gate = gates.of_heads.get(key)
            if gate is None or gate.shape[1] != placed.heads:
                self.ungated[placed] = None
            else:
                self.sites.setdefault(key, placed)

    # --- without some heads -------------------------------------------------------------------------------

    def means(self) -> dict[CallId, Tensor]:
        """What each head gives on average over the real tokens of all batches, (H, V)."""
        return {key: summed / max(tokens, 1) for key, (summed, tokens) in self._sums.items()}

    def without(
        self, heads: Mapping[CallId, Iterable[int]], mean: bool = False, blocks: Iterable[str] = ()
    ) -> tuple[float, float]:
        """The loss without some heads and blocks, over the sequences whose own loss is finite.

        Args:
            heads: of each call the numbers of its heads.
            mean: whether their mean over tokens takes their place, and not zero.
            blocks: names of blocks.

        Returns:
            The loss, and the mean cosine of token states where the loss knows it, else NaN.
        """
        total, cosine, sequences = 0.0, 0.0, 0
        means = self.means() if mean else None
        for case, finite in zip(self.cases, self._finite, strict=True):
            with torch.no_grad():
                batch = to_device(case.batch, self._device)
                output = self._run(batch, Without(heads, means, blocks), _ignore)
                read = self.loss.read(output, case)
            total += float(read.total[finite].sum())
            cosine += math.nan if read.cosine is None else float(read.cosine[finite].sum())
            sequences += int(finite.sum())
        return total / self.count, cosine / sequences

    def _run(self, batch: Batch, intervention: Intervention, on_mixer: Callable[[MixerSite], None]) -> Any:
        self.forward += 1
        options = self._capturing | {"intervention": intervention}
        with capture(self.model, on_mixer=on_mixer, on_state=_ignore, **options):
            return run_model(self.model, batch)


def named(sites: Sequence[str]) -> str:
    """Some of many names.

    Args:
        sites: all of them.
    """
    shown = ", ".join(repr(name) for name in sites[:3])
    return shown if len(sites) <= 3 else f"{shown} and {len(sites) - 3} more"


def _ignore(site: MixerSite | StateSite) -> None:
    """Nothing of it is needed."""


def _by_sequence(gradient: Tensor, finite: Tensor) -> Floats:
    """Rows (B, gates) of the sequences whose loss is finite; one row where gates are not by sequence."""
    rows = (
        gradient.detach().double().flatten(1) if gradient.dim() > 1 else gradient.detach().double()[:, None]
    )
    sequences = len(finite)
    if rows.shape[0] == sequences:
        rows = rows[finite.to(rows.device)]
    elif rows.shape[0] % sequences == 0:  # windows of a sequence follow one another
        rows = rows.unflatten(0, (sequences, -1)).sum(1)[finite.to(rows.device)]
    else:
        rows = rows.sum(0, keepdim=True)
    return rows.cpu().numpy()


def _not_differentiable(model: nn.Module, why: str) -> NotDifferentiableError:
    return NotDifferentiableError(
        f"worth of {type(model).__name__}",
        expected="a model through which gradients flow from its loss to its heads",
        got=(why.strip().splitlines() or ["none"])[0],
        fix='Pass importance="exact" (or --importance exact), which removes heads one by one '
        "and "
        "needs no gradients; or load it unquantized, without torch.inference_mode or torch.no_grad inside, "
        "and call outside of torch.inference_mode.",
    )
