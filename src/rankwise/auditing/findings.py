"""From numbers to findings: what a reader should know, why it matters, what to do."""

import math
from collections.abc import Iterator, Sequence

from rankwise.auditing.consequence import removable, with_consequences
from rankwise.auditing.head_findings import (
    MIN_TOKENS,
    grouped,
    head_findings,
    place_of,
    site_of,
    twin_findings,
)
from rankwise.auditing.importance_records import ImportanceRecord
from rankwise.auditing.null_findings import baseline_findings, null_findings
from rankwise.auditing.records import SEVERITY_ORDER, Finding, HeadRecord, LayerRecord, Place, Unseen
from rankwise.auditing.width_findings import width_findings
from rankwise.errors import InputError, did_you_mean

CODES = (
    "COLLAPSE",
    "INACTIVE_BLOCK",
    "SINK",
    "CONSTANT",
    "IDENTITY",
    "DUPLICATE_HEADS",
    "HIGH_RANK",
    "LOW_RANK",
    "OVERSIZED_HEADS",
    "REMOVABLE",
    "NONFINITE",
    "NOT_CAPTURED",
)
"""Every code a finding can have, as `--fail-on` takes them."""

COLLAPSE_WARNING, COLLAPSE_ERROR = 0.3, 0.1
"""μ/‖Y‖ at which 9 % and 1 % of the energy of the states still tells one token from another."""
COLLAPSE_FALL = 0.5
"""It must also have fallen to half of what the first block reads: states may start out alike."""
TURN = 0.01
"""1e-4 of the energy of what a block gives is its own; the rest is what it read. Likewise of one mixer."""
SWITCHED_OFF_REMEDY = (
    "see how much mixing its λ-skip or LayerScale leaves, `rankwise skip MODEL --text TEXT --certify`; or "
)
NONFINITE_REMEDY = (
    "see whether half precision overflowed, `rankwise audit MODEL --text TEXT --dtype float32 --out DIR`; "
    "what is not finite in float32 either comes from inputs or from weights, `[name for name, weight in "
    "model.named_parameters() if not weight.isfinite().all()]`"
)


def find(
    heads: Sequence[HeadRecord],
    layers: Sequence[LayerRecord],
    uncaptured: Sequence[Unseen],
    importance: ImportanceRecord | None = None,
) -> list[Finding]:
    """All findings of an audit, the gravest first, else in the order of the model.

    Args:
        heads: records of the heads.
        layers: records of the token states.
        unseen: modules that were not captured.
        worth: what was lost without heads, where that was measured: findings then say what follows.
    """
    found = [
        *_nonfinite(heads, layers),
        *_collapse(layers),
        *_switched_off(layers),
        *(finding for head in heads for finding in head_findings(head)),
        *twin_findings(heads),
        *baseline_findings(heads),
        *null_findings(heads),
        *width_findings(heads),
        *_uncaptured(uncaptured),
    ]
    if importance is not None:
        found = [*removable(importance), *with_consequences(found, heads, importance)]
    return sorted(found, key=lambda finding: SEVERITY_ORDER[finding.severity])


def _nonfinite(heads: Sequence[HeadRecord], layers: Sequence[LayerRecord]) -> Iterator[Finding]:
    meaning = "NaN or infinity appears here; those sequences are left out of every mean."
    for site, group in grouped(heads, site_of):
        broken = [head for head in group if head.nonfinite]
        if broken:
            yield Finding(
                code="NONFINITE",
                severity="error",
                where=place_of(broken[0]),
                evidence={"heads": len(broken), "sequences": max(head.nonfinite for head in broken)},
                heads=[head.head for head in broken],
                meaning=f"Attention of {site[2] or 'the model itself'}: {meaning}",
                remedy=NONFINITE_REMEDY,
            )
    for layer in layers:
        if layer.nonfinite:
            yield Finding(
                code="NONFINITE",
                severity="error",
                where=Place(stack=layer.stack, layer=layer.layer, site=layer.site),
                evidence={"sequences": layer.nonfinite},
                meaning=f"Token states after {layer.layer} blocks: {meaning}",
                remedy=NONFINITE_REMEDY,
            )


def _collapse(layers: Sequence[LayerRecord]) -> Iterator[Finding]:
    for _, group in grouped(layers, lambda layer: layer.stack):
        states = [layer for layer in group if layer.tokens >= MIN_TOKENS]
        if len(states) < 2:
            continue
        first = states[0].relative_spread
        if math.isnan(first):
            continue
        threshold = min(COLLAPSE_WARNING, COLLAPSE_FALL * first)
        low = [state for state in states[1:] if state.relative_spread < threshold]
        if not low:
            continue
        start, worst = low[0], min(low, key=lambda state: state.relative_spread)
        yield Finding(
            code="COLLAPSE",
            severity="error" if worst.relative_spread < COLLAPSE_ERROR else "warning",
            where=Place(stack=start.stack, layer=start.layer, site=start.site),
            evidence={
                "relative_spread": start.relative_spread,
                "relative_spread_layer_0": first,
                "relative_spread_lowest": worst.relative_spread,
                "mean_cosine": start.mean_cosine,
            },
            meaning=f"Tokens become alike: after {start.layer} blocks μ/‖Y‖ is "
            f"{start.relative_spread:.2g}, where the first block reads {first:.2g}.",
            remedy="rw.skips.recommend(audit, model, batch)",
        )


def _switched_off(layers: Sequence[LayerRecord]) -> Iterator[Finding]:
    """Blocks that give back what they read: a λ, a LayerScale or a gate has drowned or closed them."""
    for layer in layers:
        if layer.turn < TURN:
            yield Finding(
                code="INACTIVE_BLOCK",
                severity="warning",
                where=Place(stack=layer.stack, layer=layer.layer, site=layer.site),
                evidence={"turn": layer.turn, "norm": layer.norm},
                meaning=f"Block {layer.layer - 1} hardly changes its tokens: only {layer.turn:.1g} of what "
                "it gives is not what it reads, at some scale.",
                remedy=f"{SWITCHED_OFF_REMEDY}take the block out of its list and compare the loss",
            )


def _uncaptured(uncaptured: Sequence[Unseen]) -> Iterator[Finding]:
    for (kind, reason), modules in grouped(uncaptured, lambda module: (module.type, module.reason)):
        yield Finding(
            code="NOT_CAPTURED",
            severity="info" if reason.startswith("never called") else "warning",
            where=Place(site=modules[0].name),
            evidence={"modules": len(modules)},
            meaning=f"{len(modules)} × {kind} looks like a mixer and is not in this audit: {reason}.",
            remedy=f"rw.audit(model, batches, sites={{{modules[0].name!r}: adapter}})",
        )


def check_codes(codes: Sequence[str]) -> list[str]:
    """Refuse codes that no finding has.

    Args:
        codes: codes, in any case.

    Returns:
        The codes as findings have them.

    Raises:
        InputError: naming the nearest known code.
    """
    known = [code.upper().replace("-", "_") for code in codes]
    for code in known:
        if code not in CODES:
            raise InputError(
                f"code {code}", expected="a code of a finding", got=code, fix=did_you_mean(code, CODES)
            )
    return known
