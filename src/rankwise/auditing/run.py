"""An audit: batches run through the model, every mixer is measured as it runs, and a record is made of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from rankwise._internals.forward import (
    Batch,
    batch_size,
    device_of,
    drop_unused_labels,
    fresh_autocast_cache,
    preserve_random_state,
    run_model,
    to_device,
)
from rankwise._internals.threads import one_thread
from rankwise.auditing.batches import check_batches, check_rows, from_texts
from rankwise.auditing.digests import DataDigest, weights_digest
from rankwise.auditing.failures import AuditError, batch_failed, measuring, step_failed
from rankwise.auditing.initialization import InitialCopies
from rankwise.auditing.measure import measure_heads, measure_states, sampled
from rankwise.auditing.pictures import (
    Chosen,
    Matrices,
    NoSuchHeadsError,
    PictureTaker,
    chosen_heads,
    picture_size,
)
from rankwise.auditing.provenance import check_provenance, provenance_of
from rankwise.auditing.records import Provenance, Unseen
from rankwise.auditing.result import Audit
from rankwise.auditing.settings import BaselineOption, Method, baseline_settings, check_method
from rankwise.auditing.statistics import AuditStatistics, ModelStatistics
from rankwise.auditing.token_names import TokenNames
from rankwise.errors import CaptureError, InputError
from rankwise.importance import Importance, ImportanceSettings
from rankwise.importance import measure as measure_importance
from rankwise.importance.settings import ImportanceOption, importance_settings
from rankwise.measures import DELTA, check_delta
from rankwise.tracing import MixerSite, SiteAdapter, StateSite, Trace, capture, compiled_modules
from rankwise.tracing.model_checks import sharded_again, without_copies

Progress = Callable[[int, str], None]
"""Called with the number of finished batches and the site measured last."""


def audit(
    model: nn.Module,
    batches: Iterable[Batch] | None = None,
    delta: float = DELTA,
    *,
    texts: str | Sequence[str] | None = None,
    tokenizer: Callable[..., Any] | None = None,
    tokens: int = 256,
    batch_size: int = 4,
    method: Method = "auto",
    sites: Mapping[str, SiteAdapter] | None = None,
    blocks: str | None = None,
    matrices: Matrices | None = None,
    importance: ImportanceOption = False,
    baseline: BaselineOption = False,
    provenance: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> Audit:
    """Measure the rank of every head and the collapse of tokens through depth, as the model runs.

    Each batch runs once, without gradients, on the model's device; nothing of the model is written to, and
    `rankwise.skips.recommend` is what runs it again. With ``importance`` batches are kept in a list and run
    again: the first once, then each once with gradients and nine times backward, and some five to thirty
    times without sets of heads (log2 of the heads, and at most 16 more); with ``importance="exact"`` as
    often as there are heads
    and blocks besides. Every operator is measured as soon as its block has run and then let go: memory does
    not grow with batches or layers. The model stays in the mode it is in (call ``model.eval()`` first), its
    attention backend is not switched.

    Cost: one forward pass; for each head and sequence the eigenvalues of a Gram matrix (T S min(T, S) time,
    8 T S bytes), or where ranks are estimated 67 walks over the rows (O(T S K) time, O(T + S) memory).

    Args:
        model: any `torch.nn.Module`.
        batches: dicts (``model(**batch)``), tuples (``model(*batch)``) or tensors (``model(batch)``), such as
            a DataLoader. Labels that the model has no place for are left out, and a note says so.
        delta: singular values below it count as zero in the numerical rank.
        texts: instead of batches, strings: one sequence each, in batches padded on the right.
        tokenizer: of ``texts``; one of transformers, or anything alike. With batches too it names tokens in
            findings and pictures, if it has a method ``decode``; without one they are ids.
        tokens: of ``texts``, the most tokens of a sequence; fewer where the model takes no more.
        batch_size: of ``texts``, sequences in a batch.
        method: "exact"; "estimate" (`estimate_spectrum`: with standard errors, and an interval where δ cannot
            be resolved); or "auto", exact while a float64 matrix takes at most 512 MiB (T = S = 8,192).
        sites: operators named by hand, as in `capture`.
        blocks: names of the residual blocks, as in `capture`.
        matrices: heads that keep a picture of their matrix on the first two sequences (`AttentionMap`, at
            most 128×128, longer sequences averaged block by block): "flagged" (those with a finding), "all",
            "3:7,5:0" (layer:head), or pairs. A product with 128 columns each; 256 MiB at most in all.
        worth: whether to measure what the model loses without each head and block, and which heads can go
            together: True estimates it from gradients, "exact" removes heads one by one as well;
            `rankwise.importance.ImportanceSettings` say more, such as the loss.
        baseline: whether the same architecture is audited at fresh weights too, on the same batches, one
            copy after another: True for three seeds, their number, or a function of a seed that builds the
            model where it cannot be built anew (`reinitialized`). Each costs an audit and, while it runs, the
            memory of a copy; batches are kept in a list.
        provenance: what to write into the record besides what is known here: model, revision, data, command.
        on_progress: called after each measured site.

    Returns:
        The audit. Interrupted from the keyboard while batches run, it holds the whole ones until then (of a
        first one, its finished layers), and ``complete`` is False.

    Raises:
        AuditError: if the model or the batches raise, or worth or the baseline cannot be measured; its
            ``audit`` holds what was measured before.
        CaptureError: if no mixing operator is found.
        InputError: if there are no batches, or both batches and texts, no tokenizer for texts, no such
            method, or if the model has none of the heads in ``matrices``: said after the first batch.
        InitializationError: before anything is measured, if the model of a baseline cannot be initialized.

    Examples:
        >>> import torch, rankwise as rw
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> result = rw.audit(layer, [torch.randn(1, 5, 8)])
        >>> [(head.layer, head.head) for head in result.heads]
        [(0, 0), (0, 1)]
    """
    run = _run(
        model,
        batches,
        delta,
        texts=texts,
        tokenizer=tokenizer,
        tokens=tokens,
        batch_size=batch_size,
        method=method,
        sites=sites,
        blocks=blocks,
        matrices=matrices,
        importance=importance,
        baseline=baseline,
        provenance=provenance,
        on_progress=on_progress,
    )
    return run.result()


def collect(
    model: nn.Module, batches: Iterable[Batch] | None = None, delta: float = DELTA, **settings: Any
) -> AuditStatistics:
    """Measure a model and return the statistics from which `finished` makes an audit.

    The arguments and errors are those of `audit`. Statistics of shares of the data merge into those of all of
    it, with what files do not hold: required head dimensions and the baseline.
    """
    return _run(model, batches, delta, **settings).collected()


def finished(statistics: AuditStatistics, chosen: Chosen | None) -> Audit:
    """Return the audit of statistics, with the attention maps that were requested."""
    audit = Audit.from_statistics(statistics)
    if chosen is None:
        return audit
    return audit.model_copy(update={"heads": chosen.kept(audit.heads, audit.findings)})


def _run(
    model: nn.Module,
    batches: Iterable[Batch] | None,
    delta: float,
    *,
    texts: str | Sequence[str] | None = None,
    tokenizer: Callable[..., Any] | None = None,
    tokens: int = 256,
    batch_size: int = 4,
    method: Method = "auto",
    sites: Mapping[str, SiteAdapter] | None = None,
    blocks: str | None = None,
    matrices: Matrices | None = None,
    importance: ImportanceOption = False,
    baseline: BaselineOption = False,
    provenance: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> "Run":
    check_provenance(provenance or {})
    check_delta(delta)
    model = without_copies(model)
    notes: list[str] = []
    if texts is not None and isinstance(model, nn.Module):
        batches, notes = from_texts(model, batches, texts, tokenizer, tokens=tokens, batch_size=batch_size)
    check_batches(batches if texts is None else ())
    settings = importance_settings(importance, tokenizer)
    copies = None if (fresh := baseline_settings(baseline)) is None else InitialCopies(model, fresh)
    given = batches or ()
    given = given if settings is None and copies is None else list(given)
    names, chosen = TokenNames(tokenizer), chosen_heads(matrices)
    pictures = None if chosen is None else PictureTaker(chosen, names)
    run = Run(
        model, delta, check_method(method), dict(provenance or {}), on_progress, sites=sites, blocks=blocks
    )
    run.names, run.pictures, run.each_sequence = names, pictures, copies is not None
    run.notes += notes
    run.over(given, settings, copies)
    return run


class Run:
    """One audit under way.

    Args:
        model: the model.
        delta: threshold of the numerical rank.
        method: how ranks are computed.
        given: what the user says of the model and its data.
        on_progress: called after each measured site.
        where: what `capture` is told of the model: ``sites`` and ``blocks``.
    """

    def __init__(
        self,
        model: nn.Module,
        delta: float,
        method: Method,
        given: dict[str, Any],
        on_progress: Progress | None,
        **where: Any,
    ) -> None:
        self.model, self.delta, self.method = model, delta, method
        self.given, self.where, self.trace = given, where, Trace()
        self.names, self.each_sequence = TokenNames(), False
        self.pictures: PictureTaker | None = None
        self.statistics = ModelStatistics()
        """Statistics of the whole batches …"""
        self.batch_statistics = ModelStatistics()
        """… and of the batch that runs."""
        self.notes: list[str] = []
        self.measured_in_part: dict[str, None] = {}
        self.batches = self.sequences = 0
        self.data = DataDigest()
        self.complete = True
        self.importance: Importance | None = None
        self.copies: dict[int, ModelStatistics] = {}
        """Statistics at initialization by seed."""
        self.built = ""
        self._states: dict[str, StateSite] = {}
        """The last state of each stack, with which the next is compared."""
        self._current: Any = None
        self._on_progress = on_progress or (lambda batches, site: None)

    def over(
        self,
        batches: Iterable[Batch],
        importance: ImportanceSettings | None = None,
        copies: InitialCopies | None = None,
    ) -> None:
        """Run all batches, or as many as can be run; then copies at fresh weights and worth, if wanted."""
        with sharded_again(self.model), fresh_autocast_cache(), ExitStack() as stack:
            if isinstance(self.model, nn.Module) and compiled_modules(self.model):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                self.notes.append("the compiled model was run uncompiled, with the same weights")
            capturing = capture(self.model, on_mixer=self._mixer, on_state=self._state, **self.where)
            try:
                with capturing as self.trace, torch.no_grad():
                    self._run_all(iter(batches), device_of(self.model))
            except KeyboardInterrupt:
                if not self._keep_what_is_done():
                    raise
                self.notes.append(f"interrupted from the keyboard after {self.batches} whole batches")
            except (CaptureError, NoSuchHeadsError):
                raise
            except Exception as error:
                kept = self.collected() if self._keep_what_is_done() else None
                audit = None if kept is None else finished(kept, self._chosen)
                failure = batch_failed(error, self.model, self.batches + 1, self._current, audit)
                raise _with_statistics(failure, kept) from error
            if copies is not None and self.complete:
                self._measure_baseline(batches, copies)
            if importance is not None and self.complete:
                self._measure_importance(batches, importance)

    def _run_all(self, batches: Iterator[Batch], device: torch.device) -> None:
        for given in batches:
            batch, left_out = drop_unused_labels(self.model, given)
            self.notes += [left_out] if left_out and left_out not in self.notes else []
            self._current = batch
            check_rows(self.model, batch, self.batches + 1)
            run_model(self.model, to_device(batch, device))
            self._take_batch()
            if self.pictures is not None and not self.batches:
                self.pictures.check(
                    (head.layer, head.head) for head in self.statistics.head_records(self.delta)
                )
            self.batches += 1
            self.sequences += batch_size(batch)
            self.data.add(batch)
            self._current = None
        if not self.batches:
            raise InputError(
                "`batches`",
                expected="at least one batch",
                got="none",
                fix="Pass a list of batches; an exhausted iterator gives none.",
            )

    def _mixer(self, captured: MixerSite) -> None:
        with measuring(captured.name), one_thread():  # large work goes to several, a matrix each
            site, channels = sampled(captured)
            if len(channels) < (whole := captured.operator.shape[-3]):
                self.measured_in_part[f"{len(channels)} of the {whole} channels of {site.kind} mixers"] = None
            heads = measure_heads(
                site,
                channels,
                self.delta,
                self.method,
                name_tokens=lambda site, columns: self.names.peaks(site, self._current, columns),
                image=picture_size(self._current),
                each_sequence=self.each_sequence,
            )
            if self.pictures is not None:
                known = self.statistics.heads.get(heads.mixer)
                before = 0 if known is None else max(map(len, known.examples.attention_maps))
                for taken in self.pictures.take(site, channels, self._current, before):
                    for place, kept in taken.items():
                        heads.examples.attention_maps[place].append(kept)
            self.batch_statistics.add_heads(heads)
        self._on_progress(self.batches, site.name)

    def _state(self, state: StateSite) -> None:
        with measuring(state.name), one_thread():
            before, self._states[state.stack] = self._states.get(state.stack), state
            follows = (
                before is not None
                and (before.forward_pass, before.layer + 1) == (state.forward_pass, state.layer)
                and before.tokens.shape == state.tokens.shape
            )
            self.batch_statistics.add_states(measure_states(state, before if follows else None))
        self._on_progress(self.batches, state.name)

    def _take_batch(self) -> None:
        self.statistics.merge(self.batch_statistics)
        self._forget_batch()

    def _forget_batch(self) -> None:
        self.batch_statistics = ModelStatistics()
        self._states.clear()

    def _keep_what_is_done(self) -> bool:
        """Whole batches are kept; of a first batch that was not finished, the layers that were."""
        self.complete = False
        if self.batches:
            self._forget_batch()
        else:
            self._take_batch()
        return bool(self.statistics.heads)

    def _measure_baseline(self, batches: Iterable[Batch], copies: InitialCopies) -> None:
        self.built = copies.built
        try:
            with preserve_random_state(self.model):
                for seed, model in copies:
                    torch.manual_seed(seed)  # of dropout, where the model is in training mode
                    run = self._of_copy(model, f"seed {seed} of {len(copies)} at fresh weights")
                    run.over(batches)
                    if not run.complete:
                        raise KeyboardInterrupt
                    self.copies[seed] = run.statistics
                    del run, model  # one copy at a time
        except KeyboardInterrupt:
            self.notes.append(f"baseline of {len(self.copies)} seeds only: interrupted from the keyboard")
        except Exception as error:
            failure = step_failed(error, "baseline", "an audit at fresh weights", self.result())
            raise _with_statistics(failure, self.collected()) from error

    def _of_copy(self, model: nn.Module, name: str) -> "Run":
        run = Run(
            model,
            self.delta,
            self.method,
            {},
            lambda done, site: self._on_progress(done, f"{name}: {site}"),
            **self.where,
        )
        run.each_sequence = True
        return run

    def _measure_importance(self, batches: Iterable[Batch], settings: ImportanceSettings) -> None:
        try:
            self.importance = measure_importance(
                self.model,
                batches,
                settings,
                heads={mixer: known.heads for mixer, known in self.statistics.heads.items()},
                on_progress=lambda what: self._on_progress(self.batches, f"importance: {what}"),
                **self.where,
            )
        except KeyboardInterrupt:
            self.notes.append("importance not measured: interrupted from the keyboard")
        except Exception as error:
            wanted = "what the model loses without its heads"
            failure = step_failed(error, "importance", wanted, self.result())
            raise _with_statistics(failure, self.collected()) from error

    def result(self) -> Audit:
        """Return the audit of what is known so far."""
        return finished(self.collected(), self._chosen)

    @property
    def _chosen(self) -> Chosen | None:
        return None if self.pictures is None else self.pictures.chosen

    def collected(self) -> AuditStatistics:
        """Return the statistics of all batches, at initialization too, and what is known of their origin."""
        uncaptured = [
            Unseen(name=module.name, type=module.type, reason=module.reason)
            for module in self.trace.uncaptured
        ]
        return AuditStatistics(
            heads=self.statistics.heads,
            states=self.statistics.states,
            provenance=self._provenance(),
            complete=self.complete,
            uncaptured=uncaptured,
            texts={} if self.pictures is None else self.pictures.texts,
            importance=self.importance,
            built=self.built,
            copies=self.copies,
        )

    def _provenance(self) -> Provenance:
        if self.pictures is not None:
            missing = self.pictures.missing(self.statistics.head_records(self.delta))
            self.notes += [note for note in missing if note not in self.notes]
        found: dict[str, Any] = {
            "delta": self.delta,
            "method_asked": self.method,
            "batches": self.batches,
            "sequences": self.sequences,
            "parts": [self.data.value] if self.data.value else [],
        }
        if "weights" not in self.given:
            found["weights"] = weights_digest(self.model)
        parts = [f"measured: {part}, spread evenly" for part in self.measured_in_part]
        given = self.given | {"notes": (*self.notes, *parts, *self.trace.notes, *self.given.get("notes", ()))}
        return provenance_of(self.model, found, given)


def _with_statistics(error: Exception, kept: AuditStatistics | None) -> Exception:
    if isinstance(error, AuditError):
        error.statistics = kept
    return error
