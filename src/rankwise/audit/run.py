"""An audit under way: batches, then copies at fresh weights, then worth; and the record of what is known."""

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from rankwise.audit.baseline_numbers import head_baselines, layer_baselines
from rankwise.audit.baseline_records import BaselineRecord
from rankwise.audit.batches import cure, label_error, readable
from rankwise.audit.findings import find
from rankwise.audit.fresh_copies import FreshCopies
from rankwise.audit.heads import HeadTable, SiteKey
from rankwise.audit.layers import LayerTable
from rankwise.audit.numbers import method_of
from rankwise.audit.records import HeadRecord, Provenance, Unseen
from rankwise.audit.result import Audit
from rankwise.audit.worth_numbers import head_worths, worth_record
from rankwise.capture import MixerSite, SiteAdapter, StateSite, Trace, capture, compiled_modules
from rankwise.errors import CaptureError, InputError, RankwiseError
from rankwise.parallel import one_thread
from rankwise.running import Batch, batch_size, device_of, moved, run_model, tensors_of
from rankwise.worth import Worth, WorthSettings, measure_worth

Progress = Callable[[int, str], None]
"""Called with the number of finished batches and the site measured last."""


LIBRARIES = ("torch", "transformers")
"""Their versions go into the record, where they are loaded."""


class AuditError(RankwiseError):
    """The model or its batches failed while it was audited.

    ``audit`` holds the whole batches before; where the first failed, the layers it got through, or None.
    """

    def __init__(self, audit: Audit | None, subject: str, *, wanted: str, got: str, fix: str) -> None:
        super().__init__(subject, wanted=wanted, got=got, fix=fix)
        self.audit = audit


class Run:
    """One audit under way."""

    def __init__(
        self,
        model: nn.Module,
        delta: float,
        heads: HeadTable,
        given: dict[str, Any],
        on_progress: Progress | None,
    ) -> None:
        self.model, self.delta, self.given = model, delta, given
        self.given_notes = tuple(self.given.pop("notes", ()))
        self.heads, self.layers = heads, LayerTable()
        self.trace = Trace()
        self.notes: list[str] = []
        self.batches = 0
        self.sequences = 0
        self.complete = True
        self.worth: Worth | None = None
        self.fresh: dict[int, tuple[HeadTable, LayerTable]] = {}
        """What was measured at fresh weights, by the seed."""
        self.built = ""
        self._name = type(model).__name__
        self._current: Any = None
        self._on_progress = on_progress or (lambda batches, site: None)

    def over(
        self,
        batches: Iterable[Batch],
        sites: Mapping[str, SiteAdapter] | None,
        blocks: str | None,
        worth: WorthSettings | None = None,
        copies: FreshCopies | None = None,
    ) -> None:
        """Run all batches, or as many as can be run; then copies at fresh weights and worth, if wanted."""
        with ExitStack() as stack:
            if isinstance(self.model, nn.Module) and compiled_modules(self.model):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                self.notes.append("the compiled model was run uncompiled, with the same weights")
            watch = capture(
                self.model, on_mixer=self._mixer, on_state=self._state, sites=sites, blocks=blocks
            )
            try:
                with watch as self.trace, torch.no_grad():
                    self._run_all(iter(batches), device_of(self.model))
            except KeyboardInterrupt:
                if not self._keep_what_is_done():
                    raise
                self.notes.append(f"interrupted from the keyboard after {self.batches} whole batches")
            except CaptureError:
                raise
            except Exception as error:
                raise self._failed(error) from error
            if copies is not None and self.complete:
                self._measure_baseline(batches, sites, blocks, copies)
            if worth is not None and self.complete:
                self._measure_worth(batches, sites, blocks, worth)

    def _measure_baseline(
        self,
        batches: Iterable[Batch],
        sites: Mapping[str, SiteAdapter] | None,
        blocks: str | None,
        copies: FreshCopies,
    ) -> None:
        self.built = copies.built
        try:
            with copies.random_state_kept():
                for seed, model in copies:
                    torch.manual_seed(seed)  # of dropout, where the model is in training mode
                    run = self._of_copy(model, f"seed {seed} of {len(copies)} at fresh weights")
                    run.over(batches, sites, blocks)
                    if not run.complete:
                        raise KeyboardInterrupt
                    self.fresh[seed] = run.heads, run.layers
                    del run, model  # one copy at a time
        except KeyboardInterrupt:
            self.notes.append(f"baseline of {len(self.fresh)} seeds only: interrupted from the keyboard")
        except Exception as error:
            raise self._after_all("baseline", "an audit at fresh weights", error) from error

    def _of_copy(self, model: nn.Module, name: str) -> "Run":
        heads = HeadTable(self.delta, self.heads.method, each_sequence=True)
        return Run(
            model, self.delta, heads, {}, lambda done, site: self._on_progress(done, f"{name}: {site}")
        )

    def _measure_worth(
        self,
        batches: Iterable[Batch],
        sites: Mapping[str, SiteAdapter] | None,
        blocks: str | None,
        settings: WorthSettings,
    ) -> None:
        try:
            self.worth = measure_worth(
                self.model,
                batches,
                settings,
                readable=lambda batch: readable(self.model, batch)[0],
                sites=sites,
                blocks=blocks,
                channels=lambda site: self.heads.channels(SiteKey(*site.place(0)[:5])),
                on_progress=lambda what: self._on_progress(self.batches, f"worth: {what}"),
            )
        except KeyboardInterrupt:
            self.notes.append("worth not measured: interrupted from the keyboard")
        except Exception as error:
            raise self._after_all("worth", "what the model loses without its heads", error) from error

    def _after_all(self, subject: str, wanted: str, error: Exception) -> AuditError:
        """Of a step after the batches: the audit itself is whole."""
        if not isinstance(error, RankwiseError):
            error = RankwiseError(
                subject,
                wanted=wanted,
                got=f"{type(error).__name__}: {error}",
                fix=f"Audit without {subject}, or with smaller batches if memory ran out.",
            )
        said = {"wanted": error.wanted, "got": error.got, "fix": error.fix}
        return AuditError(self.result(), error.subject, **said)

    def _run_all(self, batches: Iterator[Batch], device: torch.device) -> None:
        for given in batches:
            batch, left_out = readable(self.model, given)
            self.notes += [left_out] if left_out and left_out not in self.notes else []
            self._current = batch
            run_model(self.model, moved(batch, device))
            for table in (self.heads, self.layers):
                table.commit()
            self.batches += 1
            self.sequences += batch_size(batch)
            self._current = None
        if not self.batches:
            raise InputError(
                "`batches`",
                wanted="at least one batch",
                got="none",
                fix="Pass a list of batches; an exhausted iterator gives none.",
            )

    def _keep_what_is_done(self) -> bool:
        """Whole batches are kept; of a first batch that was not finished, the layers that were."""
        self.complete = False
        for table in (self.heads, self.layers):
            if self.batches:
                table.discard()
            else:
                table.commit()
        return bool(self.heads.records())

    def _failed(self, error: Exception) -> Exception:
        kept = self._keep_what_is_done()
        if isinstance(error, RankwiseError):
            said = {"wanted": error.wanted, "got": error.got, "fix": error.fix}
            return AuditError(self.result(), error.subject, **said) if kept else error
        subject, got = f"batch {self.batches + 1}", f"{type(error).__name__}: {error}"
        partial = self.result() if kept else None
        wrong = label_error(self.model, self._current, self.batches + 1, error)
        if wrong is not None:
            return AuditError(partial, wrong.subject, wanted=wrong.wanted, got=wrong.got, fix=wrong.fix)
        if self._current is None:
            fix = "Iterate over the batches by themselves to see the whole traceback."
            return AuditError(partial, subject, wanted="a batch", got=got, fix=fix)
        return AuditError(
            partial,
            subject,
            wanted=f"a forward pass of {self._name} over {_described(self._current)}",
            got=got,
            fix=cure(self.model, self._current, error),
        )

    def result(self) -> Audit:
        """What is known so far."""
        worth = None if self.worth is None else worth_record(self.worth)
        fresh = list(self.fresh.values())
        heads = self.heads.records(
            {} if self.worth is None else head_worths(self.worth),
            head_baselines(self.heads, [heads for heads, _ in fresh]) if fresh else {},
        )
        layers = self.layers.records()
        at_layers = layer_baselines(layers, [layers.records() for _, layers in fresh])
        layers = [
            layer.model_copy(update={"baseline": at_layers.get((layer.stack, layer.layer))})
            for layer in layers
        ]
        unseen = [
            Unseen(name=module.name, type=module.type, reason=module.reason) for module in self.trace.unseen
        ]
        findings = find(heads, layers, unseen, worth)
        pictures = self.heads.pictures
        if pictures is not None:
            self.notes += [note for note in pictures.missing(heads) if note not in self.notes]
            heads = pictures.chosen.kept(heads, findings)
        return Audit(
            complete=self.complete,
            provenance=self._provenance(heads),
            heads=heads,
            layers=layers,
            findings=findings,
            unseen=unseen,
            texts={} if pictures is None else pictures.texts,
            worth=worth,
            baseline=BaselineRecord(seeds=list(self.fresh), built=self.built) if fresh else None,
        )

    def _mixer(self, site: MixerSite) -> None:
        self._measure(site.name, lambda: self.heads.add(site, _picture(self._current), self._current))

    def _state(self, state: StateSite) -> None:
        self._measure(state.name, lambda: self.layers.add(state))

    def _measure(self, name: str, measure: Callable[[], None]) -> None:
        try:
            with one_thread():  # what is large goes to several, a matrix each
                measure()
        except RankwiseError:
            raise
        except Exception as error:  # not the model's fault: say whose it is
            raise RankwiseError(
                f"measures of {name!r}",
                wanted="numbers",
                got=f"{type(error).__name__}: {error}",
                fix="If memory ran out, use fewer tokens or a smaller batch.",
            ) from error
        self._on_progress(self.batches, name)

    def _provenance(self, heads: list[HeadRecord]) -> Provenance:
        model = self.model
        parameters = list(model.parameters())
        found: dict[str, Any] = {
            "model": str(getattr(model, "name_or_path", "") or type(model).__name__),
            "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
            "parameters": sum(parameter.numel() for parameter in parameters),
            "delta": self.delta,
            "method": method_of(heads),
            "method_asked": self.heads.method,
            "model_dtype": ", ".join(
                sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
            ),
            "device": ", ".join(sorted({str(parameter.device) for parameter in parameters})),
            "batches": self.batches,
            "sequences": self.sequences,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": _versions(),
        }
        parts = [f"measured: {part}, spread evenly" for part in self.heads.notes]
        notes = [_printable(note) for note in (*self.notes, *parts, *self.trace.notes, *self.given_notes)]
        said = {**found, **self.given}
        return Provenance(**{name: _printable(value) for name, value in said.items()}, notes=notes)


def _printable(value: Any) -> Any:
    """Paths may hold bytes that are no text; JSON and HTML may not."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _versions() -> dict[str, str]:
    loaded = {name: version(name) for name in LIBRARIES if sys.modules.get(name) is not None}
    return {"rankwise": version("rankwise"), "python": platform.python_version(), **loaded}


def _picture(batch: Batch | None) -> tuple[int, int] | None:
    """Height and width of the pictures in a batch, (B, C, H, W), if it has any."""
    for tensor in tensors_of(batch).values() if batch is not None else ():
        if tensor.dim() == 4 and tensor.is_floating_point():
            return tensor.shape[2], tensor.shape[3]
    return None


def _described(batch: Batch) -> str:
    tensors = tensors_of(batch)
    return (
        ", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors.items()) or type(batch).__name__
    )
