"""The commands of the how-to pages run, in the order of the page, with the folders that they make."""

import glob
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from rankwise.cli import app
from rankwise.cli.load_model import demo_text

ROOT = Path(__file__).parents[1]
PAGES = ("audit", "compare", "compress", "importance", "skip")
ELSEWHERE = re.compile(r"imdb|--try-steps| rankwise audit$")
"""Commands that need the Hub, or that a tutorial or another test runs."""
CODE = """
import torch
from transformers import ViTConfig, ViTForImageClassification

class Bytes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 16)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)
        )

    def forward(self, input_ids):
        states = self.embedding(input_ids)
        for block in self.blocks:
            states = block(states)
        return states

def build():
    return Bytes()
"""
IMAGES = """
import torch
from transformers import ViTConfig, ViTForImageClassification

def build():
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **sizes))
    return model, [{"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 1, 0])}]
"""


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each command of a page, without comments."""
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^\$( rankwise .*)$", text, re.MULTILINE):
        if not ELSEWHERE.search(line.partition("  #")[0].rstrip()):
            yield shlex.split(line, comments=True)[1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with small models, texts and pictures under the names that the pages use."""
    root = tmp_path_factory.mktemp("pages")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
    }
    words = {"vocab_size": 259, "pad_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 64}
    models = {
        "gpt2": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=2, n_head=2, n_embd=32, n_positions=512, vocab_size=259, eos_token_id=1
            )
        ),
        "my-bert": transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **words)),
        "my-llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **words)),
        "my-vit": transformers.ViTForImageClassification(
            transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
        ),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
        if name != "my-vit":
            length = 512 if name == "gpt2" else 64
            transformers.ByT5Tokenizer(extra_ids=0, model_max_length=length).save_pretrained(root / name)
    size = {"height": 32, "width": 32}
    reader = {"image_processor_type": "ViTImageProcessor", "size": size, "do_normalize": False}
    (root / "my-vit" / "preprocessor_config.json").write_text(json.dumps(reader))
    for name in ("run/checkpoint-200", "run/checkpoint-1000", "checkpoints/last"):
        shutil.copytree(root / "gpt2", root / name)
    text = demo_text().read_text()
    for name in ("book.txt", "validation.txt"):
        (root / name).write_text(text)
    rows = [text[start : start + 300] for start in range(0, 30000, 300)]
    (root / "train.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    (root / "model.py").write_text(CODE)
    (root / "vit.py").write_text(IMAGES)
    image = pytest.importorskip("PIL.Image")
    for number in range(8):
        (root / "photos").mkdir(exist_ok=True)
        pixels = torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8)
        image.fromarray(pixels.numpy()).save(root / "photos" / f"{number}.png")
    return root


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    if page == "compare":  # the page begins with saved audits
        for name in ("before", "after", "small", "medium", "large"):
            run(["audit", "gpt2", "--text", "book.txt", "--out", name])
    every = list(commands(page))
    assert every
    for words in every:
        run(words)


def run(words: list[str]) -> None:
    """Run a command. Raise if it fails, except with the status of `--fail-on`."""
    shutil.rmtree("rankwise-compressed", ignore_errors=True)
    # few sequences and steps, because only the outcome of the command counts
    if {"--text", "--images"} & {*words}:
        words = [*words, "--sequences", "4"]
    if "--calibration-steps" in words:
        words = [*words, "--calibration-steps", "2"]
    words = [name for word in words for name in (sorted(glob.glob(word)) or [word])]
    result = CliRunner().invoke(app, words)
    allowed = (0, 3) if "--fail-on" in words else (0,)
    assert result.exit_code in allowed, f"{shlex.join(words)}\n{result.output}\n{result.exception!r}"
