"""The content of a report: six functions build a `Document`; console, page and notebook show it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rankwise._internals.records import grouped
from rankwise.auditing.records import SEVERITY_ORDER, Severity, Verdict

_LONGEST_NAME = 24
"""Characters above which a cell is a sentence, which may be wrapped."""
_NUMBER = re.compile(r"[≈+\-−–<|]?\s?[\d–]")


@dataclass(frozen=True)
class Cell:
    """Cell of a table that has more than text."""

    text: str
    hover: str = ""
    link: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """Table of text; a line break in a column title is for the console."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    facts: str = ""
    """Properties that all rows share, printed next to the title."""
    note: str = ""
    """Explanation of the columns, printed below the table."""
    console_rows: int | None = None
    """Number of rows on the console; None: all."""
    console_columns: int | None = None
    """Number of columns on the console, from the first; None: all."""
    redrawn: bool = False
    """True if scripts of the page draw a table that has more columns."""


def column_kinds(
    columns: int, rows: Sequence[Sequence[str | Cell]]
) -> list[Literal["number", "name", "sentence"]]:
    """Return the kind of each column: numbers are aligned to the right, sentences may be wrapped."""
    texts = [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in rows]
    cells = [[row[at] for row in texts if row[at]] for at in range(columns)]
    return [
        "sentence"
        if max(map(len, column), default=0) > _LONGEST_NAME
        else "number"
        if column and all(map(_NUMBER.match, column))
        else "name"
        for column in cells
    ]


@dataclass(frozen=True)
class Figure:
    """Plotly figure without colors: `meta` of a trace names its series, shade or scale."""

    name: str
    title: str
    data: Sequence[dict[str, Any]]
    layout: Mapping[str, Any]
    caption: str = ""


@dataclass(frozen=True)
class Item:
    """A finding, or what became of a finding in another audit."""

    severity: Severity
    code: str
    place: str
    facts: Sequence[str]
    meaning: str
    remedy: str = ""
    site: str = ""
    """Module, if the place is ambiguous."""
    link: str = ""
    """Element of the page that shows the place; empty without a link."""
    number: int | None = None
    """Index among the findings of the audit, by which scripts find it."""


@dataclass(frozen=True)
class Items:
    """List of findings under one title; if `folded`, the page hides and the console only counts them."""

    title: str
    items: Sequence[Item]
    intro: str = ""
    folded: bool = False

    @property
    def kinds(self) -> list[tuple[Severity, str, list[Item]]]:
        """Items of the same severity and code, the most severe first."""
        kinds = grouped(self.items, lambda item: (item.severity, item.code))
        found = [(severity, code, items) for (severity, code), items in kinds.items()]
        return sorted(found, key=lambda kind: SEVERITY_ORDER[kind[0]])


@dataclass(frozen=True)
class Section:
    """Part of a document; the page links to it by `name`."""

    name: str
    title: str
    intro: str = ""
    facts: Sequence[tuple[str, str]] = ()
    lists: Sequence[Items] = ()
    figures: Sequence[Figure] = ()
    choice: str = ""
    """Label of a menu by which the page shows the figures of one title at a time; empty: it shows all."""
    tables: Sequence[Table] = ()
    code: str = ""
    on_console: bool = True
    include: str = ""
    """Template of an interactive part of the page."""


@dataclass(frozen=True)
class Document:
    """A report: title, verdict, sections, and where its numbers come from."""

    command: str
    heading: str
    setting: str
    verdict: Verdict
    sections: Sequence[Section]
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    origin: Sequence[tuple[str, str]] = ()
    complete: bool = True
    highlights: Sequence[tuple[str, str, str]] = ()
    """The few numbers to know first, each with a name and with what to compare it to; on the page only."""
    data: Callable[[int], Mapping[str, Any]] = lambda excess: {}
    """Returns what included templates and scripts read, given the bytes by which the page is too large."""


def nonempty(*sections: Section) -> list[Section]:
    """Return the sections that show something, without their tables that have no rows."""
    found = [
        replace(section, tables=[table for table in section.tables if table.rows]) for section in sections
    ]
    return [
        section
        for section in found
        if section.facts
        or section.lists
        or section.figures
        or section.tables
        or section.code
        or section.include
    ]
