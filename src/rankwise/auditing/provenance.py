"""Provenance of an audit: model, weights, data and versions; merging the provenance of two audits."""

import hashlib
import json
import platform
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rankwise._internals.records import grouped
from rankwise._internals.statistics import DELTA
from rankwise.auditing.records import HeadRecord, Provenance, UncapturedModule
from rankwise.errors import InputError, RecordError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from rankwise._internals.batches import Batch

LIBRARIES = ("torch", "transformers")
"""Libraries whose versions are recorded if the library is imported."""
SAMPLE = 64
"""Number of entries of each weight in a digest; few suffice, because training changes nearly all entries."""
DIGITS = 16
"""Number of hexadecimal digits of a digest."""
PROBES, STEPS, SEED = 16, 64, 0
"""Number of random vectors, number of Lanczos steps, and random seed of rank estimates."""
SAME = ("model", "model_class", "revision", "parameters", "delta", "model_dtype", "measure_dtype")
"""Fields of `Provenance` that must be equal in audits to be merged."""
JOINED = {"data": "; ", "command": " ; ", "device": ", "}
"""Separator by field, for text fields that are joined when audits are merged."""
LATEST = ("rank_method_asked", "created", "weights_digest")
SUMS = ("batches", "sequences", "merged_audits", "seconds")
SAME_MODEL = "Merge audits of the same model and settings only, each of other sequences."
SAME_WEIGHTS = (
    "Merge audits of the same weights only. If some are in no checkpoint and drawn at each start, set a seed "
    'before the model is built; if no head reads them, `rw.audit(…, provenance={"weights_digest": ""})`.'
)


def check_provenance(fields: Mapping[str, Any]) -> None:
    """Raise `InputError` if a field of `Provenance` from the user is unknown or has a wrong value."""
    try:
        Provenance.model_validate({"model": "", "delta": DELTA} | dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        got, fix = f"{name}: {first['msg']}", did_you_mean(name, Provenance.model_fields)
        expected = "fields of `rankwise.auditing.Provenance`"
        raise InputError("`provenance`", expected=expected, got=got, fix=fix) from None


def provenance_of(model: "nn.Module", measured: Mapping[str, Any], given: Mapping[str, Any]) -> Provenance:
    """Return the provenance of an audit; fields in ``given`` (by the user) override ``measured`` fields."""
    parameters = list(model.parameters())
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
    loaded = {name: version(name) for name in LIBRARIES if sys.modules.get(name) is not None}
    read: dict[str, Any] = {
        "model": str(getattr(model, "name_or_path", "") or type(model).__name__),
        "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
        "parameters": sum(parameter.numel() for parameter in parameters),
        "model_dtype": ", ".join(sorted(dtypes)),
        "device": ", ".join(sorted({str(parameter.device) for parameter in parameters})),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"rankwise": version("rankwise"), "python": platform.python_version(), **loaded},
    }
    fields = {**read, **measured, **given}
    return Provenance(**{name: _printable(value) for name, value in fields.items()})


def _printable(value: Any) -> Any:
    """Escape undecodable bytes in texts such as paths, because JSON and HTML cannot represent them."""
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def loading_command(about: Provenance) -> str:
    """Return a shell command that prints which names a checkpoint lacks or has in excess."""
    module, _, kind = about.model_class.rpartition(".")
    which = f"{json.dumps(about.model)}, revision={json.dumps(about.revision or 'main')}"
    loading = f"{kind}.from_pretrained({which}, output_loading_info=True)[1]"
    return shlex.join(["python", "-c", f"from {module} import {kind}; print({loading})"])


def weights_digest(model: "nn.Module", without: Collection[str] = ()) -> str:
    """Return a digest of the shapes of all weights and of 64 evenly spaced entries per weight.

    The digest does not depend on the device or on a wrapper around the model. The digest is empty if a weight
    cannot be read: sharded, quantized, or on the device meta. Cost: one copy of 64 entries per weight.

    Weights named in ``without``, such as weights that are not in the checkpoint, are left out.

    Examples:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> first, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        >>> weights_digest(first) == weights_digest(torch.nn.Sequential(first))
        True
        >>> weights_digest(first) == weights_digest(other)
        False
    """
    import torch

    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if name in without:
            continue
        weight = parameter.detach()
        strided = type(weight) is torch.Tensor and weight.layout is torch.strided
        if not strided or weight.is_meta or weight.is_quantized:
            return ""
        numbers = weight.reshape(-1)
        numbers = numbers[:: max(len(numbers) // SAMPLE, 1)][:SAMPLE].cpu()
        is_complex = numbers.is_complex()
        numbers = torch.view_as_real(numbers.resolve_conj()) if is_complex else numbers.to(torch.float64)
        digest.update(str(tuple(weight.shape)).encode())
        digest.update(numbers.numpy().tobytes())
    return digest.hexdigest()[:DIGITS]


class DataDigest:
    """Digest of the measured batches in order; empty without batches, or if a batch has a sparse tensor."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._known: bool | None = None

    def add(self, batch: "Batch") -> None:
        """Update the digest with the names, shapes and values of the tensors in a batch."""
        import torch

        from rankwise._internals.batches import tensors_of

        tensors = tensors_of(batch)
        self._known = bool(tensors) and self._known is not False
        for name, tensor in sorted(tensors.items()):
            if tensor.layout != torch.strided or tensor.is_nested:
                self._known = False
                return
            values = tensor.detach().to("cpu").contiguous()
            self._digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            self._digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())

    @property
    def value(self) -> str:
        """The digest as 16 hexadecimal digits; an empty string if unknown."""
        return self._digest.hexdigest()[:DIGITS] if self._known else ""


def describe_method(heads: Sequence[HeadRecord]) -> str:
    """Return a description of how the ranks of an audit were computed: exact, estimated or both."""
    sequences, estimated = (
        sum(getattr(head, name) for head in heads) for name in ("sequences", "estimated_sequences")
    )
    how = f"estimated with {PROBES} probes, {STEPS} steps, seed {SEED}" if estimated else "exact"
    mixed = f"{sequences - estimated} of {sequences} spectra exact, the others {how}"
    return mixed if 0 < estimated < sequences else how


def check_mergeable(abouts: Sequence[Provenance], names: Sequence[str]) -> None:
    """Raise `RecordError` if audits differ in model or settings, or if two audits have the same data."""
    for field in SAME:
        check_same(field, [getattr(about, field) for about in abouts])
    check_same("weights", [about.weights_digest for about in abouts if about.weights_digest], SAME_WEIGHTS)
    check_same("rank_method_asked", [about.rank_method_asked for about in abouts if about.rank_method_asked])
    estimates = (about.rank_method.partition("estimated with")[2].strip() for about in abouts)
    check_same("method of estimates", [estimate for estimate in estimates if estimate])
    holder: dict[str, int] = {}
    for number, about in enumerate(abouts):
        for digest in about.data_digests:
            other = holder.setdefault(digest, number)
            if other != number:
                got = f"the same in {names[other]} and {names[number]}"
                fix = "Leave one of them out, or merge the original audits, each once."
                expected = "each sequence in one of them"
                raise RecordError("audits to merge", expected=expected, got=got, fix=fix)


def check_same(
    field: str, values: Sequence[object], fix: str = SAME_MODEL, subject: str = "audits to merge"
) -> None:
    """Raise `RecordError` if the values of a field differ between audits."""
    different = list(dict.fromkeys(values))
    if len(different) > 1:
        got = " and ".join(map(repr, different[:2]))
        raise RecordError(subject, expected=f"the same {field} in all of them", got=got, fix=fix)


def joined(first: Provenance, second: Provenance) -> Provenance:
    """Return the merged provenance of two audits: counts are added, texts joined, notes collected."""
    both = (first, second)
    libraries = _distinct(name for about in both for name in about.versions)
    versions = {name: _joined([about.versions.get(name, "") for about in both], ", ") for name in libraries}
    fields: dict[str, Any] = {
        "skips_examined": False, "file_digests": {}, "versions": versions,
        "data_digests": sorted(digest for about in both for digest in about.data_digests),
    }  # fmt: skip
    for name in ("notes", "random_weights"):
        fields[name] = list(dict.fromkeys(item for about in both for item in getattr(about, name)))
    fields |= {name: max(getattr(about, name) for about in both) for name in LATEST}
    fields |= {name: sum(getattr(about, name) for about in both) for name in SUMS}
    fields |= {name: _joined([getattr(about, name) for about in both], by) for name, by in JOINED.items()}
    return first.model_copy(update=fields)


def joined_uncaptured(
    first: Sequence[UncapturedModule], second: Sequence[UncapturedModule]
) -> list[UncapturedModule]:
    """Return modules that at least one audit called and failed to capture, or that neither audit called."""
    both = {module.name for module in first} & {module.name for module in second}
    kept = []
    for name, modules in grouped((*first, *second), lambda module: module.name).items():
        called = [module for module in modules if not module.reason.startswith("never called")]
        if called or name in both:
            kept.append(min(called or modules, key=lambda module: module.reason))
    return kept


def _joined(texts: Sequence[str], by: str) -> str:
    """Join the distinct parts of texts; texts of merged audits already consist of parts joined by ``by``."""
    return by.join(_distinct(text_part for text in texts for text_part in text.split(by)))


def _distinct(values: Iterable[str]) -> list[str]:
    return sorted({value for value in values if value})
