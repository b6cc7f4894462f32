"""The report on the console: findings first, then the layers, then where the numbers come from."""

import math
from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rankwise._internals.records import format_number
from rankwise.auditing.importance_findings import estimate_words, whole_words
from rankwise.auditing.measure_table import HEAD_MEASURES, LAYER_MEASURES, HeadMeasure, share
from rankwise.auditing.records import HeadRecord, LayerRecord
from rankwise.auditing.result import Audit
from rankwise.importance.records import ImportanceRecord
from rankwise.report.console import ascii_fallback, line
from rankwise.report.heatmap_grid import Grid, Row, grids_of
from rankwise.report.terminal import new_table, print_findings, tally
from rankwise.report.text import (
    RANK,
    count,
    mean,
    model_name,
    null_share,
    plain,
    random_share,
    rank_share,
    uniform_share,
)

_MOST_NAMES = 5

_HEAD_COLUMNS = [measure for measure in HEAD_MEASURES if measure.console]
_LAYER_COLUMNS = [measure for measure in LAYER_MEASURES if measure.console]
_IF_ROOM = ("required_head_dim",)
"""Left out where worth or a baseline add columns: a line of 80 characters has no room for all."""
_NULLS = {"random": random_share, "uniform": uniform_share}
"""Beside the barrier, shown where they are known."""


def render_console(audit: Audit, console: Console | None = None) -> None:
    """Print an audit: its findings, a table of the layers, and where the numbers come from.

    Args:
        audit: the audit.
        console: where to print; the standard output where there is none.

    Examples:
        >>> from rankwise.auditing.records import Provenance
        >>> about = Provenance(model="m", delta=0.01)
        >>> audit = Audit(provenance=about, heads=[], layers=[], findings=[])
        >>> render_console(audit, Console(width=60))
        Rankwise audit  m
        0 sequences · δ = 0.01
        <BLANKLINE>
        No findings
        <BLANKLINE>
        No heads: no mixing operator was captured.
        <BLANKLINE>
        exact · measured in float64
    """
    with ascii_fallback(console or Console()) as out:
        _print_header(audit, out)
        out.print()
        out.print(tally(audit.findings))
        out.print()
        print_findings(audit.findings, out)
        for title, table in _tables(audit):
            out.print(title, overflow="fold")
            out.print(table)
            out.print()
        if not audit.heads:
            out.print("No heads: no mixing operator was captured.")
            out.print()
        if audit.importance is not None:
            _print_importance(audit, audit.importance, out)
        _print_unseen(audit, out)
        _print_provenance(audit, out)


def console_text(audit: Audit, width: int = 100) -> str:
    """What `render_console` prints, as text without colours.

    Args:
        audit: the audit.
        width: of a line, in characters.
    """
    file = StringIO()
    render_console(audit, Console(file=file, width=width, color_system=None))
    return file.getvalue()


def _print_header(audit: Audit, console: Console) -> None:
    about = audit.provenance
    console.print(
        line(("Rankwise audit", "bold"), (model_name(about.model), "bold cyan"), separator="  "),
        overflow="fold",
    )
    parameters = f"{about.parameters:,} parameters" if about.parameters else ""
    sequences = count(about.sequences, "sequence")
    facts = line(about.model_class, parameters, about.data, sequences, f"δ = {about.delta}")
    console.print(facts, overflow="fold")
    if not audit.complete:
        stopped = "The audit stopped before it had read all of its data."
        console.print(line(("INCOMPLETE", "bold black on yellow"), (stopped, "yellow"), separator="  "))


def _tables(audit: Audit) -> list[tuple[Text, Table]]:
    stacks = dict.fromkeys(layer.stack for layer in audit.layers)
    heads = [_head_table(panel, audit.heads) for panel in grids_of(audit.heads)]
    return heads + [_state_table(stack, audit.layers) for stack in stacks]


def _head_table(panel: Grid, heads: Sequence[HeadRecord]) -> tuple[Text, Table]:
    """A row for each layer; what is the same in all of them is said once, in the title."""
    mine = [heads[index] for index in panel.indices]
    kinds, masks = {head.kind for head in mine}, {head.mask for head in mine}
    lengths = {format_number(head.tokens, 0) for head in mine}
    varied = [name for name, values in (("kind", kinds), ("mask", masks)) if len(values) > 1]
    facts = [
        *(kinds if len(kinds) == 1 else []),
        *(f"{mask} mask" for mask in masks if len(masks) == 1 and kinds != {"diagonal"}),
        *(["δ relative to σ₁"] if any(RANK.shown_field(head) != RANK.name for head in mine) else []),
        *([panel.pattern] if panel.pattern != panel.title else []),
        *(f"{length} tokens" for length in lengths if len(lengths) == 1),
    ]
    tokens = ["tokens"] if len(lengths) > 1 else []
    nulls = [name for name, of in _NULLS.items() if any(math.isfinite(of(head)) for head in mine)]
    crowded = any(head.baseline or head.importance for head in mine)
    if any(head.baseline for head in mine):
        nulls = []  # a line has room for what the model itself is at fresh weights, or for these
    shares = ["rank\nshare", "null\nshare", *(f"{name}\nshare" for name in nulls)]
    measures = [
        measure
        for measure in _HEAD_COLUMNS
        if (not measure.kinds or kinds & set(measure.kinds))
        and measure.known_in(mine)
        and not (crowded and measure.name in _IF_ROOM)
    ]
    numbers = [*tokens, *shares, *(measure.console for measure in measures)]
    table = new_table([(name, name not in varied) for name in ["layer", "heads", *varied, *numbers]])
    for row in panel.rows:
        own = [heads[index] for index in row.cells.values()]
        _add_layer(table, row, own, [*varied, *tokens], nulls, measures)
    return line((panel.title, "bold"), (", ".join(facts), "dim")), table


def _add_layer(
    table: Table,
    row: Row,
    heads: Sequence[HeadRecord],
    varied: Sequence[str],
    nulls: Sequence[str],
    measures: Sequence[HeadMeasure],
) -> None:
    rank, null = mean(map(rank_share, heads)), mean(map(null_share, heads))
    words = [name for name in varied if name != "tokens"]
    texts = [Text(plain(", ".join(dict.fromkeys(getattr(head, name) for head in heads)))) for name in words]
    numbers: list[str | Text] = [
        *([format_number(mean(head.tokens for head in heads), 0)] if "tokens" in varied else []),
        _share_words(heads, rank),
        format_number(null, 2),
        *(format_number(mean(map(_NULLS[name], heads)), 2) for name in nulls),
        *(_measure_words(measure, heads) for measure in measures),
    ]
    table.add_row(str(row.layer), str(len(heads)), *texts, *numbers)


def _measure_words(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> str:
    values = [value for head in heads if math.isfinite(value := measure.value(head))]
    whole = sum(values) if measure.summed and values else mean(values)
    mark = "≈" if any(measure.name in head.stderr for head in heads) else ""
    return mark + format_number(whole, measure.digits)


def _share_words(heads: Sequence[HeadRecord], rank: float) -> str:
    """The mean rank share; from the least to the most it can be where an estimate only bounds some."""
    if all(math.isfinite(rank_share(head)) or not head.estimated for head in heads):
        return ("≈" if any(head.estimated for head in heads) else "") + format_number(rank, 2)
    if any(RANK.shown_field(head) != RANK.name for head in heads):
        return format_number(rank, 2)  # of a relative rank no interval is kept
    ends = (mean(share(h.least_rank, h) for h in heads), mean(share(h.most_rank, h) for h in heads))
    return "–".join(format_number(end, 2) for end in ends)


def _state_table(stack: str, layers: Sequence[LayerRecord]) -> tuple[Text, Table]:
    columns = ["blocks\npassed", "tokens", *(measure.console for measure in _LAYER_COLUMNS)]
    name = f"{stack}, token states" if stack else "token states"
    table = new_table([(column, True) for column in columns])
    for layer in sorted((layer for layer in layers if layer.stack == stack), key=lambda layer: layer.layer):
        measured = [measure.formatted(layer) for measure in _LAYER_COLUMNS]
        table.add_row(str(layer.layer), format_number(layer.tokens, 0), *measured)
    return line((name, "bold"), ("μ/‖Y‖ of 0: all tokens alike", "dim")), table


def _print_importance(audit: Audit, importance: ImportanceRecord, console: Console) -> None:
    """What was lost, and how far the estimates of removal hold."""
    removed = (
        f"a removed head is replaced by {'zero' if importance.ablation == 'zero' else 'its mean over tokens'}"
    )
    facts = line(("Importance", "bold"), importance.loss, whole_words(importance), removed)
    console.print(facts, overflow="fold")
    for name, words in estimate_words([head.importance for head in audit.heads], importance.blocks):
        console.print(f"{name}: {words}", overflow="fold")
    found = importance.removable
    if found is not None and not found.heads:
        console.print(
            f"No set of heads was found that can go at {found.tolerance:.2%} of {importance.reference_name}."
        )
    for note in importance.notes:
        console.print(line(("Note: ", "bold"), note, separator=""), overflow="fold")
    console.print()


def _print_unseen(audit: Audit, console: Console) -> None:
    if not audit.uncaptured:
        return
    names = ", ".join(module.name for module in audit.uncaptured[:_MOST_NAMES])
    more = len(audit.uncaptured) - _MOST_NAMES
    rest = f" … and {more} more (see the report)" if more > 0 else ""
    console.print(line(("Not captured:", "bold"), f" {names}{rest}", separator=""), overflow="fold")
    console.print()


def _print_provenance(audit: Audit, console: Console) -> None:
    about = audit.provenance
    kept = f"{about.model_dtype} measured in" if about.model_dtype else "measured in"
    batches = f"in {count(about.batches, 'batch', 'batches')}" if about.batches else ""
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    revision = f"revision {about.revision}" if about.revision else ""
    facts = [
        about.method,
        f"{kept} {about.measure_dtype}",
        about.device,
        batches,
        revision,
        about.created,
        versions,
    ]
    console.print(line(*((fact, "dim") for fact in facts)), overflow="fold")
    if audit.baseline is not None:
        console.print(line(("Fresh: ", "bold"), str(audit.baseline), separator=""), overflow="fold")
    for note in about.notes:
        console.print(line(("Note: ", "bold"), note, separator=""), overflow="fold")
