"""The largest set of heads that can go together within a tolerance."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from rankwise.importance.results import HeadPlace, Importance, Joint, Removal
from rankwise.importance.runs import Runs
from rankwise.importance.settings import ImportanceSettings
from rankwise.tracing import CallId

Together = Callable[[HeadPlace], Hashable | None]
"""Heads with the same key go together or not at all; those with None stay."""

FURTHER = 16
"""Heads that are tried one by one beyond the first that does not fit."""


def search(
    runs: Runs,
    importance: Importance,
    keys: Mapping[tuple[Any, ...], CallId],
    settings: ImportanceSettings,
    say: Callable[[str], None],
    together: Together | None = None,
) -> Joint | None:
    """Remove the cheapest heads together, as many as the tolerance lets go, and run the model without them.

    Heads are sorted by what removing each alone costs, exact where every head has been removed, else
    estimated. The largest count that fits is found by bisection, as if costs rose with the count; then the
    next heads are tried one by one. Every set counted on has been run.

    Args:
        runs: the model on its batches.
        worth: what is known of single heads.
        keys: of mixers, by their places.
        settings: tolerance, and what takes their place.
        say: told what is being done.
        together: which heads can only go together; each for itself without.

    Returns:
        The set, empty where no head can go; None where no cost is known, or nothing to compare it with.
    """
    assert settings.tolerance is not None
    exactly = all(
        not math.isnan(cost) for site in importance.sites if not site.why_not for cost in site.exact
    )
    ranked = sort_by_cost(importance, exactly, together)
    if ranked and not runs.reference:
        importance.notes.append(
            f"no set of heads looked for: {runs.loss.reference}, of which {settings.tolerance:.2%} "
            "may be lost, is 0"
        )
    if not (ranked and runs.reference):
        return None
    limit = settings.tolerance * runs.reference
    tried: dict[int, float] = {}

    def cost(units: Sequence[Sequence[HeadPlace]]) -> float:
        chosen: dict[CallId, list[int]] = {}
        for place in (place for unit in units for place in unit):
            chosen.setdefault(keys[place[:5]], []).append(place.head)
        say(f"without {sum(map(len, units))} heads together")
        tried[len(tried)] = runs.without(chosen, settings.removal == "mean")[0] - runs.value
        return tried[len(tried) - 1]

    fits, spent, fails = 0, 0.0, len(ranked) + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        found = cost(ranked[:middle])
        if found <= limit:  # NaN does not
            fits, spent = middle, found
        else:
            fails = middle
    kept = ranked[:fits]
    for unit in ranked[fits + 1 : fits + 1 + FURTHER]:
        found = cost([*kept, unit])
        if found <= limit:
            kept, spent = [*kept, unit], found
    relative = spent / runs.reference
    removal = Removal(tuple(place for unit in kept for place in unit), runs.value + spent, spent, relative)
    return Joint(removal, settings.tolerance, "exact" if exactly else "estimate", len(tried))


def sort_by_cost(importance: Importance, exactly: bool, together: Together | None) -> list[list[HeadPlace]]:
    """Heads that go together, the cheapest first; costs of single heads are added up.

    Args:
        worth: what is known of single heads; those of unknown cost are left out, and all they go with.
        exactly: whether to take what their removal cost, else the estimates.
        together: which heads can only go together; each for itself without.
    """
    units: dict[Hashable, list[HeadPlace]] = {}
    costs: dict[Hashable, float] = {}
    for site in importance.sites:
        each = site.exact if exactly else site.estimates.removal
        for head in range(len(each)):
            place = site.place(head)
            key = place if together is None else together(place)
            if key is not None:
                units.setdefault(key, []).append(place)
                costs[key] = costs.get(key, 0.0) + (math.nan if site.why_not else float(each[head]))
    ranked = sorted((cost, units[key]) for key, cost in costs.items() if not math.isnan(cost))
    return [unit for _, unit in ranked]
