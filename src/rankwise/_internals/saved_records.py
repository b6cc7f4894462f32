"""Base of records with a file of their own; torch is not imported here."""

import json
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import ValidationError

from rankwise._internals import report_package
from rankwise._internals.files import parse_json, write_file
from rankwise._internals.records import Record
from rankwise.errors import RecordError, readable_file

R = TypeVar("R", bound="SavedRecord")


class WithPage:
    """Result that `rankwise.report` shows as an HTML page."""

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained HTML file, in an existing folder as ``index.html``; return the path.

        Raises:
            InputError: if the file cannot be written.
        """
        report = report_package()
        written: Path = report.write_page(report.document_of(self), Path(path))
        return written


class SavedRecord(Record, WithPage):
    """Base class of records with a file of their own, by default ``NOUN.json`` in a folder, and a page.

    A subclass has the fields ``format``, which is "rankwise-NOUN", and ``schema_version``.
    """

    _command: ClassVar[str] = ""
    """Command that writes such files; empty if its name is NOUN."""

    @classmethod
    def _noun(cls) -> str:
        return str(cls.model_fields["format"].default).removeprefix("rankwise-")

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

        Raises:
            InputError: if the file cannot be read.
            RecordError: if the file has another format, another schema version or damaged content.
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
        if (stated := content.get("format")) != file_format:
            got = "other JSON" if stated is None else _shortened(f'"format": {stated!r}')
            raise refused(
                f'an object with "format": "{file_format}"', got, f"Pass a file with a saved {noun}."
            )
        stated_version = content.get("schema_version")
        if stated_version != version or isinstance(stated_version, bool):
            fix = f"To write it in this version, {again}"
            raise refused(f"schema version {version}", _shortened(json.dumps(stated_version)), fix)
        try:
            return cls.model_validate(content)
        except (ValidationError, RecursionError) as error:
            got = "lists or objects that are nested too deeply"
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                problem = _shortened(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
                got = f"{problem} ({error.error_count()} in all)"
            fix = f"The file is damaged or was edited; {again}"
            raise refused(f"the fields of schema version {version}", got, fix) from None


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]} …"
