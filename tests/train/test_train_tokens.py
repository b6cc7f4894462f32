"""Runs on tokens: the model folder is complete, and a run that was cut off ends with the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.train.tiny import tiny
from transformers import AutoConfig, AutoTokenizer, TrainerCallback

from rankwise.data.tasks.tokenizers import tokenizer_sha256
from rankwise.train import run as running
from rankwise.train import train

pytest.importorskip("accelerate")
TOKENS = {"task.name": "tokens", "task.options.vocab_size": 280, "task.options.windows": 40}


class CutOff(TrainerCallback):
    """Ends the process's work after the first checkpoint."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            raise KeyboardInterrupt


def test_a_run_on_tokens_goes_on_exactly_and_brings_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny(tmp_path, model="softmax", **TOKENS, **{"model.options.dropout": 0.1})
    straight = train(recipe, tmp_path / "straight")
    original = running._set_callbacks
    with monkeypatch.context() as patched:
        patched.setattr(running, "_set_callbacks", lambda t, c, p: original(t, [*c, CutOff()], p))
        with pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path / "cut")
    assert train(recipe, tmp_path / "cut", resume=True)["evaluations"] == straight["evaluations"]
    weights, others = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("cut", "straight")
    )
    assert all(torch.equal(weights[name], others[name]) for name in weights)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "cut" / "model")
    assert tokenizer.decode(tokenizer("a single man")["input_ids"]) == "a single man"
    assert straight["data"]["options"]["tokenizer_sha256"] == tokenizer_sha256(tokenizer)
    assert straight["bytes_per_token"] > 1
    assert AutoConfig.from_pretrained(tmp_path / "cut" / "model").vocab_size == len(tokenizer) == 280


def test_records_tell_no_folder_of_a_tokenizer(tmp_path: Path) -> None:
    from tests.data.tasks.test_tasks_tokenizers import TOKENIZER

    TOKENIZER.save_pretrained(tmp_path / "bpe")
    given = {"task.name": "tokens", "task.options.tokenizer": str(tmp_path / "bpe"), "steps": 3}
    train(tiny(tmp_path, **given), tmp_path / "out")
    told = "".join((tmp_path / "out" / name).read_text() for name in ("results.json", "model/README.md"))
    assert "task.options.tokenizer=bpe" in told
    assert str(tmp_path) not in told
