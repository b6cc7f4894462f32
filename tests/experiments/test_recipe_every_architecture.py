"""Every architecture: what an entry says, what the page makes of it, and how a run goes on."""

from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch
from experiments import architecture_checks as checks
from experiments import every_architecture as recipe
from experiments.architectures_page import tables
from experiments.guessed_inputs import fed
from experiments.tiny_architectures import small
from torch import nn

KEPT = recipe.STUDY.kept()
ENTRY = {
    "ran": True, "identical": True, "captured": 2, "there": 2, "kinds": ["softmax"], "uncaptured": {},
    "silent": [], "told": 2, "equal": 2, "skips": 2, "no_op": True, "undone": True,
}  # fmt: skip


def test_a_model_type_is_checked_from_end_to_end():
    entry = checks.check_architecture("bert")
    assert {key: entry[key] for key in ENTRY} == ENTRY
    assert (entry["model"], entry["size"], entry["inputs"]) == ("BertModel", "small", ["input_ids"])


def test_what_does_not_build_says_why(monkeypatch):
    def refuse(model_type):
        raise ValueError(f"no {model_type}")
        yield

    monkeypatch.setattr(checks, "builds", refuse)
    assert checks.check_architecture("bert") == {"ran": False, "why": "ValueError: no bert"}


class AutoCorrelation(nn.Module):
    """Looks like a mixer by the recipe's names, not by capture's, and mixes nothing that is seen."""

    def forward(self, x):
        return x * 2


class Attention(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class Pair(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return x


def test_a_mixer_that_capture_does_not_mention_is_counted():
    entry = checks._captured(Pair(Attention(), AutoCorrelation()), {"x": torch.randn(2, 5, 4)})
    assert (entry["captured"], entry["there"], entry["silent"]) == (1, 1, ["AutoCorrelation"])
    assert entry["identical"]
    assert entry["told"] is None


def test_a_run_that_is_not_repeated_bit_by_bit_is_told(monkeypatch):
    model, noise = Pair(Attention()), iter(torch.arange(9.0))
    model.register_forward_hook(lambda module, args, output: output + next(noise))
    assert not checks._captured(model, {"x": torch.randn(2, 5, 4)})["identical"]


class Narrow(nn.Module):
    """Takes features of the width of its weights alone."""

    main_input_name = "input_features"
    config = SimpleNamespace()

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, input_features):
        return self.layer(input_features)


@pytest.mark.parametrize("layer", [nn.Linear(17, 3), nn.LayerNorm(17)])
def test_an_input_gets_the_width_that_an_error_asks_for(layer):
    batch, error = fed(Narrow(layer))
    assert error is None
    assert batch["input_features"].shape[-1] == 17


def test_an_error_that_names_no_width_is_given_back():
    refused = nn.Module()
    refused.forward = lambda x: exec("raise ValueError('no such width: 17')")
    batch, error = fed(Narrow(refused))
    assert (batch, str(error)) == ({}, "no such width: 17")


def test_stages_of_a_backbone_are_kept_on_request():
    given = {"backbone_config": {"depths": [3, 4, 6, 3], "out_indices": [2, 3, 4]}, "encoder_hidden_dim": 256}
    given |= {"decoder_in_channels": [256, 256], "encoder_in_channels": [512, 1024]}
    assert small(given)["backbone_config"] == {"depths": [1, 1, 1, 1]}
    kept = small(given, stages=True)
    assert kept["backbone_config"]["out_indices"] == [2, 3, 4]
    assert kept["decoder_in_channels"] == [kept["encoder_hidden_dim"]] * 2
    assert kept["encoder_in_channels"] == [512, 1024]


def test_sizes_are_made_small_by_name():
    given = {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "num_hidden_layers": 48,
    }
    given |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4}
    given |= {
        "vocab_size": 30000,
        "image_token_id": 29999,
        "sub": {"intermediate_size": 3072},
        "dropout": 0.1,
    }
    given |= {"use_cache": True}
    made = small(given)
    assert (made["hidden_size"], made["num_attention_heads"], made["num_key_value_heads"]) == (32, 4, 4)
    assert made["layer_types"] == ["linear_attention", "full_attention"]
    assert made["num_hidden_layers"] == 2
    assert made["image_token_id"] < made["vocab_size"] == 100
    assert (made["sub"], made["use_cache"], made["dropout"]) == ({"intermediate_size": 48}, True, 0.1)
    assert small(given, widths=False)["hidden_size"] == 768


def test_an_argument_that_an_error_names_is_given():
    class Wants(nn.Module):
        main_input_name, config = "input_ids", None

        def forward(self, input_ids, bbox=None, pixel_values=None):
            if bbox is None:
                raise ValueError("You have to specify bbox")
            return input_ids

    Wants.config = type("Config", (), {})()
    batch, error = fed(Wants())
    assert error is None
    assert set(batch) == {"input_ids", "bbox"}


def test_an_interrupted_run_resumes(monkeypatch, tmp_path):
    asked = []

    def run_all(types, jobs, limit):
        asked.append(list(types))
        for name in types:
            if name == "c" and len(asked) == 1:
                raise KeyboardInterrupt
            yield name, ENTRY

    monkeypatch.setattr(recipe, "run_all", run_all)
    monkeypatch.setattr(recipe, "model_types", lambda: ["a", "b", "c"])
    monkeypatch.setattr(recipe, "PROGRESS", tmp_path / "x.part")
    with pytest.raises(KeyboardInterrupt):
        recipe.measure(tmp_path)
    report = recipe.measure(tmp_path)
    assert asked == [["a", "b", "c"], ["c"]]
    assert (list(report["entries"]), report["model_types"]) == (["a", "b", "c"], 3)
    assert not recipe.PROGRESS.exists()


class Ended:
    """A process that has ended by a signal, or not yet."""

    def __init__(self, exitcode=None):
        self.exitcode, self.killed = exitcode, False

    def join(self):
        pass

    def kill(self):
        self.killed = True


@pytest.mark.parametrize(("exitcode", "why"), [(-9, "not done in 5 s"), (1, "its process ended with 1")])
def test_a_process_that_ends_without_an_answer(exitcode, why):
    answers, theirs = Pipe(duplex=False)
    theirs.close()
    assert recipe._answer(Ended(exitcode), answers, late=False, limit=5) == {"ran": False, "why": why}


def test_a_process_that_hangs_is_killed():
    (answers, theirs), process = Pipe(duplex=False), Ended()
    assert recipe._answer(process, answers, late=False, limit=5) is None
    assert recipe._answer(process, answers, late=True, limit=5) == {"ran": False, "why": "not done in 5 s"}
    assert process.killed
    theirs.close()


WHY = (
    "SkipError: model X: expected residual connections around mixers, got 2 that no module | reads, in a, b."
)


def test_the_page_says_what_is_not_as_claimed():
    entries = {
        "good": ENTRY,
        "changed": ENTRY | {"identical": False},
        "blind": ENTRY | {"captured": 1, "uncaptured": {"OddAttention": "it is odd"}, "silent": ["Quiet"]},
        "stuck": ENTRY | {"skips": 0, "skips_why": WHY},
        "broken": {"ran": False, "why": "ValueError: <no>"},
    }
    versions = dict.fromkeys(("torch", "transformers", "python", "machine"), "1")
    text = "\n".join(tables({"entries": entries, "versions": versions, "model_types": 7}).values())
    for line in (
        "| built tiny and ran | 4 |",
        "| not tried yet | 2 |",
        "| outputs bit-identical under capture | 3 |",
        "| of these, every called mixer captured | 3 |",
        "| called mixers captured | 7 of 8 |",
        "| it is odd | `OddAttention` | blind |",
        "| `Quiet` | blind |",
        "| some that no module \\| reads | 1 |",
        "| broken | ValueError: &lt;no> |",
        "| changed | softmax | 2 of 2 | 2 of 2 | no | yes, yes |",
    ):
        assert line in text, line


def test_outputs_are_bit_identical_wherever_a_model_ran():
    ran = [entry for entry in KEPT["entries"].values() if entry["ran"]]
    assert all(entry["identical"] for entry in ran)
    assert all(entry["no_op"] and entry["undone"] for entry in ran if entry["skips"])
