"""A tiny causal language model over bytes, and a command line in an empty folder with a text."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from rankwise.cli import app

TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 40


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model with 2 layers and 2 heads of width 16, and its tokenizer."""
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    ByT5Tokenizer(extra_ids=0).save_pretrained(path)
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command in `tmp_path`, which has text.txt; errors for users are the result's exception."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "text.txt").write_text(TEXT)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
