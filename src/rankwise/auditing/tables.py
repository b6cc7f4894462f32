"""Records of an audit as tables with one value per cell, for pandas and CSV."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from rankwise.auditing.measure_table import HEAD_MEASURES, STATE_MEASURES
from rankwise.auditing.records import Finding, Provenance
from rankwise.auditing.remedies import remedy_text
from rankwise.errors import need_package, one_of
from rankwise.importance.records import HeadImportance

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
Records = Literal["heads", "states", "findings", "uncaptured"]
"""Kinds of records of an audit: fields of `Audit`."""

_MEASURES = {
    "heads": [measure.name for measure in HEAD_MEASURES if measure.name != "removal_cost"],
    "states": [measure.name for measure in STATE_MEASURES],
}
_BEFORE = {
    "heads": "stack site layer head kind mask cross call sequences nonfinite_sequences "
    "estimated_sequences tokens sources full_rank head_dim",
    "states": "stack site blocks sequences nonfinite_sequences tokens hidden_size",
    "findings": "code severity stack layer site head",
    "uncaptured": "name type reason",
}
_AFTER = {
    "heads": "rank_low rank_high one_hot_rank random_rank uniform_rank nearest_head max_token "
    "max_token_sequences",
    "states": "largest_position",
    "findings": "meaning remedy",
}
"""Columns of each table that come before (`_BEFORE`) or after (`_AFTER`) measures and evidence."""


def table(
    kind: str, records: Sequence[Any], provenance: Provenance | None = None
) -> tuple[list[str], list[Row]]:
    """Return the columns of a table, and a row per record.

    A measure is followed by its standard deviation over sequences, ``NAME_std``, and by the standard error of
    its estimate, ``NAME_stderr``. Costs of removal are ``importance_*``. Measures at initialization are
    ``at_init_*``, with their standard deviation over seeds, ``at_init_*_seed_std``. Columns of these kinds
    that no record has are left out. Lists, such as spectra and attention maps, are left out too.
    """
    one_of("records", kind, get_args(Records))
    before, after = _BEFORE[kind].split(), _AFTER.get(kind, "").split()
    measures = _MEASURES.get(kind, [])
    numbers, always = [*measures, *after], [*before, *measures, *after]
    rows = [_row(record, always, provenance) for record in records]
    present = dict.fromkeys(name for row in rows for name in row)
    listed = [
        *before,
        *(name for name in present if name.startswith("evidence_")),
        *(f"{name}{end}" for name in numbers for end in ("", "_std", "_stderr")),
        *(f"importance_{name}" for name in HeadImportance.model_fields),
        "at_init_seeds",
        *(f"at_init_{name}{end}" for name in numbers for end in ("", "_seed_std")),
    ]
    columns = [name for name in listed if name in always or name in present]
    return columns, [{name: row.get(name) for name in columns} for row in rows]


def _row(record: Any, always: Iterable[str], provenance: Provenance | None) -> Row:
    place = record.where if isinstance(record, Finding) else record
    row = {name: getattr(place if hasattr(place, name) else record, name) for name in always}
    if isinstance(record, Finding):
        row["remedy"] = "" if record.remedy is None else remedy_text(record.remedy, provenance)
    for name, pattern in (("std", "{}_std"), ("stderr", "{}_stderr"), ("evidence", "evidence_{}")):
        row |= _named(pattern, getattr(record, name, {}))
    row |= _named("importance_{}", dict(getattr(record, "importance", None) or {}))
    if (initial := getattr(record, "at_init", None)) is not None:
        row |= {"at_init_seeds": initial.seeds} | _named("at_init_{}", initial.mean)
        row |= _named("at_init_{}_seed_std", initial.seed_std)
    return row


def _named(pattern: str, values: Mapping[str, Any]) -> Row:
    return {pattern.format(name): value for name, value in values.items()}


def csv_text(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Return rows as CSV, with numbers in full and an empty cell for an unknown value.

    Examples:
        >>> row = {"site": "h", "rank": 0.1, "share": float("nan")}
        >>> csv_text(list(row), [row]).splitlines()
        ['site,rank,share', 'h,0.1,']
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, columns)  # lines end in CRLF (RFC 4180), so that csv quotes cells with CR
    writer.writeheader()
    writer.writerows({name: "" if value != value else value for name, value in row.items()} for row in rows)
    return out.getvalue()


def data_frame(columns: Sequence[str], rows: Sequence[Row]) -> "pd.DataFrame":
    """Return rows as a pandas frame; raise `InputError` if pandas is not installed."""
    return need_package("pandas", "`to_frame`", "frames").DataFrame(rows, columns=list(columns))
