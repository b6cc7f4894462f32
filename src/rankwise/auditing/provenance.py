"""Provenance of an audit: model, weights, data and versions; merging the provenance of audits."""

import hashlib
import json
import platform
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rankwise._internals.records import grouped
from rankwise._internals.statistics import DELTA
from rankwise.auditing.records import HeadRecord, Provenance
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
SAME = ("model", "model_class", "revision", "parameters", "delta", "model_dtype", "weights_digest")
"""Fields of `Provenance` that must be equal in audits to be merged."""
LISTS, SUMS = ("notes", "random_weights"), ("batches", "sequences", "seconds")
"""Fields of `Provenance` that are joined (`LISTS`) or added (`SUMS`) when audits are merged."""
MERGED = (
    "merged audits have no required widths, no removable heads and no measures at initialization, which need "
    "all sequences at once, no importance unless all of them have it, and no ranks of pooled states, keys "
    "and values unless all of them keep moments (`--shards`, `keep_moments=True`)"
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
    """Digest of the measured batches; unknown if a batch has no tensor, or a sparse or nested tensor."""

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
        """The digest as 16 hexadecimal digits; an empty string if it is unknown."""
        return self._digest.hexdigest()[:DIGITS] if self._known else ""


def describe_method(heads: Sequence[HeadRecord]) -> str:
    """Return a description of how the ranks of an audit were computed: exact, estimated or both."""
    sequences, estimated = (
        sum(getattr(head, name) for head in heads) for name in ("sequences", "estimated_sequences")
    )
    how = f"estimated with {PROBES} probes, {STEPS} steps, seed {SEED}" if estimated else "exact"
    mixed = f"{sequences - estimated} of {sequences} spectra exact, the others {how}"
    return mixed if 0 < estimated < sequences else how


def check_mergeable(abouts: Sequence[Provenance]) -> None:
    """Raise `RecordError` if audits differ in model or settings, or if two audits have the same data."""

    def refused(expected: str, got: str) -> RecordError:
        fix = "Merge audits of one model, equal weights and settings, each of other sequences, each once."
        return RecordError("audits to merge", expected=expected, got=got, fix=fix)

    for field in SAME:
        values = list(dict.fromkeys(getattr(about, field) for about in abouts))
        if len(values) > 1:
            raise refused(f"the same {field} in all of them", " and ".join(map(repr, values[:2])))
    pairs = [(digest, number) for number, about in enumerate(abouts, 1) for digest in about.data_digests]
    for numbers in grouped(pairs, lambda pair: pair[0]).values():
        if len(numbers) > 1:
            listed = " and ".join(str(number) for _, number in numbers)
            raise refused("each sequence in one of them", f"the same data in audits {listed}")


def merged_provenance(abouts: Sequence[Provenance]) -> Provenance:
    """Return the provenance of merged audits: counts are added, notes and data joined."""
    fields: dict[str, Any] = {
        name: list(dict.fromkeys(chain(*(getattr(about, name) for about in abouts)))) for name in LISTS
    }
    fields |= {name: sum(getattr(about, name) for about in abouts) for name in SUMS}
    fields["notes"] = list(dict.fromkeys([*fields["notes"], MERGED]))
    fields["data_digests"] = sorted(chain(*(about.data_digests for about in abouts)))
    fields["data"] = "; ".join(sorted({text for about in abouts for text in about.data.split("; ")}))
    return abouts[0].model_copy(update=fields | {"file_digests": {}})
