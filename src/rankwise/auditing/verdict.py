"""The verdict of an audit: one sentence and at most three actions, computed from its findings."""

from collections import Counter
from typing import TYPE_CHECKING

from rankwise.auditing.findings import RULES
from rankwise.auditing.records import SEVERITY_ORDER, Verdict

if TYPE_CHECKING:
    from rankwise.auditing.result import Audit

MOST_ACTIONS = 3
_NOUNS = {"error": "error", "warning": "warning", "info": "note"}


def verdict_of(audit: "Audit") -> Verdict:
    """Return how many findings of each severity an audit has, and what to do about the most severe.

    A code causes one action, from its first finding, unless its rule says that no action follows.
    """
    counts = Counter(finding.severity for finding in audit.findings)
    tally = [
        f"{counts[severity]} {_NOUNS[severity]}{'s' if counts[severity] > 1 else ''}"
        for severity in SEVERITY_ORDER
        if counts[severity]
    ]
    sentence = f"{', '.join(tally) or 'No findings'}."
    if not audit.complete:
        sentence += " The audit stopped before the end: some measurements are missing."
    first = {finding.code: finding for finding in reversed(audit.findings)}
    codes = dict.fromkeys(
        finding.code
        for finding in audit.findings
        if finding.code not in RULES or RULES[finding.code].causes_action
    )
    return Verdict(
        sentence=sentence,
        actions=tuple(first[code].remedy for code in list(codes)[:MOST_ACTIONS]),
    )
