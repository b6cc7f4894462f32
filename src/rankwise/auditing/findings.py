"""Findings: a table of rules, a function per code, and `diagnose`, which applies all of them to an audit."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from rankwise._internals.records import Address, grouped
from rankwise._internals.statistics import WIDTH_TOLERANCE
from rankwise.auditing.importance_findings import (
    describe_removable,
    interval_words,
    narrowing_saves,
    saved_share,
    with_removal_costs,
)
from rankwise.auditing.provenance import loading_command
from rankwise.auditing.records import (
    SEVERITY_ORDER,
    Finding,
    HeadRecord,
    Provenance,
    Remedy,
    Severity,
    StateRecord,
    UncapturedModule,
)
from rankwise.auditing.remedies import (
    WITHOUT_HEAD,
    compress_remedy,
    in_steps,
    removal_remedy,
    unless_done,
    unless_too_little,
)
from rankwise.errors import one_of
from rankwise.importance.records import ImportanceRecord

# Shorter sequences are not judged: many 2×2 matrices are close to the identity or have nearly equal rows.
MIN_TOKENS = 8
# For shorter sequences SINK and CONSTANT are only notes: the same head may spread its weight in longer ones.
STRUCTURE_TOKENS = 64
# SINK: one token has more than nine tenths of the weight of a row, averaged over rows.
SINK_MASS = 0.9
# CONSTANT: all other σ² add up to at most 10 % of σ₁², and the squared distances of rows from their mean to
# less than 9 % (0.3²) of ‖M‖².
CONSTANT_STABLE_RANK, CONSTANT_DISTANCE = 1.1, 0.3
# IDENTITY: the squared distance is below 1 % (0.1²) of the sum of both squared norms.
IDENTITY_DISTANCE = 0.1
# COLLAPSE: threshold on direction spread, the sine of the angle between the middle token and most tokens.
# Halfway, COLLAPSED_RUNS training runs were below the threshold. COLLAPSED_FAILED of them did not learn
# (docs/evidence/collapse-rule.md).
COLLAPSE_SPREAD, COLLAPSED_RUNS, COLLAPSED_FAILED = 0.04, 34, 31
# COLLAPSE also requires that direction spread has halved since the input, whose tokens may be similar.
COLLAPSE_FALL = 0.5
# Below this direction spread at the input, as in text of one repeated token, collapse cannot be judged: half
# of it is near 0.003, which rounding in bfloat16 leaves between equal tokens.
COLLAPSE_INPUT = 0.01
# INACTIVE_BLOCK: at most 1e-4 (0.01²) of the output's squared norm is orthogonal to the input.
INACTIVE_TURN = 0.01
# OVERSIZED_HEADS: a head is oversized if it requires at most this share of its channels: one half, less a
# margin for the error of the estimate.
OVERSIZED_HEADS = 0.4
# With N tokens per channel, eigenvalues of second moments are within (1 ± 1/√N)² of the true eigenvalues
# (Marchenko and Pastur): 1/4 to 9/4 for N = 4. With fewer tokens, every head seems to need few channels.
TOKENS_PER_CHANNEL = 4

Subject = Literal["model", "stack", "layer", "mixer", "head", "modules"]
Find = Callable[..., Iterator[Finding]]


class Measured(NamedTuple):
    """Records of an audit, which the rules read to find findings."""

    heads: Sequence[HeadRecord]
    states: Sequence[StateRecord]
    uncaptured: Sequence[UncapturedModule]
    importance: ImportanceRecord | None
    mixers: Collection[list[HeadRecord]]
    """Heads grouped by mixer."""
    provenance: Provenance | None = None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule of a finding code: the function that finds it, and the properties of its findings."""

    find: Find
    """Function that yields findings from `Measured`, or from one `HeadRecord` if the rule is about a head."""
    about: Subject
    """Subject of the findings. Findings of two audits match if code and subject are equal. The
    subject ``modules`` means modules of one class that were not captured for one reason."""
    decided_by: str
    """Name of the number in the evidence that says how strong the finding is."""
    evidence: str = ""
    """Names of the record's fields that are copied to the evidence, separated by spaces."""
    shown_by: str = ""
    """Measure whose map or curve shows the finding."""
    remedy: Remedy | None = None
    """Next step for the reader; None if `find` yields findings with their own remedies."""
    names: str = ""
    """Plural name of the findings in the sentence of a verdict; empty if the sentence leaves them out."""
    with_costs: bool = False
    """True if the finding states the cost of removing its head, provided that the cost is known."""


FINDING_RULES: dict[str, Rule] = {}
"""Rules by code, in the order in which they are applied."""


def rule(*codes: str, **properties: Any) -> Callable[[Find], Find]:
    """Register the decorated function as the rule that returns findings with these codes; see `Rule`."""

    def register(find: Find) -> Find:
        FINDING_RULES.update(dict.fromkeys(codes, Rule(find=find, **properties)))
        return find

    return register


def diagnose(
    heads: Sequence[HeadRecord],
    states: Sequence[StateRecord],
    uncaptured: Sequence[UncapturedModule],
    importance: ImportanceRecord | None = None,
    provenance: Provenance | None = None,
) -> list[Finding]:
    """Return all findings, sorted by severity, then in the order of the rules and of the model."""
    mixers = grouped(heads, lambda head: (head.id.at(None), head.cross)).values()
    measured = Measured(heads, states, uncaptured, importance, mixers, provenance)
    subjects = {rule.find: rule.about for rule in FINDING_RULES.values()}
    findings: list[Finding] = []
    for about_heads, group in groupby(subjects, lambda find: subjects[find] == "head"):
        finds = list(group)
        for subject in heads if about_heads else [measured]:
            findings += (finding for find in finds for finding in find(subject))
    if importance is not None:
        codes = [code for code, rule in FINDING_RULES.items() if rule.with_costs]
        findings = with_removal_costs(findings, codes, heads, importance, states, provenance)
    elif provenance is not None:
        for index, finding in enumerate(findings):  # the cost of a small head leads to no action
            if finding.remedy == WITHOUT_HEAD:
                saved = saved_share([finding.where], heads, states, provenance)
                remedy = unless_too_little(WITHOUT_HEAD, saved)
                findings[index] = finding.model_copy(update={"remedy": remedy})
    remedies = [finding.remedy and unless_done(finding.remedy, provenance) for finding in findings]
    findings = [
        finding.model_copy(update={"remedy": remedy})
        for finding, remedy in zip(findings, remedies, strict=True)
    ]
    return sorted(findings, key=lambda finding: SEVERITY_ORDER[finding.severity])


def about(code: str) -> Subject | Literal[""]:
    """Return the subject of the findings with a code. Return an empty string for an unknown code."""
    return FINDING_RULES[code].about if code in FINDING_RULES else ""


def check_codes(codes: Sequence[str]) -> list[str]:
    """Return codes in upper case with underscores. Raise `InputError` with similar codes if one is unknown.

    Examples:
        >>> check_codes(["collapse", "inactive-block"])
        ['COLLAPSE', 'INACTIVE_BLOCK']
    """
    return [one_of(f"code {code}", code.upper().replace("-", "_"), FINDING_RULES) for code in codes]


@rule("REMOVABLE", about="model", decided_by="heads", shown_by="removal_cost")
def removable(measured: Measured) -> Iterator[Finding]:
    """Find the heads that can be removed together."""
    importance = measured.importance
    if importance is not None and (removable := importance.removable) is not None and removable.heads:
        saved = saved_share(removable.heads, measured.heads, measured.states, measured.provenance)
        names = ("cost", "relative", "low", "high", "held_out", "loss")
        numbers = {name: getattr(removable, name) for name in names}
        evidence = {"heads": len(removable.heads), **numbers, "parameters": saved}
        words = describe_removable(importance, removable, saved)
        place = Address() if len(removable.heads) > 1 else removable.heads[0]
        price = f" (these cost {removable.relative:+.2%} on held-out sequences{interval_words(removable)})"
        price = price if removable.held_out else ""
        remedy = removal_remedy(importance, saved, removable.relative, removable.tolerance, price)
        yield _finding("REMOVABLE", place, evidence, words, remedy=remedy)


@rule("RANDOM_WEIGHTS", about="model", names="random weights", decided_by="weights")
def random_weights(measured: Measured) -> Iterator[Finding]:
    """Find weights of blocks and embeddings that the checkpoint does not have."""
    about = measured.provenance
    if about is not None and (names := about.random_weights):
        words = f"{len(names)} weights are random, because the checkpoint lacks them, such as {names[0]}."
        see = Remedy(words="see which names the checkpoint has instead", code=loading_command(about))
        remedy = in_steps([see, Remedy(words="save the checkpoint under the names of the model")])
        yield _finding("RANDOM_WEIGHTS", Address(), {"weights": len(names)}, words, "warning", remedy=remedy)


OVERFLOW = Remedy(
    words="see whether half precision overflowed", verb="audit", options=[["--dtype", "float32"]],
    out="float32", code="rw.audit(model.float(), batches)",
)  # fmt: skip
BROKEN_WEIGHTS = Remedy(
    words="see if a weight is not finite; if all are, the cause is in the inputs",
    code="[name for name, weight in model.named_parameters() if not weight.isfinite().all()]",
)


@rule("NONFINITE", about="mixer", names="NaN or infinity", decided_by="heads")
def nonfinite(measured: Measured) -> Iterator[Finding]:
    """Find mixers and token states with NaN or infinity."""
    meaning = "NaN or infinity appears here; those sequences are left out of every mean."
    findings, about = [], measured.provenance
    half = about is None or "16" in about.model_dtype
    remedy = in_steps([OVERFLOW, BROKEN_WEIGHTS]) if half else BROKEN_WEIGHTS
    for mixer in measured.mixers:
        if broken := [head for head in mixer if head.nonfinite_sequences]:
            evidence = {"heads": len(broken), "sequences": max(head.nonfinite_sequences for head in broken)}
            words = f"Attention of {broken[0].site or 'the model itself'}: {meaning}"
            findings.append(_finding("NONFINITE", broken[0], evidence, words, "error", broken, remedy))
    for state in measured.states:
        if state.nonfinite_sequences:
            words = f"Token states after {state.blocks} blocks: {meaning}"
            evidence = {"blocks": state.blocks, "sequences": state.nonfinite_sequences}
            findings.append(_finding("NONFINITE", state, evidence, words, "error", remedy=remedy))
    stacks = [finding.where.stack for finding in findings]
    # the mixer of a block comes before the states that the block writes
    yield from sorted(
        findings,
        key=lambda finding: (
            stacks.index(finding.where.stack),
            finding.where.sort_key[1],
            "blocks" in finding.evidence,
        ),
    )


@rule(
    "COLLAPSE", about="stack", names="collapse through depth", decided_by="direction_spread_lowest",
    shown_by="direction_spread",
    remedy=Remedy(words="try which λ keeps tokens apart", code="rw.skips.recommend(audit, model, batch)"),
)  # fmt: skip
def collapse(measured: Measured) -> Iterator[Finding]:
    """Find stacks in which most tokens become parallel."""
    for group in grouped(measured.states, attrgetter("stack")).values():
        states = [state for state in group if state.tokens >= MIN_TOKENS]
        first = states[0].direction_spread if states else math.nan
        threshold = min(COLLAPSE_SPREAD, COLLAPSE_FALL * first)
        low = [state for state in states[1:] if state.direction_spread < threshold]
        if not low or math.isnan(first):
            continue
        start, lowest = low[0], min(state.direction_spread for state in low)
        evidence = {
            "blocks": start.blocks, "direction_spread": start.direction_spread,
            "direction_spread_input": first, "direction_spread_lowest": lowest, "spread": start.spread,
        }  # fmt: skip
        yield _finding("COLLAPSE", Address(start.stack), evidence, collapse_words(evidence), "error")


def collapse_words(evidence: Mapping[str, float | int]) -> str:
    """Return the sentences that explain a COLLAPSE finding with this evidence."""
    return (
        f"Most tokens become parallel: direction spread {evidence['direction_spread_input']:.2g} at the "
        f"input, {evidence['direction_spread']:.2g} after {evidence['blocks']:g} blocks, at the lowest "
        f"{evidence['direction_spread_lowest']:.2g}. In experiments {COLLAPSED_FAILED} of {COLLAPSED_RUNS} "
        f"training runs with a value below {COLLAPSE_SPREAD:g} halfway did not learn."
    )


@rule(
    "MASSIVE_TOKENS", about="stack", names="massive tokens", decided_by="largest_norm_share",
)  # fmt: skip
def massive_tokens(measured: Measured) -> Iterator[Finding]:
    """Find stacks with tokens of huge norm. Nothing follows from them alone."""
    for group in grouped(measured.states, attrgetter("stack")).values():
        states = [state for state in group if state.tokens >= MIN_TOKENS and state.massive_tokens >= 0.5]
        if states:
            state = max(states, key=lambda state: state.largest_norm_share)
            place = state.largest_position
            plural = "" if state.blocks == 1 else "s"
            where = f"After {state.blocks} block{plural}" if state.blocks else "At the input"
            token = "" if place is None else f", most often {f'token {place}' if place else 'the first'},"
            words = (
                f"{where} the largest token{token} has {state.largest_norm_ratio:.0f} times the median norm "
                f"and {state.largest_norm_share:.0%} of ‖Y‖². This is normal in large decoders. μ, μ/‖Y‖, "
                "relative update and effective rank depend on such tokens: the rank is "
                f"{state.effective_rank:.3g}, and {state.effective_rank_without_massive:.3g} without tokens "
                "above ten times the median norm. Direction spread and mean cosine do not depend on norms."
            )
            evidence = {
                "blocks": state.blocks, "states": len(states), "massive_tokens": state.massive_tokens,
                "largest_norm_ratio": state.largest_norm_ratio,
                "largest_norm_share": state.largest_norm_share, "effective_rank": state.effective_rank,
                "effective_rank_without_massive": state.effective_rank_without_massive,
            }  # fmt: skip
            yield _finding("MASSIVE_TOKENS", Address(state.stack), evidence, words)


def inactive_remedy(by_hand: str) -> Remedy:
    """Return the remedy of INACTIVE_BLOCK. The last step, ``by_hand``, shows if the model needs the block."""
    mixing = Remedy(
        words="see how much mixing its skip connection leaves", verb="skip", options=[["--certify"]],
        code="rw.certify_skip(model, batch)",
    )  # fmt: skip
    return in_steps([mixing, Remedy(words=f"or {by_hand} and compare the loss")])


@rule(
    "INACTIVE_BLOCK", about="layer", names="inactive blocks", decided_by="relative_update",
    evidence="relative_update norm", remedy=inactive_remedy("take the block out of its list"),
)  # fmt: skip
def inactive_block(measured: Measured) -> Iterator[Finding]:
    """Find blocks whose output is nearly a multiple of their input, as with a small λ, LayerScale or gate.

    If one token holds more than half of ‖Y‖², the update describes this token only. The block is not judged.
    """
    for state in measured.states:
        if state.relative_update < INACTIVE_TURN and not state.largest_norm_share > 0.5:
            words = (
                f"Block {state.blocks - 1} barely changes its tokens: only {state.relative_update:.1g} of "
                "its output is not a multiple of its input."
            )
            yield _finding("INACTIVE_BLOCK", state, {"blocks": state.blocks}, words, "warning")


@rule(
    "SINK", about="head", names="attention sinks", decided_by="max_token_mass",
    shown_by="max_token_mass", evidence="max_token_mass first_token_mass row_entropy", remedy=WITHOUT_HEAD,
    with_costs=True,
)  # fmt: skip
def sink(head: HeadRecord) -> Iterator[Finding]:
    """Find a head that puts more than nine tenths of its weight on one token.

    A decoder's head that attends to the first token is a note without action: trained decoders have many.
    """
    if _is_judged(head) and head.max_token_mass > SINK_MASS:
        share = f"{_token_name(head)} takes {head.max_token_mass:.0%} of a row on average"
        finding = _structure("SINK", head, f"{share}: the head passes on little else.")
        if head.mask == "causal" and head.first_token_mass > SINK_MASS:
            normal = Remedy(no_action="a sink on the first token is normal in a decoder")
            finding = finding.model_copy(update={"severity": "info", "remedy": normal})
        yield finding


@rule(
    "CONSTANT", about="head", names="constant heads", decided_by="row_spread",
    shown_by="row_spread", evidence="stable_rank row_spread", remedy=WITHOUT_HEAD, with_costs=True,
)  # fmt: skip
def constant(head: HeadRecord) -> Iterator[Finding]:
    """Find a head whose rows are nearly equal, unless it is a sink."""
    alike = head.stable_rank < CONSTANT_STABLE_RANK and head.row_spread < CONSTANT_DISTANCE
    if _is_judged(head) and alike and not head.max_token_mass > SINK_MASS:
        words = "All rows are nearly the same: every token gets the same average."
        yield _structure("CONSTANT", head, words)


@rule(
    "IDENTITY", about="head", names="identity heads", decided_by="identity_distance",
    shown_by="identity_distance", evidence="identity_distance effective_rank", with_costs=True,
    remedy=Remedy(
        words="replace it with a linear map of each token, the product of its output and value projections, "
        "and compare the loss"
    ),
)  # fmt: skip
def identity(head: HeadRecord) -> Iterator[Finding]:
    """Find a head whose mixing matrix is nearly the identity."""
    if _is_judged(head) and head.identity_distance < IDENTITY_DISTANCE:
        words = "Every token keeps to itself: the head mixes nothing."
        yield _structure("IDENTITY", head, words, severity="info")


@rule("OVERSIZED_HEADS", about="mixer", decided_by="heads", shown_by="required_head_dim")
def oversized_heads(measured: Measured) -> Iterator[Finding]:
    """Find heads that require 1 channel to 40 % of their channels. Untrained heads require no channel."""
    every = [head for head in measured.heads if _determines_width(head)]
    saved, cached, gain = narrowing_saves(every, measured.states, measured.provenance)
    words = "narrow heads to the width they need"
    remedy = compress_remedy(["width"], f"{WIDTH_TOLERANCE:g}", words, "narrow", saved)
    remedy = unless_too_little(remedy, max(saved, cached))
    for mixer in measured.mixers:
        judged = [head for head in mixer if _determines_width(head)]
        oversized = [
            head for head in judged if 1 <= head.required_head_dim <= OVERSIZED_HEADS * (head.head_dim or 0)
        ]
        if oversized:
            head = min(oversized, key=lambda head: head.required_head_dim / (head.head_dim or 1))
            required, width = head.required_head_dim, head.head_dim or 0
            evidence = {
                "heads": len(oversized), "of": len(judged), "head_dim": width, "required_head_dim": required,
                "tolerance": WIDTH_TOLERANCE, "parameters": saved,
            }  # fmt: skip
            words = (
                f"{len(oversized)} of {len(judged)} heads need less than half the width of their queries and "
                f"keys: head {head.head} {required:.0f} of {width}. With it attention stays within "
                f"{WIDTH_TOLERANCE:g} nats on these sequences (KL to second order, rows weighed evenly)."
                + gain
            )
            yield _finding("OVERSIZED_HEADS", head, evidence, words, heads=oversized, remedy=remedy)


def _determines_width(head: HeadRecord) -> bool:
    """Return True if the required width of a head can be judged.

    Second moments need `TOKENS_PER_CHANNEL` tokens per channel, and centering loses one token per sequence.
    Return False if there are fewer tokens, sequences are below `MIN_TOKENS`, or the width is NaN.
    """
    tokens = _tokens(head)
    enough = head.sequences * (tokens - 1) >= TOKENS_PER_CHANNEL * (head.head_dim or 0)
    return enough and tokens >= MIN_TOKENS and not math.isnan(head.required_head_dim)


@rule(
    "NOT_CAPTURED", about="modules", names="modules that were not captured", decided_by="modules",
)  # fmt: skip
def not_captured(measured: Measured) -> Iterator[Finding]:
    """Find modules that look like mixers and were not captured."""
    for (kind, reason), modules in grouped(
        measured.uncaptured, lambda module: (module.type, module.reason)
    ).items():
        name, evidence = modules[0].name, {"modules": len(modules)}
        words = f"{len(modules)} × {kind} looks like a mixer and is not in this audit: {reason}."
        severity: Severity = "info" if reason.startswith("never called") else "warning"
        remedy = Remedy(
            words="write a function that returns its operator (docs/reference/models.md, sites by hand), "
            "then audit with it",
            code=f"rw.audit(model, batches, sites={{{name!r}: operator_of}})",
        )
        yield _finding("NOT_CAPTURED", Address(site=name), evidence, words, severity, remedy=remedy)


def _finding(
    code: str,
    where: HeadRecord | StateRecord | Address,
    evidence: Mapping[str, float | int],
    meaning: str,
    severity: Severity = "info",
    heads: Sequence[HeadRecord] = (),
    remedy: Remedy | None = None,
) -> Finding:
    """Return a finding, with the evidence that its rule defines and, by default, the remedy of the rule."""
    rule, place = FINDING_RULES[code], where if isinstance(where, Address) else where.id
    stated = {name: getattr(where, name) for name in rule.evidence.split()}
    return Finding(
        code=code, severity=severity, where=place, evidence=stated | dict(evidence), meaning=meaning,
        remedy=remedy or rule.remedy, heads=[head.head for head in heads],
    )  # fmt: skip


def _tokens(head: HeadRecord) -> float:
    return min(head.tokens, head.sources)


def _is_judged(head: HeadRecord) -> bool:
    return _tokens(head) >= MIN_TOKENS and not math.isnan(head.stable_rank)


def _structure(code: str, head: HeadRecord, words: str, severity: Severity = "warning") -> Finding:
    """Return a finding about the matrix of a head, with severity info if the sequences are short."""
    if _tokens(head) < STRUCTURE_TOKENS:
        words += f" Of {_tokens(head):.0f} tokens; longer sequences may show another head."
        severity = "info"
    return _finding(code, head, {}, words, severity)


def _token_name(head: HeadRecord) -> str:
    """Return the name of the most attended token, or "One token" if the name is unknown.

    If only some sequences share the name, their number is added.
    """
    if not head.max_token:
        return "One token"
    name = re.sub("^the ", "The ", head.max_token)
    some = f" (in {head.max_token_sequences} of {head.sequences} sequences)"
    return name if head.max_token_sequences == head.sequences else name + some
