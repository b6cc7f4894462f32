"""A history of audits on the console: a row for each of them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from rankwise._internals.records import format_number
from rankwise.auditing.history import steps_of
from rankwise.auditing.measure_table import HEAD_MEASURES, LAYER_MEASURES, Measure
from rankwise.auditing.result import Audit
from rankwise.report.console import ascii_fallback, line
from rankwise.report.terminal import new_table
from rankwise.report.text import SEVERITIES, count, mean, model_name, plain

if TYPE_CHECKING:
    from rankwise.auditing.history import History

HEADS = [
    m
    for m in HEAD_MEASURES
    if m.name in ("numerical_rank", "effective_rank", "stable_rank", "first_token_mass")
]
_NAME = 14
"""Columns of a name that is not broken over lines, at least."""
STATES = [m for m in LAYER_MEASURES if m.name in ("relative_spread", "mean_cosine")]
"""Of the last states of each stack."""


def render_history(history: "History", console: Console | None = None) -> None:
    """Print a history: for each audit the means over its heads, its last states, and its findings.

    Args:
        history: the audits.
        console: where to print; the standard output where there is none.
    """
    with ascii_fallback(console or Console()) as out:
        said, names = count(len(history), "audit"), [plain(model_name(name)) for name in history.names]
        between = f"{names[0]} to {names[-1]}" if len(names) > 1 else ""
        out.print(line(("Rankwise history", "bold"), said, between, separator="  "), overflow="fold")
        facts = "means over all heads; states: at the end; findings: errors/warnings/notes"
        out.print(line((facts, "dim")), overflow="fold")
        for warning in history.warnings:
            out.print(line(("warning", "bold yellow"), warning, separator="  "), overflow="fold")
        told = not history.counted and steps_of(history.names) == history.steps  # then a step says it all
        first = [("step", True)] if told else [("audit", False)]
        counts = [] if told or history.counted else [("step", True)]
        measures = [(measure.console or measure.head.lower().replace(" ", "\n"), True) for measure in HEADS]
        measures += [(measure.console, True) for measure in STATES]
        longest = max((len(model_name(name)) for name in history.names), default=0)
        table = new_table([*first, *counts, ("heads", True), *measures, ("findings", True)])
        if not told:
            table.columns[0].min_width = min(longest, _NAME)
        who: Sequence[str | Text]
        for step, name, audit in zip(history.steps, history.names, history.audits, strict=True):
            called = Text(plain(model_name(name)))
            who = [str(step)] if told else [called] if history.counted else [called, str(step)]
            table.add_row(*who, *audit_words(audit))
        out.print(table)


def audit_words(audit: Audit) -> list[str]:
    """What a row says of an audit: its heads, their means, its last states, its findings.

    Args:
        audit: the audit.
    """
    last = list({layer.stack: layer for layer in sorted(audit.layers, key=lambda x: x.layer)}.values())
    return [
        str(len(audit.heads)) + ("" if audit.complete else ", incomplete"),
        *(_mean_words(measure, audit.heads) for measure in HEADS),
        *(_mean_words(measure, last) for measure in STATES),
        "/".join(str(sum(f.severity == severity for f in audit.findings)) for severity in SEVERITIES),
    ]


def _mean_words(measure: Measure, records: Sequence[Any]) -> str:
    value = mean(measure.value(record) for record in records)
    return format_number(value, measure.digits) if math.isfinite(value) else format_number(value)
