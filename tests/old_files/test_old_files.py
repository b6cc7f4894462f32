"""Files that users saved still load, and mean what they meant.

Names of today stand in the first part alone: how each kind of file is loaded, and what its fields are called.
Expectations are in the names that the files have.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from rankwise.auditing import Audit, compare

HERE = Path(__file__).parent
AUDITS = sorted(path.stem for path in (HERE / "audits").glob("*.json"))
OLDER = sorted(path.stem for path in (HERE / "older").glob("*.json"))
EXPECTED = json.loads((HERE / "expected.json").read_text())
"""For each file, a few numbers by their path in it."""

# --- names of today ------------------------------------------------------------------------------------

RENAMED = [
    (rf"(?<![^.]){old}(?![^.])", new)
    for old, new in {
        "fresh_effective_rank": "init_effective_rank",
        "fresh_numerical_rank": "init_numerical_rank",
        "needed_width": "required_head_dim",
        "null_rank": "hardmax_rank",
        "peak_mass": "max_token_mass",
        "peak_token": "max_token",
        "peak_token_sequences": "max_token_sequences",
        "relative_collapse": "relative_spread",
        "sink_mass": "first_token_mass",
        "unseen": "uncaptured",
        "worth": "importance",
    }.items()
]
"""(pattern, replacement) for `re.sub`, applied in turn to paths such as ``heads.0.worth.exact``."""
DROPPED = [r"^schema_version$"]
"""Patterns of paths that are not kept."""
VALUES = {
    "ABOVE_NULL": "HIGH_RANK",
    "BELOW_NULL": "LOW_RANK",
    "OVER_WIDE": "OVERSIZED_HEADS",
    "SWITCHED_OFF": "INACTIVE_BLOCK",
    "TWINS": "DUPLICATE_HEADS",
    "UNSEEN": "NOT_CAPTURED",
}
"""Texts that are another text today, such as codes of findings."""
DROPPED_OF_OLDER = [r"\.z_score$"]


def load_audit(path: Path) -> Audit:
    return Audit.load(path)


def merge_audits(audits: list[Audit]) -> Audit:
    return Audit.merge(audits)


def share_of_reference(audit: Audit, cost: float) -> float:
    """The cost of a removal as a share of the loss, or of what stands for it."""
    assert audit.importance is not None
    return audit.importance.share(cost)


def removable_calls(audit: Audit) -> list[tuple[str, int, str, int, int]]:
    """Stack, layer, site, call and head of each removable head; the call from 0 in a pass of the layer."""
    assert audit.importance is not None
    assert audit.importance.removable is not None
    return [
        (one.stack, one.layer, one.site, one.occurrence, one.head) for one in audit.importance.removable.heads
    ]


# --- the walk through a file ---------------------------------------------------------------------------


def leaves(content: Any, path: str = "") -> dict[str, Any]:
    """Each number, text, flag and empty list of a file by its path."""
    if isinstance(content, dict | list) and content:
        items = content.items() if isinstance(content, dict) else enumerate(content)
        return {at: leaf for name, one in items for at, leaf in leaves(one, f"{path}.{name}").items()}
    return {path.removeprefix("."): content}


def today(path: str) -> str:
    for pattern, replacement in RENAMED:
        path = re.sub(pattern, replacement, path)
    return path


def saved_again(record: Any, folder: Path) -> dict[str, Any]:
    record.save(folder / "again.json")
    return leaves(json.loads((folder / "again.json").read_text()))


def check_kept(old: dict[str, Any], new: dict[str, Any], dropped: list[str]) -> None:
    """Whether each leaf of an old file is in a new one; null stands for what is not known."""
    for path, value in old.items():
        if any(re.search(pattern, path) for pattern in dropped):
            continue
        wanted = VALUES.get(value, value) if isinstance(value, str) else value
        if wanted in (None, [], {}):
            assert new.get(today(path)) == wanted, path
        else:
            assert new[today(path)] == wanted, path


def number_at(content: dict[str, Any], path: str) -> Any:
    return content[today(path)]


# --- audits --------------------------------------------------------------------------------------------


def old(name: str) -> Path:
    return next(HERE.glob(f"*/{name}.json"))


@pytest.mark.parametrize("name", [*AUDITS, *OLDER])
def test_an_audit_keeps_every_field(name: str, tmp_path: Path) -> None:
    dropped = DROPPED + (DROPPED_OF_OLDER if name in OLDER else [])
    content = leaves(json.loads(old(name).read_text()))
    if name == "schema_1_lengths":  # at the mean of different lengths: not what it is today
        dropped = [*dropped, r"^heads\.\d+\.random_rank$"]
    check_kept(content, saved_again(load_audit(old(name)), tmp_path), dropped)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_audit_has_the_numbers_it_had(name: str, tmp_path: Path) -> None:
    saved = saved_again(load_audit(old(name)), tmp_path)
    for path, value in EXPECTED[name].items():
        found = number_at(saved, path)
        assert found == (
            pytest.approx(value, rel=1e-12) if isinstance(value, float) else VALUES.get(value, value)
        )


@pytest.mark.parametrize("name", [*AUDITS, *OLDER])
def test_an_audit_is_shown_and_compared(name: str, tmp_path: Path) -> None:
    audit = load_audit(old(name))
    assert compare(audit, audit).is_empty
    assert len(audit.summary()) > 500
    assert audit.provenance.model in audit.to_html(tmp_path / "page.html").read_text()
    first = audit.heads[0]
    found = (
        audit.head(first.layer, first.head, stack=first.stack, site=first.site) if name != "twice" else first
    )
    assert found == first


def test_files_of_parts_merge_to_the_merged_file(tmp_path: Path) -> None:
    again = saved_again(merge_audits([load_audit(old(f"part_{at}")) for at in (0, 1)]), tmp_path)
    merged = saved_again(load_audit(old("merged")), tmp_path)
    assert set(again) == set(merged)
    for path, value in merged.items():
        if not re.match(r"provenance\.(created|command|versions)|schema_version", path):
            assert again[path] == (
                pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value
            )


def test_an_audit_of_before_merging_merges_without_its_nearest_heads() -> None:
    older, newer = load_audit(old("importance_no_reference")), load_audit(old("part_0"))
    merged = merge_audits([older, newer])
    assert merged.provenance.sequences == 5
    assert all(head.nearest_head is None for head in merged.heads)
    at = (3 * older.heads[0].numerical_rank + 2 * newer.heads[0].numerical_rank) / 5
    assert merged.heads[0].numerical_rank == pytest.approx(at, rel=1e-12)


def test_schema_1_has_no_band_and_keeps_the_random_rank_of_equal_lengths() -> None:
    equal, unequal = load_audit(old("schema_1")), load_audit(old("schema_1_lengths"))
    assert [head.random_rank for head in equal.heads] == pytest.approx([10.75] * 4)
    assert all(math.isnan(head.random_rank) for head in unequal.heads)
    assert not any(head.band for head in (*equal.heads, *unequal.heads))
    assert all(math.isnan(head.uniform_rank) for head in equal.heads)


# --- what removal costs --------------------------------------------------------------------------------


def test_costs_without_a_reference_are_shares_of_the_loss(tmp_path: Path) -> None:
    """Of 1 where the loss is 0."""
    assert share_of_reference(load_audit(old("importance_no_reference")), 0.5) == pytest.approx(
        0.5 / 3.558414815007031
    )
    assert share_of_reference(load_audit(old("importance_exact")), 0.5) == pytest.approx(
        0.5 / 3.558414815007031
    )
    content = json.loads(old("importance_no_reference").read_text())
    content["worth"]["value"] = 0.0
    (tmp_path / "audit.json").write_text(json.dumps(content))
    assert share_of_reference(load_audit(tmp_path), 0.5) == 0.5


def test_removable_heads_of_a_module_that_ran_twice_are_told_apart() -> None:
    stack, calls = "layers", removable_calls(load_audit(old("twice")))
    assert calls == [
        (stack, layer, f"layers.{layer}.{module}", call, head) for layer, module, call, head in EXPECTED_CALLS
    ]


EXPECTED_CALLS = [
    (1, "attention", 1, 1), (0, "attention", 1, 0), (1, "attention", 1, 0), (0, "attention", 0, 0),
    (0, "other", 0, 0), (1, "attention", 0, 1), (1, "attention", 0, 0), (0, "attention", 1, 1),
    (1, "other", 0, 0),
]  # fmt: skip


def test_removable_heads_of_cross_attention() -> None:
    calls = removable_calls(load_audit(old("encoder_decoder")))
    assert calls[0] == ("decoder.block", 0, "decoder.block.0.layer.1.EncDecAttention", 0, 0)
    assert len(calls) == 8
    assert {stack for stack, *_ in calls} == {"encoder.block", "decoder.block"}
