"""Command `rankwise compare`: compare two audits, or show the history of more."""

from pathlib import Path
from typing import Annotated

import typer

HELP = """Show the changes from one audit to another, or over any number of audits.

Two audits: findings that are new, worse, better, unchanged and resolved, layers next to their spread, and the
largest changes. More audits, or a folder with the audits of checkpoints: a history with one row per audit,
and with --out a page of curves.

[bold]Examples[/bold]

  rankwise compare before/ after/ --out changes.html
  rankwise compare run/audits --out history.html
  rankwise compare small/ medium/ large/
"""


def command(
    audits: Annotated[
        list[Path],
        typer.Argument(help="Files audit.json, folders of one audit, or a folder of such folders."),
    ],
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Write .html, or .json for two audits and .csv for more; can be repeated."),
    ] = None,
) -> None:
    """Compare audits; `HELP` describes the command."""
    from rankwise._internals.files import write_file
    from rankwise.auditing import Audit, History, compare
    from rankwise.cli.output import print_results
    from rankwise.report.comparison_report import comparison_document, history_document

    paths = _audit_paths(audits)
    for path in out or []:
        _check_out(path, (".html", ".json") if len(paths) == 2 else (".html", ".csv"), paths)
    if len(paths) == 2:
        comparison = compare(Audit.load(paths[0]), Audit.load(paths[1]))
        print_results(comparison_document(comparison))
        for path in out or []:
            if path.suffix == ".html":
                written = comparison.to_html(path)
            else:
                written = write_file(path, comparison.model_dump_json(indent=1), "comparison")
            print_results(None, [("comparison", written)])
        return
    history = History.of([Audit.load(path) for path in paths], _short_names(paths))
    print_results(history_document(history))
    for path in out or []:
        written = history.to_html(path) if path.suffix == ".html" else history.to_csv(path)
        print_results(None, [("history", written)])


def _audit_paths(given: list[Path]) -> list[Path]:
    """Return paths of audits: a folder without an audit is replaced by the audits in its subfolders."""
    from rankwise.auditing import in_order
    from rankwise.errors import InputError

    paths: list[Path] = []
    for path in given:
        inside = [] if (path / "audit.json").exists() else [file.parent for file in path.glob("*/audit.json")]
        paths += [Path(folder) for folder in in_order(sorted(map(str, inside)))] or [path]
    if len(paths) < 2:
        subject, fix = f"audit {paths[0]}", "Pass another audit, or a folder with several."
        raise InputError(subject, expected="two audits or more to compare", got="one", fix=fix)
    return paths


def _short_names(paths: list[Path]) -> list[str]:
    """Return the last folder of each path, or the whole paths if two last folders are equal."""
    homes = [path.parent if path.name == "audit.json" else path for path in paths]
    short = [home.name or str(home) for home in homes]
    return short if len(set(short)) == len(short) else list(map(str, homes))


def _check_out(path: Path, known: tuple[str, ...], audits: list[Path]) -> None:
    """Raise `InputError` if a file has another ending, or belongs to an audit."""
    from rankwise.errors import InputError

    if path.suffix not in known:
        expected = f"a file ending in {' or '.join(known)}"
        fix = f"For instance --out {path.with_suffix(known[0])}."
        raise InputError(f"--out {path}", expected=expected, got=path.suffix or "no ending", fix=fix)
    files = ("audit.json", "index.html", "heads.csv", "layers.csv")
    of_an_audit = path.name in files and (path.parent / "audit.json").exists()
    if of_an_audit or path.resolve() in [audit.resolve() for audit in audits]:
        expected = "a file that does not belong to an audit"
        raise InputError(
            f"--out {path}", expected=expected, got="one of an audit", fix="Choose another name."
        )
