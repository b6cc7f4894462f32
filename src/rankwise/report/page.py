"""The report as one HTML file that needs nothing else."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankwise._internals.files import write_file
from rankwise._internals.records import format_number
from rankwise.auditing.measure_table import DRAWN, mixer_kind
from rankwise.auditing.records import HeadRecord
from rankwise.auditing.result import Audit
from rankwise.report.curves import draw_depth, state_table
from rankwise.report.head_columns import head_columns
from rankwise.report.heatmap import draw_panel
from rankwise.report.heatmap_grid import Grid, grids_of
from rankwise.report.memberships import membership_maps
from rankwise.report.one_head import opening_head, pack_pictures, pack_spectra
from rankwise.report.pages import chart_script, script_hash, template_text, without_nan
from rankwise.report.scatter import head_costs, importance_words, scatter
from rankwise.report.summary import origin, summary
from rankwise.report.targets import find_targets, finding_groups, marks_of, severity_counts
from rankwise.report.text import SEVERITIES, mean, model_name

PAGE_BYTES = 1_990_000
"""That a page with matrices is not to pass: where the rest of it is large, they are coarser or fewer …"""
LEAST_PICTURES_BYTES = 30_000
"""… but this much they may take in any case …"""
FEW_POINTS = 32
"""… and spectra have fewer points."""
_SCRIPTS = (
    *("theme.js", "numbers.js", "save.js", "depth.js", "spectrum.js", "matrix.js", "one_head.js"),
    *("heatmap.js", "tables.js", "memberships.js", "importance.js", "page.js"),
)


def write_html(audit: Audit, path: Path) -> Path:
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
        >>> from rankwise.auditing.records import Provenance
        >>> about = Provenance(model="m", delta=0.01)
        >>> audit = Audit(provenance=about, heads=[], layers=[], findings=[])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_html(audit, Path(folder)).name
        'index.html'
    """
    path = path / "index.html" if path.is_dir() else path
    return write_file(path, render_html(audit), "report")


def render_html(audit: Audit) -> str:
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
    template = environment.get_template("report.html")
    plotly, script = chart_script(), "\n".join(template_text(name) for name in _SCRIPTS)
    context = page_context(audit)

    def page() -> str:
        return template.render(
            context,
            style=Markup(template_text("report.css")),
            plotly=Markup(plotly),
            script=Markup(script),
            hashes=[script_hash(plotly), script_hash(script)],
        )

    text = page()
    beyond = len(text.encode()) - PAGE_BYTES
    if beyond > 0 and context["data"]["pictures"]:
        before = len(json.dumps(context["data"]))
        taken = len(json.dumps(context["data"]["pictures"]))
        context["data"] |= _spectra(audit, points=FEW_POINTS)
        beyond -= before - len(json.dumps(context["data"]))
        context["data"] |= _pictures(audit, context["flagged"], max(taken - beyond, LEAST_PICTURES_BYTES))
        text = page()
    return text


def _spectra(audit: Audit, points: int = 64) -> dict[str, Any]:
    own = [head.spectrum for head in audit.heads]
    fresh = [[] if head.baseline is None else head.baseline.spectrum for head in audit.heads]
    packed = pack_spectra(fresh, points) if any(fresh) else None
    return {"spectra": pack_spectra(own, points), "fresh_spectra": packed}


def _pictures(audit: Audit, flagged: Sequence[int], room: int | None = None) -> dict[str, Any]:
    pictures, left_out = pack_pictures(audit, flagged, room)
    here = sum(map(len, pictures.values()))
    return {"pictures": without_nan(pictures), "pictures_here": here, "pictures_left_out": left_out}


def page_context(audit: Audit) -> dict[str, Any]:
    """Gather everything the template prints; nothing in it is escaped yet.

    Args:
        audit: the audit.

    Returns:
        The template's variables; among them ``data``, what the page's script draws and follows.
    """
    panels = grids_of(audit.heads)
    targets = find_targets(audit.findings, audit)
    marks = marks_of(audit.findings, targets)
    columns = head_columns(audit.heads)
    stacks = list(dict.fromkeys(layer.stack for layer in audit.layers))
    memberships = membership_maps(panels, audit.heads)
    data = {
        "model": model_name(audit.provenance.model),
        "delta": audit.provenance.delta,
        "panels": [draw_panel(panel, marks) for panel in panels],
        "heads": _head_names(audit.heads, panels),
        "columns": [column.data() for column in columns],
        "depth": draw_depth(audit.layers),
        "stacks": stacks,
        **_spectra(audit),
        **_pictures(audit, list(marks)),
        "texts": audit.texts,
        "opening": opening_head(audit.heads, list(marks)),
        "targets": [target.data() for target in targets],
        "memberships": memberships,
        "costs": head_costs(audit),
        "scatter": scatter(audit, {column.name: column.values for column in columns if column.meaning}),
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
        "panels": [panel_words(panel, audit.heads) for panel in panels],
        "stacks": stacks,
        "memberships": memberships,
        "importance": importance_words(audit),
        "scatter": data["scatter"],
        "provenance": origin(audit),
        "flagged": list(marks),
        "data": without_nan(data),
    }


def _head_names(heads: Sequence[HeadRecord], panels: Sequence[Grid]) -> dict[str, Any]:
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
        "max_token": _coded([head.named_peak for head in heads]),
    }


def _coded(texts: Sequence[str]) -> dict[str, Any]:
    words = list(dict.fromkeys(texts))
    places = {word: at for at, word in enumerate(words)}
    return {"words": words, "of": [places[text] for text in texts]}


def panel_words(panel: Grid, heads: Sequence[HeadRecord]) -> dict[str, Any]:
    """What the page says of a panel: its title, and facts that its heads have in common.

    Args:
        panel: the panel.
        heads: all heads of the audit.
    """
    mine = [heads[index] for index in panel.indices]
    kinds = dict.fromkeys(head.kind for head in mine)
    masks = dict.fromkeys(f"{head.mask} mask" for head in mine if mixer_kind(head.kind).mixes_tokens)
    tokens = f"{format_number(mean(head.tokens for head in mine), 0)} tokens"
    if panel.cross:
        tokens += f" reading {format_number(mean(head.sources for head in mine), 0)}"
    return {
        "title": panel.title,
        "pattern": panel.pattern,
        "facts": [*kinds, *masks, tokens],
        "diagonal": "diagonal" in kinds,
        "columns": len(panel.columns),
    }
