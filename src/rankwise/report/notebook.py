"""What a notebook shows of an audit: a small table and a map of its ranks, without scripts."""

import math
from collections.abc import Sequence
from html import escape

from rankwise._internals.records import format_number
from rankwise.auditing.measure_table import HEAD_MEASURES, HeadMeasure
from rankwise.auditing.records import HeadRecord
from rankwise.auditing.result import Audit
from rankwise.report.panels import Panel, Row, make_panels
from rankwise.report.text import SEVERITIES, count, mean, model_name

MOST_ROWS, MOST_COLUMNS = 48, 64
"""Layers and heads of a map that are shown; of more, it is said how many."""
_COLUMNS = ("numerical_rank", "effective_rank", "stable_rank", "first_token_mass")
_MEASURES = [measure for measure in HEAD_MEASURES if measure.name in _COLUMNS]
_CELL = "padding:0 .3em;text-align:right"


def notebook_html(audit: Audit) -> str:
    """Write an audit as a piece of HTML: a table of the layers, and the rank of every head as a colour.

    Everything in it is escaped; it holds no script and asks the network for nothing.

    Args:
        audit: the audit.

    Examples:
        >>> from rankwise.auditing.records import Provenance
        >>> about = Provenance(model="<b>", delta=0.01)
        >>> text = notebook_html(Audit(provenance=about, heads=[], layers=[], findings=[]))
        >>> text.removeprefix("<div><strong>Rankwise audit</strong> ")
        '&lt;b&gt;<br>0 heads · 0 sequences · δ = 0.01 · no findings</div>'
    """
    panels = make_panels(audit.heads)
    return "".join([f"<div>{_header(audit)}", *(_panel(panel, audit.heads) for panel in panels), "</div>"])


def _header(audit: Audit) -> str:
    about = audit.provenance
    numbers = {severity: sum(f.severity == severity for f in audit.findings) for severity in SEVERITIES}
    findings = ", ".join(count(n, *SEVERITIES[severity]) for severity, n in numbers.items() if n)
    facts = [
        count(len(audit.heads), "head"),
        count(about.sequences, "sequence"),
        f"δ = {about.delta}",
        findings or "no findings",
        *([] if audit.complete else ["incomplete"]),
    ]
    return f"<strong>Rankwise audit</strong> {escape(model_name(about.model))}<br>{escape(' · '.join(facts))}"


def _panel(panel: Panel, heads: Sequence[HeadRecord]) -> str:
    rows, columns = panel.rows[:MOST_ROWS], panel.columns[:MOST_COLUMNS]
    head = "".join(f"<th>{escape(name)}</th>" for name in ["layer", *(m.head for m in _MEASURES)])
    body = "".join(_row(row, columns, heads) for row in rows)
    more = [
        f"{len(whole) - len(part)} more {words}"
        for words, whole, part in (("layers", panel.rows, rows), ("heads", panel.columns, columns))
        if len(whole) > len(part)
    ]
    rest = f"<div>… and {' and '.join(more)} not shown</div>" if more else ""
    measure = HEAD_MEASURES[0]
    said = f"{measure.head} of each head, from {_block(0.0)} 0 to {_block(1.0)} 1"
    return (
        "<div style='overflow-x:auto'><table>"
        f"<caption style='text-align:left'>{escape(panel.title)}</caption>"
        f"<thead><tr>{head}<th style='text-align:left'>{said}</th></tr></thead><tbody>{body}</tbody></table>"
        f"{rest}</div>"
    )


def _row(row: Row, columns: Sequence[int], heads: Sequence[HeadRecord]) -> str:
    mine = [heads[index] for index in row.cells.values()]
    numbers = "".join(
        f"<td style='{_CELL}'>{format_number(_mean(m, mine), m.digits)}</td>" for m in _MEASURES
    )
    drawn = (row.cells.get(number) for number in columns)
    cells = "".join(_block(math.nan) if index is None else _coloured(heads[index]) for index in drawn)
    return (
        f"<tr><th title='{escape(row.site)}'>{row.layer}</th>{numbers}"
        f"<td style='text-align:left;white-space:nowrap'>{cells}</td></tr>"
    )


def _mean(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> float:
    return mean(measure.value(head) for head in heads)


def _coloured(head: HeadRecord) -> str:
    measure = HEAD_MEASURES[0]
    return _block(measure.value(head), f"head {head.head}: {measure.formatted(head)}")


def _block(value: float, title: str = "") -> str:
    """A square of one hue, deeper for more; an outline alone where there is no number."""
    known = math.isfinite(value)
    depth = min(max(value, 0.0), 1.0) if known else 0.0
    colour = f"hsl(215,60%,{92 - 62 * depth:.0f}%)" if known else "transparent"
    style = (
        f"display:inline-block;width:.9em;height:.9em;margin:1px;border:1px solid #8884;background:{colour}"
    )
    return f"<span style='{style}' title='{escape(title)}'></span>"
