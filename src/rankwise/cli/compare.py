"""`rankwise compare`."""

from pathlib import Path
from typing import Annotated

import typer

HELP = """Show what changed between two audits, the largest changes first.

[bold]Example[/bold]

  rankwise compare before/ after/ --out changes.json
"""


def command(
    before: Annotated[Path, typer.Argument(help="audit.json, or the folder it lies in.")],
    after: Annotated[Path, typer.Argument(help="Likewise, of the changed model.")],
    out: Annotated[Path | None, typer.Option(help="Also write the comparison as JSON.")] = None,
) -> None:
    """Compare two audits; see `HELP`."""
    from rich.console import Console

    from rankwise.audit import Audit, compare
    from rankwise.files import write_whole
    from rankwise.report import render_comparison

    comparison = compare(Audit.load(before), Audit.load(after))
    console = Console()
    render_comparison(comparison, console)
    if out is not None:
        written = write_whole(out, comparison.model_dump_json(indent=1), "comparison")
        console.print(f"comparison: {written}", highlight=False, markup=False, soft_wrap=True)
