"""Audits that hold the same sequences: merged, these would be counted twice."""

from collections.abc import Sequence

from rankwise.auditing.records import Provenance
from rankwise.errors import RecordError

JOINT = "; "
"""Between what the data of audits are called that were merged."""


def check_apart(abouts: Sequence[Provenance], names: Sequence[str] = ()) -> None:
    """Refuse audits that share data; those of older files, which say nothing of it, pass.

    Args:
        abouts: of each audit.
        names: what an error calls them; their numbers where none are given.

    Raises:
        RecordError: naming the first two that share some, and which of them can be left out, if either.
    """
    holder: dict[str, int] = {}
    for number, about in enumerate(abouts):
        for part in about.parts:
            if holder.setdefault(part, number) != number:
                raise _counted_twice(abouts, names, holder[part], number)


def _counted_twice(abouts: Sequence[Provenance], names: Sequence[str], *both: int) -> RecordError:
    called = {number: names[number] if names else f"audit {number + 1}" for number in both}
    first, second = called.values()
    data = _shared([abouts[number] for number in both])
    fix = "Neither lies whole in the others: merge the audits that they were merged of, each once."
    for number in sorted(both, key=lambda number: (abouts[number].audits, number)):
        if _is_held(abouts[number], [*abouts[:number], *abouts[number + 1 :]]):
            fix = f"Leave {called[number]} out: all of its data are in the others."
    return RecordError(
        "audits to merge",
        expected="each sequence in one of them",
        got=f"the same in {first} and {second}" + (f" ({data})" if data else ""),
        fix="Give it once." if first == second else fix,
    )


def _is_held(about: Provenance, others: Sequence[Provenance]) -> bool:
    """Whether others hold all data of an audit; of what older files hold, nothing is known."""
    known = {part for other in others for part in other.parts}
    return len(about.parts) == about.audits and known.issuperset(about.parts)


def _shared(both: Sequence[Provenance]) -> str:
    """What is called the data that two audits share; empty where their names do not tell."""
    fewer, more = sorted(both, key=lambda about: about.audits)
    if _is_held(fewer, [more]):
        return fewer.data
    names = [set(about.data.split(JOINT)) for about in both]
    shared = names[0] & names[1]
    tells = len(shared) == len(set(fewer.parts) & set(more.parts))
    tells &= all(len(names) == about.audits for names, about in zip(names, both, strict=True))
    return JOINT.join(sorted(shared)) if tells else ""
