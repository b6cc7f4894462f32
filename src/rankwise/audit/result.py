"""An audit as its user holds it: records that can be saved, loaded, shown and turned into frames."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from rankwise.audit.records import SCHEMA_VERSION, AuditRecord
from rankwise.audit.upgrade import upgraded
from rankwise.errors import InputError, RecordError
from rankwise.files import parse_json, write_whole

if TYPE_CHECKING:
    import pandas as pd


class Audit(AuditRecord):
    """Everything an audit found: ``heads``, ``layers``, ``findings``, ``unseen``, ``provenance``."""

    def save(self, path: str | Path) -> Path:
        """Write it as JSON.

        Args:
            path: the file; for an existing folder, ``audit.json`` in it.

        Returns:
            The file written.

        Raises:
            InputError: if it cannot be written.
        """
        path = Path(path)
        path = path / "audit.json" if path.is_dir() else path
        return write_whole(path, self.model_dump_json(indent=1) + "\n", "audit")

    @classmethod
    def load(cls, path: str | Path) -> "Audit":
        """Read what `save` wrote.

        Args:
            path: the file, or the folder that holds ``audit.json``.

        Raises:
            InputError: if there is no such file or it cannot be read.
            RecordError: if it is not an audit, is damaged, or was written by a newer Rankwise.
        """
        path = Path(path)
        path = path / "audit.json" if path.is_dir() else path
        content = _parsed(path)
        _check_version(path, content)
        try:
            return cls.model_validate(upgraded(content))
        except ValidationError as error:
            first = error.errors()[0]
            raise RecordError(
                f"audit {path}",
                wanted=f"the fields of schema version {SCHEMA_VERSION}",
                got=_shortened(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
                + f" ({error.error_count()} in all)",
                fix="The file is damaged or was changed by hand; run `rankwise audit` again.",
            ) from None

    def to_html(self, path: str | Path) -> Path:
        """Write the report: one file that needs nothing else.

        Args:
            path: the file; for an existing folder, ``index.html`` in it.

        Returns:
            The file written.

        Raises:
            InputError: if it cannot be written.
        """
        from rankwise.report import write_html

        return write_html(self, Path(path))

    def to_frame(self, records: Literal["heads", "layers", "findings"] = "heads") -> "pd.DataFrame":
        """Records as a pandas frame, one row each.

        Args:
            records: which of them.

        Raises:
            InputError: if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise InputError(
                "`to_frame`",
                wanted="pandas",
                got="an environment without it",
                fix="pip install 'rankwise[frames]'",
            ) from None
        rows = [record.model_dump() for record in getattr(self, records)]
        columns = list(type(getattr(self, records)[0]).model_fields) if rows else None
        return pd.DataFrame(rows, columns=columns)

    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        return (
            f"Audit({self.provenance.model or 'model'}: {len(self.heads)} heads, {len(self.layers)} layers, "
            f"{len(self.findings)} findings{'' if self.complete else ', incomplete'})"
        )


def _parsed(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(
            f"audit {path}",
            wanted="a file written by `rankwise audit`",
            got="no such file",
            fix="Give its audit.json, or the folder it lies in.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"audit {path}",
            wanted="a readable JSON file",
            got=str(error),
            fix="Check the path and its permissions.",
        ) from error
    try:
        content = parse_json(text)
    except ValueError as error:
        raise RecordError(
            f"audit {path}",
            wanted="JSON",
            got=_shortened(str(error)),
            fix="The file is cut short or is no audit; run `rankwise audit` again.",
        ) from None
    if not isinstance(content, dict) or content.get("format") != "rankwise-audit":
        raise RecordError(
            f"audit {path}",
            wanted='an object with "format": "rankwise-audit"',
            got="other JSON",
            fix="Give a file written by `rankwise audit` or `Audit.save`.",
        )
    return content


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]} …"


def _check_version(path: Path, content: dict[str, Any]) -> None:
    version = content.get("schema_version")
    if isinstance(version, int) and not isinstance(version, bool) and 1 <= version <= SCHEMA_VERSION:
        return
    newer = isinstance(version, int) and version > SCHEMA_VERSION
    raise RecordError(
        f"audit {path}",
        wanted=f"schema version 1 to {SCHEMA_VERSION}",
        got=_shortened(repr(version)),
        fix="Upgrade rankwise to read it." if newer else "The file is damaged; run `rankwise audit` again.",
    )
