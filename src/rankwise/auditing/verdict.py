"""Verdict of an audit: one sentence on what was found, and at most three actions; imports no torch."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankwise._internals.records import grouped
from rankwise.auditing.findings import FINDING_RULES, MIN_TOKENS
from rankwise.auditing.importance_findings import cheapest_words
from rankwise.auditing.provenance import LINEAR, REFUSED
from rankwise.auditing.records import NOTHING, Finding, Verdict

if TYPE_CHECKING:
    from rankwise.auditing.result import Audit

MOST_ACTIONS = 3
"""Maximum number of actions of a verdict."""
MOST_KINDS = 3
"""Maximum number of kinds of findings that the sentence names."""
OF_STATES, OF_HEADS = ("COLLAPSE", "INACTIVE_BLOCK"), ("CONSTANT", "DUPLICATE_HEADS")
"""Codes that the sentence on a healthy model names as absent, by what was measured."""
STOPPED = "The audit stopped before the end: some measurements are missing."


def verdict_of(audit: "Audit") -> Verdict:
    """Return the sentence and the actions of an audit.

    The sentence names the errors and warnings; if there are none, it names what was looked for. Actions are
    the remedies of the most severe findings, one per code; with errors, the remedies of errors and COLLAPSE.
    A remedy that begins with "nothing:" is not an action; without actions, `no_action` says what the cheapest
    removal of a head would bring, or why `rankwise compress` refuses the model.
    """
    kinds = grouped(audit.findings, lambda finding: finding.code)
    named = {code: own for code, own in kinds.items() if code in FINDING_RULES and FINDING_RULES[code].names}
    several = len({head.stack for head in audit.heads} | {state.stack for state in audit.states}) > 1
    severe = {code: own for code, own in named.items() if own[0].severity != "info"}
    errors = any(own[0].severity == "error" for own in severe.values())
    if severe:
        sentence = ("Not healthy: " if errors else "Worth a look: ") + _listed(severe, several)
    elif not audit.heads and not audit.states:
        sentence = "Nothing was measured: no mixing operator and no token states were captured"
    else:
        sentence = _healthy(audit, named, several)
    sentences = [f"{sentence}.", *([] if audit.complete else [STOPPED])]
    actions: dict[str, str] = {}
    for finding in audit.findings:
        rule = FINDING_RULES.get(finding.code)
        first = finding.severity == "error" or finding.code == "COLLAPSE"  # a warning in older files
        acts = (rule is None or rule.causes_action) and (first or not errors)
        if acts and not finding.remedy.startswith(NOTHING):
            is_code = any(word in finding.remedy for word in ("rankwise ", "rw."))
            where = "" if is_code else f"{finding.place}: "
            actions.setdefault(finding.code, where + finding.remedy)
    if {"REMOVABLE", "OVERSIZED_HEADS"} <= actions.keys():  # a compressed model cannot be compressed again
        del actions["OVERSIZED_HEADS"]
        both = actions["REMOVABLE"].replace("--parts heads", "--parts heads,width")
        actions["REMOVABLE"] = both.replace('parts="heads"', 'parts=("heads", "width")')
    known = sorted(dict.fromkeys(actions.values()), key=lambda action: LINEAR in action)
    no_action: list[str] = []
    if not severe and not actions:
        if audit.importance is not None:
            no_action.append(cheapest_words(audit.importance, audit.heads, audit.states, audit.provenance))
        refused = [finding.remedy for finding in audit.findings if finding.remedy.startswith(REFUSED)]
        no_action += [f"{remedy.removeprefix(NOTHING)[1:]}." for remedy in refused[:1]]
    return Verdict(
        sentence=" ".join(sentences),
        actions=tuple(known[:MOST_ACTIONS]),
        no_action=" ".join(filter(None, no_action)),
    )


def _healthy(audit: "Audit", noted: dict[str, list[Finding]], several: bool) -> str:
    states = [state for state in audit.states if state.tokens >= MIN_TOKENS]
    heads = [head for head in audit.heads if min(head.tokens, head.sources) >= MIN_TOKENS]
    looked_for = [*(OF_STATES if len(states) > 1 else ()), *(OF_HEADS if heads else ())]
    absent = [f"no {FINDING_RULES[code].names}" for code in looked_for if code not in noted]
    if not looked_for:
        return f"Nothing to judge: sequences have fewer than {MIN_TOKENS} tokens"
    sentence = f"Healthy: {', '.join(absent)}" if absent else "Healthy"
    return f"{sentence}. Noted: {_listed(noted, several)}" if noted else sentence


def _listed(kinds: dict[str, list[Finding]], several: bool) -> str:
    phrases = [_phrase(code, own, several) for code, own in kinds.items()]
    more = f"; {len(phrases) - MOST_KINDS} more" if len(phrases) > MOST_KINDS else ""
    return "; ".join(phrases[:MOST_KINDS]) + more


def _phrase(code: str, findings: Sequence[Finding], several: bool) -> str:
    """Return what the findings of a code are and where: "constant heads in layers 3 to 9"."""
    rule, where = FINDING_RULES[code], []
    if rule.about in ("model", "modules"):
        return rule.names
    for stack, own in grouped(findings, lambda finding: finding.where.stack).items():
        layers = [finding.where.layer for finding in own if finding.where.layer is not None]
        words = number_words("layer", layers) if layers or not stack else "the input"
        if rule.about == "stack":
            blocks = own[0].evidence.get("blocks", math.nan)
            words = f"after {blocks:g} block{'' if blocks == 1 else 's'}"
        where.append(words + (f" of {stack}" if several and stack else ""))
    link = " " if rule.about == "stack" else " in "
    return f"{rule.names}{link}{' and '.join(where)}"


def number_words(noun: str, numbers: Sequence[int | None]) -> str:
    """Return the numbers of layers or heads in words.

    Examples:
        >>> number_words("layer", [3]), number_words("head", [3, 5, 4, 5]), number_words("layer", [1, 3])
        ('layer 3', 'heads 3 to 5', 'layers 1, 3')
        >>> number_words("layer", [0, 2, 4, 6, 8])
        '5 layers, 0 to 8'
    """
    known = sorted({number for number in numbers if number is not None})
    if not known:
        return "the model"
    first, last = known[0], known[-1]
    if first == last:
        return f"{noun} {first}"
    if known == [*range(first, last + 1)] and len(known) > 2:
        return f"{noun}s {first} to {last}"
    if len(known) > 4:
        return f"{len(known)} {noun}s, {first} to {last}"
    return f"{noun}s {', '.join(map(str, known))}"
