"""Describe one audit as a job (model, data and settings); load and run the job, in one process or several."""

import hashlib
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import typer

from rankwise._internals.forward import drop_unused_labels
from rankwise.auditing import Audit, AuditError, AuditSettings
from rankwise.auditing.provenance import DataDigest, weights_digest
from rankwise.auditing.settings import Method, chosen_heads
from rankwise.auditing.statistics import AuditStatistics
from rankwise.auditing.text_inputs import ALL, Shard
from rankwise.cli.load_data import LoadedData, load_data, parse_dataset
from rankwise.cli.load_model import LoadedModel, demo_model, demo_text, load_model, split_factory
from rankwise.cli.output import is_of_audit, show_progress, write_report
from rankwise.cli.torchrun import Processes, as_rankwise_error, first_error
from rankwise.errors import INTERRUPTED, InputError, RankwiseError
from rankwise.importance import ImportanceSettings
from rankwise.skips import recommend

WHOLE = 1 << 26
"""Number of bytes up to which a digest reads a whole file; larger files are sampled in pieces."""
PIECE = 1 << 16
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Classes of modules that wait for other processes in each forward pass."""
Say = Callable[[str], None]
"""Function that shows the user which step is running."""


@dataclass(frozen=True, kw_only=True)
class AuditJob:
    """Model, data and settings of one audit: all that decides its numbers and enters its command."""

    model: str
    revision: str | None = None
    text: Path | None = None
    images: Path | None = None
    dataset: str | None = None
    tokens: int = 256
    sequences: int = 8
    batch_size: int = 4
    delta: float = 1e-2
    method: Method = "auto"
    matrices: str | None = None
    importance: ImportanceSettings | Literal[False] = False
    baseline: bool | int = False
    device: str | None = None
    device_map: str | None = None
    offload_folder: Path | None = None
    dtype: str = "auto"
    tokenizer: str | None = None
    trust_remote_code: bool = False

    @property
    def options(self) -> dict[str, str | None]:
        """Options that differ from their defaults, with their values; None for a flag, which has no value."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "model"}
        defaults = {field.name: field.default for field in fields(self)}
        if importance := given.pop("importance"):
            how = "estimate" if importance.estimates else "loss"
            given["importance"] = "exact" if importance.exact else how
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
    def loading(self) -> dict[str, Any]:
        """Options of `load_model` that can be checked before the model is loaded."""
        names = ("revision", "dtype", "device", "device_map", "offload_folder", "tokenizer")
        return {name: getattr(self, name) for name in names}

    @property
    def arguments(self) -> list[list[str]]:
        """The model, then each option with its value."""
        return [[self.model], *([word for word in pair if word] for pair in self.options.items())]

    @property
    def command(self) -> str:
        """Command line that repeats this audit, without the options for output and Ray."""
        words = (word for pair in self.options.items() for word in pair if word is not None)
        return shlex.join(["rankwise", "audit", self.model, *words])

    def for_model(self, model: str) -> "AuditJob":
        """Return this job for another model: name, folder, ``module.py:factory`` or ``NAME@REVISION``.

        An existing path is a folder, even if the path contains an @.
        """
        name, _, revision = model.rpartition("@")
        if not name or split_factory(model)[0] or Path(model).exists():
            return replace(self, model=model)
        return replace(self, model=name, revision=revision)

    def file_digests(self) -> dict[str, str]:
        """Return digests of the local files that the job reads, by option; names on the Hub have none.

        Subfolders of models and tokenizers are ignored, because they may contain results.
        """
        model = split_factory(self.model)[0] or self.model
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
    """Return the digest of a file, or of a folder's visible files that match a pattern, without audits."""
    found = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.glob(pattern)):
        name = "" if file == path else file.relative_to(path).as_posix()
        visible = not any(part.startswith(".") for part in name.split("/"))
        if visible and file.is_file() and not is_of_audit(file):
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
    """Job with a loaded model and opened data."""

    job: AuditJob
    model: LoadedModel
    data: LoadedData
    first: list[Any]
    """List for the first batch, which is added when the audit starts, or when a shard is opened."""


def load(job: AuditJob, shard: Shard = ALL) -> LoadedJob:
    """Load the model of a job with its saved λ-skips, and open the data of one shard."""
    whole = load_model(job.model, trust_remote_code=job.trust_remote_code, **job.loading)
    model = whole.part_for("text" if job.images is None else "vision")
    data = load_data(
        model, text=job.text, images=job.images, dataset=job.dataset, tokens=job.tokens,
        sequences=job.sequences, batch_size=job.batch_size, shard=shard,
    )  # fmt: skip
    masks = job.importance and job.importance.loss == "masked" and (data.tokenizer or job.images)
    if masks and getattr(data.tokenizer, "mask_token_id", None) is None:
        expected, fix = "a tokenizer with a mask token", "Use another loss, or another --tokenizer."
        raise InputError("--importance-loss masked", expected=expected, got="none", fix=fix)
    if shard == ALL:
        return LoadedJob(job, model, data, [])
    batches = iter(data.batches)
    first = list(islice(batches, 1))
    return LoadedJob(job, model, replace(data, batches=chain(first, batches)), first)


def factory_digests(job: AuditJob) -> tuple[str, list[str]] | None:
    """Return digests of the weights and batches of a factory, as in an audit; None if the factory fails."""
    digest = DataDigest()
    try:
        loaded = load(job)
        for batch in loaded.data.batches:
            digest.add(drop_unused_labels(loaded.model.model, batch)[0])
    except (Exception, SystemExit):  # its audit will report the error
        return None
    return weights_digest(loaded.model.model), [digest.value] if digest.value else []


def run(
    loaded: LoadedJob,
    provenance: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, str], None] | None = None,
) -> AuditStatistics:
    """Measure the model of a loaded job on its data; entries of `provenance` replace those of the job."""
    from rankwise.auditing.run import collect

    job, model = loaded.job, loaded.model
    known = {
        "model": "the bundled demo" if model.name == str(demo_model()) else model.name,
        "revision": model.revision,
        "data": loaded.data.data.replace(str(demo_text()), "the bundled text"),
        "command": job.command,
        "notes": [*model.notes, *loaded.data.notes],
        "weights": weights_digest(model.model, model.random_weights),
        "random_weights": model.random_blocks,
    }
    settings = AuditSettings.of(
        delta=job.delta, method=job.method, matrices=job.matrices, baseline=job.baseline,
        importance=job.importance, tokenizer=loaded.data.tokenizer,
        provenance=known | dict(provenance or {}), on_progress=on_progress,
    )  # fmt: skip

    def batches() -> Iterator[Any]:
        for batch in loaded.data.batches:
            loaded.first[:] = loaded.first or [batch]  # the model may run on the first batch again
            yield batch

    return collect(model.model, batches(), settings)


def build(loaded: LoadedJob, statistics: AuditStatistics, say: Say) -> tuple[Audit, bool]:
    """Return the audit with recommended λ, and True if Ctrl-C stopped the audit or the recommendation.

    An incomplete audit has no recommendation. If a step fails, a note of the audit says why.
    Commands against oversized and removable heads are tried up to the first change of the model.
    """
    from rankwise.auditing.run import build_audit
    from rankwise.cli.compress import refusal

    job, maps = loaded.job, chosen_heads(loaded.job.matrices)
    arguments = [] if loaded.model.is_part else job.arguments
    statistics.provenance = statistics.provenance.model_copy(update={"arguments": arguments})
    audit = build_audit(statistics, maps)
    if not audit.complete:
        return audit, True
    failed = "`rankwise compress` was not tried, and no λ is named"
    try:
        remedies = " ".join(finding.remedy for finding in audit.findings)
        if parts := re.findall(r"`rankwise compress .*? --parts (\S+)", remedies):
            refused = {part: refusal(loaded.model.model, loaded.first[0], part) for part in set(parts)}
            statistics.provenance = statistics.provenance.model_copy(update={"refused": refused})
            audit = build_audit(statistics, maps)
        failed = "no λ is named for COLLAPSE"
        return recommend(audit, loaded.model.model, loaded.first[0], loaded.model.loss), False
    except KeyboardInterrupt:
        note, stopped = "skip connections not looked at: interrupted from the keyboard", True
    except Exception as error:  # it must not lose the audit
        reason = str(error) if isinstance(error, RankwiseError | RuntimeError) else repr(error)
        note, stopped = f"{failed}: {reason}", False
        say(note)
    provenance = audit.provenance.model_copy(update={"notes": [*audit.provenance.notes, note]})
    return audit.model_copy(update={"provenance": provenance}), stopped


def run_job(job: AuditJob, say: Say = lambda step: None) -> Audit:
    """Load and run a job; return the complete audit, with digests of the files that the job read.

    Raise `RankwiseError` for each failure, which Ray can send between processes.
    """
    try:
        digests = job.file_digests()  # taken before the files are read, so that --resume sees later changes
        loaded = load(job)
        statistics = run(
            loaded, {"sources": digests}, lambda done, step: say(f"{job.model}, batch {done + 1}: {step}")
        )
        audit, interrupted = build(loaded, statistics, say)
    except RankwiseError:
        raise
    except (Exception, SystemExit) as error:  # a factory may call sys.exit, which would end a Ray worker
        got, fix = f"{type(error).__name__}: {error}", f"Try `{job.command}`."
        raise RankwiseError(job.model, expected="an audit", got=got, fix=fix) from error
    if interrupted:
        raise KeyboardInterrupt
    return audit


@dataclass
class ShardResult:
    """Result of one process for its shard of the data."""

    statistics: AuditStatistics | None = None
    error: RankwiseError | None = None
    interrupted: bool = False


def audit_shards(
    job: AuditJob, out: Path, processes: Processes, provenance: dict[str, Any], *, verbose: bool
) -> tuple[Audit, RankwiseError | None]:
    """Audit one model, each process on its shard of the data; the main process writes the report.

    Return the audit, and the error if a process failed after the first batch. Raise `typer.Exit` after
    Ctrl-C, and in all processes except the main process.
    """
    loaded = _load_shard(job, processes)
    with show_progress() as say:
        result = _measure(loaded, processes, provenance, say)
        if processes.several:
            result = _gather_shards(result, out, processes)
        if result.statistics is None:
            raise result.error or KeyboardInterrupt
        # a process has a device of its own, and keeps maps of its own
        audit, interrupted = build(loaded._replace(job=job), result.statistics, say)
    write_report(audit, out, verbose=verbose)
    if result.error is None and interrupted:
        raise typer.Exit(INTERRUPTED)
    return audit, result.error


def _load_shard(job: AuditJob, processes: Processes) -> LoadedJob:
    """Load the job in every process; raise in all if one fails, waits for others or has other weights."""
    if not processes.several:
        return load(job)
    if job.matrices and job.matrices.strip().lower() == "flagged":
        job = replace(job, matrices="all")  # findings are only known after the merge
    error, digest = None, ""
    try:
        own = replace(job, matrices=job.matrices if processes.is_main else None)
        own = replace(own, device=processes.device(job.device))
        loaded = load(own, Shard(processes.rank, processes.world))
        model = loaded.model.model
        classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
        if waiting := sorted(classes.intersection(WRAPPERS)):
            expected = f"in each of {processes.world} processes a model that runs on its own sequences"
            got = f"a {waiting[0]}, which waits for all of them to run as many batches"
            fix = "Return the model itself. If no device holds it, use one process and --device-map auto."
            raise InputError(f"model {type(model).__name__}", expected=expected, got=got, fix=fix)
        digest = weights_digest(model, loaded.model.random_weights)
    except Exception as failed:
        error = as_rankwise_error(failed)
    errors, digests = zip(*processes.all_gather((error, digest)), strict=True)
    if (first := first_error(errors)) is not None:
        raise first
    if len(set(filter(None, digests))) > 1:  # for example if a factory draws weights at random
        got = f"others in process {next(n for n, one in enumerate(digests) if one != digests[0])}"
        fix = "Set a seed in the factory before the model is built, or load a checkpoint."
        name, expected = f"model {loaded.model.name}", "the same weights in all processes"
        raise InputError(name, expected=expected, got=got, fix=fix)
    return loaded


def _measure(loaded: LoadedJob, processes: Processes, provenance: dict[str, Any], say: Say) -> ShardResult:
    """Measure the model on the shard of this process; return errors, to send them to other processes."""
    if processes.several and not loaded.first:
        return ShardResult()
    try:
        statistics = run(loaded, provenance, lambda batches, step: say(f"batch {batches + 1}: {step}"))
    except AuditError as error:
        result = ShardResult(error.statistics, error)
        error.statistics = error.audit = None  # they would be sent to the main process twice
        return result
    except KeyboardInterrupt:
        return ShardResult(interrupted=True)
    except Exception as error:
        if not processes.several:
            raise
        return ShardResult(error=as_rankwise_error(error))
    return ShardResult(statistics, interrupted=not statistics.complete)


def _gather_shards(result: ShardResult, out: Path, processes: Processes) -> ShardResult:
    """Return the merged result in the main process; exit in the others.

    If a process has ended, save the measurements of this process and raise the error.
    """
    if result.statistics is not None:  # repeated lines of a text can give two processes equal data
        known = result.statistics.provenance
        parts = [f"{part}-{processes.rank}of{processes.world}" for part in known.parts]
        result.statistics.provenance = known.model_copy(update={"parts": parts})
    try:
        shards = processes.gather(result)
    except RankwiseError as error:
        if result.statistics is not None:
            audit, path = Audit.from_statistics(result.statistics), out / f"process-{processes.rank}.json"
            try:
                audit.save(path)
            except InputError:
                path = audit.save(Path(tempfile.mkdtemp(prefix="rankwise-")) / path.name)
            with suppress(OSError):
                said = f"rankwise: the audit of process {processes.rank} is saved in {path}"
                print(said, file=sys.__stderr__, flush=True)
        raise error from result.error
    if not processes.is_main:
        raise typer.Exit
    return merge_shards(shards, processes.interrupted)


def merge_shards(shards: Sequence[ShardResult], interrupted: bool = False) -> ShardResult:
    """Return the merged statistics of all shards that are not empty, with the first error."""
    error = first_error([shard.error for shard in shards])
    stopped = interrupted or any(shard.interrupted for shard in shards)
    measured = [shard.statistics for shard in shards if shard.statistics is not None]
    if not measured:
        return ShardResult(None, error, stopped)
    whole, *others = measured
    for other in others:
        whole.merge_audit(other)
    whole.note(f"sequences shared by {len(shards)} processes")
    whole.complete = whole.complete and error is None and not stopped
    return ShardResult(whole, error, stopped)
