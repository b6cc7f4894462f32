"""What every command does with its console and its folder."""

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rankwise._internals.files import writable_folder
from rankwise.errors import InputError

if TYPE_CHECKING:
    from rankwise.auditing import Audit


TABLES: tuple[Literal["heads", "layers"], ...] = ("heads", "layers")
"""Records that are also written as CSV."""
_KINDS = {".html": "report", ".json": "audit", ".csv": "table"}


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """`writable_folder`; where nothing comes of it, by an error or Ctrl-C, no empty folder is left behind.

    Args:
        folder: the folder.
    """
    existed = folder.exists()
    writable_folder(folder)
    try:
        yield
    except BaseException:
        if not existed:
            with suppress(OSError):  # something was written into it
                folder.rmdir()
        raise


def check_unused(folder: Path, fix: str = "Choose another name.") -> None:
    """Raise InputError if `--out` is a file or a folder with files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"--out {folder}",
            expected="a folder that is new or empty",
            got="one with files in it" if folder.is_dir() else "a file",
            fix=fix,
        )


def print_path(kind: str, path: Path, console: Console) -> None:
    """Print where a file was written, in one line that can be copied."""
    console.print(f"{kind}: {path}", highlight=False, markup=False, soft_wrap=True)


def command_line() -> str:
    """The command that is running, for the record of what it made."""
    return shlex.join(["rankwise", *sys.argv[1:]])


def quiet_libraries() -> None:
    """Keep other libraries' advice and bars out of our output; their errors reach the user through ours."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is under way, where that is a terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("running the model", total=None)

        yield lambda what: progress.update(task, description=what)


@contextmanager
def show_trials(trials: int) -> Iterator[Callable[[int], None]]:
    """A progress bar of trials on standard error, where that is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("drawing random heads", total=trials)
        yield lambda done: progress.update(task, completed=done)


def write_report(audit: "Audit", folder: Path, *, brief: bool = False) -> None:
    """Write the audit, its page and its tables, then show the findings and say what was written where.

    Args:
        audit: what to write.
        folder: where to; if that fails now, the JSON goes to the temporary folder so that nothing is lost.
        brief: say in one line what was found, and name the folder only.

    Raises:
        InputError: if the folder cannot be written to any more.
    """
    from rankwise.report import print_document
    from rankwise.report.audit_report import audit_document

    try:
        written = [audit.save(folder / "audit.json"), audit.to_html(folder / "index.html")]
        written += [audit.to_csv(folder / f"{kind}.csv", kind) for kind in TABLES]
    except InputError as error:
        rescued = audit.save(Path(tempfile.mkdtemp(prefix="rankwise-")) / "audit.json")
        raise InputError(
            error.subject,
            expected=error.expected,
            got=error.got,
            fix=f"{error.fix} The audit is kept in {rescued}.",
        ) from error
    console = Console()
    with suppress(BrokenPipeError):  # a reader that has seen enough loses nothing
        if brief:
            counts = f"{len(audit.heads)} heads, {len(audit.findings)} findings"
            console.print(
                f"{audit.provenance.model}: {counts}, {folder}", highlight=False, markup=False, soft_wrap=True
            )
            return
        print_document(audit_document(audit), console)
        for path in written:
            print_path(_KINDS[path.suffix], path, console)
