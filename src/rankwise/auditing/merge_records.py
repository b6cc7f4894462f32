"""What a record keeps so that audits of shards can be merged: plain, no torch."""

from collections.abc import Mapping, Sequence

from pydantic import Field

from rankwise._internals.records import Count, Number, Record

NAMES = 16
"""Names of each kind that are kept of the tokens at the peak of a head: a sink has one, or a few."""


class Merging(Record):
    """What the means of a head do not say, and the means of a merged head need."""

    longest: Count
    """Tokens of the longest sequence: the head's mask is that of it."""
    known: dict[str, Count] = Field(default_factory=dict)
    """Of how many sequences a number is the mean, where not of all that are finite."""
    distances: list[Number]
    """Mean distance to each head of the site, in their order; NaN to itself."""
    pairs: list[Count]
    """Of how many sequences each distance is the mean."""
    named: Count
    """Sequences whose token at the peak has a name."""
    names: list[dict[str, Count]]
    """How many of them share each name: the 16 commonest of each kind that `peak_name` tells apart."""


def most_common(counts: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """The commonest names of each kind; of equals those first in the alphabet.

    Args:
        counts: of all names.

    Examples:
        >>> most_common([{"b": 2, "a": 2, "c": 3}])
        [{'c': 3, 'a': 2, 'b': 2}]
    """
    ordered = (sorted(kind.items(), key=lambda item: (-item[1], item[0])) for kind in counts)
    return [dict(names[:NAMES]) for names in ordered]
