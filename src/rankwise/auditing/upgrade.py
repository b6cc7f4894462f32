"""Convert audit files of older schema versions to the current version."""

from collections import Counter
from typing import Any

RENAMED = {
    "collapse": "token_spread",
    "fresh_effective_rank": "init_effective_rank",
    "fresh_numerical_rank": "init_numerical_rank",
    "known": "counts",
    "needed_width": "required_head_dim",
    "null_rank": "hardmax_rank",
    "order": "sorted_by",
    "peak_mass": "max_token_mass",
    "peak_token": "max_token",
    "peak_token_sequences": "max_token_sequences",
    "picture": "attention_map",
    "relative_collapse": "relative_spread",
    "relative_collapse_layer_0": "relative_spread_layer_0",
    "relative_collapse_lowest": "relative_spread_lowest",
    "relative_collapse_lowest_at_1": "relative_spread_lowest_at_1",
    "removal": "ablation",
    "second_picture": "second_attention_map",
    "sink_mass": "first_token_mass",
    "spread": "std",
    "std": "seed_std",
    "turn": "relative_update",
    "unseen": "uncaptured",
    "worth": "importance",
}
"""Version 3 name by version 2 name, for fields and measures; one pass renames all names."""
CODES = {
    "ABOVE_NULL": "HIGH_RANK",
    "BELOW_NULL": "LOW_RANK",
    "OVER_WIDE": "OVERSIZED_HEADS",
    "SWITCHED_OFF": "INACTIVE_BLOCK",
    "TWINS": "DUPLICATE_HEADS",
    "UNSEEN": "NOT_CAPTURED",
}
"""Version 3 code by version 2 code, for findings."""
FREE = ("texts", "versions", "sources")
"""Fields whose keys must not be renamed: names of inputs, packages and files."""


def upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """Return the parsed content of an audit file, converted to the current schema version.

    Version 1 computed the random rank at the mean sequence length. This rank is kept only if all sequences
    had equal length, that is, if the hardmax rank has standard deviation 0. The z-score is removed.
    Content may be damaged, so types are checked here and values are validated later.
    """
    version = content.get("schema_version")
    if version not in (1, 2):
        return content
    content = _renamed(content) | {"schema_version": 3}
    calls: dict[tuple[str, ...], int] = {}
    if isinstance(content.get("heads"), list):
        counts, occurrences = Counter[str](), Counter[str]()
        content["heads"] = [
            _upgraded_head(head, version, counts, occurrences, calls) if isinstance(head, dict) else head
            for head in content["heads"]
        ]
    removable = _at(_at(content, "importance"), "removable")
    if isinstance(removable.get("heads"), list):
        removable["heads"] = [
            _upgraded_place(place, calls) if isinstance(place, dict) else place
            for place in removable["heads"]
        ]
    return content


def _at(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the JSON object at a key; an empty object if there is none."""
    value = content.get(name)
    return value if isinstance(value, dict) else {}


def _upgraded_head(
    head: dict[str, Any],
    version: int,
    counts: Counter[str],
    occurrences: Counter[str],
    calls: dict[tuple[str, ...], int],
) -> dict[str, Any]:
    """Number repeated calls of a module in file order, and move ``counts`` from ``merging`` to the head."""
    if version == 1:
        varied = _at(head, "std").get("hardmax_rank")
        head = {name: value for name, value in head.items() if name != "z_score"}
        head |= {"random_rank": None} if varied else {}
    merging = dict(_at(head, "merging"))
    if "counts" in merging:
        head |= {"counts": merging.pop("counts"), "merging": merging}
    mixer = str([head.get(name) for name in ("stack", "layer", "site")])
    call, occurrence = f"{mixer} {head.get('head')}", f"{mixer} {head.get('head')} {head.get('cross')}"
    calls[mixer, str(head.get("cross", False)), str(occurrences[occurrence])] = counts[call]
    head = head | {"call": counts[call]}
    counts[call] += 1
    occurrences[occurrence] += 1
    return head


def _upgraded_place(place: dict[str, Any], calls: dict[tuple[str, ...], int]) -> dict[str, Any]:
    """Replace ``cross`` and ``occurrence`` in the address of a removable head by the call of its module."""
    mixer = str([place.get(name) for name in ("stack", "layer", "site")])
    occurrence = place.get("occurrence", 0)
    call = calls.get((mixer, str(place.get("cross", False)), str(occurrence)), occurrence)
    return {name: value for name, value in place.items() if name not in ("cross", "occurrence")} | {
        "call": call
    }


def _renamed(value: Any) -> Any:
    """Rename keys and codes of findings at every level of nested content."""
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    if not isinstance(value, dict):
        return value
    new = {RENAMED.get(name, name): item if name in FREE else _renamed(item) for name, item in value.items()}
    code = value.get("code")
    return new | {"code": CODES.get(code, code)} if isinstance(code, str) else new
