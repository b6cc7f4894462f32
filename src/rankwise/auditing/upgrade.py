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
"""Names of fields and measures in version 3, by their names in version 2; renamed in a single pass."""
CODES = {
    "ABOVE_NULL": "HIGH_RANK",
    "BELOW_NULL": "LOW_RANK",
    "OVER_WIDE": "OVERSIZED_HEADS",
    "SWITCHED_OFF": "INACTIVE_BLOCK",
    "TWINS": "DUPLICATE_HEADS",
    "UNSEEN": "NOT_CAPTURED",
}
"""Codes of findings in version 3, by their codes in version 2."""
FREE = ("texts", "versions", "sources")
"""Fields whose keys must not be renamed: names of inputs, packages and files."""


def upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """Return the parsed content of an audit file, converted to the current schema version.

    Version 1 computed the random rank at the mean sequence length. This rank is kept only if all sequences
    had equal length, that is, if the hardmax rank has standard deviation 0. The z-score is removed. Repeated
    calls of a module are numbered in file order, also in addresses of removable heads.
    Content may be damaged, so types are checked here and values are validated later.
    """
    version = content.get("schema_version")
    if version not in (1, 2):
        return content
    content = _renamed(content) | {"schema_version": 3}
    calls: dict[tuple[str, ...], int] = {}
    counts, occurrences = Counter[str](), Counter[str]()
    for head in _objects(content):
        if version == 1:
            head.pop("z_score", None)
            head |= {"random_rank": None} if _at(head, "std").get("hardmax_rank") else {}
        merging = _at(head, "merging")
        if "counts" in merging:
            head["counts"] = merging.pop("counts")
        mixer, number, cross = _mixer(head), str(head.get("head")), str(head.get("cross", False))
        call = counts[mixer + number]
        calls[mixer, cross, str(occurrences[mixer + number + cross])] = head["call"] = call
        counts[mixer + number] += 1
        occurrences[mixer + number + cross] += 1
    for place in _objects(_at(_at(content, "importance"), "removable")):
        cross, occurrence = str(place.pop("cross", False)), place.pop("occurrence", 0)
        place["call"] = calls.get((_mixer(place), cross, str(occurrence)), occurrence)
    return content


def _at(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the JSON object at a key; an empty object if there is none."""
    value = content.get(name)
    return value if isinstance(value, dict) else {}


def _objects(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the heads that are JSON objects."""
    heads = content.get("heads")
    return [head for head in heads if isinstance(head, dict)] if isinstance(heads, list) else []


def _mixer(head: dict[str, Any]) -> str:
    return str([head.get(name) for name in ("stack", "layer", "site")])


def _renamed(value: Any) -> Any:
    """Rename keys and codes of findings at every level of nested content."""
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    if not isinstance(value, dict):
        return value
    new = {RENAMED.get(name, name): item if name in FREE else _renamed(item) for name, item in value.items()}
    code = value.get("code")
    return new | {"code": CODES.get(code, code)} if isinstance(code, str) else new
