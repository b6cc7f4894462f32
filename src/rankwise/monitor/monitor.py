"""`RankMonitor`: audit a probe batch every few training steps; the training stays bit-identical."""

import logging
import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rankwise._internals.batches import Batch, map_tensors, tensors_in
from rankwise._internals.forward import (
    device_of,
    eval_mode,
    out_of_memory,
    overrides_train,
    preserve_random_state,
)
from rankwise._internals.records import grouped
from rankwise._internals.torch_private import preserve_state
from rankwise.auditing import Audit, audit
from rankwise.auditing.comparison import layer_means
from rankwise.auditing.findings import check_codes
from rankwise.auditing.history import History
from rankwise.auditing.match_findings import finding_changes
from rankwise.auditing.records import Finding, HeadRecord
from rankwise.auditing.remedies import remedy_text
from rankwise.auditing.settings import AuditSettings, check_callable
from rankwise.errors import InputError, first_line, in_range, one_of, whole_number
from rankwise.monitor.folder import AuditFolder

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

EVERY = 500
"""Default number of steps between audits, which then take less than 1 % of the demo's training time."""
STOP_SPREAD, STOP_AUDITS = 0.0002, 3
"""COLLAPSE stops training if the least direction spread of a stack is below `STOP_SPREAD` in `STOP_AUDITS`
audits in a row after step 0. The rule stopped no run that learned (docs/evidence/collapse-rule.md)."""
RECOMMEND = "rw.skips.recommend(monitor.history.audits[-1], model, monitor.batches[0])"
"""Code of the remedy of COLLAPSE, with variables that exist during training."""
LOGGED: Mapping[str, tuple[str, ...]] = {
    "heads": (
        "effective_rank", "stable_rank", "first_token_mass", "largest_logit", "query_norm", "key_norm",
    ),
    "states": ("spread", "direction_spread", "mean_cosine", "effective_rank"),
}  # fmt: skip
"""Measures that are logged per layer: for heads the mean over the layer, or the maximum (largest logit)."""

STOP_LOGIT = "largest_logit"
"""Measure of heads for which ``stop_on`` takes a limit, as in "largest_logit > 100"."""

logger = logging.getLogger("rankwise.monitor")


class RankMonitor:
    """Audit a fixed probe batch every `every` steps of training and report new findings.

    An audit runs in evaluation mode without gradients. Torch's random state, buffers and attributes of the
    model and weights that layers merge for evaluation are restored, so training is bit-identical with and
    without a monitor. Other state that a model changes in evaluation mode is not restored: a private
    `torch.Generator`, random numbers of NumPy and Python, and the content of objects except lists and dicts.

    Use one monitor per training run. New findings are logged once as warnings (logger
    ``rankwise.monitor``). With ``torch.distributed`` every process audits, as sharded models require. The
    first process writes and logs; with ``stop_on``, it decides for all processes whether to stop.

    Errors after the first call of `step` do not end training: they are logged, and the audit is left out.
    At the first call, this holds only if memory runs out. If training goes back to a lower step, as
    `auto_find_batch_size` does, the next audit waits until training has passed the last audit.

    Cost: one audit of the probe per `every` steps, with a copy of the buffers and of the weights of layers
    that override ``train``. `seconds` is the total time of audits.

    Args:
        probe: a batch or a list of batches: dicts, tuples or tensors, as in `rankwise.audit`.
        every: number of steps between audits, or more if `step` skips numbers. Step 0 is also audited.
        stop_on: codes of findings that stop training. COLLAPSE stops training only if three audits in a row
            after step 0 have a direction spread below 0.0002 in one stack, because many runs recover from a
            milder collapse. The rule was fitted at ten audits per run in float32; bfloat16 keeps a spread
            of about 0.003. "largest_logit > 100" stops training if the largest attention logit of a head
            is above 100, or another positive limit; the code of the finding is then LARGEST_LOGIT.
        folder: folder for audits, as ``step-N/audit.json``; `finish` adds `history` and an HTML page. If
            None, nothing is written. The first call of `step` raises `InputError` if the folder has audits of
            another training run. If the disk is full later, one warning is logged and training continues.
        resume: True if training resumes from a checkpoint with the same folder. Audits before the first step
            are read into `history`. Later audits are removed, because training repeats their steps.
        log: function called with `logged_numbers` and the step of each audit, such as ``wandb.log``.
        on_finding: function called with the step and each new finding.
        **options: options of `rankwise.audit`, such as ``delta``, ``rank_method``, ``sites``, ``blocks``.

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
        **options: Any,
    ) -> None:
        self.batches = _checked_probe(probe)
        self.every = whole_number("`every`", every, fix=f"Take {EVERY}.")
        codes = stop_on if isinstance(stop_on, Iterable) and not isinstance(stop_on, str) else [stop_on]
        names = [str(code) for code in codes]
        conditions = [name for name in names if re.search("[<>=]", name)]
        self.stop_on = frozenset(check_codes([name for name in names if name not in conditions]))
        self.stop_logit = min(map(_logit_limit, conditions), default=math.inf)
        """Largest logit above which training stops; infinity if ``stop_on`` has no limit."""
        self.folder = None if folder is None else Path(folder)
        self.history = History()
        self.stopped_by: Finding | None = None
        """Finding that stopped training, or None. Set this attribute to None to continue training."""
        self.seconds = 0.0
        """Total time of audits, in seconds."""
        check_callable("log", log)
        check_callable("on_finding", on_finding)
        AuditSettings.of(**options)
        self._log, self._on_finding, self._options = log, on_finding, options
        self._audit_folder = None if self.folder is None else AuditFolder(self.folder)
        self._resume = resume
        self._last_step: int | None = None
        """Step of the last call; None before the first call."""
        self._due = 0
        """Lowest step at which the next audit is due."""
        self._has_warned = False
        """True after the warning that training goes back."""

    def step(self, model: nn.Module, step: int) -> Audit | None:
        """Audit the probe and return the audit. Call this method after every training step, from step 0.

        Return None if no audit is due or the audit failed.

        Raises:
            CaptureError: at the first call, if no mixer of the model can be captured.
            InputError: if the step is not an integer. At the first call, if the folder cannot be used, if
                the model fails on the probe, except for lack of memory, or if ``stop_on`` has a limit for
                logits and the model has no known logits.
            KeyboardInterrupt: if Ctrl-C interrupts the audit, which is then discarded.
        """
        step, first = _step_number(step), self._last_step is None
        if first:
            self._begin(model, step)
        elif step < (self._last_step or 0) and not self._has_warned:
            logger.warning(
                "training goes back to step %d: the next audit is at step %d. Count steps over all epochs, "
                "and make a new RankMonitor for another training.",
                step,
                self._due,
            )
            self._has_warned = True
        self._last_step = step
        if step < self._due:
            return None
        self._due = step + self.every
        result, new = None, list[Finding]()
        try:
            result = self._audit(model)
            unknown = [
                math.isnan(head.largest_logit) and not head.nonfinite_sequences for head in result.heads
            ]
            if first and self.stop_logit < math.inf and all(unknown):
                fix = f"Leave {STOP_LOGIT!r} out of `stop_on`."
                got = "no head with known logits"
                raise InputError("`stop_on`", expected="a model with softmax attention", got=got, fix=fix)
            new = self._new_findings(result)
            self.history.add(step, result)
        except Exception as error:
            if first and not out_of_memory(error):
                raise
            logger.exception("step %d: no audit, and training continues: %s", step, first_line(error))
        stops_now = self._decide(result, device_of(model))
        if result is not None and _is_first_process():
            self._report(step, result, new, stops_now)
        return result

    def _audit(self, model: nn.Module) -> Audit:
        """Return the audit of the probe. The model and the random state are restored."""
        began = time.perf_counter()
        # `eval_mode` comes last, because entering it merges weights that must be copied before.
        with (
            preserve_random_state(model),
            preserve_state(model),
            preserve_merged_weights(model),
            eval_mode(model),
        ):
            result = audit(model, self.batches, **self._options)
        self.seconds += time.perf_counter() - began
        if not result.complete:
            raise KeyboardInterrupt
        return result

    def _new_findings(self, result: Audit) -> list[Finding]:
        """Return the findings that the last audit did not have."""
        if not len(self.history):
            return result.findings
        changes = finding_changes(self.history.audits[-1], result)
        return [change.finding for change in changes if change.outcome == "new"]

    def _decide(self, result: Audit | None, device: torch.device) -> bool:
        """Return True if training stops now. ``result`` is None in a process whose audit failed."""
        findings = [] if result is None else result.findings
        stopping = next((finding for finding in findings if self._ends_training(finding)), None)
        stopping = stopping or self._above_limit([] if result is None else result.heads)
        if self.stop_on or self.stop_logit < math.inf:
            stopping = _broadcast_from_first(stopping, device)
        stops_now = self.stopped_by is None and stopping is not None
        self.stopped_by = self.stopped_by or stopping
        return stops_now

    def _ends_training(self, finding: Finding) -> bool:
        """Return True if the code is in `stop_on` and, for COLLAPSE, the rule of `STOP_SPREAD` applies."""
        if finding.code != "COLLAPSE" or finding.code not in self.stop_on:
            return finding.code in self.stop_on
        recent = [audit for step, audit in self.history if step > 0][-STOP_AUDITS:]
        low = [
            any(
                collapse.code == "COLLAPSE"
                and collapse.where.stack == finding.where.stack
                and collapse.evidence["direction_spread_lowest"] < STOP_SPREAD
                for collapse in audit.findings
            )
            for audit in recent
        ]
        return len(low) == STOP_AUDITS and all(low)

    def _above_limit(self, heads: Sequence[HeadRecord]) -> Finding | None:
        """Return a finding on the head with the largest logit if it is above the limit."""
        above = [head for head in heads if head.largest_logit > self.stop_logit]  # NaN is not
        if not above:
            return None
        head = max(above, key=lambda head: head.largest_logit)
        meaning = f"The largest attention logit is {head.largest_logit:.4g}, above {self.stop_logit:g}. "
        meaning += f"Heads above this limit: {len(above)} of {len(heads)}."
        evidence = {STOP_LOGIT: head.largest_logit, "limit": self.stop_logit}
        code, where = STOP_LOGIT.upper(), head.id
        return Finding(code=code, severity="error", where=where, evidence=evidence, meaning=meaning)

    def attach(self, trainer: "Trainer") -> "TrainerCallback":
        """Add a callback to a transformers Trainer that audits and logs numbers; return the callback."""
        from rankwise.monitor.callbacks import trainer_callback

        callback = trainer_callback(self, trainer)
        trainer.add_callback(callback)
        return callback

    def lightning(self) -> Any:
        """Return a callback for Lightning: ``Trainer(callbacks=[monitor.lightning()])``."""
        from rankwise.monitor.callbacks import lightning_callback

        return lightning_callback(self)

    def finish(self) -> Path | None:
        """Write the history and an HTML page, and return its path. Return None if nothing was written."""
        if self._audit_folder is None or not len(self.history) or not _is_first_process():
            return None
        return self._audit_folder.finish(self.history)

    def _begin(self, model: nn.Module, step: int) -> None:
        """Check the folder at the first step, and read the audits of a resumed run."""
        if self._audit_folder is not None:
            for earlier, saved in self._audit_folder.begin(
                step, resume=self._resume, writes=_is_first_process()
            ):
                self.history.add(earlier, saved)
        self._due = (
            -(-step // self.every) * self.every
        )  # first multiple of `every` that is not below the step

    def _report(self, step: int, result: Audit, new: Sequence[Finding], stops_now: bool) -> None:
        unsaved = "" if self._audit_folder is None else self._audit_folder.write(step, result)
        for code, (first, *others) in grouped(new, lambda finding: finding.code).items():
            if first.severity != "info" or code in self.stop_on:
                more = f" and {len(others)} more" if others else ""
                logger.warning("step %d: %s at %s%s: %s", step, code, first.place, more, first.meaning)
        if stops_now and self.stopped_by is not None:
            saved = f"audit not saved ({unsaved})" if unsaved else "audit"
            where = "" if self.folder is None else f"; {saved} in {self.folder}"
            stop, rule = self.stopped_by, ""
            if stop.code == "COLLAPSE":
                states = [state for state in result.states if state.stack == stop.where.stack]
                lowest = min(states, key=lambda state: state.direction_spread)
                rule = f" {STOP_AUDITS} audits in a row below {STOP_SPREAD:g}, the last with "
                rule += f"{lowest.direction_spread:.2g} after {lowest.blocks} blocks."
            remedy = stop.remedy
            if remedy is not None and stop.code == "COLLAPSE":
                remedy = remedy.model_copy(update={"code": RECOMMEND})
            advice = "" if remedy is None else f" What to do: {remedy_text(remedy)}"
            words = f"at {stop.place}:{rule} {stop.meaning}{advice}"
            logger.error("step %d: training stops on %s%s, %s", step, stop.code, where, words)
        if self._on_finding is not None:
            for finding in new:
                with continues("on_finding"):
                    self._on_finding(step, finding)
        if self._log is not None:
            with continues("log"):
                self._log(logged_numbers(result) | {"rank/seconds": self.seconds}, step)


@contextmanager
def continues(what: str) -> Iterator[None]:
    """Context manager that logs an error of the user's code, which must not end the training."""
    try:
        yield
    except Exception as error:
        logger.exception("`%s` failed, and training continues: %s", what, first_line(error))


@contextmanager
def preserve_merged_weights(model: nn.Module) -> Iterator[None]:
    """Context manager that restores weights that layers merge for evaluation (LoRA).

    Unmerging would leave rounding errors in the weights. Only direct parameters of modules in training mode
    that override ``train`` are copied.
    """
    before = [
        (weight, weight.detach().clone())
        for module in model.modules()
        if module.training and overrides_train(module)
        for weight in module.parameters(recurse=False)
        if not weight.is_meta
    ]
    try:
        yield
    finally:
        for weight, copy in before:
            if not torch.equal(weight, copy):
                weight.data.copy_(copy)  # unseen by autograd: a pending backward pass may use the weight


def logged_numbers(audit: Audit, prefix: str = "rank") -> dict[str, float]:
    """Return numbers of an audit by name for a logger, such as ``rank/heads_effective_rank/decoder.03``.

    Names are ``prefix/of_measure/stack.layer``, where a stack is a sequence of blocks. State 0 is the input
    of the first block. Numbers that are not finite are left out; findings are counted by severity.

    Examples:
        >>> from rankwise.auditing.records import Provenance
        >>> about = Provenance(model="m", delta=0.01)
        >>> logged_numbers(Audit(provenance=about, heads=[], states=[], findings=[]))
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
    """Return copies of the probe's batches, because the caller may reuse their tensors.

    Raise `InputError` if a batch is not a dict, tuple or tensor, has no tensors, or has an axis of size 0.
    """
    numbers = isinstance(probe, list) and all(isinstance(item, int | float) for item in probe)
    several = isinstance(probe, list) and bool(probe) and not numbers
    fix = "Take a batch of the evaluation data: `next(iter(loader))`."
    batches = probe if several else [probe]
    for batch in batches:
        if not isinstance(batch, Mapping | tuple | Tensor):
            expected = "a batch (dict, tuple or tensor) or a list of batches"
            raise InputError("`probe`", expected=expected, got=type(batch).__name__, fix=fix)
        shapes = [tuple(tensor.shape) for tensor in tensors_in(batch)]
        if not shapes:
            got = f"a {type(batch).__name__} without tensors"
            raise InputError("`probe`", expected="at least one tensor in each batch", got=got, fix=fix)
        if any(0 in shape for shape in shapes):
            got = "tensors of shape " + ", ".join(map(str, shapes))
            raise InputError("`probe`", expected="at least one sequence of one token", got=got, fix=fix)
    return [map_tensors(batch, Tensor.clone) for batch in batches]


def _logit_limit(condition: str) -> float:
    """Return the limit in "largest_logit > 100". Raise `InputError` for another measure or no limit."""
    name, _, limit = condition.partition(">")
    one_of(f"measure in `stop_on` {condition!r}", name.strip(), [STOP_LOGIT])
    try:
        number = float(limit)
    except ValueError:
        number = math.nan
    fix = f'Write "{STOP_LOGIT} > 100".'
    return in_range(f"limit in `stop_on` {condition!r}", number, "(0, inf)", fix=fix)


def _step_number(step: Any) -> int:
    """Return a step (int, NumPy integer or tensor) as an int. Raise `InputError` if it is not an integer."""
    fix = "Count the steps: `for step, batch in enumerate(loader)`."
    with suppress(TypeError):
        step = operator.index(step)
    return whole_number("`step`", step, 0, fix=fix)


def _several_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _is_first_process() -> bool:
    return not _several_processes() or torch.distributed.get_rank() == 0


def _broadcast_from_first(stopping: Finding | None, device: torch.device) -> Finding | None:
    """Return the decision of the first process in every process, because all processes must stop together."""
    decision = [stopping]
    if _several_processes():
        torch.distributed.broadcast_object_list(decision, src=0, device=device)
    return decision[0]
