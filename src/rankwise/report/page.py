"""What the page says, in the order and words of the page."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rankwise.audit.measures import DRAWN, PICTURED
from rankwise.audit.records import AuditRecord, Finding, HeadRecord, LayerRecord, Severity
from rankwise.report.curves import draw_depth, opening_heads, spectra
from rankwise.report.heatmap import describe, draw_panel
from rankwise.report.memberships import membership_maps
from rankwise.report.panels import Panel, make_panels
from rankwise.report.targets import Target, find_target
from rankwise.report.text import (
    SEVERITIES,
    count,
    estimated_words,
    mean,
    null_share,
    pieces,
    random_share,
    rank_share,
    rank_words,
    shown,
    title,
    uniform_share,
)

_GRAVEST = list(SEVERITIES)

_OPEN = 4
"""Findings of one kind shown before the rest is folded away."""


def page_context(audit: AuditRecord) -> dict[str, Any]:
    """Gather everything the template prints; nothing in it is escaped yet.

    Args:
        audit: the audit.

    Returns:
        The template's variables.
    """
    panels = make_panels(audit.heads)
    targets = [find_target(finding, audit) for finding in audit.findings]
    homes = {index: number for number, panel in enumerate(panels) for index in panel.indices}
    return {
        "audit": audit,
        "about": audit.provenance,
        "summary": summary(audit),
        "words": {severity: one for severity, (one, _) in SEVERITIES.items()},
        "severities": severity_counts(audit.findings),
        "groups": finding_groups(audit.findings, targets, panels),
        "measures": PICTURED,
        "states": DRAWN,
        "panels": [_panel_words(panel, audit.heads) for panel in panels],
        "stacks": list(dict.fromkeys(layer.stack for layer in audit.layers)),
        "rows": [_table_row(head, homes[index]) for index, head in enumerate(audit.heads)],
        "state_rows": [(layer, _state_words(layer)) for layer in audit.layers],
        "memberships": membership_maps(panels, audit.heads),
        "provenance": _provenance(audit),
    }


def page_data(audit: AuditRecord) -> dict[str, Any]:
    """Gather what the page's script draws and follows.

    Args:
        audit: the audit.

    Returns:
        Figures, spectra and targets; numbers may be NaN.
    """
    panels = make_panels(audit.heads)
    targets = [find_target(finding, audit) for finding in audit.findings]
    marks = _marks(audit.findings, targets)
    names = [panel.title for panel in panels]
    return {
        "panels": [draw_panel(panel, audit.heads, marks) for panel in panels],
        "depth": draw_depth(audit.layers),
        "stacks": list(dict.fromkeys(layer.stack for layer in audit.layers)),
        "spectra": spectra(audit.heads, audit.provenance.delta),
        "names": [f"layer {head.layer}, head {head.head}" for head in audit.heads],
        "details": [describe(head) for head in audit.heads],
        "panel_names": names,
        "opening": opening_heads(audit.heads),
        "targets": [_target_data(target) for target in targets],
        "memberships": membership_maps(panels, audit.heads),
    }


def severity_counts(findings: Sequence[Finding]) -> list[tuple[Severity, int, str]]:
    """Count findings by severity, the worst first, each with its word; none that does not occur."""
    counted = [(severity, sum(f.severity == severity for f in findings)) for severity in SEVERITIES]
    return [(severity, number, SEVERITIES[severity][number > 1]) for severity, number in counted if number]


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


def finding_groups(
    findings: Sequence[Finding], targets: Sequence[Target], panels: Sequence[Panel]
) -> list[dict[str, Any]]:
    """Put findings of one severity and code together, the worst first."""
    homes = {index: number for number, panel in enumerate(panels) for index in panel.indices}
    stacks = [panel.stack for panel in panels]
    grouped: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for index, (finding, target) in enumerate(zip(findings, targets, strict=True)):
        link = f"panel-{homes[target.heads[0]]}" if target.section == "heads" else target.section
        evidence = [(title(name), shown(value)) for name, value in finding.evidence.items()]
        where = finding.where
        item = {"index": index, "finding": finding, "place": str(where), "link": link, "evidence": evidence}
        item["remedy"] = pieces(finding.remedy)
        item["site"] = where.site if stacks.count(where.stack) > 1 and where.site != str(where) else ""
        grouped[_GRAVEST.index(finding.severity), finding.code].append(item)
    return [
        {"severity": _GRAVEST[rank], "code": code, "shown": items[:_OPEN], "folded": items[_OPEN:]}
        for (rank, code), items in sorted(grouped.items(), key=lambda group: group[0][0])
    ]


def _marks(findings: Sequence[Finding], targets: Sequence[Target]) -> dict[int, Severity]:
    """The worst finding of each head that has one of its own."""
    marks: dict[int, Severity] = {}
    for finding, target in zip(findings, targets, strict=True):
        for index in target.heads if finding.where.head is not None else ():
            worst = min(finding.severity, marks.get(index, finding.severity), key=_GRAVEST.index)
            marks[index] = worst
    return marks


def _target_data(target: Target) -> dict[str, Any]:
    return {
        "section": target.section,
        "heads": list(target.heads),
        "measure": target.measure,
        "stack": target.stack,
        "layer": target.layer,
    }


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


def _table_row(head: HeadRecord, panel: int) -> dict[str, Any]:
    ranks, others = PICTURED[0], PICTURED[1:]
    values = [(ranks.value(head), rank_words(head))]
    nulls = (share(head) for share in (null_share, random_share, uniform_share))
    values += [(value, shown(value, 2)) for value in nulls]
    for measure in others:
        value = measure.value(head)
        values.append((value, estimated_words(head, measure.name, value, measure.digits)))
    nearest = "" if head.nearest_head is None else str(head.nearest_head)
    numbers = [(value if math.isfinite(value) else "", words) for value, words in values]
    tokens = (head.tokens if math.isfinite(head.tokens) else "", shown(head.tokens, 0))
    return {"head": head, "panel": panel, "tokens": tokens, "numbers": numbers, "nearest": nearest}


def _state_words(layer: LayerRecord) -> list[str]:
    measured = [shown(measure.value(layer), measure.digits) for measure in DRAWN]
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
