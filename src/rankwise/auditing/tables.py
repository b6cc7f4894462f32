"""Records as flat tables: one row each, one value a cell, for frames and for CSV."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

Row = dict[str, Any]

SUFFIXES = {"spread": "std", "stderr": "stderr"}
"""What is kept of a measure beside it: a field of the record, and the end of its column's name."""
PACKED = ("picture", "second_picture", "merging", "known")
"""What is no number of its own, and no text that anybody reads."""
COPIES = ("init_numerical_rank", "init_effective_rank", "removal_cost")
"""Fields that repeat for maps what a record inside holds, whose own columns are in the table: the mean of a
baseline, exact or estimated worth."""
MEANS = {"mean": "", "std": "seed_std"}
"""What a baseline holds of each measure by its name; its ``std`` is over seeds."""
_LISTS: tuple[type, ...] = (list, tuple, set)
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula."""


def flat_rows(records: Sequence[BaseModel]) -> list[Row]:
    """Flatten records: every row has the same columns, in the order of the fields.

    The standard deviation over sequences stands after its measure as ``NAME_std``, a standard error as
    ``NAME_stderr``; the parts of a record inside as ``FIELD_NAME``, those of a place without ``where_``.
    Lists (spectra, maps, thresholds), pictures of matrices and `COPIES` are left out.

    Args:
        records: of one kind.

    Examples:
        >>> from rankwise.auditing.records import LayerRecord
        >>> state = LayerRecord(stack="h", site="h.0", layer=0, sequences=2, tokens=8, width=4, norm=1,
        ...     collapse=1, relative_spread=1, mean_cosine=0, effective_rank=2, spread={"norm": 0.5})
        >>> list(flat_rows([state])[0])[6:9]
        ['width', 'norm', 'norm_std']
    """
    rows = [_flat(record) for record in records]
    columns = _columns(rows)
    return [{name: row.get(name) for name in columns} for row in rows]


def csv_text(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Write rows as CSV: numbers in full, what is unknown as nothing, text that no spreadsheet will run.

    A text that begins as a formula does (= + - @, tab, return) gets an apostrophe before it.

    Args:
        columns: of the table.
        rows: with these columns.

    Examples:
        >>> row = {"site": "=1+1", "rank": 0.1, "share": float("nan")}
        >>> csv_text(list(row), [row]).splitlines()
        ['site,rank,share', "'=1+1,0.1,"]
    """
    out = io.StringIO()
    writer = csv.writer(out)  # ends its lines as RFC 4180 says, and so quotes a \r within a cell
    writer.writerow([_cell(name) for name in columns])
    writer.writerows([_cell(row[name]) for name in columns] for row in rows)
    return out.getvalue()


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return f"'{value}" if value.startswith(FORMULA) else value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return repr(value)


def flat_columns(of: type[BaseModel]) -> list[str]:
    """The columns of records of which there is none to look at: those that every record has.

    Args:
        of: their type.

    Examples:
        >>> from rankwise.auditing.records import Unseen
        >>> flat_columns(Unseen)
        ['name', 'type', 'reason']
    """
    columns: list[str] = []
    for name, field in of.model_fields.items():
        inside = _record_in(field.annotation)
        if inside is not None:
            always = inside is field.annotation
            columns += [f"{_prefix(name)}{part}" for part in flat_columns(inside)] if always else []
        elif name not in COPIES and not _holds(field.annotation, (dict, *_LISTS)):
            columns.append(name)
    return columns


def _flat(record: BaseModel) -> Row:
    """One row; what is kept beside a measure comes right after it."""
    beside = {end: dict(getattr(record, field, {})) for field, end in SUFFIXES.items()}
    row: Row = {}
    for name, may_be_left_out in _fields(type(record)).items():
        value = getattr(record, name)
        if value is None and may_be_left_out:
            continue
        if isinstance(value, (BaseModel, dict, *_LISTS)):
            row |= _parts(name, value)
            continue
        row[name] = value
        for end, kept in beside.items():
            if name in kept:
                row[f"{name}_{end}"] = kept.pop(name)
    for end, kept in beside.items():
        row |= {f"{name}_{end}": value for name, value in kept.items()}
    return row


@cache
def _fields(of: type[BaseModel]) -> dict[str, bool]:
    """Fields that become columns, and whether None in them stands for a record or a list."""
    return {
        name: _record_in(field.annotation) is not None or _holds(field.annotation, _LISTS)
        for name, field in of.model_fields.items()
        if name not in (*SUFFIXES, *PACKED, *COPIES)
    }


def _parts(name: str, value: Any) -> Row:
    if isinstance(value, BaseModel):
        return {f"{_prefix(name)}{part}": item for part, item in _flat(value).items()}
    if isinstance(value, Mapping):
        of, _, kind = name.rpartition("_")
        if kind in MEANS:
            return {"_".join(filter(None, (of, key, MEANS[kind]))): part for key, part in value.items()}
        parts = [_parts(f"{name}_{key}", part) for key, part in value.items()]
        return {column: item for part in parts for column, item in part.items()}
    return {} if isinstance(value, _LISTS) else {name: value}


def _prefix(name: str) -> str:
    return "" if name == "where" else f"{name}_"


def _holds(annotation: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a value of this type can be a list or the like."""
    return get_origin(annotation) in kinds or any(_holds(part, kinds) for part in get_args(annotation))


def _record_in(annotation: Any) -> type[BaseModel] | None:
    """The record that a field holds, always or sometimes."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return next((found for part in parts if (found := _record_in(part))), None)


def _columns(rows: Iterable[Row]) -> list[str]:
    """All columns; a column that only some rows have stands before the column it precedes there."""
    columns: list[str] = []
    for row in rows:
        names = list(row)
        if names == columns or set(names) <= set(columns):
            continue
        at = len(columns)
        for name in reversed(names):
            if name in columns:
                at = columns.index(name)
            else:
                columns.insert(at, name)
    return columns
