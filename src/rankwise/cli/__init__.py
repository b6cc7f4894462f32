"""Command line, with one file per command: each parses options, calls the library and prints results."""

import re
import sys

import typer

from rankwise.cli import audit, claims, compare, compress, convert, merge, plan, skip
from rankwise.cli.options import OptionalValues

__all__ = ["app", "main"]

app = typer.Typer(
    name="rankwise",
    help="Measure, preserve and use the rank of sequence models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for module in (audit, merge, compare, claims, plan, skip, compress, convert):
    # Rich keeps line breaks. Lines of paragraphs are joined, because a terminal can be narrow.
    paragraphs = re.sub(r"(?<!\n)\n(?![\n ])", " ", module.HELP)
    name = module.__name__.rpartition(".")[2]
    app.command(name, help=paragraphs, cls=OptionalValues)(module.command)


@app.callback(invoke_without_command=True)
def _main(
    version: bool = typer.Option(False, "--version", is_eager=True, help="Print the version and leave."),
) -> None:
    if version:
        from rankwise import __version__

        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run a command; print errors that are meant for users on standard error, without a traceback."""
    from rankwise.errors import RankwiseError

    try:
        app()
    except RankwiseError as error:
        sys.exit(f"rankwise: {error}")
