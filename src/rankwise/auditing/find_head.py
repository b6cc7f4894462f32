"""One head of an audit, by its numbers."""

from collections.abc import Sequence

from rankwise.auditing.records import HeadRecord
from rankwise.errors import InputError

_MOST = 6
"""Names that an error lists, at most."""


def find_head(
    heads: Sequence[HeadRecord], layer: int, head: int, *, stack: str | None = None, site: str | None = None
) -> HeadRecord:
    """The record of one head; see `Audit.head`.

    Args:
        heads: of the audit.
        layer: its layer.
        head: its number there.
        stack: the blocks it belongs to.
        site: the module that mixed.

    Raises:
        InputError: if there is no such head, or there are several.
    """
    asked = {"layer": layer, "head": head, "stack": stack, "site": site}
    named = {name: value for name, value in asked.items() if value is not None}
    subject = ", ".join(f"{name} {value!r}" for name, value in named.items())
    left = list(heads)
    for name, value in (("stack", stack), ("layer", layer), ("site", site), ("head", head)):
        if value is None:
            continue
        found = [head for head in left if getattr(head, name) == value]
        if not found:
            known = list(dict.fromkeys(getattr(head, name) for head in left))
            raise InputError(
                subject, expected="a head of this audit", got=f"no {name} {value!r}", fix=_known(known)
            )
        left = found
    if len(left) > 1:
        by = "stack" if len({head.stack for head in left}) > 1 else "site"
        names = list(dict.fromkeys(getattr(head, by) for head in left))
        fix = f"Say which: {', '.join(f'{by}={name!r}' for name in names[:_MOST])}."
        if len(names) == 1:
            fix = "Its module runs several times: choose among `[h for h in audit.heads if h.layer == …]`."
        raise InputError(subject, expected="one head", got=f"{len(left)}", fix=fix)
    return left[0]


def _known(known: list[int] | list[str]) -> str:
    if not known:
        return "It has no heads: no mixing operator was captured."
    if isinstance(known[0], int) and len(known) > _MOST:
        return f"It has {len(known)} of them, {min(known)} to {max(known)}."
    return f"Known: {', '.join(map(repr, known[:_MOST]))}{' …' if len(known) > _MOST else ''}."
