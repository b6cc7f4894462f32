"""The numbers of an audit that a run's logger draws over the steps."""

import math
from collections.abc import Mapping

from rankwise.auditing.comparison import layer_means
from rankwise.auditing.records import AuditRecord

LOGGED: Mapping[str, tuple[str, ...]] = {
    "heads": ("effective_rank", "stable_rank", "first_token_mass"),
    "states": ("relative_spread", "mean_cosine", "effective_rank"),
}
"""Measures of heads (their mean over a layer) and of token states; the others are in the saved audits."""


def scalars(audit: AuditRecord, prefix: str = "rank") -> dict[str, float]:
    """Name the numbers of an audit for a logger, layer by layer.

    A name is ``prefix/measure/stack.layer``: a logger groups the layers of a measure. States are counted from
    what the first block reads, as in `LayerRecord`. What is not finite is left out, findings are counted.

    Args:
        audit: the audit.
        prefix: what the names begin with.

    Returns:
        A number for each name.

    Examples:
        >>> from rankwise.auditing.records import Provenance
        >>> about = Provenance(model="m", delta=0.01)
        >>> scalars(AuditRecord(provenance=about, heads=[], layers=[], findings=[]))
        {'rank/findings/error': 0.0, 'rank/findings/warning': 0.0}
    """
    named: dict[str, float] = {}
    for key, (value, _) in layer_means(audit).items():
        if key.measure in LOGGED[key.of] and math.isfinite(value):
            where = f"{key.stack}.{key.layer:02d}" + (".cross" if key.cross else "")
            named[f"{prefix}/{key.of}_{key.measure}/{where.lstrip('.')}"] = value
    for severity in ("error", "warning"):
        count = sum(finding.severity == severity for finding in audit.findings)
        named[f"{prefix}/findings/{severity}"] = float(count)
    return named
