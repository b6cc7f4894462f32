"""Define `Document`, the content of a report, which the console and the page show."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import Any, Literal

from rankwise._internals.records import MISSING, grouped
from rankwise.auditing.records import SEVERITY_ORDER, Severity, Verdict

MOST_PLACES = 12
"""Maximum number of rows on the console in the table of findings of one kind."""
TO_DO = "what to do"
_LONGEST_NAME = 24
"""Number of characters above which a table cell counts as a sentence, which may be wrapped."""
_NUMBER = re.compile(r"[≈+\-−–<>|]?\s?[\d–]")


@dataclass(frozen=True)
class Cell:
    """Table cell with a hover text, a link or bold type, in addition to its text."""

    text: str
    hover: str = ""
    link: str = ""
    strong: bool = False
    number: int | None = None
    """Index of the finding that the cell shows. Scripts of the page find the cell by this index."""


@dataclass(frozen=True)
class Table:
    """Table of text. Line breaks in column titles have an effect on the console only."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    facts: str = ""
    """Properties that all rows share, shown next to the title."""
    note: str = ""
    """Explanation of the columns, shown below the table."""
    console_rows: int | None = None
    """Maximum number of rows on the console. None means all rows."""
    console_columns: int | None = None
    """Number of columns on the console, from the left. None means all columns."""
    redrawn: bool = False
    """True if a script of the page draws this table itself, with more columns."""


def column_kinds(
    columns: int, rows: Sequence[Sequence[str | Cell]]
) -> list[Literal["number", "name", "sentence"]]:
    """Return the kind of each column: numbers are aligned to the right, and sentences may be wrapped."""
    texts = [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in rows]
    cells = [[row[index] for row in texts if row[index]] for index in range(columns)]
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
    """Plotly figure without colors: `meta` of a trace names the series, shade or scale to color it by."""

    name: str
    title: str
    data: Sequence[dict[str, Any]]
    layout: Mapping[str, Any]
    caption: str = ""


@dataclass(frozen=True)
class Item:
    """Entry in a list of findings: a finding, or the change of a finding between two audits."""

    severity: Severity
    code: str
    place: str
    facts: Sequence[tuple[str, str]]
    """Evidence: pairs of a name and a number."""
    meaning: str
    remedy: str = ""
    site: str = ""
    """Name of the module, if the place is ambiguous."""
    link: str = ""
    """Id of the page element that shows the place. Empty if there is no link."""
    number: int | None = None
    """Index of the finding in the audit. Scripts of the page find the item by this index."""


@dataclass(frozen=True)
class Items:
    """List of findings under one title. If `folded`, the page hides it and the console prints only counts."""

    title: str
    items: Sequence[Item]
    intro: str = ""
    folded: bool = False

    @property
    def entries(self) -> list[tuple[Item, Table | None]]:
        """One entry per severity and code, most severe first. Several items become one item and a table."""
        kinds = grouped(self.items, lambda item: (item.severity, item.code)).values()
        entries = [(items[0], None) if len(items) == 1 else _joined(items) for items in kinds]
        return sorted(entries, key=lambda entry: SEVERITY_ORDER[entry[0].severity])


def _joined(items: Sequence[Item]) -> tuple[Item, Table]:
    """Return an item with the facts that all items share, and a table of all other facts, a row per item."""
    facts = [dict(item.facts) | {TO_DO: item.remedy} for item in items]
    columns = {name: [fact.get(name, MISSING) for fact in facts] for name in dict.fromkeys(chain(*facts))}
    shared = {name: texts[0] for name, texts in columns.items() if len(set(texts)) == 1}
    varying = [name for name in columns if name not in shared]
    places = [Cell(item.place or item.site, item.meaning, item.link, number=item.number) for item in items]
    alike = len({item.meaning for item in items}) == 1
    joined = replace(
        items[0], place=f"{len(items)} places", remedy=shared.pop(TO_DO, ""), facts=[*shared.items()],
        meaning=items[0].meaning if alike else f"{places[0].text}: {items[0].meaning}",
        site="", link="", number=None,
    )  # fmt: skip
    return joined, Table(
        "",
        ["place", *varying],
        [[place, *(columns[name][row] for name in varying)] for row, place in enumerate(places)],
        console_rows=MOST_PLACES,
    )


@dataclass(frozen=True)
class Section:
    """Section of a report. The page links to the section by `name`."""

    name: str
    title: str
    intro: str = ""
    facts: Sequence[tuple[str, str]] = ()
    lists: Sequence[Items] = ()
    figures: Sequence[Figure] = ()
    choice: str = ""
    """Label of a menu that selects figures by title. If it is empty, the page shows all figures."""
    tables: Sequence[Table] = ()
    code: str = ""
    on_console: bool = True
    include: str = ""
    """File name of the template for an interactive part of the page, if there is one."""


@dataclass(frozen=True)
class Document:
    """Report with a title, verdict, sections, and the origin of the numbers."""

    command: str
    heading: str
    setting: str
    verdict: Verdict
    sections: Sequence[Section]
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    origin: Sequence[tuple[str, str]] = ()
    complete: bool = True
    first: Sequence[Table] = ()
    """Tables of the console's first screen. If there are any, sections are printed only if `verbose`."""
    hints: Sequence[str] = ()
    """Lines below the tables of the first screen: how to read the tables, and missing measurements."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Data for templates and scripts of the page."""


def nonempty(*sections: Section) -> list[Section]:
    """Return the sections that have content, without their empty tables."""
    parts = attrgetter("facts", "lists", "figures", "tables", "code", "include")
    trimmed = [replace(section, tables=[t for t in section.tables if t.rows]) for section in sections]
    return [section for section in trimmed if any(parts(section))]
