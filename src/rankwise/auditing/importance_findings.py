"""Add costs of removing heads to findings, and describe these costs as text; imports no torch."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter

from rankwise._internals.records import Address, format_number, grouped
from rankwise.auditing.records import NOTHING, Finding, HeadRecord, Provenance, StateRecord
from rankwise.importance.records import HeadImportance, ImportanceRecord, RemovableSet, agreement

WITHOUT_IT = (
    "see what the model loses without it: `{audit --importance --out NAME-importance | "
    "rw.audit(model, batches, importance=True)}`"
)
EXACTLY = (
    "remove heads one by one, `{audit --importance exact --out NAME-exact | "
    'rw.audit(model, batches, importance="exact")}`'
)
CAUTION = "sort heads and can fall far short of large costs"
HEAD_CAUTION = f"estimates of second order {CAUTION}"
BLOCK_CAUTION = "an order at most: removing a block is a large change, and estimates can fall far short of it"
ENTROPY = "the entropy of the predictions"
WORTH = 0.05
"""Smallest share of the parameters whose removal is an action: less is below the noise of a measured time."""
TOLERANCE = 0.01
"""Largest relative increase of the loss for a removable head, used if no removable set was searched."""


def with_removal_costs(
    findings: Sequence[Finding],
    about: Mapping[str, str],
    heads: Sequence[HeadRecord],
    importance: ImportanceRecord,
    states: Sequence[StateRecord] = (),
    provenance: Provenance | None = None,
) -> list[Finding]:
    """Add known costs of removal to findings; ``about`` maps each code that states costs to its subject."""
    known, found = {head.id: head.importance for head in heads}, []
    mixers = grouped(heads, lambda head: head.id.at(None))
    for finding in findings:
        numbers: Sequence[int | None] = finding.heads or [finding.where.head]
        costs = [known.get(finding.where.at(number)) for number in numbers if finding.code in about]
        complete = [cost for cost in costs if cost is not None and not math.isnan(cost.cost)]
        if complete and len(complete) == len(numbers):
            mixer = mixers.get(finding.where.at(None), [])
            saved = saved_share([finding.where], mixer, states, provenance) if provenance else math.nan
            finding = _with_removal_cost(finding, about[finding.code], complete, importance, saved)
        found.append(finding)
    return found


def _with_removal_cost(
    finding: Finding, about: str, known: Sequence[HeadImportance], importance: ImportanceRecord, saved: float
) -> Finding:
    low, high, alone = min(one.cost for one in known), max(one.cost for one in known), len(known) == 1
    exact = all(one.method == "exact" for one in known)
    tolerance = TOLERANCE if importance.removable is None else importance.removable.tolerance
    within = importance.share(high) <= tolerance
    shares = _percent(importance, low) if alone else _percent(importance, low, high)
    if exact:
        change = f"{_change(importance, low)}, " if about == "head" else ""
        words = f"Without {'it' if alone else 'one of them'} the loss changes by {shares} ({change}exact)"
        words += ": any one of them can be removed" if about == "group" and within else ""
    else:
        each = "" if alone else " each"
        words = f"The estimated cost of removal is {shares}{each}; such estimates {CAUTION}"
    remedy = EXACTLY
    if about == "group":
        remedy = finding.remedy
    elif about == "head" and math.isnan(importance.share(low)):
        remedy = f"{NOTHING} {importance.reference_name}, which costs are compared with, is 0"
    elif about == "head" and exact:
        remedy = removal_remedy(saved, tolerance) if within else f"{NOTHING} the model needs this head"
    elif exact:
        remedy = f"{NOTHING} the rank is not a fault, and its price is known"
    price = {"least_removal_cost": low, "most_removal_cost": high}
    price = {"removal_cost": low} if about == "head" else price
    meaning, evidence = f"{finding.meaning} {words}.", finding.evidence | price
    return finding.model_copy(update={"meaning": meaning, "evidence": evidence, "remedy": remedy})


def describe_removable(importance: ImportanceRecord, found: RemovableSet, saved: float) -> str:
    """Return sentences on the cost of removing a set of heads, and on the share of parameters they have."""
    count = len(found.heads)
    layers = grouped(sorted(found.heads, key=attrgetter("sort_key")), attrgetter("stack", "layer"))
    where = "; ".join(
        f"layer {layer}: {', '.join(str(one.head) for one in own)}" for (_, layer), own in layers.items()
    )
    heads, them = ("this head", "it") if count == 1 else (f"these {count} heads together", "them")
    verb = "lowers the loss by" if found.cost < 0 else "costs"
    cost = f"{verb} {abs(importance.share(found.cost)):.2%}{_of(importance)}"
    cost += f" ({_change(importance, found.cost)})"
    gain = "" if math.isnan(saved) else f" It saves at most {saved:.1%} of the parameters."
    return f"Removing {heads} {cost}, by a run without {them} on this audit's batches ({where}).{gain}"


def saved_share(
    removed: Sequence[Address],
    heads: Sequence[HeadRecord],
    states: Sequence[StateRecord],
    about: Provenance | None,
) -> float:
    """Return an upper bound on the share of the model's parameters that heads have; NaN if not known.

    A head of dim K in tokens of width D has at most 2 K (D + 1) of them in queries and output, and as many in
    its keys and values, which remain while a head that shares them remains.
    """
    hidden_sizes = {state.stack: state.hidden_size for state in states}
    total, gone = 0 if about is None else about.parameters, {*removed}
    found, known = [head for head in heads if head.id in gone], []
    if {head.id for head in found} != gone:
        return math.nan
    for group in by_key_head(found):
        parts = 2 * len(group) + 2 * (len(group) == group[0].heads_per_group)
        known.append(parts * (group[0].head_dim or 0) * (hidden_sizes.get(group[0].stack, -1) + 1))
    return sum(known) / total if total and known and all(known) else math.nan


def narrowing_saves(
    heads: Sequence[HeadRecord], states: Sequence[StateRecord], about: Provenance | None
) -> tuple[float, str, str]:
    """Return the share of parameters saved if heads keep the width that they need, and words on it.

    Heads that share a key head keep one width. The words are a sentence and the beginning of a remedy. If the
    saving is not known, they are empty, and the share is NaN.
    """
    hidden_sizes = {state.stack: state.hidden_size for state in states}
    total = 0 if about is None else about.parameters
    parameters, freed, keys = 0, 0, 0
    for group in by_key_head(head for head in heads if not head.cross):
        width, tokens = group[0].head_dim or 0, hidden_sizes.get(group[0].stack, -1)
        if total and tokens >= 0 and len(group) == group[0].heads_per_group:
            unneeded = width - max(1, *(math.ceil(head.required_head_dim) for head in group))
            parameters += (len(group) + 1) * unneeded * (tokens + 1)
            freed, keys = freed + unneeded * (group[0].mask == "causal"), keys + width
    if not keys:
        return math.nan, "", ""
    saved, cached = parameters / total, freed / keys
    also = f" and {cached:.0%} of the cached keys" if cached else ""
    words = (
        f" Narrowing all {len(heads)} heads to the width they need saves about {saved:.1%} of the parameters"
    )
    return saved, f"{words}{also}.", too_little(max(saved, cached))


def by_key_head(heads: Iterable[HeadRecord]) -> Collection[list[HeadRecord]]:
    """Return groups of heads that share a key head."""
    return grouped(heads, lambda head: (head.id.at(None), head.head // head.heads_per_group)).values()


def too_little(saved: float) -> str:
    """Return the beginning of a remedy that is no action, if a saving is too small to be noticed."""
    return f"{NOTHING} that is too little to notice; to do it anyway, " if saved < WORTH else ""


def removal_remedy(saved: float, tolerance: float) -> str:
    """Return the remedy that removes heads; it is no action if they save too little."""
    command = f"compress --parts heads --tolerance {tolerance:g} --out NAME-heads"
    code = f'rw.compress(model, batches, parts="heads", tolerance={tolerance:g})'
    return f"{too_little(saved)}`{{{command} | {code}}}` (it chooses heads again)"


def cheapest_words(
    importance: ImportanceRecord,
    heads: Sequence[HeadRecord],
    states: Sequence[StateRecord],
    about: Provenance,
) -> str:
    """Return a sentence on the head whose removal costs least; an empty string if no cost is known."""
    costs = [(one.cost, head) for head in heads if (one := head.importance) and math.isfinite(one.cost)]
    if not costs:
        return ""
    cost, head = min(costs, key=lambda pair: pair[0])
    exact = head.importance is not None and head.importance.method == "exact"
    saved = saved_share([head.id], heads, states, about)
    costs_it = f"{'costs' if exact else 'is estimated to cost'} {_percent(importance, cost)}"
    if not _of(importance) and not math.isnan(importance.share(cost)):
        costs_it += f" of {importance.reference_name}"
    gain = "" if math.isnan(saved) else f" and saves at most {saved:.1%} of the parameters"
    return f"Nothing worth doing: the cheapest head (layer {head.layer} head {head.head}) {costs_it}{gain}."


def whole_words(importance: ImportanceRecord) -> str:
    """Describe the loss of the unchanged model; if it is 0, the reference with which costs are compared."""
    if importance.value:
        return f"{format_number(importance.value)} {importance.unit}"
    if _of(importance):
        return f"{importance.unit}, {format_number(importance.reference)} in {importance.reference_name}"
    return "" if importance.unit.startswith("of ") else importance.unit  # a unit "of X" names the reference


def _of(importance: ImportanceRecord) -> str:
    """Return " of REFERENCE" if shares refer to the entropy of predictions; "" if they refer to the loss."""
    return f" of {importance.reference_name}" if importance.reference_name == ENTROPY else ""


def _percent(importance: ImportanceRecord, *costs: float) -> str:
    """Return costs as shares with the same number of decimals; in the loss's unit if the reference is 0."""
    shares = [importance.share(cost) for cost in costs]
    if any(map(math.isnan, shares)):
        return " to ".join(f"{cost:+.2g}" for cost in costs) + f" {importance.unit}"
    digits = 2 if max(map(abs, shares)) < 0.1 else 1
    return " to ".join(f"{share:+.{digits}%}" for share in shares) + _of(importance)


def _change(importance: ImportanceRecord, cost: float) -> str:
    if importance.value:
        return f"{importance.unit} {importance.value:.4g} → {importance.value + cost:.4g}"
    return f"{importance.loss} {cost:.2g}" + (f" {importance.unit}" if _of(importance) else "")


def estimate_words(
    heads: Sequence[HeadImportance | None], blocks: Sequence[HeadImportance | None]
) -> list[tuple[str, str]]:
    """Return pairs (title, text) on estimated costs: their agreement with exact costs, or a caution."""
    words = []
    for name, importances, caution in (("heads", heads, HEAD_CAUTION), ("blocks", blocks, BLOCK_CAUTION)):
        known = [one for one in importances if one is not None and math.isfinite(one.cost)]
        if (found := agreement(importances)) is not None:
            words.append((f"Estimated against exact, {name}", str(found)))
        elif any(one.method == "estimated" for one in known):
            words.append((f"Estimated costs of {name}", caution))
    return words
