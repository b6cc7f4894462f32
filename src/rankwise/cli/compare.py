"""`rankwise compare`."""

from pathlib import Path
from typing import Annotated

import typer

HELP = """Show what changed from one audit to another, or over any number of them.

Of two, the findings that are new, worse, better, unchanged and gone, the layers beside their spread, and
the largest changes. Of more, or of a folder that holds the audits of checkpoints, a history: a row for each
audit, and with --out a page of curves.

[bold]Examples[/bold]

  rankwise compare before/ after/ --out changes.html

  rankwise compare run/audits --out history.html

  rankwise compare small/ medium/ large/
"""


def command(
    audits: Annotated[
        list[Path], typer.Argument(help="audit.json, or the folder it lies in; or a folder of such folders.")
    ],
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Also write it, by its ending: .html a page, .json of two, .csv of more."),
    ] = None,
) -> None:
    """Compare audits; see `HELP`."""
    from rich.console import Console

    from rankwise._internals.files import write_file
    from rankwise.auditing import Audit, History, compare
    from rankwise.cli.output import print_path
    from rankwise.report import print_document
    from rankwise.report.comparison_report import comparison_document, history_document

    paths = _paths(audits)
    for path in out or []:
        _check_ending(path, (".html", ".json") if len(paths) == 2 else (".html", ".csv"))
    console = Console()
    if len(paths) == 2:
        comparison = compare(Audit.load(paths[0]), Audit.load(paths[1]))
        print_document(comparison_document(comparison), console)
        for path in out or []:
            if path.suffix == ".html":
                written = comparison.to_html(path)
            else:
                written = write_file(path, comparison.model_dump_json(indent=1), "comparison")
            print_path("comparison", written, console)
        return
    history = History.of([Audit.load(path) for path in paths], _names(paths))
    print_document(history_document(history), console)
    for path in out or []:
        written = history.to_html(path) if path.suffix == ".html" else history.to_csv(path)
        print_path("history", written, console)


def _paths(given: list[Path]) -> list[Path]:
    """The audits that are meant: a folder without one stands for those in its folders, by their steps."""
    from rankwise.auditing import in_order
    from rankwise.errors import InputError

    paths: list[Path] = []
    for path in given:
        inside = [] if (path / "audit.json").exists() else [file.parent for file in path.glob("*/audit.json")]
        paths += [Path(folder) for folder in in_order(sorted(map(str, inside)))] or [path]
    if len(paths) < 2:
        raise InputError(
            f"audit {paths[0]}",
            expected="two audits or more to compare",
            got="one",
            fix="Name the other, or a folder that holds several.",
        )
    return paths


def _names(paths: list[Path]) -> list[str]:
    """As short as tells them apart: the folder of an audit.json, else the whole path."""
    homes = [path.parent if path.name == "audit.json" else path for path in paths]
    short = [home.name or str(home) for home in homes]
    return short if len(set(short)) == len(short) else list(map(str, homes))


def _check_ending(path: Path, known: tuple[str, ...]) -> None:
    from rankwise.errors import InputError

    if path.suffix not in known:
        raise InputError(
            f"--out {path}",
            expected=f"a file ending in {' or '.join(known)}",
            got=path.suffix or "no ending",
            fix=f"For instance --out {path.with_suffix(known[0])}.",
        )
