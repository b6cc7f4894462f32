"""Findings of single heads: SINK, CONSTANT, IDENTITY and DUPLICATE_HEADS; and helpers of all findings."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

from rankwise.auditing.mixer_kinds import mixer_kind
from rankwise.auditing.records import Finding, HeadRecord, Place, Severity

R = TypeVar("R")
K = TypeVar("K", bound=Hashable)

MIN_TOKENS = 8
"""Fewer rows say nothing about structure: of 2×2 matrices many are near the identity or near constant."""

STRUCTURE_TOKENS = 64
"""Of fewer, what the rows of a head have in common is a note, and says of how many tokens it is: mass that 20
tokens leave to one may go elsewhere among 500."""

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
WITHOUT_HEAD = "set the weights of the output projection that read this head to 0, and compare the loss"
"""Every attention head is read by some part of a linear map, whatever the model's library calls it."""


def grouped(records: Sequence[R], key: Callable[[R], K]) -> list[tuple[K, list[R]]]:
    """Records with the same key together, in the order of the first of each: stacks may run in turn.

    Args:
        records: of heads, layers or modules.
        key: what those of a group have in common.
    """
    groups: dict[K, list[R]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.items())


def site_of(head: HeadRecord) -> tuple[str, int, str, bool]:
    """The mixer that a head is part of.

    Args:
        head: the head.
    """
    return head.stack, head.layer, head.site, head.cross


def place_of(head: HeadRecord) -> Place:
    """Where a finding about a head points to.

    Args:
        head: the head.
    """
    return Place(stack=head.stack, layer=head.layer, site=head.site, head=head.head)


def head_findings(head: HeadRecord) -> Iterator[Finding]:
    """SINK or CONSTANT, and IDENTITY.

    Args:
        head: the head.
    """
    if min(head.tokens, head.sources) < MIN_TOKENS or math.isnan(head.stable_rank):
        return
    if head.max_token_mass > SINK_MASS:
        yield Finding(
            code="SINK",
            severity=_structural(head),
            where=place_of(head),
            evidence={
                "max_token_mass": head.max_token_mass,
                "first_token_mass": head.first_token_mass,
                "row_entropy": head.row_entropy,
            },
            meaning=f"{_peak(head)} takes {head.max_token_mass:.0%} of a row on average: the head passes "
            f"on little else.{_short_words(head)}",
            remedy=WITHOUT_HEAD,
        )
    elif head.stable_rank < CONSTANT_STABLE_RANK and head.row_distance < CONSTANT_DISTANCE:
        yield Finding(
            code="CONSTANT",
            severity=_structural(head),
            where=place_of(head),
            evidence={"stable_rank": head.stable_rank, "row_distance": head.row_distance},
            meaning=f"All rows are nearly the same: every token gets the same average.{_short_words(head)}",
            remedy=WITHOUT_HEAD,
        )
    if head.identity_distance < IDENTITY_DISTANCE:
        yield Finding(
            code="IDENTITY",
            severity="info",
            where=place_of(head),
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
    if not head.max_token:
        return "One token"
    name = head.max_token.removeprefix("the ")
    name = f"The {name}" if name != head.max_token else name
    of = f" (in {head.max_token_sequences} of {head.sequences} sequences)"
    return name if head.max_token_sequences == head.sequences else name + of


def _is_trivial(head: HeadRecord) -> bool:
    return any(True for _ in head_findings(head))


def twin_findings(heads: Sequence[HeadRecord]) -> Iterator[Finding]:
    """DUPLICATE_HEADS: a head and its nearest head, once per pair; not if both have a finding of their own.

    Of queries and keys that could be shared: channels of a state-space mixer are alike by the dozen.

    Args:
        heads: all heads of the audit.
    """
    attention = [head for head in heads if not mixer_kind(head.kind).state_space]
    for _, group in grouped(attention, site_of):
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
                code="DUPLICATE_HEADS",
                severity="info",
                where=place_of(lower),
                evidence={"nearest_head": upper.head, "nearest_distance": head.nearest_distance},
                heads=[lower.head, upper.head],
                meaning=f"Heads {lower.head} and {upper.head} mix the same way.",
                remedy=f"give both the {_weights(head)} of one of them, and compare the loss",
            )


def _weights(head: HeadRecord) -> str:
    return "query and key weights" if head.kind in ("softmax", "linear") else "weights"
