"""In what two models differ before any number is compared, in the words of the field."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rankwise.auditing.layer_changes import paired_stacks, stacks_of
from rankwise.auditing.records import AuditRecord, HeadRecord

_SHOWN = 6
"""Runs of layers named in a sentence; of more, how many."""


def structure_differences(before: AuditRecord, after: AuditRecord) -> list[str]:
    """Sentences about stacks, layers, heads, kinds of mixing, masks and widths that are not the same.

    Args:
        before: one audit.
        after: the other.

    Returns:
        None where the two are of one structure.

    Examples:
        >>> from rankwise.auditing.records import Provenance
        >>> about = Provenance(model="m", delta=0.01)
        >>> empty = AuditRecord(provenance=about, heads=[], layers=[], findings=[])
        >>> structure_differences(empty, empty)
        []
    """
    stacks = paired_stacks(before, after)
    said: list[str] = []
    for ours, theirs in stacks.items():
        if ours != theirs:
            said.append(f"The stack {ours or 'model'!r} is held against {theirs or 'model'!r}.")
        said += _of_stack(ours, theirs, before, after)
    for words, audit, known in (
        ("before", before, set(stacks)),
        ("after", after, set(stacks.values())),
    ):
        alone = [stack for stack in stacks_of(audit) if stack not in known]
        said += [f"The stack {stack or 'model'!r} is only in the audit {words}." for stack in alone]
    return said


def _of_stack(ours: str, theirs: str, before: AuditRecord, after: AuditRecord) -> Iterator[str]:
    old, new = _by_layer(before.heads, ours), _by_layer(after.heads, theirs)
    name = f" in {theirs!r}" if theirs else ""
    if old and new and len(old) != len(new):
        yield f"Layers that mix{name}: {len(old)} before, {len(new)} after."
    facts = {
        "Heads of a layer": lambda heads: str(len(heads)),
        "Mixing": lambda heads: " and ".join(dict.fromkeys(head.kind for head in heads)),
        "Masks": lambda heads: " and ".join(dict.fromkeys(head.mask for head in heads)),
    }
    for words, fact in facts.items():
        pairs = [(at, fact(old[at]), fact(new[at])) for at in old if at in new]
        unlike = [pair for pair in pairs if pair[1] != pair[2]]
        if unlike:
            yield f"{words}{name}: {_runs(unlike, len(pairs))}.{_COMPARED if words == 'Mixing' else ''}"
    widths = [
        {layer.width for layer in audit.layers if layer.stack == stack}
        for audit, stack in ((before, ours), (after, theirs))
    ]
    if all(widths) and widths[0] != widths[1]:
        said = [", ".join(map(str, sorted(width))) for width in widths]
        yield f"Width of the token states{name}: {said[0]} before, {said[1]} after."


_COMPARED = (
    " Ranks of different kinds of operators are no two values of one quantity: of these layers the token "
    "states are compared, and totals."
)


def _by_layer(heads: Sequence[HeadRecord], stack: str) -> dict[int, list[HeadRecord]]:
    layers: dict[int, list[HeadRecord]] = {}
    for head in heads:
        if head.stack == stack:
            layers.setdefault(head.layer, []).append(head)
    return layers


def _runs(unlike: Sequence[tuple[int, str, str]], of: int) -> str:
    """What changed to what, once for each run of layers."""
    runs = []
    for (old, new), group in groupby(sorted(unlike), key=lambda row: row[1:]):
        layers = [at for at, *_ in group]
        which = "layer" if len(layers) == 1 else "layers"
        span = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        where = "all layers" if len(layers) == of and of > 1 else f"{which} {span}"
        runs.append(f"{old} before, {new} after ({where})")
    more = f"; and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
    return "; ".join(runs[:_SHOWN]) + more
