"""`rankwise audit` of several models: one after the other, then their history."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rankwise.auditing import Audit


def audit_each(models: Sequence[str], out: Path, audit_one: "Callable[..., Audit]") -> "list[Audit]":
    """Audit models in the order of their steps, each into its own folder, and write the page of them all.

    A model that fails is told of and left out; the others are audited, and the command then leaves with
    status 1. After Ctrl-C the page holds those that were done.

    Args:
        models: names, folders or factories.
        out: the folder of the page and of the folders.
        audit_one: audits a model into a folder.

    Returns:
        The audits, where all were made.

    Raises:
        typer.Exit: with status 1 where one failed, 130 after Ctrl-C.
        RankwiseError: if none could be audited; that of the first.
    """
    from rankwise.auditing import in_order
    from rankwise.errors import RankwiseError

    ordered = in_order(list(dict.fromkeys(models)))
    done: list[tuple[str, str, Audit]] = []
    failures: list[RankwiseError] = []
    status = 0
    for name, folder in zip(ordered, _folders(ordered), strict=True):
        try:
            done.append((name, folder, audit_one(name, out / folder, brief=True)))
        except RankwiseError as error:
            failures.append(error)
            status = 1
            print(f"rankwise: {error}", file=sys.stderr)
        except (KeyboardInterrupt, typer.Exit):
            status = 130
            break
    if not done and failures:
        raise failures[0]
    if done:
        write_history_page(done, out)
    if status:
        raise typer.Exit(status)
    return [audit for _, _, audit in done]


def _folders(models: Sequence[str]) -> list[str]:
    """The last part of each name; the whole names where these are not all different."""
    from rankwise.auditing.history import folder_name

    for names in ([Path(model).name for model in models], list(models)):
        folders = [folder_name(name) for name in names]
        if len({folder.lower() for folder in folders}) == len(folders):  # disks may not tell case
            return folders
    return [f"{number:03d}-{folder}" for number, folder in enumerate(folders)]


def write_history_page(done: "Sequence[tuple[str, str, Audit]]", out: Path) -> None:
    """Show how audits differ from one to the next, and write the page and the table of that.

    Args:
        done: name, folder and audit of each, in their order.
        out: the folder of the page.
    """
    from rich.console import Console

    from rankwise.auditing import History
    from rankwise.cli.output import print_path
    from rankwise.report import print_document, write_page
    from rankwise.report.comparison_report import history_document

    names = [folder for _, folder, _ in done]
    history = History.of([audit for _, _, audit in done], names)
    document = history_document(history, {folder: f"{folder}/index.html" for folder in names})
    console = Console()
    print_document(document, console)
    for kind, path in (
        ("history", write_page(document, out / "index.html")),
        ("table", history.to_csv(out / "history.csv")),
    ):
        print_path(kind, path, console)
