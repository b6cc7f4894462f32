"""Describe one audit as a job: model, data and settings, with digests of the files that the job reads."""

import hashlib
import re
import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from rankwise.auditing.batches import ALL, Shard
from rankwise.auditing.settings import RankMethod
from rankwise.cli.load_data import parse_dataset
from rankwise.cli.load_model import split_factory
from rankwise.cli.output import is_of_audit
from rankwise.errors import InputError
from rankwise.importance import ImportanceSettings


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
            given["importance"] = None if given["loss"] else "exact" if importance.exact else "estimate"
            defaults |= {"loss": False, "importance": None}
            for name in ("tolerance", "loss"):
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
        names = ("revision", "dtype", "device", "device_map", "offload_folder")
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

    def for_model(self, model: str) -> "AuditJob":
        """Return this job for another model: name, folder, ``module.py:factory`` or ``NAME@REVISION``.

        An existing path is a folder, even if the path contains an @.
        """
        name, _, revision = model.rpartition("@")
        if not name or split_factory(model)[0] or Path(model).exists():
            return replace(self, model=model)
        return replace(self, model=name, revision=revision)

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
    """Return the digest of a file, or of a folder's visible files that match a pattern, without audits."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.glob(pattern)):
        name = "" if file == path else file.relative_to(path).as_posix()
        visible = not any(folder.startswith(".") for folder in name.split("/"))
        if visible and file.is_file() and not is_of_audit(file):
            about = file.stat()
            digest.update(f"{name} {about.st_size} {about.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
