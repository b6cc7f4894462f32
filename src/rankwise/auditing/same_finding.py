"""Which finding of one audit is which of another: what must agree for two to say the same of one thing."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping

from rankwise.auditing.records import AuditRecord, Finding

OF_A_SITE = ("HIGH_RANK", "LOW_RANK", "OVERSIZED_HEADS", "NONFINITE")
"""Codes that speak of all heads of a site and are placed at one of them, an example."""
OF_A_STACK = ("COLLAPSE",)
"""Codes that speak of a stack from a layer on."""
OF_THE_MODEL = ("REMOVABLE",)
"""Codes that speak of a set of heads anywhere in the model; a set of one is placed at its head."""

Pair = tuple[Finding | None, Finding | None]


def paired_findings(before: AuditRecord, after: AuditRecord) -> list[Pair]:
    """Findings of two audits in pairs, in the order of the second; then those that only the first has.

    Two findings are one where code and place agree, whatever their numbers and severity. The place of a code
    `OF_A_SITE` is the site, of one `OF_A_STACK` the stack, of NOT_CAPTURED the class of the modules and the
    reason, of DUPLICATE_HEADS a group of heads that are alike: of three such heads, which two are the
    nearest says nothing. A code `OF_THE_MODEL` has no place: of two sets of removable heads, which head is
    the cheapest says nothing. Where a place has several findings of a code, as a module that runs twice in
    its block, they are paired in order.

    Args:
        before: one audit.
        after: the other.

    Examples:
        >>> from rankwise.auditing.records import Place, Provenance
        >>> words = {"evidence": {}, "meaning": "", "remedy": ""}
        >>> sink = Finding(code="SINK", severity="warning", where=Place(layer=2, head=7), **words)
        >>> about = Provenance(model="m", delta=0.01)
        >>> empty = AuditRecord(provenance=about, heads=[], layers=[], findings=[])
        >>> paired_findings(empty, empty.model_copy(update={"findings": [sink]}))
        [(None, Finding(SINK, warning, 'layer 2 head 7': ''))]
    """
    left = _Left(before, after)
    pairs: list[Pair] = [(left.take(finding), finding) for finding in after.findings]
    gone = [finding for finding in before.findings if not left.is_met(finding)]
    return [*pairs, *((finding, None) for finding in gone)]


class _Left:
    """Findings of the first audit that have no partner yet."""

    def __init__(self, before: AuditRecord, after: AuditRecord) -> None:
        self._after_modules = _modules(after)
        self._groups, self._after_groups = _twin_groups(before), _twin_groups(after)
        self._known: dict[Hashable, list[Finding]] = defaultdict(list)
        self._twins: dict[Hashable, list[Finding]] = defaultdict(list)
        modules = _modules(before)
        for finding in before.findings:
            if _is_twins(finding):
                self._twins[_site(finding)].append(finding)
            else:
                self._known[_identity(finding, modules)].append(finding)
        self._met: set[int] = set()

    def take(self, finding: Finding) -> Finding | None:
        """The partner of a finding of the second audit, if there is one."""
        found = self._twin_of(finding) if _is_twins(finding) else self._alike(finding)
        if found is not None:
            self._met.add(id(found))
        return found

    def is_met(self, finding: Finding) -> bool:
        """Whether a finding of the first audit has a partner, or is of a group that the second has too."""
        if id(finding) in self._met:
            return True
        return _is_twins(finding) and _group_of(finding, self._after_groups) is not None

    def _alike(self, finding: Finding) -> Finding | None:
        waiting = self._known[_identity(finding, self._after_modules)]
        return waiting.pop(0) if waiting else None

    def _twin_of(self, finding: Finding) -> Finding | None:
        """The same two heads, else two of a group that holds these."""
        group = _group_of(finding, self._groups)
        if group is None:
            return None
        mine = [twin for twin in self._twins[_site(finding)] if group >= _pair(twin)]
        same = [twin for twin in mine if _pair(twin) == _pair(finding)]
        fresh = [twin for twin in mine if id(twin) not in self._met]
        return (same or fresh or mine)[0]


def _modules(audit: AuditRecord) -> dict[str, tuple[str, str]]:
    return {module.name: (module.type, module.reason) for module in audit.uncaptured}


def _identity(finding: Finding, modules: dict[str, tuple[str, str]]) -> Hashable:
    where: Hashable = finding.where
    if finding.code in OF_A_SITE:
        where = finding.where.model_copy(update={"head": None})
    elif finding.code in OF_THE_MODEL:
        where = None
    elif finding.code in OF_A_STACK:
        where = finding.where.stack
    elif finding.code == "NOT_CAPTURED":
        where = modules.get(finding.where.site, where)
    return finding.code, where


def _is_twins(finding: Finding) -> bool:
    return finding.code == "DUPLICATE_HEADS"


def _site(finding: Finding) -> Hashable:
    return finding.where.stack, finding.where.layer, finding.where.site


def _pair(finding: Finding) -> set[Hashable]:
    """The two heads of a DUPLICATE_HEADS."""
    where = finding.where
    other = finding.evidence.get("nearest_head", math.nan)
    heads = (where.head, other if math.isfinite(other) else None)
    return {(where.stack, where.layer, where.site, head) for head in heads}


Groups = Mapping[Hashable, set[Hashable]]
"""The group of each head that has a twin."""


def _group_of(finding: Finding, groups: Groups) -> set[Hashable] | None:
    """The group that holds both heads, if one does."""
    pair = _pair(finding)
    group = groups.get(next(iter(pair)), set())
    return group if group >= pair else None


def _twin_groups(audit: AuditRecord) -> Groups:
    """Heads that are twins, or twins of a twin, and so on."""
    groups: dict[Hashable, set[Hashable]] = {}
    for finding in filter(_is_twins, audit.findings):
        pair = _pair(finding)
        joined = pair.union(*(groups.get(head, ()) for head in pair))
        groups.update(dict.fromkeys(joined, joined))
    return groups
