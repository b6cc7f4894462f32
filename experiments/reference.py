"""Pages of docs/reference that are made from the code: command line, findings, measures and file formats."""

import re
from collections.abc import Sequence
from typing import Any

from typer.main import get_command

from experiments.render import fill_page, markdown_table
from rankwise import measures
from rankwise.auditing import findings, tables
from rankwise.auditing.measure_table import HEAD_MEASURES, STATE_MEASURES, Measure
from rankwise.cli import app

FUNCTIONS = {*measures.__all__}
"""Functions with the names of measures."""

COLUMNS = {
    "place and kind": "stack site layer head kind mask cross call",
    "sequences": "sequences nonfinite_sequences estimated_sequences",
    "size": "tokens sources full_rank head_dim hidden_size heads_per_group",
    "ranks": "numerical_rank scale_free_rank effective_rank stable_rank required_head_dim sigma_max",
    "rows": "row_entropy first_token_mass max_token_mass",
    "distances": "row_spread identity_distance nearest_head_distance",
    "bounds and references of the rank": "rank_low rank_high one_hot_rank random_rank uniform_rank",
    "nearest head, token with the most weight": "nearest_head max_token max_token_sequences",
}
"""Columns of CSV files by group; the rest are other measures."""


def pages() -> dict[str, str]:
    """Return the pages in Markdown by name."""
    numbers = {name: f"{value:g}" for name, value in vars(findings).items() if isinstance(value, int | float)}
    tables = {
        "command-line": {"commands": commands()},
        "findings": {"comparison": _comparison()},
        "measures": {"heads": _measures(HEAD_MEASURES), "states": _measures(STATE_MEASURES, "states: ")},
        "records": {kind: _columns(kind) for kind in ("heads", "states")},
    }
    return {name: fill_page(f"reference/{name}", marks, numbers) for name, marks in tables.items()}


def commands() -> str:
    """Return a section per command: what it does, examples, arguments and options."""
    group: Any = get_command(app)
    parent = group.make_context("rankwise", [], resilient_parsing=True)
    return "\n\n".join(_command(command, parent) for command in group.commands.values())


def _command(command: Any, parent: Any) -> str:
    context = command.make_context(command.name, [], parent, resilient_parsing=True)
    usage = re.sub("[{}]", "", " ".join([context.command_path, *command.collect_usage_pieces(context)]))
    about, _, rest = command.help.partition("[bold]Examples[/bold]")
    examples, _, more = rest.strip().partition("\n\n")
    code = re.sub("^ *", "", f"{usage}\n\n{examples}", flags=re.MULTILINE)
    rows = [_parameter(*param.get_help_record(context)) for param in command.params]
    table = markdown_table(("argument or option", "meaning", "default, range"), rows)
    parts = (f"## rankwise {command.name}", about.strip(), f"```text\n{code}\n```", more, table)
    return "\n\n".join(filter(None, parts))


def _parameter(names: str, words: str) -> list[str]:
    """Return the cells of an option, such as ``--tokens <int range>``, ``Cut …  [default: 256; x>=2]``."""
    meaning, _, default = words.replace("\\[", "[").partition("  [")
    names = re.sub(r"list\[(\w+)\]| range", r"\1", names)
    meaning = re.sub(r"([\[\]])", r"\\\1", meaning)
    default = default.replace("default: ", "").replace("x>=", "at least ").removesuffix("]")
    return _cells(f"`{names}`", meaning, default)


def _comparison() -> str:
    """Return a table: what a comparison matches the findings of each code by, and their number."""
    rows = [
        (f"[{code}](#{code.lower()})", rule.about, f"`{rule.decided_by}`")
        for code, rule in findings.FINDING_RULES.items()
    ]
    return markdown_table(("code", "matched by", "number that is compared"), rows)


def _columns(kind: str) -> str:
    """Return a table of the columns that each CSV file of a kind has, by group."""
    groups: dict[str, list[str]] = {}
    for name in tables.table(kind, [])[0]:
        found = [group for group, names in COLUMNS.items() if name in names.split()]
        groups.setdefault(*found or ["other measures"], []).append(f"`{name}`")
    return markdown_table(
        ("group", "columns"), [(group, ", ".join(names)) for group, names in groups.items()]
    )


def _measures(shown: Sequence[Measure], prefix: str = "") -> str:
    """Return a table of measures, and a section per measure."""
    headings = [f"{prefix}{measure.name}" for measure in shown]
    rows, sections = [], []
    for heading, one in zip(headings, shown, strict=True):
        name = f"[`{one.name}`](#{heading.replace(': ', '-')})" + (f", {one.symbol}" if one.symbol else "")
        rows.append(_cells(name, one.range.text, one.low, one.high))
        function = one.function or one.name
        link = f"\n- Function: [`rw.measures.{function}`](python.md#rankwise.measures.{function})"
        title = f"**{one.title.replace(' share', '')}.** {one.meaning}"
        about = f"- Formula: {one.formula}\n- Cost: {one.cost}" + (link if function in FUNCTIONS else "")
        sections.append(f"### {heading}\n\n{title}\n\n{about}")
    table = markdown_table(("measure", "range", "low", "high"), rows)
    return "\n\n".join([table, *sections])


def _cells(*cells: str) -> list[str]:
    return [cell.replace("|", "\\|") for cell in cells]
