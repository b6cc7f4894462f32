"""Describe one audit as a job: model, data and settings; load and run it."""

import hashlib
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rankwise.auditing.text_inputs import ALL, Shard
from rankwise.cli.load_data import LoadedData, load_data, parse_dataset
from rankwise.cli.load_model import LoadedModel, load_model
from rankwise.errors import RankwiseError

if TYPE_CHECKING:
    from rankwise.auditing import Audit
    from rankwise.auditing.settings import Method
    from rankwise.auditing.statistics import AuditStatistics
    from rankwise.importance import ImportanceSettings

WHOLE = 1 << 26
"""Number of bytes that a digest reads of a file at most, of larger files in evenly spaced pieces."""
PIECE = 1 << 16
Say = Callable[[str], None]
"""Function that shows which step is running."""


@dataclass(frozen=True, kw_only=True)
class AuditJob:
    """One audit: model, data and settings. The fields are options of `rankwise audit`."""

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
    def options(self) -> dict[str, str | None]:
        """Options that differ from their defaults, with their values; None for an option without a value."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "model"}
        defaults = {field.name: field.default for field in fields(self)}
        if importance := given.pop("importance"):
            given["importance"] = "exact" if importance.exact else "estimate"
            for name in ("tolerance", "ablation", "loss"):
                given[f"importance_{name}"] = getattr(importance, name)
                defaults[f"importance_{name}"] = getattr(type(importance), name)
        if (seeds := given["baseline"]) is not True:
            given["baseline"], given["baseline_seeds"] = False, seeds or None
        return {
            f"--{name.replace('_', '-')}": None if value is True else str(value)
            for name, value in given.items()
            if value != defaults.get(name)
        }

    @property
    def command(self) -> str:
        """The command line that repeats this audit, without options of output and Ray."""
        words = (word for pair in self.options.items() for word in pair if word is not None)
        return shlex.join(["rankwise", "audit", self.model, *words])

    def for_model(self, model: str) -> "AuditJob":
        """Return this job for a name, a folder, ``module.py:factory``, or ``NAME@REVISION`` of the Hub.

        A path that exists is a folder, even if its name contains an @.
        """
        name, _, revision = model.rpartition("@")
        is_factory = model.rpartition(":")[0].endswith(".py")
        if not name or is_factory or Path(model).exists():
            return replace(self, model=model)
        return replace(self, model=name, revision=revision)

    def file_digests(self) -> dict[str, str]:
        """Return digests of the local files that the job reads, by option; none for names on the Hub.

        In folders of models and tokenizers, subfolders do not count: they may hold results.
        """
        factory, _, _ = self.model.rpartition(":")
        model = factory if factory.endswith(".py") else self.model
        dataset = parse_dataset(self.dataset).name if self.dataset else ""
        deep = {"text": self.text, "images": self.images, "dataset": dataset}
        flat = {"model": model, "tokenizer": self.tokenizer}
        return {
            name: _digest(Path(path), pattern)
            for pattern, paths in (("*", flat), ("**/*", deep))
            for name, path in paths.items()
            if path and Path(path).exists()
        }


def _digest(path: Path, pattern: str) -> str:
    """Return the digest of a file, or of all files in a folder that match a pattern and are not hidden."""
    found = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.glob(pattern)):
        name = "" if file == path else file.relative_to(path).as_posix()
        if file.is_file() and not any(part.startswith(".") for part in name.split("/")):
            about = file.stat()
            found.update(f"{name} {_file_digest(file, about.st_size, about.st_mtime_ns)}".encode())
    return found.hexdigest()[:16]


@lru_cache(maxsize=4096)
def _file_digest(file: Path, size: int, changed: int) -> str:
    found = hashlib.sha256(str(size).encode())
    pieces = range(0, size, PIECE) if size <= WHOLE else range(0, size, size * PIECE // WHOLE)
    with file.open("rb") as content:
        for at in pieces:
            content.seek(at)
            found.update(content.read(PIECE))
    return found.hexdigest()


class LoadedJob(NamedTuple):
    """A job with its model loaded and its data open."""

    job: AuditJob
    model: LoadedModel
    data: LoadedData
    notes: list[str]
    first: list[Any]
    """The first batch, after the audit has started."""
    is_empty: bool = False
    """True if this shard has no sequences."""


def load(job: AuditJob, shard: Shard = ALL) -> LoadedJob:
    """Load the model, with the λ-skips saved next to it, and open the data of one shard.

    Raise `InputError` if the model or the data cannot be loaded.
    """
    from rankwise.skips import apply_saved_skips

    model = load_model(
        job.model, revision=job.revision, dtype=job.dtype, device=job.device, device_map=job.device_map,
        offload_folder=job.offload_folder, trust_remote_code=job.trust_remote_code, tokenizer=job.tokenizer,
    )  # fmt: skip
    skipped = apply_saved_skips(model.model, Path(model.source)) if model.source else None
    data = load_data(
        model, text=job.text, images=job.images, dataset=job.dataset, tokens=job.tokens,
        sequences=job.sequences, batch_size=job.batch_size, shard=shard,
    )  # fmt: skip
    skips = [] if skipped is None else [f"with the {len(skipped)} λ-skips saved beside the model"]
    notes = [*model.notes, *skips, *data.notes]
    if shard == ALL:
        return LoadedJob(job, model, data, notes, [])
    batches = iter(data.batches)
    first = list(islice(batches, 1))
    return LoadedJob(job, model, replace(data, batches=chain(first, batches)), notes, [], not first)


def run(
    loaded: LoadedJob,
    provenance: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, str], None] | None = None,
) -> "AuditStatistics":
    """Measure the model of a loaded job on its data; raise as `rankwise.audit` does.

    Entries of `provenance` replace entries that follow from the job, such as the command.
    """
    from rankwise.auditing import AuditSettings
    from rankwise.auditing.provenance import weights_digest
    from rankwise.auditing.run import collect
    from rankwise.cli.load_model import demo_model, demo_text

    job, model = loaded.job, loaded.model
    known = {
        "model": "the bundled demo" if model.name == str(demo_model()) else model.name,
        "revision": model.revision,
        "data": loaded.data.data.replace(str(demo_text()), "the bundled text"),
        "command": job.command,
        "notes": loaded.notes,
        "weights": weights_digest(model.model, model.random_weights),
    }
    settings = AuditSettings.of(
        delta=job.delta, method=job.method, matrices=job.matrices, baseline=job.baseline,
        importance=job.importance, tokenizer=loaded.data.tokenizer,
        provenance=known | dict(provenance or {}), on_progress=on_progress,
    )  # fmt: skip
    return collect(model.model, _keep_first(loaded.data.batches, loaded.first), settings)


def _keep_first(batches: Iterable[Any], first: list[Any]) -> Iterator[Any]:
    """Yield batches; keep the first batch, on which the model may run again."""
    for batch in batches:
        first[:] = first or [batch]
        yield batch


def build(loaded: LoadedJob, statistics: "AuditStatistics", say: Say) -> "tuple[Audit, bool]":
    """Return the audit of statistics, with a recommended λ if it is complete; also True after Ctrl-C.

    If the recommendation fails, the audit has a note that says why.
    """
    from rankwise.auditing.run import build_audit
    from rankwise.auditing.settings import chosen_heads
    from rankwise.skips import recommend

    audit = build_audit(statistics, chosen_heads(loaded.job.matrices))
    if not audit.complete:
        return audit, True
    try:
        return recommend(audit, loaded.model.model, loaded.first[0]), False
    except KeyboardInterrupt:
        note, stopped = "skip connections not looked at: interrupted from the keyboard", True
    except Exception as error:  # the audit must not be lost
        reason = str(error) if isinstance(error, RankwiseError | RuntimeError) else repr(error)
        note, stopped = f"no λ is named for COLLAPSE: {reason}", False
        say(note)
    provenance = audit.provenance.model_copy(update={"notes": [*audit.provenance.notes, note]})
    return audit.model_copy(update={"provenance": provenance}), stopped


def run_job(job: AuditJob, say: Say = lambda step: None) -> "Audit":
    """Load a job, run it to its end and return the audit, with digests of the files that it read.

    Raise `RankwiseError` for every failure, as processes of Ray can send it, and `KeyboardInterrupt` instead
    of returning an incomplete audit.
    """
    from rankwise.auditing import AuditError

    try:
        digests = job.file_digests()  # before files are read: --resume then sees every later change
        loaded = load(job)
        statistics = run(
            loaded,
            {"sources": digests},
            lambda batches, step: say(f"{job.model}, batch {batches + 1}: {step}"),
        )
        audit, interrupted = build(loaded, statistics, say)
    except AuditError as error:
        error.audit = error.statistics = None  # large, and not needed where the error is shown
        raise
    except RankwiseError:
        raise
    except (Exception, SystemExit) as error:  # a factory may call sys.exit, which would end a Ray worker
        got, fix = f"{type(error).__name__}: {error}", f"Try `{job.command}`."
        raise RankwiseError(job.model, expected="an audit", got=got, fix=fix) from error
    if interrupted:
        raise KeyboardInterrupt
    return audit
