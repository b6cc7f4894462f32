"""Every architecture: entries of the check, the page made of them, and resumed runs."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from experiments.coverage import architectures as experiment
from experiments.coverage import third_party
from torch import nn

ENTRY = {
    "ran": True, "identical": True, "captured": 2, "there": 2, "kinds": ["softmax"], "uncaptured": {},
    "silent": [], "told": 2, "equal": 2, "skips": 2, "no_op": True, "undone": True,
}  # fmt: skip


def test_a_model_type_is_checked_from_end_to_end():
    entry = experiment.check_architecture("bert")
    assert {key: entry[key] for key in ENTRY} == ENTRY
    assert (entry["model"], entry["size"], entry["inputs"]) == ("BertModel", "small", ["input_ids"])


class AutoCorrelation(nn.Module):
    """Looks like a mixer to this experiment, not to capture, and mixes nothing."""

    def forward(self, x):
        return x * 2


class Attention(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class Residual(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return x


def test_a_mixer_that_capture_does_not_mention_is_counted():
    model = Residual(Attention(), AutoCorrelation())
    entry = experiment.compare_captured(model, {"x": torch.randn(2, 5, 4)})
    assert (entry["captured"], entry["there"], entry["silent"]) == (1, 1, ["AutoCorrelation"])
    assert entry["identical"]
    assert entry["told"] is None


def test_outputs_that_differ_between_runs_are_not_identical():
    model, noise = Residual(Attention()), iter(torch.arange(9.0))
    model.register_forward_hook(lambda module, args, output: output + next(noise))
    assert not experiment.compare_captured(model, {"x": torch.randn(2, 5, 4)})["identical"]


# --- runs ------------------------------------------------------------------------------------------------


def test_an_interrupted_run_resumes(monkeypatch, tmp_path):
    measured = []

    def run_one(name):
        if name == "c" and "c" not in measured:
            measured.append(name)
            raise KeyboardInterrupt
        measured.append(name)
        return ENTRY

    monkeypatch.setattr(experiment, "ThreadPool", lambda jobs: nullcontext(SimpleNamespace(imap=map)))
    monkeypatch.setattr(experiment, "run_one", run_one)
    monkeypatch.setattr(experiment, "model_types", lambda: ["a", "b", "c"])
    monkeypatch.setattr(experiment, "PROGRESS", tmp_path / "x.part")
    with pytest.raises(KeyboardInterrupt):
        experiment.measure()
    report = experiment.measure()
    assert measured == ["a", "b", "c", "c"]
    assert (list(report["entries"]), report["model_types"]) == (["a", "b", "c"], 3)
    assert not experiment.PROGRESS.exists()


# --- the page --------------------------------------------------------------------------------------------

WHY = (
    "SkipError: model X: expected residual connections around mixers, got 2 that no module | reads, in a, b."
)


def test_the_page_shows_every_failure():
    entries = {
        "good": ENTRY,
        "changed": ENTRY | {"identical": False},
        "blind": ENTRY | {"captured": 1, "uncaptured": {"OddAttention": "it is odd"}, "silent": ["Quiet"]},
        "stuck": ENTRY | {"skips": 0, "skips_why": WHY},
        "broken": {"ran": False, "why": "ValueError: <no>"},
    }
    versions = dict.fromkeys(("torch", "transformers", "python", "machine"), "1")
    report = {"entries": entries, "versions": versions, "model_types": 7}
    text = "\n".join(experiment.tables(report).values())
    for line in (
        "| built tiny and ran | 4 |",
        "| not tried yet | 2 |",
        "| outputs bit-identical under capture | 3 |",
        "| of these, every called mixer captured | 3 |",
        "| called mixers captured | 7 of 8 |",
        "| it is odd | `OddAttention` | blind |",
        "| classes that look like mixers, were called, and are not mentioned | 1 |",
        "| some that no module \\| reads | 1 |",
        "| broken | ValueError: &lt;no> |",
        "| changed | softmax | 2 of 2 | 2 of 2 | no | yes, yes |",
    ):
        assert line in text, line


def test_kept_outputs_are_bit_identical():
    ran = [entry for entry in experiment.STUDY.kept()["entries"].values() if entry["ran"]]
    assert all(entry["identical"] for entry in ran)
    assert all(entry["no_op"] and entry["undone"] for entry in ran if entry["skips"])


# --- models of other packages ----------------------------------------------------------------------------


def test_the_kept_operators_of_other_packages_are_those_by_hand():
    entries = third_party.STUDY.kept()["entries"]
    assert {entry["package"] for entry in entries} == {*third_party.PACKAGES} - {"mlstm_kernels"}
    lost = {entry["model"] for entry in entries if entry["mixers"] != entry["layers"]}
    # products without a softmax (docs/decisions/019-rules-of-capture.md)
    assert lost == {"attn_sigmoid=True", "in both directions", "parallel form"}
    for entry in entries:
        assert not entry["mixers"] or entry["mixers"] == entry["layers"]
        assert entry["mixers"] or entry["notes"]
        # Softmaxes of float32 scores of size ≤ 20, and an iterated pseudo-inverse.
        assert not entry["mixers"] or entry["difference"] < 1e-5
