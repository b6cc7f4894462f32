"""Print a report on a console. Signs such as σ are spelled out if the console has no Unicode."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from textwrap import wrap

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from rankwise.auditing.records import SEVERITIES, Severity
from rankwise.errors import strip_control
from rankwise.report.document import Cell, Document, Item, Items, Section, Table, column_kinds
from rankwise.report.format import count

STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}
INDENT = 9
MORE = "All findings and numbers{notes}: the report, or --verbose (`summary(verbose=True)`)."
MOST_NOTES = 2
"""Number of notes on the first screen."""
_LEAST_NAME = 16
"""Number of characters up to which names are never wrapped, even on a narrow console."""
_SHORT_TITLE = 12
"""Maximum number of characters of a column title that is not wrapped."""
_ASCII = str.maketrans(
    {"–": "-", "·": "|", "…": "...", "→": "->", "×": "x", "−": "-", "‖": "|"}
    | {"μ": "mu", "δ": "delta", "σ": "sigma", "λ": "lambda"}
)


def print_document(document: Document, console: Console | None = None, *, verbose: bool = False) -> None:
    """Print a report on a rich console, by default on standard output: verdict, actions, tables, notes.

    If the report has tables for the first screen, print sections, further notes and origin only if `verbose`.
    Example: `document_text`.
    """
    with ascii_fallback(console or Console()) as out:
        title = line((document.command, "bold"), (document.heading, "bold cyan"), document.setting)
        out.print(title, overflow="fold")
        if not document.complete:
            out.print(line(("INCOMPLETE", "bold black on yellow")))
        for warning in document.warnings:
            out.print(line(("warning", "bold yellow"), warning, separator="  "), overflow="fold")
        out.print()
        out.print(line((document.verdict.sentence, "bold")), overflow="fold")
        for action in document.verdict.actions:
            for number, words in enumerate(action.splitlines()):
                has_code = "`" in words  # code stays in one piece, so that it can be copied
                text = line("  " if number else "→ ", words, separator="")
                # with soft_wrap, a given overflow would cut the line off
                out.print(text, overflow=None if has_code else "fold", soft_wrap=has_code)
        if document.verdict.no_action:
            out.print(line(document.verdict.no_action), overflow="fold")
        out.print()
        if document.first and not verbose:
            _print_first(document, out)
            return
        for section in (section for section in document.sections if section.on_console):
            _print_section(section, out)
        for note in document.notes:
            out.print(line(("Note: ", "bold"), note, separator=""), overflow="fold")
        facts = [f"{name}: {value}" for name, value in document.origin if not value.startswith("rankwise ")]
        if facts:
            out.print(line(*((fact, "dim") for fact in facts)), overflow="fold")


def _print_first(document: Document, console: Console) -> None:
    """Print the first screen below the verdict: the most severe findings, tables, hints and some notes."""
    lists = [items for section in document.sections for items in section.lists]
    entries = [entry for items in lists for entry in items.entries]
    worst = [item for item, _ in entries if item.severity == entries[0][0].severity != "info"]
    for item in worst:
        head = (SEVERITIES[item.severity][0], STYLES[item.severity]), (item.code, "bold")
        words = item.meaning.partition(". ")[0].removesuffix(".")
        console.print(line(*head, item.place, f"{words}.", separator="  "), overflow="fold")
    if worst:
        console.print()
    for table in document.first:
        _print_table(table, console)
    notes = f", {len(document.notes)} notes" if len(document.notes) > MOST_NOTES else ""
    for hint in (*document.hints, MORE.format(notes=notes)):
        console.print(line((hint, "dim")), overflow="fold")
    for note in document.notes[:MOST_NOTES]:
        console.print(line(("Note: ", "bold"), note, separator=""), overflow="fold")


def document_text(document: Document, width: int = 100, *, verbose: bool = False) -> str:
    """Return the text that `print_document` prints, without colors, in lines of up to `width` characters.

    Examples:
        >>> from rankwise.auditing import Audit, Provenance
        >>> from rankwise.report.audit_report import audit_document
        >>> about = Provenance(model="gpt2", delta=0.01)
        >>> document = audit_document(Audit(provenance=about, heads=[], states=[], findings=[]))
        >>> document_text(document).splitlines()[0]  # as print_document and write_page show it
        'rankwise audit · gpt2 · 0 sequences'
    """
    file = StringIO()  # in Jupyter, rich would display the text rather than write it to this file
    console = Console(file=file, width=width, color_system=None, force_jupyter=False)
    print_document(document, console, verbose=verbose)
    return file.getvalue()


@contextmanager
def ascii_fallback(console: Console) -> Iterator[Console]:
    """Yield a console whose output spells out signs, such as σ, that the encoding of `console` lacks."""
    if not console.options.ascii_only:
        yield console
        return
    with console.capture() as captured:
        yield console
    text = captured.get().translate(_ASCII)
    console.file.write(text.encode(console.encoding, "replace").decode(console.encoding))


def line(*parts: str | tuple[str, str], separator: str = " · ") -> Text:
    """Return nonempty parts (strings or pairs of string and style) joined. Rich markup has no effect."""
    pairs = [words if isinstance(words, tuple) else (words, "") for words in parts]
    return Text(separator).join(Text(strip_control(words), style) for words, style in pairs if words)


def _print_section(section: Section, console: Console) -> None:
    for name, words in section.facts:
        console.print(line((f"{name}: ", "bold"), words, separator=""), overflow="fold")
    if section.facts:
        console.print()
    for listed in section.lists:
        _print_items(listed, console)
    for table in section.tables:
        _print_table(table, console)
        console.print()
    if section.code:
        console.print(line((section.title, "bold")))
        for code in section.code.splitlines():  # not wrapped, so that it can be copied in one piece
            console.print(line((code, "cyan")), soft_wrap=True)
        if section.intro:
            console.print(line(section.intro), overflow="fold")
        console.print()


def _print_items(listed: Items, console: Console) -> None:
    if listed.title:
        counts = Counter(item.severity for item in listed.items)
        words = [
            (count(counts[severity], *SEVERITIES[severity]), STYLES[severity])
            for severity in SEVERITIES
            if counts[severity]
        ]
        console.print(line((f"{listed.title}: ", "bold"), separator="") + line(*words, separator=", "))
    if listed.title and not listed.folded:
        console.print()
    for item, table in () if listed.folded else listed.entries:
        _print_item(item, console)
        if table is not None:
            _print_table(table, console)
            console.print()


def _print_item(item: Item, console: Console) -> None:
    severity = (SEVERITIES[item.severity][0].ljust(INDENT - 2), STYLES[item.severity])
    console.print(line(severity, (item.code, "bold"), item.place, separator="  "), overflow="fold")
    for text in (line(*(f"{name} {text}" for name, text in item.facts)), line(item.meaning)):
        if text:
            console.print(Padding(text, (0, 0, 0, INDENT), expand=False), overflow="fold")
    console.print()


def _print_table(table: Table, console: Console) -> None:
    rows, columns = table.rows[: table.console_rows], table.console_columns
    if not rows:
        return
    if table.title:
        console.print(line((table.title, "bold"), (table.facts, "dim")), overflow="fold")
    for piece in _pieces(table.columns[:columns], [row[:columns] for row in rows], console):
        console.print(piece)
    if len(rows) < len(table.rows):
        console.print(line(f"… and {len(table.rows) - len(rows)} more (see the page)"))
    if table.note:
        console.print(line((table.note, "dim")), overflow="fold")


def _pieces(
    columns: Sequence[str], rows: Sequence[Sequence[str | Cell]], console: Console
) -> Iterator[RichTable]:
    """Yield a table. If the console is too narrow, yield several tables that repeat the first column."""
    wide = console.options.update_width(10_000)  # else rich returns at most the width of the console
    for size in range(len(columns), 0, -1):
        drawn = _rich_table(columns[:size], [row[:size] for row in rows])
        if size <= 2 or console.measure(drawn, options=wide).minimum <= console.width:
            break
    yield drawn
    if size < len(columns):
        yield from _pieces([columns[0], *columns[size:]], [[row[0], *row[size:]] for row in rows], console)


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str | Cell]]) -> RichTable:
    """Return a rich table that never wraps numbers. On a narrow console, it wraps sentences, then names."""
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    texts = [[strip_control(cell.text if isinstance(cell, Cell) else cell) for cell in row] for row in rows]
    for index, (column, kind) in enumerate(zip(columns, column_kinds(len(columns), rows), strict=True)):
        words = column.split("\n" if "\n" in column else None)
        longest = max([0, *(len(row[index]) for row in texts), *map(len, words)])
        if kind == "number" and "\n" not in column:
            column = "\n".join(wrap(column, max(longest, _SHORT_TITLE)))
        is_number = kind == "number"
        least = longest if is_number else min(longest, _LEAST_NAME) if kind == "name" else None
        drawn.add_column(
            Text(column),
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number,
            min_width=least,
        )
    for row in texts:
        drawn.add_row(*map(Text, row))
    return drawn
