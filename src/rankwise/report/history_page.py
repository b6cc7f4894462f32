"""A history of audits as one HTML file: curves over the steps, a table, and what became of findings."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise._internals.files import write_file
from rankwise.auditing.comparison import LayerKey
from rankwise.auditing.findings import about
from rankwise.auditing.measure_table import DRAWN, PICTURED, HeadMeasure, LayerMeasure
from rankwise.auditing.records import SEVERITY_ORDER, Finding
from rankwise.report.comparison_page import finding_groups
from rankwise.report.history import HEADS, STATES, audit_words
from rankwise.report.pages import chart_script, render_page, template_text
from rankwise.report.text import SEVERITIES, model_name

if TYPE_CHECKING:
    from rankwise.auditing.history import History

MOST_FINDINGS = 60
"""Rows of the table of findings; those that changed come first."""
DIGITS = 5
"""Significant digits of a point."""


def write_history(history: "History", path: Path, links: Mapping[str, str] | None = None) -> Path:
    """Write a history as one self-contained HTML file.

    Args:
        history: the audits.
        path: the file; for an existing folder, ``index.html`` in it.
        links: pages of single audits, by name.

    Returns:
        The file written.

    Raises:
        InputError: where it cannot be written.
    """
    path = path / "index.html" if path.is_dir() else path
    scripts = [chart_script(), template_text("history.js")]
    return write_file(
        path, render_page("history.html", history_context(history, links or {}), scripts), "history"
    )


def history_context(history: "History", links: Mapping[str, str]) -> dict[str, Any]:
    """Gather what the template prints; nothing of it is escaped yet.

    Args:
        history: the audits.
        links: pages of single audits, by name.
    """
    columns = ["heads", *(measure.head for measure in HEADS), *(m.symbol or m.title for m in STATES)]
    findings = finding_rows([audit.findings for audit in history.audits])
    return {
        "history": history,
        "columns": [*columns, "errors/warnings/notes"],
        "rows": [
            (model_name(name), links.get(name, ""), step, audit_words(audit))
            for step, name, audit in zip(history.steps, history.names, history.audits, strict=True)
        ],
        "findings": findings[:MOST_FINDINGS],
        "more_findings": max(0, len(findings) - MOST_FINDINGS),
        "ends": finding_groups(history.comparison) if len(history) > 1 else [],
        "warnings": history.warnings,
        "structure": history.comparison.structure if len(history) > 1 else [],
        "data": {
            "steps": history.steps,
            "names": [model_name(name) for name in history.names],
            "counted": history.counted,
            "charts": charts(history),
        },
    }


def charts(history: "History") -> list[dict[str, Any]]:
    """A chart for each measure and stack: a line for each layer over the steps, with its spread.

    Args:
        history: the audits.
    """
    curves = history.curves()
    drawn: list[dict[str, Any]] = []
    tables: list[tuple[str, Sequence[HeadMeasure] | Sequence[LayerMeasure]]] = [
        ("heads", PICTURED),
        ("states", DRAWN),
    ]
    for of, table in tables:
        for measure in table:
            mine = [key for key in curves if key.of == of and key.measure.split(" of ")[0] == measure.name]
            for (stack, cross, called), keys in groupby(mine, key=lambda y: (y.stack, y.cross, y.measure)):
                name = f"{stack}{', cross' if cross else ''}"
                lines = [_line(key, curves[key]) for key in keys]
                quantity = called.partition(" of ")[2]
                drawn.append(
                    {"of": of, "title": measure.title, "stack": name, "quantity": quantity, "lines": lines}
                )
    return drawn


def _line(key: LayerKey, points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    values, spreads = ([_short(pair[side]) for pair in points] for side in (0, 1))
    return {"layer": key.layer, "values": values, "spread": spreads}


def _short(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def finding_rows(findings: Sequence[Sequence[Finding]]) -> list[tuple[str, list[str]]]:
    """Findings by code and layer, of the model by code: for each audit the severity of the gravest there.

    Args:
        findings: of each audit.

    Returns:
        Those that are not in all audits first.
    """
    rows: dict[tuple[str, str, int], dict[int, str]] = {}
    for at, found in enumerate(findings):
        for listed in sorted(found, key=lambda finding: -SEVERITY_ORDER[finding.severity]):
            layer = -1 if listed.where.layer is None else listed.where.layer
            key = (listed.code, listed.where.stack or listed.where.site, layer)
            key = (listed.code, "", -1) if about(listed.code) == "model" else key
            rows.setdefault(key, {})[at] = SEVERITIES[listed.severity][0]
    ordered = sorted(rows, key=lambda key: (len(rows[key]) == len(findings), key))
    return [
        (
            " ".join([code, *([stack] if stack else []), *([f"layer {layer}"] if layer >= 0 else [])]),
            [rows[code, stack, layer].get(at, "") for at in range(len(findings))],
        )
        for code, stack, layer in ordered
    ]
