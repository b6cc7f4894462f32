"""Prepare folders, show progress, print results and write reports for all commands."""

import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import rich.progress
import typer
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rankwise._internals.files import locked, writable_folder
from rankwise._internals.forward import Progress
from rankwise.cli.options import FOUND
from rankwise.errors import InputError, RankwiseError

if TYPE_CHECKING:
    from rankwise.auditing import Audit
    from rankwise.report.document import Document

_new: list[Path] = []
"""Folders that did not exist before the running command, innermost first."""


@contextmanager
def new_folder(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Create a folder, locked unless `shared`. If the command fails, remove new folders that stay empty."""
    _new[:] = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        writable_folder(folder)
        with nullcontext() if shared else locked(folder):
            yield
    except BaseException:
        remove_empty_folders()
        raise


def remove_empty_folders() -> None:
    """Remove the folders that the running command created, innermost first, up to a folder with files."""
    with suppress(OSError):
        for path in _new:
            path.rmdir()


def is_of_audit(file: Path) -> bool:
    """Return True if a file belongs to an audit or is the page or table of several audits."""
    if (file.parent / "audit.json").exists():
        return file.name in ("audit.json", "index.html", "heads.csv", "states.csv")
    return file.name in ("index.html", "history.csv") and any(file.parent.glob("*/audit.json"))


def check_no_audit(out: Path, *, several: bool | None = None) -> None:
    """Raise `InputError` if a folder holds audits whose page a command would replace.

    The page of one model may be replaced by another audit of one model (``several=False``), and the page of
    several models by audits of several models (``several=True``).
    """
    has_one = (out / "audit.json").exists()
    if is_of_audit(out / "index.html") and several is not (not has_one):
        expected, fix = "a folder without other audits", "Choose another folder: its page would be replaced."
        got = "the audit of one model" if has_one else "audits of several models"
        raise InputError(f"--out {out}", expected=expected, got=got, fix=fix)


def exit_if_found(audits: "Iterable[Audit]", codes: Iterable[str], error: Exception | None = None) -> None:
    """Exit with status `FOUND` if an audit has a finding of these codes. Otherwise raise any ``error``."""
    failing = sorted({finding.code for audit in audits for finding in audit.findings} & set(codes))
    if failing:
        if isinstance(error, RankwiseError):
            print(f"rankwise: {error}", file=sys.stderr)
        print(f"rankwise: found {', '.join(failing)} (--fail-on)", file=sys.stderr)
        raise typer.Exit(FOUND)
    if error is not None:
        raise error


def command_line() -> str:
    """Return the running command, which is recorded with its results."""
    return shlex.join(["rankwise", *sys.argv[1:]])


def quiet_libraries() -> None:
    """Turn off the messages and progress bars of other libraries."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def show_progress(what: str = "loading the model") -> Iterator[Progress]:
    """Show a step, the finished share and the remaining time if standard error is a terminal.

    Yield a function of step and share. The time counts from the last restart of the share.
    """
    console = Console(stderr=True)
    text = TextColumn("{task.description}", markup=False)
    columns = (
        SpinnerColumn(),
        text,
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with rich.progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=None)
        last = math.inf

        def update(step: str, done: float) -> None:
            nonlocal last
            if not done >= last:  # a new kind of step
                progress.reset(task, total=None if math.isnan(done) else 1.0)
            progress.update(task, description=step, completed=0.0 if math.isnan(done) else done)
            last = done

        yield update


def print_results(
    document: "Document | None", written: Iterable[tuple[str, Path | str]] = (), *, verbose: bool = False
) -> None:
    """Print a report, then the kind and path of each written file; ignore a closed pipe."""
    from rankwise.report import print_document

    console = Console()
    with suppress(BrokenPipeError):
        if document is not None:
            print_document(document, console, verbose=verbose)
        for kind, path in written:
            console.print(f"{kind}: {path}", highlight=False, markup=False, emoji=False, soft_wrap=True)


def keep_finished(record: Path, complete: bool) -> Path:
    """Return the folder for a new record: a subfolder if an incomplete one would replace a complete one."""
    with suppress(OSError, ValueError, AttributeError):  # the old record may be damaged
        if not complete and json.loads(record.read_bytes()).get("complete", True):
            folder = record.parent / "incomplete"
            print(f"rankwise: {record} is complete and kept; see {folder} for this run", file=sys.stderr)
            return folder
    return record.parent


def write_report(audit: "Audit", folder: Path, *, brief: bool = False, verbose: bool = False) -> None:
    """Write an audit, its page and its tables. Print the report, or a single line if `brief`.

    Raises:
        InputError: if the folder cannot be written. The audit is then in the temporary folder.
    """
    from rankwise.report.audit_report import audit_document
    from rankwise.report.format import count

    folder = keep_finished(folder / "audit.json", audit.complete)
    try:
        data, page = audit.save(folder / "audit.json"), audit.to_html(folder / "index.html")
        tables = [audit.to_csv(folder / f"{kind}.csv", kind).name for kind in ("heads", "states")]
    except InputError as error:
        rescued = audit.save(Path(tempfile.mkdtemp(prefix="rankwise-")) / "audit.json")
        fix = f"{error.fix} The audit is kept in {rescued}."
        raise InputError(error.subject, expected=error.expected, got=error.got, fix=fix) from error
    if brief:
        sizes = f"{count(len(audit.heads), 'head')}, {count(len(audit.findings), 'finding')}"
        sizes += "" if audit.complete else ", incomplete"
        print_results(None, [(f"{audit.provenance.model}: {sizes}", folder)])
    else:
        files = ", ".join([str(data), *tables])
        print_results(audit_document(audit), [("report", page), ("data", files)], verbose=verbose)
