"""`RankMonitor`: audit a probe batch every so many steps of training, without a trace in the training."""

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise._internals.forward import Batch, device_of, eval_mode
from rankwise.auditing import Audit, audit
from rankwise.auditing.batches import check_rows
from rankwise.auditing.history import History
from rankwise.auditing.match_findings import finding_changes
from rankwise.auditing.records import Finding
from rankwise.auditing.settings import check_callable, check_settings
from rankwise.errors import InputError
from rankwise.monitor.record import Record
from rankwise.monitor.scalars import scalars
from rankwise.monitor.settings import (
    probe_batches,
    step_number,
    steps_between,
    stopping_codes,
)
from rankwise.monitor.untouched import buffers_kept, random_state_kept, weights_kept

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

EVERY = 500
"""Steps between two audits: the demo's training spends less than 1 % of its time in them then."""
Log = Callable[[dict[str, float], int], None]
"""Takes scalars and the step they were measured at."""
OnFinding = Callable[[int, Finding], None]

logger = logging.getLogger("rankwise.monitor")


class RankMonitor:
    """Audits a fixed probe batch every ``every`` steps and tells what it finds.

    An audit runs in evaluation mode, without gradients, with the random state of torch and the model's
    buffers put aside: a training is bit-identical with and without it. Layers that merge weights for
    evaluation are called to undo it. Not put back is what else a model changes in evaluation mode: its own
    `torch.Generator`, random numbers of NumPy and Python, and Python attributes, such as a counter that is no
    buffer. A monitor serves one training. Each new finding is
    logged once as a warning (logger ``rankwise.monitor``). With ``torch.distributed`` every process audits,
    so that sharded models run as they must; the first process writes, logs, and with ``stop_on`` decides
    for all whether to stop.

    Cost: one audit of the probe every ``every`` steps, and while it runs a copy of the model's buffers and of
    the weights of layers that have a ``train`` of their own; `seconds` is what they took.

    Args:
        probe: a batch, or a list of batches: dicts, tuples or tensors, as `rankwise.audit` takes them.
        every: steps between two audits; step 0 is audited, too.
        stop_on: codes of findings that end the training.
        folder: where each audit goes as ``step-N/audit.json``; `history` is saved there with its page by
            `finish`. Nothing is written where it is None. It holds one training: the first step is refused
            where there are other audits. A disk that fills up later is warned of once; the training goes on.
        resume: whether the training goes on from a checkpoint with the same folder: audits before the first
            step are read into `history`; later ones are removed, as the training comes to their steps again.
        log: called with the scalars of each audit and its step, such as ``wandb.log``.
        on_finding: called with the step and each new finding.
        **settings: passed on to `rankwise.audit`: ``delta``, ``method``, ``sites``, ``blocks``.

    Raises:
        RankwiseError: if ``every`` is no positive number, the probe is no batch or holds no tensor, a code or
            setting is not known, or `rankwise.audit` does not take a setting's value.

    Examples:
        >>> import torch, rankwise as rw
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> monitor = rw.RankMonitor(torch.randn(1, 5, 8), every=2)
        >>> for step in range(4):
        ...     audited = monitor.step(model, step)
        >>> monitor.history.steps
        [0, 2]
    """

    def __init__(
        self,
        probe: Batch | Sequence[Batch],
        every: int = EVERY,
        *,
        stop_on: Sequence[str] = (),
        folder: str | Path | None = None,
        resume: bool = False,
        log: Log | None = None,
        on_finding: OnFinding | None = None,
        **settings: Any,
    ) -> None:
        self.batches = probe_batches(probe)
        self.every = steps_between(every, EVERY)
        self.stop_on = stopping_codes(stop_on)
        self.folder = None if folder is None else Path(folder)
        self.history = History()
        self._record = None if self.folder is None else Record(self.folder)
        self._resume = resume
        self._last: tuple[weakref.ref[nn.Module], int] | None = None
        """The model, and the last step that was asked for."""
        self.stopped_by: Finding | None = None
        """The first finding that ends the training, once there is one; audits after it leave it as it is. Set
        it to None to train on."""
        self.seconds = 0.0
        """Time that the audits took."""
        check_callable("log", log)
        check_callable("on_finding", on_finding)
        self._log, self._on_finding, self._settings = log, on_finding, check_settings(settings)

    def step(self, model: nn.Module, step: int) -> Audit | None:
        """Audit the probe if it is time to; call it after every step of training.

        Args:
            model: the model that trains; it stays as it is.
            step: the number of the step, from 0.

        Returns:
            The audit; None at the steps between, and at a step asked for again.

        Raises:
            AuditError: if the model cannot run on the probe.
            CaptureError: if it holds no mixer that can be captured.
            InputError: if the step is no whole number from 0 on, or of another training: smaller than the
                last, or of another model; at the first step, if the folder cannot be used, or a sequence of
                the probe has no token that is not padding.
            KeyboardInterrupt: if it was pressed during the audit; what was measured is dropped.
        """
        step = step_number(step)
        self._begin_or_go_on(model, step)
        if step % self.every or step in self.history.steps:
            return None
        began = time.perf_counter()
        with random_state_kept(model), buffers_kept(model), weights_kept(model), eval_mode(model):
            found = audit(model, self.batches, **self._settings)
        self.seconds += time.perf_counter() - began
        if not found.complete:
            raise KeyboardInterrupt
        new = found.findings
        if len(self.history):
            changes = finding_changes(self.history.audits[-1], found)
            new = [change.finding for change in changes if change.outcome == "new"]
        self.history.add(step, found)
        ending = next((finding for finding in found.findings if finding.code in self.stop_on), None)
        if self.stop_on:
            ending = _of_first_process(ending, device_of(model))
        stops = self.stopped_by is None and ending is not None
        self.stopped_by = self.stopped_by or ending
        if _first_process():
            self._tell(step, found, new, stops)
        return found

    def __getattr__(self, name: str) -> Any:
        """Tell a trainer that is given the monitor itself what it should be given."""
        hint = ""
        if name.startswith("on_"):
            hint = (
                ". A monitor is no callback itself: `monitor.attach(trainer)` for transformers, "
                "`callbacks=[monitor.lightning()]` for Lightning, `monitor.step(model, step)` in a loop"
            )
        raise AttributeError(f"'RankMonitor' object has no attribute {name!r}{hint}", name=name, obj=self)

    def attach(self, trainer: "Trainer") -> "TrainerCallback":
        """Let a Hugging Face `Trainer` call this monitor; scalars go to its own loggers.

        Args:
            trainer: the trainer.

        Returns:
            The callback that was added to it.
        """
        from rankwise.monitor.trainer import RankCallback

        callback = RankCallback(self, trainer)
        trainer.add_callback(callback)
        return callback

    def lightning(self) -> Any:
        """A Lightning callback of this monitor: ``Trainer(callbacks=[monitor.lightning()])``.

        Raises:
            InputError: if neither ``lightning`` nor ``pytorch_lightning`` is installed.
        """
        from rankwise.monitor.lightning import lightning_callback

        return lightning_callback(self)

    def finish(self) -> Path | None:
        """Write the history with its page into the folder; the callbacks call it at the end of training.

        Returns:
            The page; None where there is no folder, no audit, or another process writes, and where it cannot
            be written, which a warning says.
        """
        if self._record is None or not len(self.history) or not _first_process():
            return None
        return self._record.finish(self.history)

    def _begin_or_go_on(self, model: nn.Module, step: int) -> None:
        """Open the folder at the first step; later, refuse a second training: audits would be mixed."""
        if self._last is None:
            for number, batch in enumerate(self.batches, 1):
                check_rows(model, batch, number)
            if self._record is not None:
                for at, audit in self._record.begin(step, self._resume, _first_process()):
                    self.history.add(at, audit)
            self._last = weakref.ref(model), step
        known, last = self._last
        if known() is not model or step < last:
            raise InputError(
                "`RankMonitor.step`",
                expected=f"the model of the steps before, at step {last} or later",
                got=f"step {step}" if step < last else "another model",
                fix="Make a new RankMonitor for another training; in one training pass the same object at "
                "each step, either the model or what wraps it.",
            )
        self._last = known, step

    def _tell(self, step: int, found: Audit, new: Sequence[Finding], stops: bool) -> None:
        lost = {} if self._record is None else {"audit": self._record.write(step, found)}
        for finding in new:
            if finding.severity != "info" or finding.code in self.stop_on:
                logger.warning("step %d: %s at %s: %s", step, finding.code, finding.where, finding.meaning)
            if self._on_finding is not None:
                self._on_finding(step, finding)
        if self._log is not None:
            self._log(scalars(found) | {"rank/seconds": self.seconds}, step)
        if stops and self.stopped_by is not None:
            where = ""
            if self._record is not None:
                lost["probe"] = self._record.write_probe(self.batches)
                causes = [f"{name} not saved ({cause})" for name, cause in lost.items() if cause]
                where = f"; {' and '.join(causes) or 'audit and probe'} in {self.folder}"
            logger.error("step %d: training stops on %s%s", step, self.stopped_by.code, where)


def _several_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _first_process() -> bool:
    return not _several_processes() or torch.distributed.get_rank() == 0


def _of_first_process(stop: Finding | None, device: torch.device) -> Finding | None:
    """What the first process found, in all: where only some leave a training, the others wait for ever."""
    told = [stop]
    if _several_processes():
        torch.distributed.broadcast_object_list(told, src=0, device=device)
    return told[0]
