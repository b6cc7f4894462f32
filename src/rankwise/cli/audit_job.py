"""Describe one audit as a job (model, data, settings, digests of the files it reads), and run it."""

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import typer

from rankwise._internals.forward import Progress
from rankwise.auditing import Audit, AuditError, audit
from rankwise.auditing.batches import ALL, Shard
from rankwise.auditing.provenance import weights_digest
from rankwise.auditing.settings import RankMethod
from rankwise.cli.load_data import LoadedData, load_data, parse_dataset
from rankwise.cli.load_model import LoadedModel, demo_model, demo_text, load_model, split_factory
from rankwise.cli.output import is_of_audit, show_progress, write_report
from rankwise.errors import INTERRUPTED, InputError, RankwiseError
from rankwise.importance import ImportanceSettings
from rankwise.skips import recommend


@dataclass(frozen=True, kw_only=True)
class AuditJob:
    """Model, data and settings of one audit: all that decides its numbers and enters its command."""

    model: str
    text: Path | None = None
    images: Path | None = None
    dataset: str | None = None
    tokens: int = 256
    sequences: int = 8
    batch_size: int = 4
    shards: str | None = None
    """``N``: merge the audits of N shards of the sequences. ``K/N``: audit shard K alone, from 1 to N."""
    delta: float = 1e-2
    rank_method: RankMethod = "auto"
    attention_maps: str | None = None
    importance: ImportanceSettings | Literal[False] = False
    at_init: int = 0
    """Number of initializations at which the same architecture is audited as well."""
    device: str | None = None
    device_map: str | None = None
    offload_folder: Path | None = None
    dtype: str = "auto"
    tokenizer: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        numbers = re.fullmatch(r"(?:(\d+)/)?(\d+)", self.shards or "1")
        if numbers is None or not 1 <= int(numbers[1] or 1) <= int(numbers[2]):
            expected, fix = "N, or K/N with K from 1 to N", "For instance: --shards 4, or --shards 1/4."
            raise InputError("--shards", expected=expected, got=str(self.shards), fix=fix)

    @property
    def options(self) -> dict[str, str | None]:
        """Options that differ from their defaults, with their values; the value of a flag is None."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "model"}
        defaults = {field.name: field.default for field in fields(self)}
        if importance := given.pop("importance"):
            given["loss"] = not importance.estimates and not importance.exact
            methods = {True: "exact", False: "estimate", None: "auto"}
            given["importance"] = None if given["loss"] else methods[importance.exact]
            defaults |= {"loss": False, "importance": None}
            for name in ("tolerance", "loss", "tokens"):
                given[f"importance_{name}"] = getattr(importance, name)
                defaults[f"importance_{name}"] = getattr(type(importance), name)
        return {
            f"--{name.replace('_', '-')}": None if value is True else str(value)
            for name, value in given.items()
            if value != defaults[name]
        }

    @property
    def loading(self) -> dict[str, Any]:
        """Options of `load_model` that can be checked before the model is loaded."""
        names = ("dtype", "device", "device_map", "offload_folder")
        return {name: getattr(self, name) for name in names}

    @property
    def arguments(self) -> list[list[str]]:
        """The model, then each option with its value."""
        return [[self.model], *([word for word in pair if word] for pair in self.options.items())]

    @property
    def command(self) -> str:
        """Command line that repeats this audit, without the options for output and Ray."""
        return shlex.join(["rankwise", "audit", *(word for words in self.arguments for word in words)])

    @property
    def shard(self) -> Shard:
        """Shard that this job audits: shard K of N if ``shards`` is K/N, otherwise all sequences."""
        number, _, count = (self.shards or "").rpartition("/")
        return Shard(int(number) - 1, int(count)) if number else ALL

    @property
    def parts(self) -> list["AuditJob"]:
        """Jobs of the shards; if the sequences are not split, a list of this job."""
        if self.shards is None or "/" in self.shards:
            return [self]
        return [replace(self, shards=f"{number + 1}/{self.shards}") for number in range(int(self.shards))]

    def file_digests(self) -> dict[str, str]:
        """Return digests of the local files that the job reads, by option; models on the Hub have no digest.

        A digest depends on names, sizes and times of the last change, not on contents. Subfolders of models
        and tokenizers are ignored, because they may contain results.
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
    """Return the digest of a file, or of a folder's visible files that match a pattern, except audits."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.glob(pattern)):
        name = "" if file == path else file.relative_to(path).as_posix()
        visible = not any(folder.startswith(".") for folder in name.split("/"))
        if visible and file.is_file() and not is_of_audit(file):
            about = file.stat()
            digest.update(f"{name} {about.st_size} {about.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def load(job: AuditJob) -> tuple[LoadedModel, LoadedData]:
    """Load the model of a job with its saved λ-skips, and the data of the job's shard; return both."""
    whole = load_model(
        job.model, trust_remote_code=job.trust_remote_code, tokenizer=job.tokenizer, **job.loading
    )
    model = whole.part_for("text" if job.images is None else "vision")
    data = load_data(
        model, text=job.text, images=job.images, dataset=job.dataset, tokens=job.tokens,
        sequences=job.sequences, batch_size=job.batch_size, shard=job.shard,
    )  # fmt: skip
    return model, data


def measure(
    job: AuditJob, say: Progress = lambda step, done: None, provenance: Mapping[str, Any] | None = None
) -> tuple[Audit, bool]:
    """Return the audit of a job, and True if Ctrl-C stopped the audit or the recommendation of λ.

    If all sequences are audited, a λ is recommended, for which the model runs on the first batch again. If
    the recommendation fails, a note of the audit says why. `provenance` replaces fields of the job.
    """
    model, data = load(job)
    first: list[Any] = []

    def batches() -> Iterator[Any]:
        for batch in data.batches:
            first[:] = first or [batch]
            yield batch

    about = {
        "model": "the bundled demo" if model.name == str(demo_model()) else model.name,
        "revision": model.revision,
        "data": data.data.replace(str(demo_text()), "the bundled text"),
        "command": job.command,
        "arguments": replace(job, shards=None).arguments,
        "part": model.part,
        "notes": [*model.notes, *data.notes],
        "weights_digest": weights_digest(model.model, model.random_weights),
        "random_weights": model.random_blocks,
    }
    result = audit(
        model.model, data.batches if isinstance(data.batches, list) else batches(), job.delta,
        rank_method=job.rank_method, attention_maps=job.attention_maps, at_init=job.at_init or False,
        keep_moments=job.shard != ALL,
        importance=job.importance, tokenizer=data.tokenizer, on_progress=say,
        provenance=about | dict(provenance or {}),
    )  # fmt: skip
    if job.shard != ALL:
        # With repeated lines, two shards can have equal data, which merging would refuse.
        digests = [f"{digest}-{job.shards}" for digest in result.provenance.data_digests]
        return _with_provenance(result, data_digests=digests), not result.complete
    if not result.complete:
        return result, True
    try:
        example = first[0] if first else next(iter(data.batches))
        return recommend(result, model.model, example, model.loss), False
    except KeyboardInterrupt:
        note, stopped = "skip connections not looked at: interrupted from the keyboard", True
    except Exception as error:  # a failed recommendation must not lose the audit
        reason = str(error) if isinstance(error, RankwiseError | RuntimeError) else repr(error)
        note, stopped = f"no λ is named for COLLAPSE: {reason}", False
    return _with_provenance(result, notes=[*result.provenance.notes, note]), stopped


def _with_provenance(result: Audit, **fields: Any) -> Audit:
    return result.model_copy(update={"provenance": result.provenance.model_copy(update=fields)})


def run_job(job: AuditJob, say: Progress = lambda step, done: None) -> Audit:
    """Run a job. Return the complete audit, with digests of the files that the job read.

    Raise `RankwiseError` for each failure, because Ray can send this error between processes. Raise
    KeyboardInterrupt if Ctrl-C stopped the job.
    """
    try:
        digests = job.file_digests()  # taken before the files are read, so that --resume sees later changes
        about = {"file_digests": digests}
        result, interrupted = measure(job, lambda step, done: say(f"{job.model}, {step}", done), about)
    except RankwiseError:
        raise
    except (Exception, SystemExit) as error:  # a factory may call sys.exit, which would end a Ray worker
        got, fix = f"{type(error).__name__}: {error}", f"Try `{job.command}`."
        raise RankwiseError(job.model, expected="an audit", got=got, fix=fix) from error
    if interrupted:
        raise KeyboardInterrupt
    return result


def audit_one(job: AuditJob, out: Path, command: str, *, verbose: bool) -> tuple[Audit, RankwiseError | None]:
    """Audit one model, write the report, and return the audit and an error.

    The error is None, unless the audit failed after a part of it was finished. After Ctrl-C, the report
    contains the finished measurements, and `typer.Exit` is raised.
    """
    error = None
    with show_progress() as say:
        try:
            result, interrupted = measure(job, say, {"command": command})
        except AuditError as failed:
            result, interrupted, error = failed.audit, False, failed
    write_report(result, out, verbose=verbose)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    return result, error


def merge_shards(job: AuditJob, audits: list[Audit]) -> Audit:
    """Return the audit of a job, merged from the audits of all its shards."""
    merged = Audit.merge(audits)
    files = set.intersection(*(set(result.provenance.file_digests.items()) for result in audits))
    return _with_provenance(merged, command=job.command, file_digests=dict(files))
