"""`audit`: run a model over batches and measure every head and every layer, keeping only numbers."""

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.audit.advice import with_scales
from rankwise.audit.findings import find
from rankwise.audit.heads import HeadTable
from rankwise.audit.layers import LayerTable
from rankwise.audit.numbers import Method, check_method, method_of
from rankwise.audit.records import HeadRecord, Provenance, Unseen
from rankwise.audit.result import Audit
from rankwise.capture import MixerSite, SiteAdapter, StateSite, Trace, capture, compiled_modules
from rankwise.errors import CaptureError, InputError, RankwiseError
from rankwise.measures import DELTA, check_delta

Batch = Mapping[str, Any] | tuple[Any, ...] | list[Any] | Tensor
Progress = Callable[[int, str], None]
"""Called with the number of finished batches and the site measured last."""


SAMPLE = 4
"""Sequences of a dict that a certificate is made on."""
LIBRARIES = ("torch", "transformers")
"""Their versions go into the record, where they are loaded."""


class AuditError(RankwiseError):
    """The model or its batches failed while it was audited.

    ``audit`` holds the whole batches before; where the first one failed, the layers it got through, or None.
    """

    def __init__(self, audit: Audit | None, subject: str, *, wanted: str, got: str, fix: str) -> None:
        super().__init__(subject, wanted=wanted, got=got, fix=fix)
        self.audit = audit


def audit(
    model: nn.Module,
    batches: Iterable[Batch],
    delta: float = DELTA,
    *,
    method: Method = "auto",
    sites: Mapping[str, SiteAdapter] | None = None,
    blocks: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> Audit:
    """Measure the rank of every head and the collapse of tokens through depth, as the model runs.

    Each batch runs once, without gradients, on the model's device. Every operator is measured as soon as its
    block has run and then let go: memory does not grow with batches or layers. The model stays in the mode
    it is in (call ``model.eval()`` first), its attention backend is not switched.

    Cost: one forward pass; for each head and sequence the eigenvalues of a Gram matrix (T S min(T, S) time,
    8 T S bytes), or where ranks are estimated 67 walks over the rows (O(T S K) time, O(T + S) memory).

    Args:
        model: any `torch.nn.Module`.
        batches: dicts (``model(**batch)``), tuples (``model(*batch)``) or tensors (``model(batch)``).
        delta: singular values below it count as zero in the numerical rank.
        method: "exact"; "estimate" (`estimate_spectrum`: with standard errors, and an interval where δ cannot
            be resolved); or "auto", exact while a float64 matrix takes at most 512 MiB (T = S = 8,192).
        sites: operators named by hand, as in `capture`.
        blocks: names of the residual blocks, as in `capture`.
        provenance: what to write into the record besides what is known here: model, revision, data, command.
        on_progress: called after each measured site.

    Returns:
        The audit. Interrupted from the keyboard while batches run, it holds the whole ones until then (of a
        first one, its finished layers), and ``complete`` is False.

    Raises:
        AuditError: if the model or the batches raise; its ``audit`` holds what was measured before.
        CaptureError: if no mixing operator is found.
        InputError: if there are no batches, or no such method.

    Examples:
        >>> import torch, rankwise as rw
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> result = rw.audit(layer, [torch.randn(1, 5, 8)])
        >>> [(head.layer, head.head) for head in result.heads]
        [(0, 0), (0, 1)]
    """
    _check_batches(batches)
    check_delta(delta)
    run = _Run(model, delta, check_method(method), dict(provenance or {}), on_progress)
    run.over(batches, sites, blocks)
    return run.result()


def _check_batches(batches: object) -> None:
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise InputError(
            "`batches`",
            wanted="an iterable of batches",
            got=type(batches).__name__,
            fix="Put a single batch into a list: `rw.audit(model, [batch])`.",
        )


class _Run:
    """One audit under way."""

    def __init__(
        self,
        model: nn.Module,
        delta: float,
        method: Method,
        given: dict[str, Any],
        on_progress: Progress | None,
    ) -> None:
        self.model, self.delta, self.given = model, delta, given
        self.given_notes = tuple(self.given.pop("notes", ()))
        self.heads, self.layers = HeadTable(delta, method), LayerTable()
        self.trace = Trace()
        self.notes: list[str] = []
        self.batches = 0
        self.sequences = 0
        self.complete = True
        self._name = type(model).__name__
        self._current: Any = None
        self._sample: Any = None
        """The first batch, or a few sequences of it, for a certificate if tokens collapse."""
        self._on_progress = on_progress or (lambda batches, site: None)

    def over(
        self, batches: Iterable[Batch], sites: Mapping[str, SiteAdapter] | None, blocks: str | None
    ) -> None:
        """Run all batches, or as many as can be run."""
        with ExitStack() as stack:
            if isinstance(self.model, nn.Module) and compiled_modules(self.model):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                self.notes.append("the compiled model was run uncompiled, with the same weights")
            watch = capture(
                self.model, on_mixer=self._mixer, on_state=self._state, sites=sites, blocks=blocks
            )
            try:
                with watch as self.trace, torch.no_grad():
                    self._run_all(iter(batches), _device(self.model))
            except KeyboardInterrupt:
                if not self._keep_what_is_done():
                    raise
                self.notes.append(f"interrupted from the keyboard after {self.batches} whole batches")
            except CaptureError:
                raise
            except Exception as error:
                raise self._failed(error) from error

    def _run_all(self, batches: Iterator[Batch], device: torch.device) -> None:
        for batch in batches:
            self._current = batch
            moved = _moved(batch, device)
            self._sample = _sampled(moved) if self._sample is None else self._sample
            self._call(moved)
            for table in (self.heads, self.layers):
                table.commit()
            self.batches += 1
            self.sequences += _batch_size(batch)
            self._current = None
        if not self.batches:
            raise InputError(
                "`batches`",
                wanted="at least one batch",
                got="none",
                fix="Pass a list of batches; an exhausted iterator gives none.",
            )

    def _call(self, batch: Batch) -> None:
        if isinstance(batch, Mapping):
            self.model(**batch)
        elif isinstance(batch, tuple | list):
            self.model(*batch)
        else:
            self.model(batch)

    def _keep_what_is_done(self) -> bool:
        """Whole batches are kept; of a first one that was not finished, the layers that were."""
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
        if self._current is None:
            fix = "Iterate over the batches by themselves to see the whole traceback."
            return AuditError(partial, subject, wanted="a batch", got=got, fix=fix)
        return AuditError(
            partial,
            subject,
            wanted=f"a forward pass of {self._name} over {_described(self._current)}",
            got=got,
            fix="Run the model on this batch by itself to see the whole traceback; shorter sequences or "
            "other keys are the usual cure.",
        )

    def result(self) -> Audit:
        """What is known so far."""
        heads, layers = self.heads.records(), self.layers.records()
        unseen = [Unseen(name=one.name, type=one.type, reason=one.reason) for one in self.trace.unseen]
        findings = find(heads, layers, unseen)
        notes: list[str] = []
        if self.complete:
            findings, notes = with_scales(findings, self.model, self._sample)
        self.notes.extend(notes)
        return Audit(
            complete=self.complete,
            provenance=self._provenance(heads),
            heads=heads,
            layers=layers,
            findings=findings,
            unseen=unseen,
        )

    def _mixer(self, site: MixerSite) -> None:
        self._measure(site.name, lambda: self.heads.add(site, _picture(self._current)))

    def _state(self, state: StateSite) -> None:
        self._measure(state.name, lambda: self.layers.add(state))

    def _measure(self, name: str, measure: Callable[[], None]) -> None:
        try:
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
            "model_dtype": ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in parameters})),
            "device": ", ".join(sorted({str(one.device) for one in parameters})),
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


def _device(model: nn.Module) -> torch.device:
    """Where the first weight lies: models spread over devices read their inputs there."""
    tensors = chain(model.parameters(), model.buffers()) if isinstance(model, nn.Module) else ()
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))


def _moved(value: Any, device: torch.device) -> Any:
    return _changed(value, lambda tensor: tensor.to(device))


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with other tensors, in whatever dicts and lists they lie."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _changed(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_changed(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _tensors(batch: Batch) -> dict[str, Tensor]:
    items = (
        batch.items()
        if isinstance(batch, Mapping)
        else enumerate([batch] if isinstance(batch, Tensor) else batch)
    )
    return {str(name): value for name, value in items if isinstance(value, Tensor)}


def _sampled(batch: Batch) -> Any:
    """A copy, as the batch itself is let go: of a dict the first sequences, of anything else the whole.

    A dict lies batch first, by the convention of Hugging Face; elsewhere the first axis may be time.
    """
    sequences = _batch_size(batch) if isinstance(batch, Mapping) else None

    def copied(tensor: Tensor) -> Tensor:
        batched = tensor.dim() > 0 and tensor.shape[0] == sequences
        return (tensor[:SAMPLE] if batched else tensor).clone()

    return _changed(batch, copied)


def _picture(batch: Batch | None) -> tuple[int, int] | None:
    """Height and width of the pictures in a batch, (B, C, H, W), if it has any."""
    for tensor in _tensors(batch).values() if batch is not None else ():
        if tensor.dim() == 4 and tensor.is_floating_point():
            return tensor.shape[2], tensor.shape[3]
    return None


def _batch_size(batch: Batch) -> int:
    return next((value.shape[0] for value in _tensors(batch).values() if value.dim()), 1)


def _described(batch: Batch) -> str:
    tensors = _tensors(batch)
    return (
        ", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors.items()) or type(batch).__name__
    )
