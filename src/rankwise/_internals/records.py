"""Base class, field types and loading of records (results saved as JSON); torch is not imported here."""

import json
import math
from collections.abc import Callable, Hashable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rankwise._internals.files import parse_json, write_file
from rankwise.errors import RecordError, readable_file

K = TypeVar("K", bound=Hashable)
R = TypeVar("R", bound="SavedRecord")
T = TypeVar("T")

MISSING = "–"
"""Text for a number that is not finite; not "0", because an unknown number is not a small number."""


Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""Float field; NaN and infinity are written as null in JSON, and null is read as NaN."""


def _positive(value: float) -> float:
    if value <= 0:
        raise ValueError("Input should be above 0, or null")
    return value


Size = Annotated[Number, AfterValidator(_positive)]
"""Mean number of rows or columns over sequences, above 0; NaN if no sequence has any."""

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""Count, or index from 0; below 2⁵³, because JSON readers may round larger integers."""


class Record(BaseModel):
    """Base class of records: immutable, without unknown fields, with NaN and infinity written as null."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")

    def __str__(self) -> str:
        return repr(self)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items of each key, in the order in which keys first occur; items need not be sorted."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def format_number(value: float, digits: int | None = None) -> str:
    """Return a number with some decimals, by default three significant digits; a dash if it is not finite.

    Scientific notation is used if the number would round to 0.

    Examples:
        >>> format_number(0.6321), format_number(0.6321, 2), format_number(0.00004, 2)
        ('0.632', '0.63', '4e-05')
        >>> format_number(2048.0), format_number(float("nan"))
        ('2048', '–')
    """
    if not math.isfinite(value):
        return MISSING
    if digits is None:
        return f"{value:.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"
    if 0 < abs(value) < 0.5 * 10**-digits:
        return f"{value:.0e}"
    return f"{value:.{digits}f}"


class SavedRecord(Record):
    """Base class of records with a file of their own, by default ``NOUN.json`` in a folder, and a page.

    A subclass has the fields ``format``, which is "rankwise-NOUN", and ``schema_version``.
    """

    _unmarked: ClassVar[bool] = False
    """True if files of schema version 1 contain neither format nor version."""
    _command: ClassVar[str] = ""
    """Command that writes such files; empty if its name is NOUN."""
    _report: ClassVar[str] = ""
    """Module of `rankwise.report` that has the function ``NOUN_document``; empty for ``NOUN_report``."""

    @classmethod
    def _noun(cls) -> str:
        return str(cls.model_fields["format"].default).removeprefix("rankwise-")

    @staticmethod
    def _upgraded(content: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a file, of an older schema version too, with the current fields."""
        return content

    def save(self, path: str | Path) -> Path:
        """Write JSON, in an existing folder as ``audit.json``, ``plan.json``, …; return the path.

        Raises:
            InputError: if the file cannot be written.
        """
        noun = self._noun()
        return write_file(path, self.model_dump_json(indent=1) + "\n", noun, f"{noun}.json")

    @classmethod
    def load(cls: type[R], path: str | Path) -> R:
        """Return the record in a file, or in ``audit.json``, ``plan.json``, … of a folder.

        Files of older schema versions are converted.

        Raises:
            InputError: if the file cannot be read.
            RecordError: if the file has another format, a newer schema version or damaged content.
        """
        noun, version = cls._noun(), cls.model_fields["schema_version"].default
        file_format = f"rankwise-{noun}"
        path = Path(path)
        path = path / f"{noun}.json" if path.is_dir() else path
        subject, again = f"{noun} {path}", f"run `rankwise {cls._command or noun}` again."
        fix = f"Pass a file that Rankwise wrote, such as {noun}.json, or the folder of {noun}.json."

        def refused(expected: str, got: str, fix: str) -> RecordError:
            return RecordError(subject, expected=expected, got=got, fix=fix)

        data = readable_file(path, f"a file with a saved {noun}", fix=fix)
        try:
            content = parse_json(data.decode("utf-8"))
        except ValueError as error:
            fix = f"The file is cut short or of another kind; {again}"
            raise refused("JSON", _shortened(str(error)), fix) from None
        content = content if isinstance(content, dict) else {}
        if cls._unmarked and content:
            content = {"format": file_format, "schema_version": 1} | content
        if (stated := content.get("format")) != file_format:
            got = "other JSON" if stated is None else _shortened(f'"format": {stated!r}')
            raise refused(
                f'an object with "format": "{file_format}"', got, f"Pass a file with a saved {noun}."
            )
        found = content.get("schema_version")
        if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= version:
            newer = isinstance(found, int) and found > version
            expected = f"schema version {version}" if version == 1 else f"schema version 1 to {version}"
            fix = "Upgrade rankwise to read it." if newer else f"The file is damaged; {again}"
            raise refused(expected, _shortened(json.dumps(found)), fix)
        try:
            return cls.model_validate(cls._upgraded(content))
        except (ValidationError, RecursionError) as error:
            got = "lists or objects that are nested too deeply"
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                problem = _shortened(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
                got = f"{problem} ({error.error_count()} in all)"
            fix = f"The file is damaged or was edited; {again}"
            raise refused(f"the fields of schema version {version}", got, fix) from None

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained HTML file, in an existing folder as ``index.html``; return the path.

        Raises:
            InputError: if the file cannot be written.
        """
        from rankwise.report import write_page

        noun = self._noun()
        module = import_module(f"rankwise.report.{self._report or f'{noun}_report'}")
        return write_page(getattr(module, f"{noun}_document")(self), Path(path))


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]} …"
