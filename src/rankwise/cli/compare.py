"""Command `rankwise compare`: compare two audits, or show the history of more."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rankwise.auditing import Audit, Comparison

HELP = """Show the changes from one audit to another, or over any number of audits.

For two audits, the command shows which findings are new, changed, unchanged or resolved. Then it shows the
changes of layers and the largest changes of heads. For more audits, or a folder with the audits of
checkpoints, it shows a history with one row per audit. With --out it also writes a page with curves.

[bold]Examples[/bold]

  rankwise compare before/ after/ --out changes.html
  rankwise compare run/audits --out history.html
  rankwise compare small/ medium/ large/
"""


def command(
    audits: Annotated[
        list[Path],
        typer.Argument(metavar="AUDIT", help="Files audit.json, or folders with one audit or several."),
    ],
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Write .html, or numbers (.json for two audits, else .csv); can be repeated."),
    ] = None,
) -> None:
    """Compare audits; `HELP` describes the command."""
    from rankwise.auditing import History
    from rankwise.auditing.comparison import compare_two
    from rankwise.cli.output import is_of_audit, print_results
    from rankwise.errors import InputError, one_of
    from rankwise.report.comparison_report import comparison_document, history_document

    loaded = _load(audits)
    two, paths = len(loaded) == 2, [path for path, _ in loaded]
    endings = (".html", ".json") if two else (".html", ".csv")
    for path in out or []:
        one_of(f"ending of --out {path}", path.suffix, endings)
        if is_of_audit(path) or path.resolve() in [audit.resolve() for audit in paths]:
            expected, got = "a file that does not belong to an audit", "one of an audit"
            raise InputError(f"--out {path}", expected=expected, got=got, fix="Choose another name.")
    result: Comparison | History
    if two:
        result = compare_two(loaded[0][1], loaded[1][1])
        print_results(comparison_document(result))
    else:
        homes = [path.parent if path.name == "audit.json" else path for path in paths]
        short = [home.name or str(home) for home in homes]
        names = short if len(set(short)) == len(short) else list(map(str, homes))
        result = History.of([audit for _, audit in loaded], names)
        print_results(history_document(result))
    for path in out or []:
        if path.suffix == ".html":
            written = result.to_html(path)
        elif isinstance(result, History):
            written = result.to_csv(path)
        else:
            written = result.save(path)
        print_results(None, [("comparison" if two else "history", written)])


def _load(given: list[Path]) -> list[tuple[Path, "Audit"]]:
    """Return pairs (path, audit). If a folder has no audit, return the audits in its subfolders.

    Audits in subfolders are sorted by step, or by time if names contain no steps. Incomplete audits in
    subfolders are left out with a message. Raise `InputError` if fewer than two audits remain.
    """
    from rankwise.auditing import Audit
    from rankwise.auditing.history import load_audits
    from rankwise.cli.output import is_of_audit
    from rankwise.errors import InputError

    loaded: list[tuple[Path, Audit]] = []
    for path in given:
        if is_of_audit(path) and path.name != "audit.json":  # DIR/* also names the page of several audits
            continue
        inside = {} if (path / "audit.json").exists() else load_audits(path)
        for folder, audit in (inside or {path: Audit.load(path)}).items():
            if audit.complete or not inside:
                loaded.append((folder, audit))
            else:
                print(f"rankwise: {folder} is left out: it is incomplete", file=sys.stderr)
    if len(loaded) < 2:
        subject, got = "audits", ", ".join(str(path) for path, _ in loaded) or "none"
        fix = "Pass another audit, or a folder with several."
        raise InputError(subject, expected="two or more to compare", got=got, fix=fix)
    return loaded
