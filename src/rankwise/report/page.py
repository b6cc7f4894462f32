"""The report as one HTML file that needs nothing else: what the page says, in its order and words."""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rankwise.audit.measures import DRAWN, HeadMeasure, pictured, shown
from rankwise.audit.records import AuditRecord, Finding, HeadRecord, LayerRecord
from rankwise.files import write_whole
from rankwise.report.charts import chart_script
from rankwise.report.curves import draw_depth, opening_heads, spectra
from rankwise.report.heatmap import describe, draw_panel
from rankwise.report.memberships import membership_maps
from rankwise.report.panels import Panel, make_panels
from rankwise.report.targets import find_targets, finding_groups, marks_of, severity_counts
from rankwise.report.text import (
    SEVERITIES,
    count,
    mean,
    null_share,
    random_share,
    rank_share,
    uniform_share,
)

_SCRIPTS = ("theme.js", "heatmap.js", "curves.js", "memberships.js", "page.js")


def write_html(audit: AuditRecord, path: Path) -> Path:
    """Write an audit as one self-contained HTML file.

    The file holds its scripts, styles and data; it asks the network for nothing, and a policy in it forbids
    the browser to. It is written beside its place under another name and then renamed, so that a reader never
    meets half a report.

    Args:
        audit: the audit.
        path: the file to write; for an existing folder, ``index.html`` in it.

    Returns:
        The file written.

    Raises:
        InputError: where the file cannot be written.

    Examples:
        >>> import tempfile
        >>> from rankwise.audit.records import Provenance
        >>> about = Provenance(model="m", delta=0.01)
        >>> audit = AuditRecord(provenance=about, heads=[], layers=[], findings=[])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_html(audit, Path(folder)).name
        'index.html'
    """
    path = path / "index.html" if path.is_dir() else path
    return write_whole(path, render_html(audit), "report")


def render_html(audit: AuditRecord) -> str:
    """Render the page that `write_html` writes.

    Args:
        audit: the audit.

    Returns:
        The HTML text.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("rankwise.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plotly, script = chart_script(), "\n".join(_template_text(name) for name in _SCRIPTS)
    return environment.get_template("report.html").render(
        page_context(audit),
        style=Markup(_template_text("report.css")),
        plotly=Markup(plotly),
        script=Markup(script),
        hashes=[_hash(plotly), _hash(script)],
    )


def page_context(audit: AuditRecord) -> dict[str, Any]:
    """Gather everything the template prints; nothing in it is escaped yet.

    Args:
        audit: the audit.

    Returns:
        The template's variables; among them ``data``, what the page's script draws and follows.
    """
    panels = make_panels(audit.heads)
    targets = find_targets(audit.findings, audit)
    marks = marks_of(audit.findings, targets)
    measures = pictured(audit.heads)
    homes = {index: number for number, panel in enumerate(panels) for index in panel.indices}
    stacks = list(dict.fromkeys(layer.stack for layer in audit.layers))
    memberships = membership_maps(panels, audit.heads)
    data = {
        "panels": [draw_panel(panel, audit.heads, marks) for panel in panels],
        "depth": draw_depth(audit.layers),
        "stacks": stacks,
        "spectra": spectra(audit.heads, audit.provenance.delta),
        "names": [f"layer {head.layer}, head {head.head}" for head in audit.heads],
        "details": [describe(head) for head in audit.heads],
        "panel_names": [panel.title for panel in panels],
        "opening": opening_heads(audit.heads),
        "targets": [target.data() for target in targets],
        "memberships": memberships,
    }
    return {
        "audit": audit,
        "about": audit.provenance,
        "summary": summary(audit),
        "words": {severity: one for severity, (one, _) in SEVERITIES.items()},
        "severities": severity_counts(audit.findings),
        "groups": finding_groups(audit.findings, targets, panels),
        "measures": measures,
        "states": DRAWN,
        "panels": [_panel_words(panel, audit.heads) for panel in panels],
        "stacks": stacks,
        "rows": [_table_row(head, homes[index], measures) for index, head in enumerate(audit.heads)],
        "state_rows": [(layer, _state_words(layer)) for layer in audit.layers],
        "memberships": memberships,
        "provenance": _provenance(audit),
        "data": without_nan(data),
    }


def summary(audit: AuditRecord) -> list[tuple[str, str, str]]:
    """Name the few numbers to know first: what, how much, and what to hold against it."""
    heads, layers = audit.heads, audit.layers
    facts = [("Heads", str(len(heads)), f"in {count(len({(h.stack, h.layer) for h in heads}), 'layer')}")]
    if heads:
        share, null = mean(map(rank_share, heads)), mean(map(null_share, heads))
        facts.append(("Mean rank share", shown(share, 2), f"chance would give {shown(null, 2)}"))
        above, below = (_heads_of(audit.findings, code) for code in ("ABOVE_NULL", "BELOW_NULL"))
        against = f"{shown(above)} above and {shown(below)} below every null"
        facts.append(("Heads beyond chance", shown(above + below), against))
    last = {layer.stack: layer for layer in sorted(layers, key=lambda layer: layer.layer)}
    worst = min(last.values(), key=lambda y: _nan_last(y.relative_collapse), default=None)
    if worst is not None:
        against = f"0: all tokens alike; mean cosine {shown(worst.mean_cosine, 2)}"
        facts.append(("μ/‖Y‖ at the end", shown(worst.relative_collapse, 3), against))
    return facts


def _heads_of(findings: Sequence[Finding], code: str) -> float:
    counts = [finding.evidence.get("heads", math.nan) for finding in findings if finding.code == code]
    return sum((count for count in counts if math.isfinite(count)), 0.0)


def _nan_last(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _panel_words(panel: Panel, heads: Sequence[HeadRecord]) -> dict[str, Any]:
    mine = [heads[index] for index in panel.indices]
    kinds = dict.fromkeys(head.kind for head in mine)
    masks = dict.fromkeys(f"{head.mask} mask" for head in mine)
    tokens = f"{shown(mean(head.tokens for head in mine), 0)} tokens"
    if panel.cross:
        tokens += f" reading {shown(mean(head.sources for head in mine), 0)}"
    options = [(index, f"layer {heads[index].layer}, head {heads[index].head}") for index in panel.indices]
    facts = [*kinds, *masks, tokens]
    return {
        "title": panel.title,
        "pattern": panel.pattern,
        "facts": facts,
        "options": options,
        "columns": len(panel.columns),
    }


def _table_row(head: HeadRecord, panel: int, measures: Sequence[HeadMeasure]) -> dict[str, Any]:
    ranks, others = measures[0], measures[1:]
    values = [(ranks.value(head), ranks.said(head))]
    nulls = (share(head) for share in (null_share, random_share, uniform_share))
    values += [(value, shown(value, 2)) for value in nulls]
    values += [(measure.value(head), measure.said(head)) for measure in others]
    nearest = "" if head.nearest_head is None else str(head.nearest_head)
    numbers = [(value if math.isfinite(value) else "", words) for value, words in values]
    tokens = (head.tokens if math.isfinite(head.tokens) else "", shown(head.tokens, 0))
    return {"head": head, "panel": panel, "tokens": tokens, "numbers": numbers, "nearest": nearest}


def _state_words(layer: LayerRecord) -> list[str]:
    measured = [measure.said(layer) for measure in DRAWN]
    return [shown(layer.tokens, 0), shown(layer.norm, 1), *measured]


def _provenance(audit: AuditRecord) -> list[tuple[str, str]]:
    about = audit.provenance
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    facts = {
        "Model": about.model,
        "Class": about.model_class,
        "Revision": about.revision,
        "Parameters": f"{about.parameters:,}" if about.parameters else "",
        "Data": about.data,
        "Sequences": f"{about.sequences} in {count(about.batches, 'batch', 'batches')}",
        "Threshold δ": str(about.delta),
        "Method": about.method,
        "Model's dtype": about.model_dtype,
        "Measured in": about.measure_dtype,
        "Device": about.device,
        "Made": about.created,
        "Complete": "yes" if audit.complete else "no",
        "Versions": versions,
    }
    return [(name, value) for name, value in facts.items() if value]


def without_nan(value: Any) -> Any:
    """Replace what JSON cannot say, NaN and infinities, by None, however deep it lies.

    Examples:
        >>> without_nan({"a": [1.0, float("nan")]})
        {'a': [1.0, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


def _hash(script: str) -> str:
    """Name a script to the browser's content security policy, which then runs no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _template_text(name: str) -> str:
    return (resources.files("rankwise.report") / "templates" / name).read_text(encoding="utf-8")
