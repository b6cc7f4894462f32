"""Command `rankwise merge`: merge saved audits of one model into the audit of all their data."""

from pathlib import Path
from typing import Annotated

import typer

from rankwise.cli import options

HELP = """Merge saved audits of one model, each of other sequences, into one audit of all sequences.

Means, standard deviations and counts are as in one audit of all sequences, and findings are judged again.
Removable heads, required head widths and comparisons with initialization are left out, because files do not
hold enough for them. Ranks of pooled states, keys and values need audits of shards (--shards K/N), whose
files hold second moments. Each sequence may be counted only once.

[bold]Examples[/bold]

  rankwise merge first/audit.json second/audit.json --out both
  rankwise merge shard-*/ --out all --fail-on COLLAPSE
"""


def command(
    audits: Annotated[
        list[Path], typer.Argument(metavar="AUDIT", help="Files audit.json, or folders with an audit.")
    ],
    out: Annotated[Path, typer.Option(help="Write the report to this folder.")],
    fail_on: options.FailOn = None,
    verbose: options.Verbose = False,
) -> None:
    """Merge audits; `HELP` describes the command."""
    from rankwise.auditing import Audit
    from rankwise.auditing.findings import check_codes
    from rankwise.cli import output

    codes = check_codes(fail_on or [])
    output.check_no_audit(out)
    parts = [Audit.load(path) for path in audits]
    with output.new_folder(out):
        merged = Audit.merge(parts)
        output.write_report(merged, out, verbose=verbose)
    output.exit_if_found([merged], codes)
