"""Audit a model: run batches, measure each mixer (module that mixes tokens), build the audit."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import length_hint
from time import perf_counter
from typing import Any

import torch
from torch import nn

from rankwise._internals.batches import (
    Batch,
    batch_size,
    drop_unused_labels,
    each_batch,
    to_device,
    without_logits,
)
from rankwise._internals.forward import (
    Progress,
    check_in_memory,
    device_of,
    fresh_autocast_cache,
    run_model,
    without_copies,
)
from rankwise._internals.threads import exclusive, one_thread
from rankwise._internals.torch_private import outside_transforms, uncompiled
from rankwise.auditing.attention_maps import AttentionMapRecorder, only_flagged
from rankwise.auditing.error_hints import batch_errors
from rankwise.auditing.examples import TokenNames
from rankwise.auditing.initialization import AtInitSettings, built_words, initial_copies
from rankwise.auditing.measure import measure_heads, measure_states, sampled
from rankwise.auditing.provenance import DataDigest, provenance_of, weights_digest
from rankwise.auditing.records import Provenance
from rankwise.auditing.result import Audit
from rankwise.auditing.settings import AtInitOption, AuditSettings, MapOption, RankMethod
from rankwise.auditing.statistics import AuditStatistics, ModelStatistics
from rankwise.errors import CaptureError, RankwiseError
from rankwise.importance import Importance, ImportanceSettings, measure_importance
from rankwise.importance.settings import ImportanceOption
from rankwise.measures import DELTA
from rankwise.tracing import CapturedMixer, CapturedState, OperatorFunction, Trace, capture, compiled_modules
from rankwise.tracing.model_checks import sharded_again


class AuditError(RankwiseError):
    """Raised if the model, a batch, or a step after the batches fails during an audit.

    ``audit`` is the audit of the finished batches. If the first batch failed, ``audit`` is the audit of its
    finished layers. If nothing was finished, the cause is raised instead.
    """

    def __init__(self, cause: RankwiseError, audit: Audit) -> None:
        super().__init__(cause.subject, expected=cause.expected, got=cause.got, fix=cause.fix)
        self.audit = audit


@exclusive
def audit(
    model: nn.Module,
    batches: Iterable[Batch],
    delta: float = DELTA,
    *,
    tokenizer: Callable[..., Any] | None = None,
    rank_method: RankMethod = "auto",
    sites: Mapping[str, OperatorFunction] | None = None,
    blocks: str | None = None,
    attention_maps: MapOption | None = None,
    importance: ImportanceOption = False,
    loss: bool = False,
    at_init: AtInitOption = False,
    keep_moments: bool = False,
    provenance: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> Audit:
    """Measure the rank of every head, and the collapse of token states through depth, in forward passes.

    Each batch runs once, without gradients, on the device of the model. The model is not changed: it stays
    in its mode (call ``model.eval()`` first), and its attention backend is not switched. Each mixing matrix
    is measured when its block has run and then released, so memory does not grow with batches or layers.

    Cost: one forward pass per batch. Exact ranks need the eigenvalues of a Gram matrix per head and sequence
    (T S min(T, S) time, 8 T S bytes). Estimated ranks need 64 products of each matrix and its transpose with
    16 vectors (O(T S) time, 4 T S bytes, at most 2 GiB). With ``importance``, each batch needs two more
    forward passes, half a forward pass per head and block or, beyond 100 of them, five backward passes, and 8
    more forward passes than log2 of the number of heads, to remove sets of them. "exact" needs both.

    Args:
        model: any `torch.nn.Module`.
        batches: dicts (``model(**batch)``), tuples (``model(*batch)``) or tensors (``model(batch)``), such as
            a DataLoader or the result of `text_batches`. Labels that the model does not accept are left out.
            Batches are kept in memory only if ``importance`` or ``at_init`` runs them again.
        delta: threshold δ: the numerical rank counts singular values of at least δ.
        tokenizer: object whose method ``decode`` names tokens in findings and attention maps. Without it,
            tokens are shown as ids.
        rank_method: "exact", "estimate" or "auto". Estimates (`estimate_spectrum`) have standard errors, and
            intervals if they only bound a rank. "auto" is exact for float64 matrices of at most 512 MiB
            (T = S = 8,192) and estimates the ranks of larger matrices.
        sites: functions that return the mixing matrix (operator) of a module, by name, as in `capture`.
        blocks: names of the residual blocks, as in `capture`.
        attention_maps: heads whose map of the first sequence is kept: "flagged" (heads with a finding),
            "all", "3:7,5:0" (layer:head), or pairs. A map (`AttentionMap`) has at most 128×128 entries;
            longer sequences are averaged block by block. Cost per head: a product with 128 columns, 43 KiB.
        importance: measure the loss without each head and block, and which heads can be removed together.
            True removes heads and blocks one by one, or beyond 100 of them estimates the losses from
            gradients. "exact" does both.
            `rankwise.importance.ImportanceSettings` has more options, such as the loss.
        loss: also measure the loss of the model, as ``audit.importance.value``, by one more forward pass per
            batch, and two of the first.
        at_init: audit copies of the model at initialization on the same batches, one at a time. True for
            three seeds, a number of seeds, or a function that builds the model from a seed, for models that
            `reinitialized` cannot build. Each copy costs one audit and the memory of the model.
        keep_moments: keep the second moments of pooled states, keys and values in the records, so that
            merged audits have their effective ranks: 8·K² bytes per key head, and 8·D bytes per sequence and
            layer (at most 2D sequences), a third more in a file.
        provenance: fields of `Provenance` to record: model, revision, data, command.
        on_progress: function called with each step, such as the batch and the name of the module, and the
            finished share of the batches, copies or passes (of the current batch, if the number of batches
            is unknown).

    After Ctrl-C, the audit contains the finished batches (or layers of the first batch), copies at
    initialization and removals of heads, and ``complete`` is False. KeyboardInterrupt is raised if nothing
    was finished.

    Raises:
        AuditError: if the model or a batch fails, or importance or ``at_init`` cannot be measured. The
            attribute ``audit`` contains the finished measurements.
        CaptureError: if no mixing operator is found.
        InputError: if an option is wrong, no batch is passed, the model fails before it mixes tokens, or
            importance is requested of a model with offloaded weights.
        InitializationError: before anything is measured, if ``at_init`` is requested and the model cannot be
            built at initialization.

    Examples:
        >>> import torch, rankwise as rw
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> result = rw.audit(layer, [torch.randn(1, 5, 8)])
        >>> [(head.layer, head.head) for head in result.heads]
        [(0, 0), (0, 1)]
    """
    settings = AuditSettings.of(
        delta=delta, tokenizer=tokenizer, rank_method=rank_method, sites=sites, blocks=blocks,
        attention_maps=attention_maps, importance=importance, loss=loss, at_init=at_init,
        keep_moments=keep_moments, provenance=provenance, on_progress=on_progress,
    )  # fmt: skip
    run = Run(without_copies(model), settings)
    run.run(batches)
    return run.audit()


class Run:
    """Audit in progress, of a model or of a copy of the model at initialization."""

    def __init__(self, model: nn.Module, settings: AuditSettings) -> None:
        self.model, self.settings, self.started = model, settings, perf_counter()
        self.names = TokenNames(settings.tokenizer)
        self.maps = None if settings.maps is None else AttentionMapRecorder(settings.maps, self.names)
        self.where: dict[str, Any] = {"sites": settings.sites, "blocks": settings.blocks}
        self.trace = Trace()
        self.statistics = ModelStatistics()
        """Statistics of finished batches."""
        self.batch_statistics = ModelStatistics()
        """Statistics of the current batch, merged when the batch has finished."""
        self.notes: list[str] = []
        self.batches = self.sequences = 0
        self.data = DataDigest()
        self.complete = True
        self.importance: Importance | None = None
        self.copies: dict[int, ModelStatistics] = {}
        """Statistics of copies at initialization, by random seed."""
        self.built = ""
        self._states: dict[str, CapturedState] = {}
        """Last token state by stack of blocks, with which the next state is compared."""
        self._batch: Any = None
        self._on_progress = settings.on_progress or (lambda step, done: None)
        modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
        self._place = {name: place / len(modules) for place, name in enumerate(modules)}
        self._planned, self._reached, self._digest = 0, 0.0, ""

    def run(self, batches: Iterable[Batch]) -> None:
        """Audit all batches; then audit copies at initialization and measure importance, if requested."""
        at_init, importance = self.settings.at_init, self.settings.importance
        if at_init is not None:
            next(initial_copies(self.model, at_init))  # a copy that cannot be built fails before measuring
        only_loss = importance is not None and not importance.estimates and not importance.exact
        if importance is not None and not only_loss and isinstance(self.model, nn.Module):
            check_in_memory(self.model)  # each pass would read the weights again
        if at_init is not None or importance is not None:
            batches = list(each_batch(batches))
        self._planned = length_hint(batches)
        if "weights_digest" not in self.settings.provenance:
            self._digest = weights_digest(self.model)  # now, because a device may fail during the audit
        with sharded_again(self.model), fresh_autocast_cache(), ExitStack() as stack:
            stack.enter_context(uncompiled())
            if isinstance(self.model, nn.Module) and compiled_modules(self.model):
                self.notes.append("the compiled model was run uncompiled, with the same weights")
            capturing = capture(
                self.model, on_mixer=self._mixer, on_state=self._state, values="attention", **self.where
            )
            try:
                with capturing as self.trace, torch.no_grad():
                    self._run_all(batches, device_of(self.model))
            except KeyboardInterrupt:
                if not self._keep_finished():
                    raise
                self.notes.append(f"interrupted from the keyboard after {self.batches} whole batches")
            except Exception as error:
                if isinstance(error, CaptureError) or not self._keep_finished():
                    raise
                raise self._failed(error, f"batch {self.batches + 1}", "a batch") from error
            if at_init is not None and self.complete:
                self._measure_at_init(batches, at_init)
            if importance is not None and self.complete:
                self._measure_importance(batches, importance)

    def _run_all(self, batches: Iterable[Any], device: torch.device) -> None:
        for given in each_batch(batches):
            batch, left_out = drop_unused_labels(self.model, given)
            if left_out:
                self._note(left_out)
            self._batch = batch
            with batch_errors(self.model, batch, f"`batches`, batch {self.batches + 1}"):
                run_model(self.model, to_device(without_logits(self.model, batch), device))
            self._take_batch()
            self.batches += 1
            self.sequences += batch_size(batch)
            self.data.add(batch)
            self._batch = None

    def _mixer(self, captured: CapturedMixer) -> None:
        with _measuring(captured.name), one_thread():  # one thread per matrix; matrices run in parallel
            site, heads = sampled(captured)
            if len(heads) < (every := captured.operator.shape[-3]):
                self._note(
                    f"measured: {len(heads)} of the {every} channels of {site.kind} mixers, spread evenly"
                )
            statistics = measure_heads(
                site, heads, self.settings.delta, self.settings.rank_method,
                names=self.names, batch=self._batch,
            )  # fmt: skip
            if self.maps is not None and statistics.mixer not in self.statistics.heads:
                for place, attention_map in self.maps.record(site, heads, self._batch).items():
                    statistics.examples[place].attention_map = attention_map
            self.batch_statistics.add_heads(statistics)
        self._report(site.name)

    def _state(self, state: CapturedState) -> None:
        with _measuring(state.name), one_thread():
            before, self._states[state.stack] = self._states.get(state.stack), state
            follows = (
                before is not None
                and (before.forward_pass, before.layer + 1) == (state.forward_pass, state.layer)
                and before.tokens.shape == state.tokens.shape
            )
            self.batch_statistics.add_states(measure_states(state, before if follows else None))
        self._report(state.name)

    def _report(self, module: str) -> None:
        """Report progress: the place of the module among the modules of the model is the share of a batch."""
        self._reached = max(self._reached, self._place.get(module, 0.0))  # a block ends after its modules
        number, done = f"batch {self.batches + 1}", self._reached
        if self._planned:
            number, done = f"{number} of {self._planned}", (self.batches + done) / self._planned
        self._on_progress(f"{number}: {module}", done)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _take_batch(self) -> None:
        self.statistics.merge(self.batch_statistics)
        self.batch_statistics = ModelStatistics()
        self._states.clear()
        self._reached = 0.0

    def _keep_finished(self) -> bool:
        """Keep finished batches, or finished layers of the first batch. Return True if a head is kept."""
        self.complete = False
        if not self.batches:
            self._take_batch()
        return bool(self.statistics.heads)

    def _measure_at_init(self, batches: Iterable[Batch], settings: AtInitSettings) -> None:
        self.built = built_words(self.model, settings)
        try:
            for seed, model in initial_copies(self.model, settings):
                run = Run(model, self._for_copy(settings.seeds))
                run.run(batches)
                if not run.complete:
                    raise KeyboardInterrupt
                self.copies[seed] = run.statistics
                del run, model  # free the memory of the copy before the next copy is built
        except KeyboardInterrupt:
            self.complete = False
            self.notes.append(
                f"{len(self.copies)} seeds at initialization only: interrupted from the keyboard"
            )
        except Exception as error:
            raise self._failed(error, "at_init", "an audit at initialization") from error

    def _for_copy(self, copies: int) -> AuditSettings:
        """Return the settings for auditing a copy, without steps that only the model itself needs."""
        left_out: dict[str, Any] = dict.fromkeys(("tokenizer", "maps", "importance", "at_init"))
        left_out["provenance"] = {"weights_digest": ""}  # only the statistics of a copy are read
        finished = len(self.copies)

        def on_progress(step: str, done: float) -> None:
            name = f"copy {finished + 1} of {copies} at initialization"
            self._on_progress(f"{name}, {step}", (finished + done) / copies)

        return replace(self.settings, **left_out, on_progress=on_progress)

    def _measure_importance(self, batches: Iterable[Batch], settings: ImportanceSettings) -> None:
        try:
            heads = {mixer: statistics.heads for mixer, statistics in self.statistics.heads.items()}
            self.importance = measure_importance(
                self.model, batches, settings, heads=heads, **self.where,
                on_progress=lambda step, done: self._on_progress(f"importance, {step}", done),
            )  # fmt: skip
            self.complete = self.importance.complete
        except KeyboardInterrupt:
            self.complete = False
            self.notes.append("importance not measured: interrupted from the keyboard")
        except Exception as error:
            raise self._failed(error, "importance", "the model's loss without its heads") from error

    def audit(self) -> Audit:
        """Return the audit of all that was measured so far: batches, copies, importance and origin."""
        statistics = AuditStatistics(
            heads=self.statistics.heads, states=self.statistics.states, copies=self.copies, built=self.built,
            provenance=self._provenance(), complete=self.complete, importance=self.importance,
            uncaptured=list(self.trace.uncaptured),
            texts={} if self.maps is None else self.maps.texts, keep_moments=self.settings.keep_moments,
        )  # fmt: skip
        audit = Audit.from_statistics(statistics)
        if self.settings.maps is None or not self.settings.maps.flagged:
            return audit
        return audit.model_copy(update={"heads": only_flagged(audit.heads, audit.findings)})

    def _provenance(self) -> Provenance:
        given = self.settings.provenance
        missing = []
        if self.maps is not None:
            heads = [(head.layer, head.head) for head in self.statistics.head_records()]
            missing = self.maps.missing(heads)
        measured: dict[str, Any] = {
            "delta": self.settings.delta, "batches": self.batches, "sequences": self.sequences,
            "data_digests": [self.data.value] if self.data.value else [],
            "seconds": round(perf_counter() - self.started, 1), "weights_digest": self._digest,
        }  # fmt: skip
        notes = list(dict.fromkeys((*self.notes, *missing, *self.trace.notes, *given.get("notes", ()))))
        return provenance_of(self.model, measured, {**given, "notes": notes})

    def _failed(self, error: Exception, subject: str, expected: str) -> AuditError:
        """Return an error with the audit of everything that was measured before."""
        if not isinstance(error, RankwiseError):
            got = f"{type(error).__name__}: {error}"
            fix = f"Audit without {subject}, or with smaller batches if memory ran out."
            error = RankwiseError(subject, expected=expected, got=got, fix=fix)
        return AuditError(error, self.audit())


@contextmanager
def _measuring(name: str) -> Iterator[None]:
    """Context manager that reports an exception as a failure of a measure, not of the model."""
    try:
        with outside_transforms():  # the model may call its mixers inside `torch.vmap`
            yield
    except RankwiseError:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        fix = "If memory ran out, use fewer tokens or a smaller batch."
        raise RankwiseError(f"measures of {name!r}", expected="numbers", got=got, fix=fix) from error
