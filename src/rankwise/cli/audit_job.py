"""An audit as it is asked for, of which model, on which data, how; and how it is run."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rankwise.auditing.text_inputs import ALL, Shard
from rankwise.cli.file_digests import source_digests
from rankwise.cli.load_data import LoadedData, load_data
from rankwise.cli.load_model import LoadedModel, load_model

if TYPE_CHECKING:
    from rankwise.auditing.settings import Method
    from rankwise.auditing.statistics import AuditStatistics
    from rankwise.importance import ImportanceSettings

FLAGS = (
    *("revision", "text", "images", "dataset", "tokens", "sequences", "batch_size", "delta", "method"),
    *("matrices", "device", "device_map", "offload_folder", "dtype", "tokenizer"),
)
"""Fields that `rankwise audit` has options of the same name for."""


@dataclass(frozen=True, kw_only=True)
class AuditTask:
    """Of which model, on which data, how; the fields are the options of `rankwise audit`."""

    model: str
    revision: str | None = None
    text: Path | None = None
    images: Path | None = None
    dataset: str | None = None
    tokens: int = 256
    sequences: int = 8
    batch_size: int = 4
    delta: float = 1e-2
    method: "Method" = "auto"
    matrices: str | None = None
    importance: "ImportanceSettings | Literal[False]" = False
    baseline: bool | int = False
    device: str | None = None
    device_map: str | None = None
    offload_folder: Path | None = None
    dtype: str = "auto"
    tokenizer: str | None = None
    trust_remote_code: bool = False

    @property
    def command(self) -> str:
        """The command that runs it alone, without worth and baseline."""
        words = ["rankwise", "audit", self.model]
        options = self.options
        for name in FLAGS:
            option = _option(name)
            words += [option, str(options[option])] if option in options else []
        words += ["--trust-remote-code"] if self.trust_remote_code else []
        return shlex.join(words)

    @property
    def options(self) -> dict[str, object]:
        """What is not as usual, by option."""
        given = {field: getattr(self, field.name) for field in fields(self) if field.name != "model"}
        return {_option(field.name): value for field, value in given.items() if value != field.default}

    @property
    def data(self) -> dict[str, str | Path | None]:
        """Where it reads its data, by option; of a data set on the Hub, its name."""
        return {"text": self.text, "images": self.images, "dataset": (self.dataset or "").partition(":")[0]}

    def sources(self) -> dict[str, str]:
        """Digests of the local files it reads, by option; of what is on the Hub there is none."""
        path, _, _ = self.model.rpartition(":")
        model = path if path.endswith(".py") else self.model
        found = {"model": model, **self.data, "tokenizer": self.tokenizer}
        return source_digests(found, flat=("model", "tokenizer"))


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


class Ready(NamedTuple):
    """A task whose model is loaded and whose data is read."""

    task: AuditTask
    subject: LoadedModel
    inputs: LoadedData
    notes: list[str]
    first: list[Any]
    """The first batch, once the audit has begun."""
    is_empty: bool = False
    """Whether this share of the sequences has none."""


def prepare(task: AuditTask, shard: Shard = ALL) -> Ready:
    """Load the model, with the λ-skips saved beside it, and read the data.

    Args:
        task: what is asked for.
        shard: which of the sequences.

    Raises:
        InputError: if either cannot be had as asked.
    """
    from rankwise.skips import apply_saved_skips

    subject = load_model(
        task.model,
        revision=task.revision,
        dtype=task.dtype,
        device=task.device,
        device_map=task.device_map,
        offload_folder=task.offload_folder,
        trust_remote_code=task.trust_remote_code,
        tokenizer=task.tokenizer,
    )
    skipped = apply_saved_skips(subject.model, Path(subject.source)) if subject.source else None
    inputs = load_data(
        subject,
        text=task.text,
        images=task.images,
        dataset=task.dataset,
        tokens=task.tokens,
        sequences=task.sequences,
        batch_size=task.batch_size,
        shard=shard,
    )
    skips = [] if skipped is None else [f"with the {len(skipped)} λ-skips saved beside the model"]
    notes = [*subject.notes, *skips, *inputs.notes]
    if shard == ALL:
        return Ready(task, subject, inputs, notes, [])
    batches = iter(inputs.batches)
    first = list(islice(batches, 1))
    return Ready(task, subject, replace(inputs, batches=chain(first, batches)), notes, [], not first)


def run(
    ready: Ready,
    provenance: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, str], None] | None = None,
) -> "AuditStatistics":
    """Measure the model of a task on its data.

    Args:
        ready: the task, prepared.
        provenance: what to write down besides what the task says.
        on_progress: as in `rankwise.audit`.

    Raises:
        AuditError: as `rankwise.audit`.
    """
    from rankwise.auditing import AuditSettings
    from rankwise.auditing.provenance import weights_digest
    from rankwise.auditing.run import collect
    from rankwise.cli.load_model import demo_model, demo_text

    task, subject = ready.task, ready.subject
    said = {
        "model": "the bundled demo" if subject.name == str(demo_model()) else subject.name,
        "revision": subject.revision,
        "data": ready.inputs.data.replace(str(demo_text()), "the bundled text"),
        "command": task.command,
        "notes": ready.notes,
        "weights": weights_digest(subject.model, subject.random_weights),
    }
    settings = AuditSettings.of(
        delta=task.delta,
        method=task.method,
        matrices=task.matrices,
        baseline=task.baseline,
        tokenizer=ready.inputs.tokenizer,
        importance=task.importance,
        provenance=said | dict(provenance or {}),
        on_progress=on_progress,
    )
    return collect(subject.model, _keeping_first(ready.inputs.batches, ready.first), settings)


def _keeping_first(batches: Iterable[Any], first: list[Any]) -> Iterator[Any]:
    """The batches; the first is kept for what looks at the model once more."""
    for batch in batches:
        first[:] = first or [batch]
        yield batch
