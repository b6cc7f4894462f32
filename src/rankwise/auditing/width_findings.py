"""Findings about the width of queries and keys: heads that need less than they have."""

import math
from collections.abc import Iterator, Sequence

from rankwise._internals.statistics import WIDTH_TOLERANCE
from rankwise.auditing.head_findings import MIN_TOKENS, grouped, place_of, site_of
from rankwise.auditing.records import Finding, HeadRecord

OVERSIZED_HEADS = 0.4
"""Of its width: then half of the channels can go, with a tenth left for what the second order misses of the
KL (docs/how-to/findings.md)."""
TOKENS_PER_CHANNEL = 4
"""Of N tokens for each channel, eigenvalues of second moments lie within (1 ± 1/√N)² of the true ones (the
edges of Marchenko and Pastur): from 1/4 to 9/4 of them. Fewer tokens need little width whatever the head."""

OVER_WIDE_REMEDY = (
    "`rankwise compress MODEL --parts qk --tolerance {tolerance:g} --text TEXT --out DIR`, with the part "
    "rotary in place of qk where positions are rotated in"
)


def width_findings(heads: Sequence[HeadRecord]) -> Iterator[Finding]:
    """One finding a layer: heads of it that need less than half of their width.

    Heads that need none weigh all they see evenly, as at fresh weights: there the width is not what is idle.

    Args:
        heads: records of the heads.
    """
    for _, group in grouped(heads, site_of):
        site = [head for head in group if _width_is_known(head)]
        found = [head for head in site if 1 <= head.required_head_dim <= OVERSIZED_HEADS * _width(head)]
        if not found:
            continue
        least = min(found, key=lambda head: head.required_head_dim / _width(head))
        yield Finding(
            code="OVERSIZED_HEADS",
            severity="info",
            where=place_of(least),
            evidence={
                "heads": len(found),
                "of": len(site),
                "width": _width(least),
                "required_head_dim": least.required_head_dim,
                "tolerance": WIDTH_TOLERANCE,
            },
            meaning=f"{len(found)} of {len(site)} heads need less than half the width of their queries and "
            f"keys: head {least.head} {least.required_head_dim:.0f} of {_width(least)}. With it attention "
            f"stays within {WIDTH_TOLERANCE:g} nats on these sequences (KL to second order, rows weighed "
            "evenly).",
            remedy=OVER_WIDE_REMEDY.format(tolerance=WIDTH_TOLERANCE),
            heads=[head.head for head in found],
        )


def _width(head: HeadRecord) -> int:
    return head.width or 0


def _width_is_known(head: HeadRecord) -> bool:
    """Whether its tokens were enough to say what its channels do."""
    fewest = min(head.tokens, head.sources)
    if math.isnan(head.required_head_dim) or fewest < MIN_TOKENS:
        return False
    return head.sequences * (fewest - 1) >= TOKENS_PER_CHANNEL * _width(head)  # centred: one less in each
