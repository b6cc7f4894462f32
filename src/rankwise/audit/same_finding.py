"""Which finding of one audit is which of another: what must agree for two to say the same."""

import math
from collections import Counter
from collections.abc import Hashable

from rankwise.audit.records import AuditRecord, Finding

OF_A_SITE = ("ABOVE_NULL", "BELOW_NULL", "NONFINITE")
"""Codes that speak of all heads of a site and are placed at one of them, an example."""


def missing_from(known: AuditRecord, audit: AuditRecord) -> list[Finding]:
    """Findings of ``audit`` that ``known`` does not have.

    Two findings are the same where code, severity and place agree, whatever their numbers. The place of a
    code `OF_A_SITE` is the site, of UNSEEN the class of the modules and the reason, of TWINS a group of heads
    that are alike: of three such heads, which two are the nearest says nothing. Where a place has several
    findings of a code, as a module that runs twice in its block, they are counted.

    Args:
        known: the audit that may have them.
        audit: the audit whose findings are looked up, in its order.

    Examples:
        >>> from rankwise.audit.records import Place, Provenance
        >>> words = {"evidence": {}, "meaning": "", "remedy": ""}
        >>> sink = Finding(code="SINK", severity="warning", where=Place(layer=2, head=7), **words)
        >>> about = Provenance(model="m", delta=0.01)
        >>> empty = AuditRecord(provenance=about, heads=[], layers=[], findings=[])
        >>> [str(one.where) for one in missing_from(empty, empty.model_copy(update={"findings": [sink]}))]
        ['layer 2 head 7']
    """
    groups, modules = _twin_groups(known), {one.name: (one.type, one.reason) for one in audit.unseen}
    known_modules = {one.name: (one.type, one.reason) for one in known.unseen}
    left = Counter(_identity(finding, known_modules) for finding in known.findings if not _is_twins(finding))
    missing = []
    for finding in audit.findings:
        if _is_twins(finding):
            there = any(group.issuperset(_pair(finding)) for group in groups)
        else:
            identity = _identity(finding, modules)
            there = left[identity] > 0
            left[identity] -= 1
        if not there:
            missing.append(finding)
    return missing


def _identity(finding: Finding, modules: dict[str, tuple[str, str]]) -> Hashable:
    where: Hashable = finding.where
    if finding.code in OF_A_SITE:
        where = finding.where.model_copy(update={"head": None})
    elif finding.code == "UNSEEN":
        where = modules.get(finding.where.site, where)
    return finding.code, finding.severity, where


def _is_twins(finding: Finding) -> bool:
    return finding.code == "TWINS"


def _pair(finding: Finding) -> set[Hashable]:
    """The two heads of a TWINS."""
    where = finding.where
    other = finding.evidence.get("nearest_head", math.nan)
    heads = (where.head, other if math.isfinite(other) else None)
    return {(where.stack, where.layer, where.site, head) for head in heads}


def _twin_groups(audit: AuditRecord) -> list[set[Hashable]]:
    """Heads that are twins, or twins of a twin, and so on."""
    groups: list[set[Hashable]] = []
    for finding in filter(_is_twins, audit.findings):
        joined = [group for group in groups if group & _pair(finding)]
        groups = [group for group in groups if group not in joined]
        groups.append(_pair(finding).union(*joined))
    return groups
