"""The report as one HTML file that needs nothing else: the numbers of heads, each once, as the page has them.

Map, head beside it, table and CSV read the columns of `head_columns`; what adds numbers of its own (worth,
a baseline) adds columns to them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankwise.audit.measures import DRAWN, HEAD_MEASURES, NULLS, HeadMeasure, share
from rankwise.audit.records import AuditRecord, HeadRecord
from rankwise.files import write_whole
from rankwise.report.curves import draw_depth, state_table
from rankwise.report.heatmap import draw_panel
from rankwise.report.memberships import membership_maps
from rankwise.report.one_head import opening_head, pack_pictures, pack_spectra
from rankwise.report.pages import chart_script, script_hash, short, template_text, without_nan
from rankwise.report.panels import Panel, make_panels, panel_words
from rankwise.report.references import Reference, references_of
from rankwise.report.scatter import scatter, worth_words
from rankwise.report.summary import origin, summary
from rankwise.report.targets import find_targets, finding_groups, marks_of, severity_counts
from rankwise.report.text import SEVERITIES, model_name

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
    plotly, script = chart_script(), "\n".join(template_text(name) for name in _SCRIPTS)
    return environment.get_template("report.html").render(
        page_context(audit),
        style=Markup(template_text("report.css")),
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
        "worth": worth_words(audit),
        "scatter": data["scatter"],
        "provenance": origin(audit),
        "data": without_nan(data),
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


@dataclass(frozen=True, kw_only=True)
class Column:
    """A number of each head."""

    name: str
    """Of the measure, which findings name."""
    share: bool = False
    """Whether it is a share of min(T, S): its name in a CSV file says so."""
    title: str
    head: str
    """A title for a narrow column."""
    digits: int | None
    """Decimals that are shown."""
    values: Sequence[float]
    """One for each head; NaN where it is not known."""
    spread: Sequence[float] = ()
    """Standard deviations over sequences, if known."""
    words: dict[int, str] = field(default_factory=dict)
    """What is shown of a head in place of its number, such as a range."""
    meaning: str = ""
    """Said beside its heat map; a column without has none."""
    low: str = ""
    high: str = ""
    """What the ends of its scale mean."""
    limits: tuple[float, float] = (0.0, 1.0)
    """The ends of its scale."""
    silent: frozenset[int] = frozenset()
    """Heads of which it says nothing."""
    references: Sequence[Reference] = ()

    def data(self) -> dict[str, Any]:
        """As the page's scripts read it."""
        low, high = self.limits
        beyond = [value for value in self.values if math.isfinite(value) and value > high]
        said: dict[str, Any] = {
            "name": self.name,
            "file_name": f"{self.name}_share" if self.share else self.name,
            "title": self.title,
            "head": self.head,
            "digits": self.digits,
            "values": [short(value) for value in self.values],
        }
        if any(math.isfinite(number) for number in self.spread):
            said["spread"] = [short(number) for number in self.spread]
        if self.words:
            said["words"] = self.words
        if self.meaning:
            said |= {
                "meaning": self.meaning,
                "ends": [[short(low), self.low], [short(high), self.high]],
                "beyond": [len(beyond), short(max(beyond, default=math.nan))],
                "silent": sorted(self.silent),
                "references": [reference.data() for reference in self.references],
            }
        return said


def head_columns(heads: Sequence[HeadRecord]) -> list[Column]:
    """The columns of an audit's heads, in the order in which they are shown.

    Args:
        heads: its heads.
    """
    columns: list[Column] = []
    for measure in HEAD_MEASURES:
        if not measure.known_in(heads):
            continue
        column = measure_column(measure, heads)
        if measure.kinds and not any(map(math.isfinite, column.values)):
            continue
        columns.append(column)
        nulls = [
            Column(
                name=name,
                share=True,
                title=f"{words.capitalize()}, share",
                head=words.capitalize(),
                digits=measure.digits,
                values=[share(getattr(head, name), head) for head in heads],
            )
            for name, words in NULLS.items()
            if name in measure.nulls
        ]
        columns += [null for null in nulls if any(map(math.isfinite, null.values))]
    return columns


def measure_column(measure: HeadMeasure, heads: Sequence[HeadRecord]) -> Column:
    """A measure of the table of measures as a column.

    Args:
        measure: its row.
        heads: all heads.
    """
    values = [measure.value(head) for head in heads]
    said = [(at, measure.said(head)) for at, head in enumerate(heads) if measure.name in head.stderr]
    spoken = [head for head in heads if head.kind not in measure.silent]
    return Column(
        name=measure.name,
        share=measure.share,
        title=measure.title,
        head=measure.head,
        digits=measure.digits,
        values=values,
        spread=[_spread(measure, head) for head in heads],
        words=dict(said),
        meaning=measure.meaning,
        low=measure.low,
        high=measure.high,
        limits=measure.limits(spoken),
        silent=frozenset(at for at, head in enumerate(heads) if head.kind in measure.silent),
        references=references_of(measure, spoken),
    )


def _spread(measure: HeadMeasure, head: HeadRecord) -> float:
    """Of a share it is not known: the deviation of a rank holds that of the lengths of sequences."""
    return math.nan if measure.share else head.spread.get(measure.name, math.nan)
