"""The report as one HTML file that needs nothing else: what the page says, in its order and words."""

import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rankwise.audit.measures import DRAWN, HEAD_MEASURES, LAYER_MEASURES, NULLS, share, shown
from rankwise.audit.records import AuditRecord, Finding, HeadRecord, LayerRecord
from rankwise.files import write_whole
from rankwise.report.columns import head_columns
from rankwise.report.curves import draw_depth
from rankwise.report.heatmap import draw_panel
from rankwise.report.memberships import membership_maps
from rankwise.report.one_head import opening_head, pack_pictures, pack_spectra
from rankwise.report.pages import chart_script, script_hash, without_nan
from rankwise.report.panels import Panel, make_panels
from rankwise.report.scatter import scatter, worth_words
from rankwise.report.targets import find_targets, finding_groups, marks_of, severity_counts
from rankwise.report.text import (
    SEVERITIES,
    count,
    mean,
    model_name,
    rank_share,
)

_SCRIPTS = (
    *("theme.js", "numbers.js", "save.js", "depth.js", "spectrum.js", "matrix.js", "one_head.js"),
    *("heatmap.js", "tables.js", "memberships.js", "worth.js", "page.js"),
)


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
        hashes=[script_hash(plotly), script_hash(script)],
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
    columns = head_columns(audit.heads)
    stacks = list(dict.fromkeys(layer.stack for layer in audit.layers))
    memberships = membership_maps(panels, audit.heads)
    pictures, left_out = pack_pictures(audit)
    fresh = [[] if head.baseline is None else head.baseline.spectrum for head in audit.heads]
    data = {
        "model": model_name(audit.provenance.model),
        "delta": audit.provenance.delta,
        "panels": [draw_panel(panel, marks) for panel in panels],
        "heads": _head_names(audit.heads, panels),
        "columns": [column.data() for column in columns],
        "depth": draw_depth(audit.layers),
        "stacks": stacks,
        "spectra": pack_spectra([head.spectrum for head in audit.heads]),
        "fresh_spectra": pack_spectra(fresh) if any(fresh) else None,
        "pictures": pictures,
        "pictures_left_out": left_out,
        "texts": audit.texts,
        "opening": opening_head(audit.heads, list(marks)),
        "targets": [target.data() for target in targets],
        "memberships": memberships,
        "scatter": scatter(audit, columns),
        "states": state_table(audit.layers),
    }
    return {
        "audit": audit,
        "about": audit.provenance,
        "name": model_name(audit.provenance.model),
        "summary": summary(audit),
        "words": {severity: word for severity, (word, _) in SEVERITIES.items()},
        "severities": severity_counts(audit.findings),
        "groups": finding_groups(audit.findings, targets, panels),
        "measures": [column for column in columns if column.meaning],
        "states": DRAWN,
        "panels": [_panel_words(panel, audit.heads) for panel in panels],
        "stacks": stacks,
        "memberships": memberships,
        "worth": worth_words(audit),
        "scatter": data["scatter"],
        "provenance": _provenance(audit),
        "data": without_nan(data),
    }


def summary(audit: AuditRecord) -> list[tuple[str, str, str]]:
    """Name the few numbers to know first: what, how much, and what to hold against it."""
    heads, layers = audit.heads, audit.layers
    facts = [("Heads", str(len(heads)), f"in {count(len({(h.stack, h.layer) for h in heads}), 'layer')}")]
    mixing = [head for head in heads if head.kind not in HEAD_MEASURES[0].silent]
    if mixing:
        nulls = {words: mean(share(getattr(h, name), h) for h in mixing) for name, words in NULLS.items()}
        fresh = mean(share(head.fresh_numerical_rank, head) for head in mixing)
        named = {"fresh weights": fresh, **nulls}
        known = [f"{words} {value:.2g}" for words, value in named.items() if math.isfinite(value)]
        facts.append(("Mean rank share", shown(mean(map(rank_share, mixing)), 2), ", ".join(known)))
    above, below = (_heads_of(audit.findings, code) for code in ("ABOVE_NULL", "BELOW_NULL"))
    if any(head.baseline is not None and head.baseline.judged for head in mixing):
        against = f"rank above theirs in {above}, below in {below}, by more than 95 % of pairs vary"
        facts.append(("Heads unlike fresh weights", str(above + below), against))
    elif any(head.band for head in mixing):
        against = f"rank above all of them in {above}, below all in {below}, at every δ of a decade"
        facts.append(("Heads unlike every reference", str(above + below), against))
    last = {layer.stack: layer for layer in sorted(layers, key=lambda layer: layer.layer)}
    nearest = min(last.values(), key=lambda y: _nan_last(y.relative_collapse), default=None)
    if nearest is not None:
        against = f"0: all tokens alike; mean cosine {shown(nearest.mean_cosine, 2)}"
        facts.append(("μ/‖Y‖ at the end", shown(nearest.relative_collapse, 3), against))
    return facts


def _heads_of(findings: Sequence[Finding], code: str) -> int:
    """How many heads findings of a code speak of, as the map marks them; files before that named one each."""
    counts = [
        len(finding.heads) or finding.evidence.get("heads", 1.0)
        for finding in findings
        if finding.code == code
    ]
    return int(sum(number for number in counts if math.isfinite(number)))


def _nan_last(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _panel_words(panel: Panel, heads: Sequence[HeadRecord]) -> dict[str, Any]:
    mine = [heads[index] for index in panel.indices]
    kinds = dict.fromkeys(head.kind for head in mine)
    masks = dict.fromkeys(f"{head.mask} mask" for head in mine if head.kind != "diagonal")
    tokens = f"{shown(mean(head.tokens for head in mine), 0)} tokens"
    if panel.cross:
        tokens += f" reading {shown(mean(head.sources for head in mine), 0)}"
    return {
        "title": panel.title,
        "pattern": panel.pattern,
        "facts": [*kinds, *masks, tokens],
        "diagonal": "diagonal" in kinds,
        "columns": len(panel.columns),
    }


def _head_names(heads: Sequence[HeadRecord], panels: Sequence[Panel]) -> dict[str, Any]:
    """Which heads there are: a list of each fact, one entry a head, texts as places in a list of words."""
    homes = {index: number for number, panel in enumerate(panels) for index in panel.indices}
    return {
        "layer": [head.layer for head in heads],
        "head": [head.head for head in heads],
        "panel": [homes[index] for index in range(len(heads))],
        "full_rank": [head.smaller for head in heads],
        "nearest": [head.nearest_head for head in heads],
        "tokens": [float(f"{head.tokens:.6g}") for head in heads],
        "sequences": [head.sequences for head in heads],
        "nonfinite": [head.nonfinite for head in heads],
        "kind": _coded([head.kind for head in heads]),
        "mask": _coded([head.mask for head in heads]),
        "site": _coded([head.site for head in heads]),
        "peak_token": _coded([head.named_peak for head in heads]),
    }


def _coded(texts: Sequence[str]) -> dict[str, Any]:
    words = list(dict.fromkeys(texts))
    places = {word: at for at, word in enumerate(words)}
    return {"words": words, "of": [places[text] for text in texts]}


def state_table(layers: Sequence[LayerRecord]) -> list[dict[str, Any]]:
    """The token states as columns of a table, each with its numbers and how they are shown.

    Args:
        layers: the layer records of an audit.
    """
    columns: list[dict[str, Any]] = [
        {"name": "stack", "head": "Stack", "texts": [layer.stack for layer in layers]},
        {"name": "layer", "head": "Blocks passed", "digits": 0, "values": [y.layer for y in layers]},
        {"name": "tokens", "head": "Tokens", "digits": 0, "values": [y.tokens for y in layers]},
    ]
    for measure in LAYER_MEASURES:
        numbers = [measure.value(layer) for layer in layers]
        columns.append(
            {"name": measure.name, "head": measure.head, "digits": measure.digits, "values": numbers}
        )
    for name, head in (("sequences", "Sequences"), ("nonfinite", "Not finite")):
        columns.append(
            {"name": name, "head": head, "digits": 0, "values": [getattr(y, name) for y in layers]}
        )
    return columns


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


def _template_text(name: str) -> str:
    return (resources.files("rankwise.report") / "templates" / name).read_text(encoding="utf-8")
