"""Where the numbers of an audit come from: the model, its data, its versions; what is written beside them."""

import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from pydantic import ValidationError
from torch import nn

from rankwise._internals.statistics import DELTA
from rankwise.auditing.records import Provenance
from rankwise.errors import InputError, did_you_mean

LIBRARIES = ("torch", "transformers")
"""Their versions go into the record, where they are loaded."""


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


def provenance_of(model: nn.Module, measured: Mapping[str, Any], given: Mapping[str, Any]) -> Provenance:
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
