"""Where the numbers of an audit come from: the model, its data, its versions; what is written beside them."""

import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rankwise._internals.statistics import DELTA
from rankwise.auditing.records import Provenance
from rankwise.errors import InputError, RecordError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

LIBRARIES = ("torch", "transformers")
"""Their versions go into the record, where they are loaded."""
SAME = ("model", "model_class", "revision", "parameters", "delta", "model_dtype", "measure_dtype")
"""What audits that are merged must have in common."""
JOINED = {"data": "; ", "command": " ; ", "device": ", "}
"""What is joined, and the text between the parts."""
SUMS = ("batches", "sequences", "audits")
SAME_MODEL = "Merge audits of the same model only, each of other sequences."
SAME_WEIGHTS = (
    "Merge audits of the same weights only. Where some are in no checkpoint and drawn at each start, set a "
    'seed before the model is built; if no head reads them, `rw.audit(…, provenance={"weights": ""})`.'
)


def check_provenance(given: Mapping[str, Any]) -> None:
    """Refuse what cannot be written, before anything is measured: the record would be lost.

    Args:
        given: what the user gave.

    Raises:
        InputError: if a field is not known, or holds what it cannot.
    """
    try:
        Provenance.model_validate({"model": "", "delta": DELTA} | dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise InputError(
            "`provenance`",
            expected="fields of `rankwise.auditing.Provenance`",
            got=f"{name}: {first['msg']}",
            fix=did_you_mean(name, Provenance.model_fields),
        ) from None


def provenance_of(model: "nn.Module", measured: Mapping[str, Any], given: Mapping[str, Any]) -> Provenance:
    """What to write down of a run.

    Args:
        model: the model that was measured.
        measured: what the run knows of itself: batches, sequences, method, δ.
        given: what the user says of it, which goes before what is found here, and all notes.
    """
    parameters = list(model.parameters())
    found: dict[str, Any] = {
        "model": str(getattr(model, "name_or_path", "") or type(model).__name__),
        "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
        "parameters": sum(parameter.numel() for parameter in parameters),
        "model_dtype": ", ".join(
            sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
        ),
        "device": ", ".join(sorted({str(parameter.device) for parameter in parameters})),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
    }
    said = {**found, **measured, **given}
    return Provenance(**{name: _printable(value) for name, value in said.items()})


def _printable(value: Any) -> Any:
    """Paths may hold bytes that are no text; JSON and HTML may not."""
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _versions() -> dict[str, str]:
    loaded = {name: version(name) for name in LIBRARIES if sys.modules.get(name) is not None}
    return {"rankwise": version("rankwise"), "python": platform.python_version(), **loaded}


def check_mergeable(abouts: Sequence[Provenance], names: Sequence[str]) -> None:
    """Refuse audits of different models, or that share data; older files do not say what data they are of.

    Args:
        abouts: provenance of each audit.
        names: names of the audits in errors.

    Raises:
        RecordError: naming the field that differs and both values, or two audits that share data.
    """
    for field in SAME:
        check_same(field, [getattr(about, field) for about in abouts])
    check_same("weights", [about.weights for about in abouts if about.weights], SAME_WEIGHTS)
    check_same("method_asked", [about.method_asked for about in abouts if about.method_asked])
    estimates = (about.method.partition("estimated with")[2].strip() for about in abouts)
    check_same("method of estimates", [estimate for estimate in estimates if estimate])
    holder: dict[str, int] = {}
    for number, about in enumerate(abouts):
        for part in about.parts:
            other = holder.setdefault(part, number)
            if other != number:
                raise RecordError(
                    "audits to merge",
                    expected="each sequence in one of them",
                    got=f"the same in {names[other]} and {names[number]}",
                    fix="Leave one of them out, or merge the audits of which they were made, each once.",
                )


def check_same(
    field: str, values: Sequence[object], fix: str = SAME_MODEL, subject: str = "audits to merge"
) -> None:
    """Refuse audits that differ in a field."""
    different = list(dict.fromkeys(values))
    if len(different) > 1:
        raise RecordError(
            subject,
            expected=f"the same {field} in all of them",
            got=" and ".join(map(repr, different[:2])),
            fix=fix,
        )


def joined(first: Provenance, second: Provenance) -> Provenance:
    """Return the provenance of an audit of the sequences of two."""
    both = (first, second)
    libraries = _distinct(name for about in both for name in about.versions)
    fields: dict[str, Any] = {
        "method_asked": max(about.method_asked for about in both),
        "created": max(about.created for about in both),
        "advised": False,
        "parts": sorted(part for about in both for part in about.parts),
        "weights": max(about.weights for about in both),
        "sources": {},
        "versions": {
            name: _joined([about.versions.get(name, "") for about in both], ", ") for name in libraries
        },
        "notes": list(dict.fromkeys(note for about in both for note in about.notes)),
    }
    fields |= {name: sum(getattr(about, name) for about in both) for name in SUMS}
    fields |= {name: _joined([getattr(about, name) for about in both], by) for name, by in JOINED.items()}
    return first.model_copy(update=fields)


def _joined(texts: Sequence[str], by: str) -> str:
    """Return the parts of texts, once each: texts of merged audits are joined already."""
    return by.join(_distinct(part for text in texts for part in text.split(by)))


def _distinct(values: Iterable[str]) -> list[str]:
    return sorted({value for value in values if value})
