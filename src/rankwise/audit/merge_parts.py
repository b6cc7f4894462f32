"""Audits that hold the same sequences: merged, these would be counted twice."""

from collections.abc import Sequence

from rankwise.audit.records import Provenance
from rankwise.errors import RecordError


def check_apart(abouts: Sequence[Provenance], names: Sequence[str] = ()) -> None:
    """Refuse audits that share data; those of older files, which say nothing of it, pass.

    Args:
        abouts: of each audit.
        names: what an error calls them; their numbers where none are given.

    Raises:
        RecordError: naming the first two that share some, and which of them to leave out.
    """
    holder: dict[str, int] = {}
    for number, about in enumerate(abouts):
        for part in about.parts:
            if holder.setdefault(part, number) != number:
                raise _counted_twice(abouts, names, holder[part], number)


def _counted_twice(abouts: Sequence[Provenance], names: Sequence[str], *both: int) -> RecordError:
    called = [names[number] if names else f"audit {number + 1}" for number in both]
    merged = [name for name, number in zip(called, both, strict=True) if abouts[number].audits > 1]
    data = abouts[both[0]].data
    if len(merged) == 1:
        fix = f"Leave {merged[0]} out: it was merged of audits that are here, too."
    else:
        fix = f"Leave {called[1]} out." if called[0] != called[1] else "Give it once."
    return RecordError(
        "audits to merge",
        wanted="each sequence in one of them",
        got=f"the same in {called[0]} and {called[1]}" + (f" ({data})" if data else ""),
        fix=fix,
    )
