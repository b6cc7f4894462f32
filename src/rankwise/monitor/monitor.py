"""`RankMonitor`: audit a probe batch every few steps of training, and leave the training bit-identical."""

import logging
import math
import operator
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from rankwise._internals.forward import Batch, device_of, eval_mode, map_tensors, preserve_random_state
from rankwise.auditing import Audit, audit
from rankwise.auditing.batches import check_rows
from rankwise.auditing.comparison import layer_means
from rankwise.auditing.findings import check_codes
from rankwise.auditing.history import History
from rankwise.auditing.match_findings import finding_changes
from rankwise.auditing.records import Finding
from rankwise.auditing.settings import AuditOptions, AuditSettings, check_callable
from rankwise.errors import InputError, whole_number
from rankwise.monitor.folder import AuditFolder
from rankwise.monitor.preserve_state import preserve_buffers, preserve_merged_weights

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

EVERY = 500
"""Default steps between audits: audits then take less than 1 % of the demo's training time."""
LOGGED: Mapping[str, tuple[str, ...]] = {
    "heads": ("effective_rank", "stable_rank", "first_token_mass"),
    "states": ("relative_spread", "mean_cosine", "effective_rank"),
}
"""Measures that are logged: means over the heads of a layer, and measures of token states."""

logger = logging.getLogger("rankwise.monitor")


class RankMonitor:
    """Audit a fixed probe batch every `every` steps of training and report new findings.

    An audit runs in evaluation mode without gradients. Torch's random state, the model's buffers and weights
    that layers merge for evaluation are restored, so training is bit-identical with and without a monitor.
    Other state that a model changes in evaluation mode is not restored: its own `torch.Generator`, random
    numbers of NumPy and Python, and Python attributes.

    A monitor serves one training run. New findings are logged once as warnings (logger
    ``rankwise.monitor``). With ``torch.distributed`` every process audits, as sharded models require; the
    first process writes, logs, and with ``stop_on`` decides for all whether to stop.

    Cost: one audit of the probe every `every` steps, and during it a copy of the buffers and of the weights
    of layers that have a ``train`` of their own. `seconds` is the time of all audits.

    Args:
        probe: a batch or a list of batches: dicts, tuples or tensors, as in `rankwise.audit`.
        every: steps between audits; step 0 is audited, too.
        stop_on: codes of findings that stop training.
        folder: where audits are written, as ``step-N/audit.json``; `finish` adds `history` with its page.
            Without it nothing is written. A folder holds one training run: audits of another are refused at
            the first step. If the disk fills up later, a warning says so once and training continues.
        resume: training resumes from a checkpoint with the same folder: audits before the first step are
            read into `history`, later ones are removed, because training reaches their steps again.
        log: called with the scalars of each audit and its step, such as ``wandb.log``.
        on_finding: called with the step and each new finding.
        **options: options of `rankwise.audit`, such as ``delta``, ``method``, ``sites``, ``blocks``.

    Raises:
        RankwiseError: if an argument, the probe or an option of the audit is wrong.

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
        log: Callable[[dict[str, float], int], None] | None = None,
        on_finding: Callable[[int, Finding], None] | None = None,
        **options: Unpack[AuditOptions],
    ) -> None:
        self.batches = _checked_probe(probe)
        self.every = whole_number("`every`", every, fix=f"Take {EVERY}.")
        codes = stop_on if isinstance(stop_on, Iterable) and not isinstance(stop_on, str) else [stop_on]
        self.stop_on = frozenset(check_codes([str(code) for code in codes]))
        self.folder = None if folder is None else Path(folder)
        self.history = History()
        self.stopped_by: Finding | None = None
        """The first finding that stopped training; later audits do not change it. Set it to None to go on."""
        self.seconds = 0.0
        """Time of all audits."""
        check_callable("log", log)
        check_callable("on_finding", on_finding)
        AuditSettings.of(**options)
        self._log, self._on_finding, self._options = log, on_finding, options
        self._audit_folder = None if self.folder is None else AuditFolder(self.folder)
        self._resume = resume
        self._last: tuple[weakref.ref[nn.Module], int] | None = None
        """The model and the last step."""

    def step(self, model: nn.Module, step: int) -> Audit | None:
        """Audit the probe if it is due; call it after every step of training.

        Args:
            model: the model in training; it is not changed.
            step: number of the step, from 0.

        Returns:
            The audit; None between audits, and for a step that was audited before.

        Raises:
            AuditError: if the model cannot run on the probe.
            CaptureError: if no mixer of the model can be captured.
            InputError: if the step is not a whole number, or belongs to another training run: it is smaller
                than the last one, or the model is another. At the first step, if the folder cannot be used,
                or a sequence of the probe is nothing but padding.
            KeyboardInterrupt: if it was raised during the audit, which is then dropped.
        """
        step = _step_number(step)
        self._check_same_training(model, step)
        if step % self.every or step in self.history.steps:
            return None
        began = time.perf_counter()
        # Evaluation mode merges weights: they are copied before it and compared after it.
        with (
            preserve_random_state(model),
            preserve_buffers(model),
            preserve_merged_weights(model),
            eval_mode(model),
        ):
            result = audit(model, self.batches, **self._options)
        self.seconds += time.perf_counter() - began
        if not result.complete:
            raise KeyboardInterrupt
        new = result.findings
        if len(self.history):
            changes = finding_changes(self.history.audits[-1], result)
            new = [change.finding for change in changes if change.outcome == "new"]
        self.history.add(step, result)
        stopping = next((finding for finding in result.findings if finding.code in self.stop_on), None)
        if self.stop_on:
            stopping = _broadcast_from_first(stopping, device_of(model))
        stops_now = self.stopped_by is None and stopping is not None
        self.stopped_by = self.stopped_by or stopping
        if _is_first_process():
            self._report(step, result, new, stops_now)
        return result

    def __getattr__(self, name: str) -> Any:
        """Say what to pass if a trainer got the monitor itself as a callback."""
        hint = ""
        if name.startswith("on_"):
            hint = (
                ". A monitor is not a callback: pass `monitor.attach(trainer)` for transformers, "
                "`callbacks=[monitor.lightning()]` for Lightning, `monitor.step(model, step)` in a loop"
            )
        raise AttributeError(f"'RankMonitor' object has no attribute {name!r}{hint}", name=name, obj=self)

    def attach(self, trainer: "Trainer") -> "TrainerCallback":
        """Add the monitor to a transformers Trainer, which also logs the scalars; return the callback."""
        from rankwise.monitor.callbacks import trainer_callback

        callback = trainer_callback(self, trainer)
        trainer.add_callback(callback)
        return callback

    def lightning(self) -> Any:
        """Return a Lightning callback of the monitor: ``Trainer(callbacks=[monitor.lightning()])``."""
        from rankwise.monitor.callbacks import lightning_callback

        return lightning_callback(self)

    def finish(self) -> Path | None:
        """Write the history and its page; None if nothing was written. The callbacks call it at the end."""
        if self._audit_folder is None or not len(self.history) or not _is_first_process():
            return None
        return self._audit_folder.finish(self.history)

    def _check_same_training(self, model: nn.Module, step: int) -> None:
        """Open the folder at the first step; later, refuse another training run."""
        if self._last is None:
            for number, batch in enumerate(self.batches, 1):
                check_rows(model, batch, number)
            if self._audit_folder is not None:
                first = _is_first_process()
                for at, saved in self._audit_folder.begin(step, resume=self._resume, writes=first):
                    self.history.add(at, saved)
            self._last = weakref.ref(model), step
        known, last = self._last
        if known() is not model or step < last:
            raise InputError(
                "`RankMonitor.step`",
                expected=f"the model of the steps before, at step {last} or later",
                got=f"step {step}" if step < last else "another model",
                fix="Make a new RankMonitor for another training; in one training pass the same object at "
                "each step, either the model or its wrapper.",
            )
        self._last = known, step

    def _report(self, step: int, result: Audit, new: Sequence[Finding], stops_now: bool) -> None:
        unsaved = {} if self._audit_folder is None else {"audit": self._audit_folder.write(step, result)}
        counts = Counter(finding.code for finding in new)
        first: dict[str, Finding] = {}
        for finding in new:
            first.setdefault(finding.code, finding)
            if self._on_finding is not None:
                self._on_finding(step, finding)
        for finding in first.values():
            if finding.severity != "info" or finding.code in self.stop_on:
                more = f" and {counts[finding.code] - 1} more" if counts[finding.code] > 1 else ""
                logger.warning(
                    "step %d: %s at %s%s: %s", step, finding.code, finding.where, more, finding.meaning
                )
        if self._log is not None:
            self._log(scalars(result) | {"rank/seconds": self.seconds}, step)
        if stops_now and self.stopped_by is not None:
            where = ""
            if self._audit_folder is not None:
                unsaved["probe"] = self._audit_folder.write_probe(self.batches)
                causes = [f"{name} not saved ({cause})" for name, cause in unsaved.items() if cause]
                where = f"; {' and '.join(causes) or 'audit and probe'} in {self.folder}"
            verdict = result.verdict
            action = f" {verdict.actions[0].text}" if verdict.actions else ""
            logger.error(
                "step %d: training stops on %s%s. %s%s",
                step,
                self.stopped_by.code,
                where,
                verdict.sentence,
                action,
            )


def scalars(audit: Audit, prefix: str = "rank") -> dict[str, float]:
    """Name the numbers of an audit for a logger: ``prefix/of_measure/stack.layer``.

    State 0 of a stack is the input of its first block, as in `LayerRecord`. Numbers that are not finite are
    left out; findings are counted by severity.

    Examples:
        >>> from rankwise.auditing.records import Provenance
        >>> about = Provenance(model="m", delta=0.01)
        >>> scalars(Audit(provenance=about, heads=[], layers=[], findings=[]))
        {'rank/findings/error': 0.0, 'rank/findings/warning': 0.0}
    """
    named: dict[str, float] = {}
    for key, (value, _) in layer_means(audit).items():
        if key.measure in LOGGED[key.of] and math.isfinite(value):
            where = f"{key.stack}.{key.layer:02d}" + (".cross" if key.cross else "")
            named[f"{prefix}/{key.of}_{key.measure}/{where.lstrip('.')}"] = value
    for severity in ("error", "warning"):
        count = sum(finding.severity == severity for finding in audit.findings)
        named[f"{prefix}/findings/{severity}"] = float(count)
    return named


def _checked_probe(probe: Any) -> list[Batch]:
    """Copy the batches of a probe, because the caller may reuse its tensors."""
    numbers = isinstance(probe, list) and all(isinstance(item, int | float) for item in probe)
    several = isinstance(probe, list) and bool(probe) and not numbers
    fix = "Take a batch of the evaluation data: `next(iter(loader))`."
    copies: list[Batch] = []
    for batch in probe if several else [probe]:
        if not isinstance(batch, Mapping | tuple | Tensor):
            expected = "a batch (dict, tuple or tensor) or a list of batches"
            raise InputError("`probe`", expected=expected, got=type(batch).__name__, fix=fix)
        shapes: list[tuple[int, ...]] = []

        def copy(tensor: Tensor, shapes: list[tuple[int, ...]] = shapes) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor.clone()

        copies.append(map_tensors(batch, copy))
        if not shapes:
            got = f"a {type(batch).__name__} without tensors"
            raise InputError("`probe`", expected="at least one tensor in each batch", got=got, fix=fix)
        if any(0 in shape for shape in shapes):
            got = "tensors of shape " + ", ".join(map(str, shapes))
            raise InputError("`probe`", expected="at least one sequence of one token", got=got, fix=fix)
    return copies


def _step_number(step: Any) -> int:
    """Return the number of a step, which may be a NumPy integer or a tensor."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise InputError(
            "`step`",
            expected="a whole number, 0 or more",
            got=repr(step),
            fix="Count the steps: `for step, batch in enumerate(loader)`.",
        )
    return number


def _several_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _is_first_process() -> bool:
    return not _several_processes() or torch.distributed.get_rank() == 0


def _broadcast_from_first(stopping: Finding | None, device: torch.device) -> Finding | None:
    """Broadcast the first process's stop decision; if only some processes stop, the others hang."""
    decision = [stopping]
    if _several_processes():
        torch.distributed.broadcast_object_list(decision, src=0, device=device)
    return decision[0]
