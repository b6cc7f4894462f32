"""Read audits of older schema versions."""

from typing import Any

RENAMED = {
    "fresh_effective_rank": "init_effective_rank",
    "fresh_numerical_rank": "init_numerical_rank",
    "needed_width": "required_head_dim",
    "null_rank": "hardmax_rank",
    "peak_mass": "max_token_mass",
    "peak_token": "max_token",
    "peak_token_sequences": "max_token_sequences",
    "relative_collapse": "relative_spread",
    "relative_collapse_layer_0": "relative_spread_layer_0",
    "relative_collapse_lowest": "relative_spread_lowest",
    "relative_collapse_lowest_at_1": "relative_spread_lowest_at_1",
    "sink_mass": "first_token_mass",
    "unseen": "uncaptured",
    "worth": "importance",
}
"""Names of fields and measures in version 2, and their names in version 3."""
CODES = {
    "ABOVE_NULL": "HIGH_RANK",
    "BELOW_NULL": "LOW_RANK",
    "OVER_WIDE": "OVERSIZED_HEADS",
    "SWITCHED_OFF": "INACTIVE_BLOCK",
    "TWINS": "DUPLICATE_HEADS",
    "UNSEEN": "NOT_CAPTURED",
}
"""Codes of findings in version 2, and their codes in version 3."""
FREE = ("texts", "versions", "sources")
"""Fields whose keys are names of inputs, packages and files, not of fields."""


def upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """Return the parsed content of an audit file with the fields of the current schema version.

    Version 1 held a z-score, which was removed. It took the random rank at the mean length of the sequences:
    that number stays only if all were equally long, which a hardmax rank without deviation shows.
    The content may be damaged: validation follows.
    """
    version = content.get("schema_version")
    if version == 1 and isinstance(content.get("heads"), list):
        heads = [_from_version_1(head) if isinstance(head, dict) else head for head in content["heads"]]
        content = content | {"heads": heads}
    return _renamed(content) | {"schema_version": 3} if version in (1, 2) else content


def _from_version_1(head: dict[str, Any]) -> dict[str, Any]:
    spread = head.get("spread")
    varied = spread.get("null_rank") if isinstance(spread, dict) else None
    kept = {name: value for name, value in head.items() if name != "z_score"}
    return kept | {"random_rank": None} if varied else kept


def _renamed(value: Any) -> Any:
    """Rename keys and codes at every level."""
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    if not isinstance(value, dict):
        return value
    new = {RENAMED.get(name, name): item if name in FREE else _renamed(item) for name, item in value.items()}
    code = value.get("code")
    return new | {"code": CODES.get(code, code)} if isinstance(code, str) else new
