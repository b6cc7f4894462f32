"""lm-evaluation-harness, started as in the docs, finds the likelihoods of our models."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, PreTrainedModel

import rankwise as rw
from rankwise.cli.load_model import demo_model
from rankwise.models import ToSTConfig, ToSTForCausalLM

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train.md"
ROWS = [("To be, or not to", " be"), ("Now is the winter of our", " discontent"), ("O Romeo,", " Romeo")]
TASK = """
task: local_lines
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{rows}"}}}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{target}}}}"
metric_list: [{{metric: perplexity, aggregation: perplexity, higher_is_better: false}}]
"""


def tost(folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    config = ToSTConfig(
        vocab_size=259, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = ToSTForCausalLM(config).eval()
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return model


def compressed(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(demo_model()).eval()
    rw.compress(model, [{"input_ids": torch.arange(3, 131)[None]}], keep=0.75, parts="width")
    AutoTokenizer.from_pretrained(demo_model()).save_pretrained(folder)
    return model


def log_likelihood(model: PreTrainedModel, context: str, target: str) -> float:
    """Σ ln p of the target's bytes, by the definition; ids of ByT5 are bytes + 3."""
    given, asked = ([byte + 3 for byte in text.encode()] for text in (context, target))
    with torch.no_grad():
        told = model(torch.tensor([given + asked])).logits[0].double().log_softmax(-1)
    return sum(told[len(given) + at - 1, token].item() for at, token in enumerate(asked))


@pytest.mark.extra
@pytest.mark.parametrize("make", [tost, compressed])
def test_the_harness_finds_the_likelihoods_of_the_model(make: Any, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    folder = tmp_path / "model"
    model = make(folder)
    model.save_pretrained(folder)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"context": c, "target": t}) + "\n" for c, t in ROWS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local.yaml").write_text(TASK.format(rows=rows))
    scripts = re.findall(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (script,) = (one for one in scripts if "cli_evaluate" in one)
    (tmp_path / "harness.py").write_text(script)
    done = subprocess.run(
        [
            sys.executable, "harness.py", "--model", "hf", "--device", "cpu", "--batch_size", "2",
            "--model_args", f"pretrained={folder},add_bos_token=False",
            "--tasks", "local_lines", "--include_path", "tasks", "--output_path", "found",
        ],
        cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "found").rglob("results_*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    sums = [log_likelihood(model, context, target) for context, target in ROWS]
    wanted = math.exp(-sum(sums) / len(sums))
    assert found["results"]["local_lines"]["perplexity,none"] == pytest.approx(wanted, rel=1e-3)
