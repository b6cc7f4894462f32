"""What stands on the page around its numbers: the few to know first, and where all of them come from."""

import math
from collections.abc import Sequence

from rankwise._internals.records import format_number
from rankwise.auditing.measure_table import HEAD_MEASURES, NULLS, share
from rankwise.auditing.records import Finding
from rankwise.auditing.result import Audit
from rankwise.report.text import count, mean, rank_share


def summary(audit: Audit) -> list[tuple[str, str, str]]:
    """Name the few numbers to know first: what, how much, and what to hold against it.

    Args:
        audit: the audit.
    """
    heads, layers = audit.heads, audit.layers
    facts = [("Heads", str(len(heads)), f"in {count(len({(h.stack, h.layer) for h in heads}), 'layer')}")]
    mixing = [head for head in heads if HEAD_MEASURES[0].applies_to(head)]
    if mixing:
        nulls = {words: mean(share(getattr(h, name), h) for h in mixing) for name, words in NULLS.items()}
        fresh = mean(share(head.init_numerical_rank, head) for head in mixing)
        named = {"fresh weights": fresh, **nulls}
        known = [f"{words} {value:.2g}" for words, value in named.items() if math.isfinite(value)]
        facts.append(("Mean rank share", format_number(mean(map(rank_share, mixing)), 2), ", ".join(known)))
    above, below = (_heads_of(audit.findings, code) for code in ("HIGH_RANK", "LOW_RANK"))
    if any(head.baseline is not None and head.baseline.judged for head in mixing):
        against = f"rank above theirs in {above}, below in {below}, by more than 95 % of pairs vary"
        facts.append(("Heads unlike fresh weights", str(above + below), against))
    elif any(head.band for head in mixing):
        against = f"rank above all of them in {above}, below all in {below}, at every δ of a decade"
        facts.append(("Heads unlike every reference", str(above + below), against))
    last = {layer.stack: layer for layer in sorted(layers, key=lambda layer: layer.layer)}
    nearest = min(last.values(), key=lambda y: _nan_last(y.relative_spread), default=None)
    if nearest is not None:
        against = f"0: all tokens alike; mean cosine {format_number(nearest.mean_cosine, 2)}"
        facts.append(("μ/‖Y‖ at the end", format_number(nearest.relative_spread, 3), against))
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


def origin(audit: Audit) -> list[tuple[str, str]]:
    """Name the model, the data and the versions, as far as they are known.

    Args:
        audit: the audit.
    """
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
