"""From numbers to findings: what a reader should know, why it matters, what to do."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

from rankwise.audit.consequence import removable, with_consequences
from rankwise.audit.measures import NULLS, OF_KNOWN_SCALE
from rankwise.audit.numbers import AVERAGING
from rankwise.audit.records import (
    SEVERITY_ORDER,
    Finding,
    HeadRecord,
    LayerRecord,
    Place,
    RankAt,
    Severity,
    Unseen,
)
from rankwise.audit.worth_records import WorthRecord
from rankwise.errors import InputError, did_you_mean

R = TypeVar("R")
K = TypeVar("K", bound=Hashable)

CODES = (
    "COLLAPSE",
    "SWITCHED_OFF",
    "SINK",
    "CONSTANT",
    "IDENTITY",
    "TWINS",
    "ABOVE_NULL",
    "BELOW_NULL",
    "REMOVABLE",
    "NONFINITE",
    "UNSEEN",
)
"""Every code a finding can have, as `--fail-on` takes them."""

MIN_TOKENS = 8
"""Fewer rows say nothing about structure: of 2×2 matrices many are near the identity or near constant."""

STRUCTURE_TOKENS = 64
"""Of fewer, what the rows of a head have in common is a note, and says of how many tokens it is: mass that 20
tokens leave to one may go elsewhere among 500."""

COLLAPSE_WARNING, COLLAPSE_ERROR = 0.3, 0.1
"""μ/‖Y‖ at which 9 % and 1 % of the energy of the states still tells one token from another."""
COLLAPSE_FALL = 0.5
"""It must also have fallen to half of what the first block reads: states may start out alike."""
TURN = 0.01
"""1e-4 of the energy of what a block gives is its own; the rest is what it read. Likewise of one mixer."""
SINK_MASS = 0.9
"""Nine tenths of every row on one token: the head passes on that token and little else."""
CONSTANT_STABLE_RANK = 1.1
"""At most a tenth of the energy of the strongest direction lies outside it …"""
CONSTANT_DISTANCE = 0.3
"""… and at most 9 % (0.3²) of the energy tells one row from another."""
IDENTITY_DISTANCE = 0.1
"""1 % of the joint energy of M and I in M − I: at most about 1 % of a row goes to other tokens."""
TWIN_DISTANCE = 0.1
"""Two heads whose difference holds 1 % of their joint energy mix the same way."""
ABOVE_NULL, BELOW_NULL = 1.25, 0.5
"""Rank relative to every null that is known, at every threshold of the band; the spread of a hardmax rank at
T ≥ 32 is below 8 % of it. Random winners, random queries and keys at the head's scale, and equal weights are
heads that know nothing, at a temperature of 0, of the head, and without end: a rank between two of them is
that of such a head at another temperature. Without a mask equal weights have rank 1, which no rank is below.
"""

NULL_REMEDY = "see what training did: `rw.audit(model, batches, baseline=True)`"
"""No null knows the weights a model starts with."""
BASELINE_REMEDY = "see what the model loses without it: `rw.audit(model, batches, worth=True)`"
"""More or less rank than at the start is what training did, and no fault."""

SWITCHED_OFF_REMEDY = (
    "see how much mixing its λ-skip or LayerScale leaves, `rankwise skip MODEL --text TEXT --certify`; or "
)
NONFINITE_REMEDY = (
    "see whether half precision overflowed, `rankwise audit MODEL --text TEXT --dtype float32 --out DIR`; "
    "what is not finite in float32 either comes from inputs or from weights, `[name for name, weight in "
    "model.named_parameters() if not weight.isfinite().all()]`"
)
WITHOUT_HEAD = "set the weights of the output projection that read this head to 0, and compare the loss"
"""Every attention head is read by some part of a linear map, whatever the model's library calls it."""


def find(
    heads: Sequence[HeadRecord],
    layers: Sequence[LayerRecord],
    unseen: Sequence[Unseen],
    worth: WorthRecord | None = None,
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
        *(finding for head in heads for finding in _head(head)),
        *_twins(heads),
        *_baseline(heads),
        *_null(heads),
        *_unseen(unseen),
    ]
    if worth is not None:
        found = [*with_consequences(found, heads, worth), *removable(worth)]
    return sorted(found, key=lambda finding: SEVERITY_ORDER[finding.severity])


def _grouped(records: Sequence[R], key: Callable[[R], K]) -> list[tuple[K, list[R]]]:
    """Records with the same key together, in the order of the first of each: stacks may run in turn."""
    groups: dict[K, list[R]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.items())


def _site_of(head: HeadRecord) -> tuple[str, int, str, bool]:
    return head.stack, head.layer, head.site, head.cross


def _place(head: HeadRecord) -> Place:
    return Place(stack=head.stack, layer=head.layer, site=head.site, head=head.head)


def _nonfinite(heads: Sequence[HeadRecord], layers: Sequence[LayerRecord]) -> Iterator[Finding]:
    meaning = "NaN or infinity appears here; those sequences are left out of every mean."
    for site, group in _grouped(heads, _site_of):
        broken = [head for head in group if head.nonfinite]
        if broken:
            yield Finding(
                code="NONFINITE",
                severity="error",
                where=_place(broken[0]),
                evidence={"heads": len(broken), "sequences": max(head.nonfinite for head in broken)},
                heads=[head.head for head in broken],
                meaning=f"Attention of {site[2]}: {meaning}",
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
    for _, group in _grouped(layers, lambda layer: layer.stack):
        states = [layer for layer in group if layer.tokens >= MIN_TOKENS]
        if len(states) < 2:
            continue
        first = states[0].relative_collapse
        if math.isnan(first):
            continue
        threshold = min(COLLAPSE_WARNING, COLLAPSE_FALL * first)
        low = [state for state in states[1:] if state.relative_collapse < threshold]
        if not low:
            continue
        start, worst = low[0], min(low, key=lambda state: state.relative_collapse)
        yield Finding(
            code="COLLAPSE",
            severity="error" if worst.relative_collapse < COLLAPSE_ERROR else "warning",
            where=Place(stack=start.stack, layer=start.layer, site=start.site),
            evidence={
                "relative_collapse": start.relative_collapse,
                "relative_collapse_layer_0": first,
                "relative_collapse_lowest": worst.relative_collapse,
                "mean_cosine": start.mean_cosine,
            },
            meaning=f"Tokens become alike: after {start.layer} blocks μ/‖Y‖ is "
            f"{start.relative_collapse:.2g}, where the first block reads {first:.2g}.",
            remedy="rw.advise(audit, model, batch)",
        )


def _switched_off(layers: Sequence[LayerRecord]) -> Iterator[Finding]:
    """Blocks that give back what they read: a λ, a LayerScale or a gate has drowned or closed them."""
    for layer in layers:
        if layer.turn < TURN:
            yield Finding(
                code="SWITCHED_OFF",
                severity="warning",
                where=Place(stack=layer.stack, layer=layer.layer, site=layer.site),
                evidence={"turn": layer.turn, "norm": layer.norm},
                meaning=f"Block {layer.layer - 1} hardly changes its tokens: only {layer.turn:.1g} of what "
                "it gives is not what it reads, at some scale.",
                remedy=f"{SWITCHED_OFF_REMEDY}take the block out of its list and compare the loss",
            )


def _head(head: HeadRecord) -> Iterator[Finding]:
    if min(head.tokens, head.sources) < MIN_TOKENS or math.isnan(head.stable_rank):
        return
    if head.peak_mass > SINK_MASS:
        yield Finding(
            code="SINK",
            severity=_structural(head),
            where=_place(head),
            evidence={
                "peak_mass": head.peak_mass,
                "sink_mass": head.sink_mass,
                "row_entropy": head.row_entropy,
            },
            meaning=f"{_peak(head)} takes {head.peak_mass:.0%} of a row on average: the head passes "
            f"on little else.{_short_words(head)}",
            remedy=WITHOUT_HEAD,
        )
    elif head.stable_rank < CONSTANT_STABLE_RANK and head.row_distance < CONSTANT_DISTANCE:
        yield Finding(
            code="CONSTANT",
            severity=_structural(head),
            where=_place(head),
            evidence={"stable_rank": head.stable_rank, "row_distance": head.row_distance},
            meaning=f"All rows are nearly the same: every token gets the same average.{_short_words(head)}",
            remedy=WITHOUT_HEAD,
        )
    if head.identity_distance < IDENTITY_DISTANCE:
        yield Finding(
            code="IDENTITY",
            severity="info",
            where=_place(head),
            evidence={"identity_distance": head.identity_distance, "effective_rank": head.effective_rank},
            meaning=f"Every token keeps to itself: the head mixes nothing.{_short_words(head)}",
            remedy="put a linear map of each token in its place, the product of its output and value "
            "projections, and compare the loss",
        )


def _structural(head: HeadRecord) -> Severity:
    return "warning" if min(head.tokens, head.sources) >= STRUCTURE_TOKENS else "info"


def _short_words(head: HeadRecord) -> str:
    fewest = min(head.tokens, head.sources)
    short = f" Of {fewest:.0f} tokens; longer sequences may show another head."
    return short if fewest < STRUCTURE_TOKENS else ""


def _peak(head: HeadRecord) -> str:
    """What the token at the peak is, and in how many sequences where not in all."""
    if not head.peak_token:
        return "One token"
    name = head.peak_token.removeprefix("the ")
    name = f"The {name}" if name != head.peak_token else name
    of = f" (in {head.peak_token_sequences} of {head.sequences} sequences)"
    return name if head.peak_token_sequences == head.sequences else name + of


def _is_trivial(head: HeadRecord) -> bool:
    return any(True for _ in _head(head))


def _twins(heads: Sequence[HeadRecord]) -> Iterator[Finding]:
    """A head and the one it is nearest to, once a pair; not where both have a finding of their own.

    Of queries and keys that could be shared: channels of a state-space mixer are alike by the dozen.
    """
    attention = [head for head in heads if head.kind in (*AVERAGING, "diagonal")]
    for _, group in _grouped(attention, _site_of):
        by_head = {head.head: head for head in group}
        for head in group:
            other = by_head.get(-1 if head.nearest_head is None else head.nearest_head)
            if other is None or min(head.tokens, head.sources) < MIN_TOKENS:
                continue
            mutual = other.nearest_head == head.head
            if head.nearest_distance >= TWIN_DISTANCE or (mutual and other.head < head.head):
                continue
            if _is_trivial(head) and _is_trivial(other):
                continue
            lower, upper = sorted((head, other), key=lambda twin: twin.head)
            yield Finding(
                code="TWINS",
                severity="info",
                where=_place(lower),
                evidence={"nearest_head": upper.head, "nearest_distance": head.nearest_distance},
                heads=[lower.head, upper.head],
                meaning=f"Heads {lower.head} and {upper.head} mix the same way.",
                remedy=f"give both the {_weights(head)} of one of them, and compare the loss",
            )


def _weights(head: HeadRecord) -> str:
    return "query and key weights" if head.kind in ("softmax", "linear") else "weights"


def _baseline(heads: Sequence[HeadRecord]) -> Iterator[Finding]:
    """One finding a layer and direction, against the same heads at fresh weights."""
    for _, group in _grouped(heads, _site_of):
        site = [head for head in group if _is_long_enough(head) and has_baseline(head)]
        for code, words in (("ABOVE_NULL", "more"), ("BELOW_NULL", "less")):
            found = [head for head in site if beyond_null(head) == code]
            if not found:
                continue
            extreme = max(found, key=_distance_from_baseline)
            known = extreme.baseline
            assert known is not None
            low, at, high = (known.band[number] for number in (0, len(known.band) // 2, -1))
            fresh = (at.rank_low + at.rank_high) / 2
            yield Finding(
                code=code,
                severity="info",
                where=_place(extreme),
                evidence={
                    "heads": len(found),
                    "of": len(site),
                    "numerical_rank": _middle_rank(extreme),
                    "baseline": fresh,
                    "baseline_std": at.std,
                    "difference": (at.difference_low + at.difference_high) / 2,
                    "margin": at.margin,
                    "pairs": at.pairs,
                    "seeds": known.seeds,
                    **extreme.band[len(extreme.band) // 2].nulls,
                    "delta_low": low.delta,
                    "delta_high": high.delta,
                },
                meaning=f"{len(found)} of {len(site)} heads have {words} rank than the same heads at fresh "
                f"weights on the same data: head {extreme.head} has {_middle_rank(extreme):.0f} of "
                f"{extreme.smaller:.0f}, fresh {fresh:.0f}; over sequences and seeds the difference varies "
                f"by ±{at.margin:.2g}. So it is for δ from {low.delta:.2g} to {high.delta:.2g}.",
                remedy=BASELINE_REMEDY,
                heads=[head.head for head in found],
            )


def has_baseline(head: HeadRecord) -> bool:
    """Whether the head is held against fresh weights: their spread is known, and the scale of its matrix.

    Args:
        head: the head.
    """
    return head.kind in OF_KNOWN_SCALE and head.baseline is not None and head.baseline.judged


def _is_long_enough(head: HeadRecord) -> bool:
    return min(head.tokens, head.sources) >= MIN_TOKENS


def _distance_from_baseline(head: HeadRecord) -> float:
    """At δ, on a scale of ratios."""
    assert head.baseline is not None
    at = head.baseline.band[len(head.baseline.band) // 2]
    return abs(math.log((_middle_rank(head) + 1) / ((at.rank_low + at.rank_high) / 2 + 1)))


def _null(heads: Sequence[HeadRecord]) -> Iterator[Finding]:
    """One finding a layer and direction: most heads of a trained model lie on one side or the other."""
    for _, group in _grouped(heads, _site_of):
        site = [head for head in group if _is_long_enough(head) and _judged(head) and not has_baseline(head)]
        for code, words in (("ABOVE_NULL", f"over {ABOVE_NULL:g} times"), ("BELOW_NULL", "less than half")):
            found = [head for head in site if beyond_null(head) == code]
            if not found:
                continue
            extreme = max(found, key=_distance_from_nulls)
            low, at, high = (extreme.band[number] for number in (0, len(extreme.band) // 2, -1))
            said = ", ".join(f"{NULLS[name]} {null:.0f}" for name, null in at.nulls.items())
            yield Finding(
                code=code,
                severity="info",
                where=_place(extreme),
                evidence={
                    "heads": len(found),
                    "of": len(site),
                    "numerical_rank": _middle_rank(extreme),
                    **at.nulls,
                    "delta_low": low.delta,
                    "delta_high": high.delta,
                },
                meaning=f"{len(found)} of {len(site)} heads have {words} the rank of each reference "
                f"(of {extreme.tokens:.0f}: {said}), whatever δ from {low.delta:.2g} to {high.delta:.2g}.",
                remedy=NULL_REMEDY,
                heads=[head.head for head in found],
            )


def beyond_null(head: HeadRecord) -> str | None:
    """ABOVE_NULL or BELOW_NULL where that holds at every threshold of the band.

    Against the same head at fresh weights, where the spread of those is known; else against every known null.

    Args:
        head: the head.
    """
    if head.baseline is not None and has_baseline(head):
        at = head.baseline.band
        if all(point.difference_low > point.margin for point in at):
            return "ABOVE_NULL"
        return "BELOW_NULL" if all(-point.difference_high > point.margin for point in at) else None
    points = _judged(head)
    if points and all(point.rank_low > ABOVE_NULL * max(point.nulls.values()) for point in points):
        return "ABOVE_NULL"
    if points and all(point.rank_high < BELOW_NULL * min(point.nulls.values()) for point in points):
        return "BELOW_NULL"
    return None


def _judged(head: HeadRecord) -> list[RankAt]:
    """The thresholds of the band; none where one of them has no null."""
    return head.band if all(point.nulls for point in head.band) else []


def _distance_from_nulls(head: HeadRecord) -> float:
    """How far beyond the nearest null, at δ, on a scale of ratios."""
    nulls = head.band[len(head.band) // 2].nulls.values()
    return min(abs(math.log((_middle_rank(head) + 1) / (null + 1))) for null in nulls)


def _middle_rank(head: HeadRecord) -> float:
    """The numerical rank; the middle of its interval where an estimate can only bound it."""
    return (head.least_rank + head.most_rank) / 2 if math.isnan(head.numerical_rank) else head.numerical_rank


def _unseen(unseen: Sequence[Unseen]) -> Iterator[Finding]:
    for (kind, reason), modules in _grouped(unseen, lambda module: (module.type, module.reason)):
        yield Finding(
            code="UNSEEN",
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
                f"code {code}", wanted="a code of a finding", got=code, fix=did_you_mean(code, CODES)
            )
    return known
