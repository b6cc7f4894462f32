"""Files that an older Rankwise wrote, brought to the fields of today."""

from typing import Any


def upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """The parsed content of an audit file, as this version would read it; itself where it is no older.

    Version 1 held a z-score, which is gone, and took the random rank at the mean length of the sequences:
    that is kept only where they were all as long, which a null rank that does not vary shows.

    Args:
        content: of any version there has been; it may be damaged.
    """
    heads = content.get("heads")
    if content.get("schema_version") != 1 or not isinstance(heads, list):
        return content
    return content | {"heads": [_from_version_1(head) if isinstance(head, dict) else head for head in heads]}


def _from_version_1(head: dict[str, Any]) -> dict[str, Any]:
    spread = head.get("spread")
    varied = spread.get("null_rank") if isinstance(spread, dict) else None
    kept = {name: value for name, value in head.items() if name != "z_score"}
    return kept | {"random_rank": None} if varied else kept
