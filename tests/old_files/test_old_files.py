"""Files that users saved still load with the same content.

Only the first part uses current names: functions that load files, and names of fields. All other parts use
the names in the files.
"""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rankwise.auditing import Audit, History, compare
from rankwise.monitor import RankMonitor
from rankwise.plan import HeadDimPlan
from rankwise.skips import SkipCertificate

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected.json").read_text())
"""For each record, a few numbers by their path in its file."""

# --- current names -------------------------------------------------------------------------------------

NAMES = {
    "std": "seed_std",
    "spread": "std",
    "known": "counts",
    "collapse": "token_spread",
    "turn": "relative_update",
    "picture": "attention_map",
    "second_picture": "second_attention_map",
    "fresh_effective_rank": "init_effective_rank",
    "fresh_numerical_rank": "init_numerical_rank",
    "needed_width": "required_head_dim",
    "null_rank": "hardmax_rank",
    "order": "sorted_by",
    "peak_mass": "max_token_mass",
    "peak_token": "max_token",
    "peak_token_sequences": "max_token_sequences",
    "relative_collapse": "relative_spread",
    "removal": "ablation",
    "relative_collapse_layer_0": "relative_spread_layer_0",
    "relative_collapse_lowest": "relative_spread_lowest",
    "relative_collapse_lowest_at_1": "relative_spread_lowest_at_1",
    "sink_mass": "first_token_mass",
    "unseen": "uncaptured",
    "worth": "importance",
}
"""Current names of fields and measures, by their names in old files.

The names are not imported from the code that loads the files: if the code confused two fields, a test with
imported names would confuse them, too."""
RENAMED = [(r"\.merging\.known(?![^.])", ".counts")]
RENAMED += [(rf"(?<![^.]){old}(?![^.])", new) for old, new in NAMES.items()]
RENAMED += [
    (rf"^(layers|stacks)\.(\d+)\.{old}$", rf"\1.\2.{new}")
    for old, new in {
        "scale": "lambda_value",
        "collapse_in": "spread_in",
        "collapse_out": "spread_out",
        "relative_in": "relative_spread_in",
        "relative_out": "relative_spread_out",
        "price": "mixing_share",
        "sound_bound": "kept_lower_bound",
        "sound_scale": "min_lambda_proved",
        "sound_scale_relative": "min_lambda_proved_relative",
        "sound_scale_any_mixing": "min_lambda_any_mixing",
        "paper_scale_with_floor": "min_lambda_paper",
    }.items()
]
RENAMED += [(r"^(by_layer\.\d+)\.spread$", r"\1.std")]
RENAMED += [(r"^layers\.0\.points\b", "curve"), (r"^layers\.0\.(head_dim|interval|saturated|fall)\b", r"\1")]
RENAMED += [
    (r"^(trained\.\d+)\.(stack|layer|head)$", r"\1.head.\2"),
    (r"^(trained\.\d+)\.needed$", r"\1.required"),
]
"""Pairs (pattern, replacement) that `re.sub` applies in order to paths such as ``heads.0.worth.exact``; no
replacement may match a later pattern."""
OF_CERTIFICATES = [
    r"\.(gain|mixing_norm_worst|paper_(holds|scale|scale_worst|floor))$",
    r"(^|\.)(target|threshold|threshold_mu|recommended)$",
]
"""Patterns of the fields that certificates no longer have."""
DROPPED = [r"^schema_version$", r"^heads\.\d+\.z_score$", r"\.removable\.heads\.\d+\.(cross|occurrence)$"]
"""Patterns of paths that are not kept."""
VALUES = {
    **NAMES,
    "ABOVE_NULL": "HIGH_RANK",
    "BELOW_NULL": "LOW_RANK",
    "OVER_WIDE": "OVERSIZED_HEADS",
    "SWITCHED_OFF": "INACTIVE_BLOCK",
    "TWINS": "DUPLICATE_HEADS",
    "UNSEEN": "NOT_CAPTURED",
    "gone": "resolved",
    "μ/‖Y‖ at the end": "token spread at the end",
}
NOTES = {
    "differences to fresh weights": "differences from initialization",
    "width needed left out": "required width left out",
}
"""Current words of notes, by their words in old files."""
"""Current codes of findings and names of measures, by their text in old files."""

KINDS: dict[str, Callable[[Path], Any]] = {
    "audits": Audit.load,
    "certificates": SkipCertificate.load,
    "history": Audit.load,
    "monitor": Audit.load,
    "older": Audit.load,
    "plans": HeadDimPlan.load,
}
"""How the records in each folder are loaded."""
load_audit, load_history, merge_audits = Audit.load, History.load, Audit.merge


def share_of_reference(audit: Any, cost: float) -> float:
    """Return the cost of a removal as a share of the loss, or of the reference in its place."""
    return audit.importance.share(cost)


def removable_calls(audit: Any) -> list[tuple[int, str, int, int]]:
    """Layer, site, call and head of each removable head; calls from 0, in the order of the file's heads."""
    return [(one.layer, one.site, one.call, one.head) for one in audit.importance.removable.heads]


# --- records -------------------------------------------------------------------------------------------

FILES = ("*.json", "*/audit.json")
RECORDS = sorted(
    str(path.relative_to(HERE)) for kind in KINDS for of in FILES for path in (HERE / kind).glob(of)
)
AUDITS = [name for name in RECORDS if KINDS[name.partition("/")[0]] == Audit.load]


def load(name: str) -> Any:
    return KINDS[name.partition("/")[0]](HERE / name)


def leaves(content: Any, path: str = "") -> dict[str, Any]:
    """Return each number, text, flag and empty list of a file by its path."""
    if isinstance(content, dict | list) and content:
        items = content.items() if isinstance(content, dict) else enumerate(content)
        return {at: leaf for name, one in items for at, leaf in leaves(one, f"{path}.{name}").items()}
    return {path.removeprefix("."): content}


def of_file(name: str) -> dict[str, Any]:
    return leaves(json.loads((HERE / name).read_text()))


def written(record: Any) -> dict[str, Any]:
    """Return the leaves of the file that the current code writes for a record."""
    return leaves(json.loads(record.model_dump_json()))


def renamed(path: str) -> str:
    for pattern, replacement in RENAMED:
        path = re.sub(pattern, replacement, path)
    return path


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_keeps_every_field(name: str) -> None:
    new, file = written(load(name)), of_file(name)
    dropped = list(DROPPED)
    if name.startswith("certificates"):
        dropped += OF_CERTIFICATES
    if name == "older/schema_1_lengths.json":  # computed at the mean of different lengths, so unknown
        dropped.append(r"^heads\.\d+\.random_rank$")
    if name.startswith("plans/"):  # one curve is kept, without prices, advice and the law in ln T
        dropped += [r"^(block|fixed_width|latency_tokens|law|options|reason|recommended|value_dim)(\.|$)"]
        dropped += [r"^layers\.(1|0\.layer$)", r"^trained\.\d+\.(effective_rank|tokens)$"]
    for path, value in file.items():
        if not any(re.search(pattern, path) for pattern in dropped):
            wanted = VALUES.get(value, value) if isinstance(value, str) else value
            found = new.get(renamed(path)) if wanted in (None, [], {}) else new[renamed(path)]
            assert found == wanted, path
    assert {path: file[path] for path in EXPECTED[name]} == EXPECTED[name]  # the file itself is unchanged


@pytest.mark.parametrize("name", AUDITS)
def test_an_audit_is_shown_and_compared(name: str, tmp_path: Path) -> None:
    audit = load(name)
    assert compare(audit, audit).is_empty
    assert len(audit.summary()) > 400
    assert audit.provenance.model in audit.to_html(tmp_path / "page.html").read_text()


def test_files_of_parts_merge_to_the_merged_file() -> None:
    again = written(merge_audits([load(f"audits/part_{at}.json") for at in (0, 1)]))
    merged = written(load("audits/merged.json"))
    younger = {path: value for path, value in again.items() if path not in merged}
    assert all(re.search(r"\.std\.\w+$", path) and value is None for path, value in younger.items()), younger
    assert set(merged) <= set(again)
    for path, value in merged.items():
        if isinstance(value, str):
            value = next((value.replace(old, new) for old, new in NOTES.items() if old in value), value)
        if not re.match(r"provenance\.(created|command|versions)|schema_version", path):
            close = pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value
            assert again[path] == close, path


def test_an_audit_without_merge_data_merges_without_its_nearest_heads() -> None:
    older, newer = load("older/importance_no_reference.json"), load("audits/part_0.json")
    merged = merge_audits([older, newer])
    assert merged.provenance.sequences == 5
    assert all(head.nearest_head is None for head in merged.heads)
    at = (3 * older.heads[0].numerical_rank + 2 * newer.heads[0].numerical_rank) / 5
    assert merged.heads[0].numerical_rank == pytest.approx(at, rel=1e-12)


def test_schema_1_has_no_band_and_keeps_the_random_rank_of_equal_lengths() -> None:
    equal, unequal = load("older/schema_1.json"), load("older/schema_1_lengths.json")
    assert [head.random_rank for head in equal.heads] == [10.75] * 4
    assert all(math.isnan(head.random_rank) for head in unequal.heads)
    assert not any(head.band for head in (*equal.heads, *unequal.heads))
    assert all(math.isnan(head.uniform_rank) for head in equal.heads)


def changed(name: str, folder: Path, change: Callable[[Any], None]) -> Path:
    """Write a changed copy of a file, and return its folder."""
    content = json.loads((HERE / name).read_text())
    change(content)
    (folder / "audit.json").write_text(json.dumps(content))
    return folder


def test_words_of_users_are_not_renamed_as_fields(tmp_path: Path) -> None:
    words = {"spread": "a", "worth": "b", "std": "c", "null_rank": "d", "cross": "e", "collapse": "f"}

    def change(content: Any) -> None:
        content["texts"] = {name: [name, word] for name, word in words.items()}
        content["provenance"] |= {"versions": words, "sources": words, "notes": list(words)}

    audit = load_audit(changed("audits/plain.json", tmp_path, change))
    assert audit.texts == {name: [name, word] for name, word in words.items()}
    assert audit.provenance.versions == audit.provenance.sources == words
    assert audit.provenance.notes == list(words)


def test_costs_without_a_reference_are_shares_of_the_loss_or_of_1_if_the_loss_is_0(tmp_path: Path) -> None:
    loss, old = 3.558414815007031, "older/importance_no_reference.json"
    assert share_of_reference(load(old), 0.5) == pytest.approx(0.5 / loss)
    assert share_of_reference(load("audits/importance_exact.json"), 0.5) == pytest.approx(0.5 / loss)
    no_loss = changed(old, tmp_path, lambda content: content["worth"].update(value=0.0))
    assert share_of_reference(load_audit(no_loss), 0.5) == 0.5


@pytest.mark.parametrize(
    ("name", "site", "calls"),
    [
        ("twice", "attention", [(1, 1, 1), (0, 1, 0), (1, 1, 0), (0, 0, 0), (1, 0, 1), (1, 0, 0), (0, 1, 1)]),
        ("twice", "other", [(0, 0, 0), (1, 0, 0)]),
        # other tokens are read in the first call, the own in the second: the file counts each from 0
        (
            "self_and_cross",
            "attention",
            [(0, 1, 0), (1, 0, 0), (0, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1), (1, 1, 0)],
        ),
    ],
)
def test_removable_heads_are_of_calls(name: str, site: str, calls: list[tuple[int, int, int]]) -> None:
    """(layer, call, head) of each."""
    found = removable_calls(load(f"audits/{name}.json"))
    wanted = [(layer, f"layers.{layer}.{site}", call, head) for layer, call, head in calls]
    assert [one for one in found if one[1].endswith(site)] == wanted


def test_removable_heads_of_a_stack_that_ran_twice_and_of_an_encoder_decoder() -> None:
    calls = removable_calls(load("audits/stack_twice.json"))
    assert calls[:2] == [(0, "layers.0.attention", 0, 0), (2, "layers.0.attention", 0, 0)]
    calls = removable_calls(load("audits/encoder_decoder.json"))
    assert calls[0] == (0, "decoder.block.0.layer.1.EncDecAttention", 0, 0)


def test_pictures_are_unpacked() -> None:
    head = load("audits/importance_exact.json").heads[1]
    for picture in (head.attention_map, head.second_attention_map):
        matrix = torch.tensor(picture.matrix())
        assert torch.allclose(matrix.sum(1), torch.ones(12), atol=2e-3)
        assert torch.equal(matrix, matrix.tril())


def test_a_history_is_in_the_order_of_its_steps_and_compares_as_before() -> None:
    history = load_history(HERE / "history")
    assert history.steps == [20, 100, 300]
    assert history.names == [f"run-checkpoint-{step}" for step in history.steps]
    assert history[100].heads[0].numerical_rank == 9.5
    comparison = compare(history[20], history[100])
    found, file = written(comparison), json.loads((HERE / "comparison.json").read_text())
    changes = {(str(one.where), one.measure): one.change for one in comparison.changes}
    assert len(changes) == len(file["changes"])
    for one in file.pop("changes"):
        where = one["where"]
        head = "" if where["head"] is None else f" head {where['head']}"
        place = f"{where['stack']} layer {where['layer']}{head}", VALUES.get(one["measure"], one["measure"])
        assert changes[place] == pytest.approx(one["change"], rel=1e-9), place
    for path, value in leaves(file).items():
        value = VALUES.get(value, value) if isinstance(value, str) else value
        if path != "schema_version":
            close = pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value
            assert found[renamed(path)] == close, path


def test_a_plan_keeps_the_width_of_its_deciding_layer() -> None:
    plan = load("plans/command.json")
    assert (plan.head_dim, plan.interval, plan.saturated) == (12, (12, 12), True)
    assert plan.curve[-1] == (128, 0.40625, 0.07365695637359868)
    assert str(plan.trained[3].head) == "model.layers layer 0 head 3"
    assert any("Curve of layer 1 of 2" in note for note in plan.notes)
    assert any("KL divergence" in note for note in plan.notes)


def test_a_certificate_holds_infinity() -> None:
    layer = load("certificates/equal.json").layers[0]
    assert layer.site == "layers.0.dropout1"
    assert layer.kept == math.inf


def test_a_monitor_resumes_from_its_folder(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(HERE / "monitor", tmp_path / "monitor"))
    probe = load_file(folder / "probe.safetensors")
    batches = list(probe.values())
    assert [tuple(batch.shape) for batch in batches] == [(2, 10, 8), (1, 10, 8)]
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    monitor = RankMonitor(batches, every=2, folder=folder, resume=True)
    monitor.step(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 4)
    assert monitor.history.steps == [0, 2, 4]
    assert monitor.history[2] == load("monitor/step-2/audit.json")
    assert not (folder / "probe.safetensors").exists()
