"""Text files, read so that whatever is wrong with one is said in terms of the file."""

import gzip
import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankwise._internals.files import parse_json
from rankwise.errors import InputError, did_you_mean

_ROWS = (".jsonl", ".jsonl.gz")
_GZIP = b"\x1f\x8b"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def load_text(path: str | Path, column: str = "text") -> str | list[str]:
    """Read one continuous text, or the rows of a ``.jsonl`` or ``.jsonl.gz`` file.

    Args:
        path: the file.
        column: the field of a row that holds its text.

    Returns:
        One text, which `rankwise.auditing.text_batches` cuts into windows, or one text per sequence.

    Raises:
        InputError: as :func:`read_text` and :func:`read_rows`.

    Examples:
        >>> load_text("missing.txt")
        Traceback (most recent call last):
        ...
        rankwise.errors.InputError: missing.txt: expected a text file, got no such file. Check the path.
    """
    return read_rows(path, column) if str(path).lower().endswith(_ROWS) else read_text(path)


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file whole; a byte order mark is dropped, everything else is kept as it is.

    Args:
        path: the file.

    Raises:
        InputError: if it is missing, a folder, not readable, empty or not UTF-8.
    """
    text = _decode(_read_bytes(path), path)
    if not text.strip():
        raise InputError(
            str(path), expected="some text", got="an empty file", fix="Give a file with a paragraph or more."
        )
    return text


def read_rows(path: str | Path, column: str = "text") -> list[str]:
    """Read one text from each line of a JSON Lines file, gzipped or not; blank lines are skipped.

    Args:
        path: the ``.jsonl`` or ``.jsonl.gz`` file.
        column: the field that holds the text.

    Raises:
        InputError: as :func:`read_text`; also for a line that is not JSON, not an object or without text in
            ``column``, by its number.
    """
    return [_text(row, where, column) for where, row in _objects(path, column)]


def read_labelled_rows(
    path: str | Path, column: str = "text", label: str = "label"
) -> tuple[list[str], list[int]]:
    """Read a text and its class from each line of a JSON Lines file, gzipped or not.

    Args:
        path: the ``.jsonl`` or ``.jsonl.gz`` file.
        column: the field that holds the text.
        label: the field that holds the class, a whole number.

    Raises:
        InputError: as :func:`read_rows`; also for an empty text and for a class that is no whole number.
    """
    texts, labels = [], []
    for where, row in _objects(path, column):
        text, number = _text(row, where, column), row.get(label)
        if not text or isinstance(number, bool) or not isinstance(number, int):
            got = "an empty text" if not text else f"{number!r} in {label!r}"
            fix = "Correct the line or leave it out."
            raise InputError(
                where, expected=f'a text in "{column}" and a whole number in "{label}"', got=got, fix=fix
            )
        texts.append(text)
        labels.append(number)
    return texts, labels


def _objects(path: str | Path, column: str) -> list[tuple[str, dict[str, Any]]]:
    """Where each row stands, and the row."""
    raw = _read_bytes(path)
    if raw.startswith(_GZIP):
        raw = _unzip(raw, path)
    lines = _decode(raw, path).split("\n")
    places = ((f"{path}, line {number}", line) for number, line in _numbered(lines))
    rows = [(where, _object(line, where, column)) for where, line in places]
    if not rows:
        raise InputError(
            str(path), expected="JSON objects, one a line", got="an empty file", fix="Give a row or more."
        )
    return rows


def _numbered(lines: list[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _object(line: str, where: str, column: str) -> dict[str, Any]:
    wanted = f'a JSON object such as {{"{column}": "Once upon a time"}}'
    try:
        row = parse_json(line)
    except ValueError as error:
        raise InputError(
            where, expected=wanted, got=f"no JSON ({error})", fix="Write one object a line."
        ) from error
    if not isinstance(row, dict):
        raise InputError(
            where, expected=wanted, got=f"type {type(row).__name__}", fix="Write one object a line."
        )
    return row


def _text(row: dict[str, Any], where: str, column: str) -> str:
    if column not in row:
        fields = ", ".join(map(repr, row)) or "none"
        fix = did_you_mean(column, row) or f"Write the text under {column!r}."
        raise InputError(where, expected=f"a field {column!r}", got=f"the fields {fields}", fix=fix)
    if not isinstance(row[column], str):
        got = f"type {type(row[column]).__name__} in {column!r}"
        raise InputError(
            where, expected="text", got=got, fix="Give the name of the column that holds the text."
        )
    return row[column]


def _read_bytes(path: str | Path) -> bytes:
    path = Path(path)
    wanted = "a text file"
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(str(path), expected=wanted, got="no such file", fix="Check the path.") from error
    except IsADirectoryError as error:
        raise InputError(str(path), expected=wanted, got="a folder", fix="Name one file in it.") from error
    except PermissionError as error:
        if path.is_dir():  # what Windows says of a folder
            raise InputError(
                str(path), expected=wanted, got="a folder", fix="Name one file in it."
            ) from error
        raise InputError(
            str(path), expected=wanted, got="a file you may not read", fix="Change its permissions."
        ) from error
    except OSError as error:
        raise InputError(
            str(path), expected=wanted, got=str(error), fix="Check the path and the disk."
        ) from error


def _unzip(raw: bytes, path: str | Path) -> bytes:
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            str(path),
            expected="a whole gzip file",
            got=f"a broken one ({error})",
            fix="Download or pack it again.",
        ) from error


def _decode(raw: bytes, path: str | Path) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # utf-8-sig counts from the end of a byte order mark it has dropped
        offset = error.start + (3 if raw.startswith(b"\xef\xbb\xbf") else 0)
        line = raw.count(b"\n", 0, offset) + 1
        got = f"byte 0x{raw[offset]:02X} at offset {offset} (line {line})"
        raise InputError(str(path), expected="UTF-8 text", got=got, fix=_conversion(raw, path)) from error


def _conversion(raw: bytes, path: str | Path) -> str:
    if raw.startswith(_GZIP):
        return f"It is a gzip file; unpack it: gunzip -k {shlex.quote(str(path))}"
    encoding = "UTF-16" if raw.startswith(_UTF16) else "LATIN1"
    return f"Convert it, for instance: iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > utf8.txt"
