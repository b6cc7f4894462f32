"""Verdict of an audit: one sentence on the findings, and at most three actions; imports no torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from rankwise._internals.records import Address, grouped
from rankwise._internals.statistics import mean
from rankwise.auditing.findings import COLLAPSE_INPUT, FINDING_RULES, MIN_TOKENS
from rankwise.auditing.measure_table import HEAD_MEASURES, mixer_kind, share
from rankwise.auditing.records import Finding, Remedy, Verdict
from rankwise.auditing.remedies import join_compressions, remedy_text

if TYPE_CHECKING:
    from rankwise.auditing.result import Audit

MOST_ACTIONS = 3
"""Maximum number of actions of a verdict."""
MOST_KINDS = 3
"""Maximum number of kinds of findings that the sentence names."""
OF_STATES, OF_HEADS = ("COLLAPSE", "INACTIVE_BLOCK"), ("CONSTANT",)
"""Codes about states and about heads that the sentence on a healthy model names as absent."""
STOPPED = "The audit stopped before the end: some measurements are missing."


def verdict_of(audit: "Audit") -> Verdict:
    """Return the sentence and the actions of an audit.

    The sentence names the errors and warnings. Without errors and warnings, it names the absent faults, the
    lowest attention rank, and the cheapest and the costliest head.
    Actions are the remedies of the most severe findings, one per code. If there are errors, only their
    remedies are actions. A remedy with `no_action` is not an action. If a search found no heads that are
    worth removing, one more sentence says why.
    """
    kinds = grouped(audit.findings, lambda finding: finding.code)
    named = {
        code: group for code, group in kinds.items() if code in FINDING_RULES and FINDING_RULES[code].names
    }
    several = len({head.stack for head in audit.heads} | {state.stack for state in audit.states}) > 1
    severe = {code: group for code, group in named.items() if group[0].severity != "info"}
    errors = any(group[0].severity == "error" for group in severe.values())
    if severe:
        sentence = ("Not healthy: " if errors else "Worth a look: ") + _listed(severe, several)
    elif not audit.heads and not audit.states:
        sentence = "Nothing was measured: no mixing operator and no token states were captured"
    elif not audit.complete and not audit.provenance.batches:
        sentence = "No verdict: the first batch did not finish"
    else:
        sentence = _healthy(audit, named, several)
    distinctive = _distinctive(audit, several) if sentence.startswith("Healthy") else ()
    sentences = [f"{sentence}.", *distinctive, *([] if audit.complete else [STOPPED])]
    actions = _actions([finding for finding in audit.findings if finding.severity == "error" or not errors])
    texts = dict.fromkeys(place + remedy_text(remedy, audit.provenance) for place, remedy in actions)
    no_action = "" if errors else _no_removal(audit)
    return Verdict(sentence=" ".join(sentences), actions=tuple(texts)[:MOST_ACTIONS], no_action=no_action)


def _no_removal(audit: "Audit") -> str:
    """Return the reason why a search for heads led to no removal; "" without a search or such a reason."""
    searched = None if audit.importance is None else audit.importance.removable
    if audit.importance is None or searched is None:
        return ""
    limit = f"{searched.tolerance:.2%} of {audit.importance.reference_name}"
    if not searched.heads:
        half = f"{searched.chosen_on} of {searched.chosen_on + searched.held_out} sequences"
        return f"No heads to remove: none was found that costs at most {limit} on the {half} that choose."
    finding = next((finding for finding in audit.findings if finding.code == "REMOVABLE"), None)
    if finding is None or finding.remedy is None or not finding.remedy.no_action:
        return ""
    return f"No heads are worth removing at {limit}: {finding.remedy.no_action}."


def _actions(findings: Sequence[Finding]) -> list[tuple[str, Remedy]]:
    """Return a pair (place, remedy) per finding code, with conditional remedies last.

    The place is empty if the remedy has code to run. Remedies that compress the model are joined into one,
    because a compressed model cannot be compressed again.
    """
    actions: dict[str, tuple[str, Remedy]] = {}
    for finding in findings:
        remedy = finding.remedy
        if remedy is not None and not remedy.no_action:
            has_code = any(step.verb or step.code for step in (remedy, *remedy.then))
            actions.setdefault(finding.code, ("" if has_code else f"{finding.place}: ", remedy))
    compressing = {code: remedy for code, (_, remedy) in actions.items() if remedy.verb == "compress"}
    for number, code in enumerate(compressing):
        if number:
            del actions[code]
        else:
            actions[code] = "", join_compressions([*compressing.values()])
    return sorted(actions.values(), key=lambda action: bool(action[1].condition))


def _healthy(audit: "Audit", noted: dict[str, list[Finding]], several: bool) -> str:
    states = [state for state in audit.states if state.tokens >= MIN_TOKENS]
    heads = [head for head in audit.heads if min(head.tokens, head.sources) >= MIN_TOKENS]
    looked_for = [*(OF_STATES if len(states) > 1 else ()), *(OF_HEADS if heads else ())]
    if not looked_for:
        return f"Nothing to judge: sequences have fewer than {MIN_TOKENS} tokens"
    unjudged = any(not state.blocks and state.direction_spread < COLLAPSE_INPUT for state in states)
    judged = [code for code in looked_for if not (unjudged and code == "COLLAPSE")]
    absent = [f"no {FINDING_RULES[code].names}" for code in judged if code not in noted]
    sentence = f"Healthy: {', '.join(absent)}" if absent else "Healthy"
    if unjudged:
        sentence += ". Collapse cannot be judged: most input tokens are parallel"
    return f"{sentence}. Noted: {_listed(noted, several)}" if noted else sentence


def _distinctive(audit: "Audit", several: bool) -> Iterator[str]:
    """Yield sentences on the layer with the lowest attention rank, and on the cheapest and costliest head.

    If ranks at initialization are known, the layer is that with the lowest rank relative to them.
    """

    def place(address: Address) -> str:
        return str(address if several else replace(address, stack=""))

    rank, is_relative = HEAD_MEASURES[0], audit.at_init is not None
    mixing = [head for head in audit.heads if mixer_kind(head.kind).rows_are_means]
    ranks: list[tuple[float, str]] = []
    for (stack, layer), heads in grouped(mixing, attrgetter("stack", "layer")).items():
        value, name = mean(map(rank.value, heads)), place(Address(stack, layer))
        initial = mean(
            share(head.at_init.mean[rank.name], head) for head in heads if head.at_init is not None
        )
        if is_relative and initial > 0:
            ratio = f"{value / initial:.2g} times the untrained {initial:.2f}"
            ranks.append((value / initial, f"{value:.2f} in {name}, {ratio}"))
        elif not is_relative and value >= 0:
            ranks.append((value, f"{value:.2f} in {name}"))
    if len(ranks) > 1 and max(ranks)[0] > min(ranks)[0] + 0.005:
        yield f"Lowest attention rank{' relative to initialization' * is_relative}: {min(ranks)[1]}."
    known = [(head.importance, head.id) for head in audit.heads if head.importance is not None]
    costs = sorted(
        (cost.cost, place(address), cost.method) for cost, address in known if math.isfinite(cost.cost)
    )
    if len(costs) > 1 and (record := audit.importance) and record.reference and not record.is_chance:
        estimated = ", estimated" * any(method == "estimated" for _, _, method in costs)
        ends = [f"{name} ({record.share(cost):+.1%})" for cost, name, _ in (costs[0], costs[-1])]
        yield f"Cheapest and costliest head{estimated}: {', '.join(ends)}."


def _listed(kinds: dict[str, list[Finding]], several: bool) -> str:
    phrases = [_phrase(code, findings, several) for code, findings in kinds.items()]
    more = f"; {len(phrases) - MOST_KINDS} more" if len(phrases) > MOST_KINDS else ""
    return "; ".join(phrases[:MOST_KINDS]) + more


def _phrase(code: str, findings: Sequence[Finding], several: bool) -> str:
    """Return the name and the places of the findings of a code: "constant heads in layers 3 to 9"."""
    rule, where = FINDING_RULES[code], []
    if rule.about in ("model", "modules"):
        return rule.names
    for stack, group in grouped(findings, lambda finding: finding.where.stack).items():
        layers = [finding.where.layer for finding in group if finding.where.layer is not None]
        words = number_words("layer", layers) if layers or not stack else "the input"
        if rule.about == "stack":
            blocks = group[0].evidence.get("blocks", math.nan)
            words = f"after {blocks:g} block{'' if blocks == 1 else 's'}"
        where.append(words + (f" of {stack}" if several and stack else ""))
    link = " " if rule.about == "stack" else " in "
    return f"{rule.names}{link}{' and '.join(where)}"


def number_words(noun: str, numbers: Sequence[int | None]) -> str:
    """Return the numbers of layers or heads as text.

    Examples:
        >>> number_words("layer", [3]), number_words("head", [3, 5, 4, 5]), number_words("layer", [1, 3])
        ('layer 3', 'heads 3 to 5', 'layers 1, 3')
        >>> number_words("layer", [0, 2, 4, 6, 8])
        '5 layers, 0 to 8'
    """
    distinct = sorted({number for number in numbers if number is not None})
    if not distinct:
        return "the model"
    first, last = distinct[0], distinct[-1]
    if first == last:
        return f"{noun} {first}"
    if distinct == [*range(first, last + 1)] and len(distinct) > 2:
        return f"{noun}s {first} to {last}"
    if len(distinct) > 4:
        return f"{len(distinct)} {noun}s, {first} to {last}"
    return f"{noun}s {', '.join(map(str, distinct))}"
