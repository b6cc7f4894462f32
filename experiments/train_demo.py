"""Train the model of the bundled demo: a byte-level causal transformer on tiny Shakespeare.

Claim     `rankwise audit` with no model has something real to show: 16 heads that have learnt.
Data      tiny Shakespeare (karpathy/char-rnn, data/tinyshakespeare/input.txt), 1,115,394 bytes:
          first 90 % to train on, last 10 % to validate on. Get it once:
          curl -o data/tinyshakespeare.txt \
            https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
Hardware  two CPU cores (AMD EPYC, 2.6 GHz), float32, about 12 minutes; the recorded run shared its cores
          with other work and took 38
Expect    validation loss 1.49 ± 0.03 nats per byte; two runs on one machine gave the same weights to the bit

    python experiments/train_demo.py --text data/tinyshakespeare.txt
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    ByT5Tokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from rankwise.models import ToSTConfig
from rankwise.ops import half_lives

ROOT = Path(__file__).parents[1]
CARD = Path(__file__).parent / "pages" / "demo-card.md"
TOKENIZER = {"extra_ids": 0, "model_max_length": 256}


def llama() -> LlamaConfig:
    """The demo's architecture: as many parameters as fit in 3 MB of float32."""
    return LlamaConfig(
        vocab_size=259,  # ByT5Tokenizer: <pad>, </s>, <unk>, 256 bytes
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=272,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides a run. A variant is ``dataclasses.replace(demo(), name=..., model=...)``."""

    name: str
    model: PreTrainedConfig = field(default_factory=llama)
    """Any configuration that AutoModelForCausalLM knows, over the 259 tokens of ByT5Tokenizer."""
    tokens: int = 256
    steps: int = 1200
    batch: int = 32
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    joined: float = 0.25
    """Share of training windows made of two passages with </s> between them, so that the </s> with which
    the tokenizer closes a text is a token the model has read before."""
    validation_share: float = 0.1
    excerpt_bytes: int = 40960
    """Size of text.txt at most, cut from the beginning of the validation part."""
    bundles_text: bool = True
    """Whether text.txt is written; it is the same for every model trained on the same text."""
    threads: int = 2
    seed: int = 0


def demo() -> Recipe:
    """The bundled demo."""
    return Recipe(name="demo")


def tost(**changes: Any) -> ToSTConfig:
    """The demo's frame with causal TSSA in place of attention, and as many parameters (within 0.1 %)."""
    return ToSTConfig(
        vocab_size=259,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        **changes,
    )


def demo_tost() -> Recipe:
    """The demo's twin: causal TSSA as published."""
    model = tost(intermediate_size=496)
    return replace(demo(), name="demo_tost", model=model, bundles_text=False, threads=1)


def demo_tost_decayed() -> Recipe:
    """The twin whose statistics forget: half-lives from 4 tokens to the length of the window."""
    model = tost(intermediate_size=500, half_life=half_lives(4, 4, 256).tolist())
    return replace(demo(), name="demo_tost_decayed", model=model, bundles_text=False, threads=1)


RECIPES = {"demo": demo, "demo_tost": demo_tost, "demo_tost_decayed": demo_tost_decayed}


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Windows of token ids, each a training example that is its own label."""

    def __init__(self, windows: list[Tensor]) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def training_windows(ids: Tensor, recipe: Recipe, eos: int) -> Windows:
    """Draw every window of the run beforehand, so that the seed alone decides what is read."""
    draw = np.random.default_rng(recipe.seed)
    windows = []
    for _ in range(recipe.steps * recipe.batch):
        start, other = (int(s) for s in draw.integers(0, len(ids) - recipe.tokens + 1, size=2))
        window = ids[start : start + recipe.tokens]
        if draw.random() < recipe.joined:
            cut = int(draw.integers(1, recipe.tokens))
            rest = ids[other : other + recipe.tokens - cut - 1]
            window = torch.cat([window[:cut], ids.new_tensor([eos]), rest])
        windows.append(window)
    return Windows(windows)


def scoring_windows(ids: Tensor, tokens: int) -> Windows:
    """Cut consecutive windows that overlap by one token: each byte but the first is predicted once."""
    count = (len(ids) - 1) // (tokens - 1)
    return Windows([ids[i * (tokens - 1) : i * (tokens - 1) + tokens] for i in range(count)])


def excerpt(validation: str, size: int) -> str:
    """Take whole speeches from the beginning of the validation part, ``size`` characters at most."""
    start = validation.index("\n\n") + 2
    end = validation.rindex("\n\n", start, start + size) + 1
    return validation[start:end]


def train(
    recipe: Recipe, text: str, log_every: int = 50
) -> tuple[PreTrainedModel, ByT5Tokenizer, dict[str, float]]:
    """Train by the recipe and score the result, in nats per byte."""
    torch.set_num_threads(recipe.threads)
    set_seed(recipe.seed)
    tokenizer = ByT5Tokenizer(**TOKENIZER)
    train_text, validation_text = split(text, recipe)
    bundled_text = excerpt(validation_text, recipe.excerpt_bytes)
    texts = {"train": train_text, "validation": validation_text, "bundled_text": bundled_text}
    ids = {part: encode(tokenizer, part_text) for part, part_text in texts.items()}
    model = AutoModelForCausalLM.from_config(deepcopy(recipe.model))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=arguments(recipe, folder, log_every),
            train_dataset=training_windows(ids["train"], recipe, tokenizer.eos_token_id),
        )
        started = time.perf_counter()
        trainer.train()
        minutes = (time.perf_counter() - started) / 60
        ids["train"] = ids["train"][: len(ids["validation"])]  # as much as is validated on: enough to compare
        losses = {
            f"{part}_loss": trainer.evaluate(scoring_windows(part_ids, recipe.tokens))["eval_loss"]
            for part, part_ids in ids.items()
        }
    model.config.use_cache = recipe.model.use_cache  # the Trainer turns it off
    return model.eval(), tokenizer, {**losses, "minutes": minutes}


def split(text: str, recipe: Recipe) -> tuple[str, str]:
    """Split a text into what is trained on and what is validated on."""
    boundary = int(len(text) * (1 - recipe.validation_share))
    return text[:boundary], text[boundary:]


def encode(tokenizer: ByT5Tokenizer, text: str) -> Tensor:
    """Turn a text into ids without </s>, all of it."""
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def arguments(recipe: Recipe, folder: str, log_every: int) -> TrainingArguments:
    """Say the recipe in the Trainer's words."""
    return TrainingArguments(
        output_dir=folder,
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch,
        per_device_eval_batch_size=recipe.batch,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=recipe.warmup,
        weight_decay=recipe.weight_decay,
        adam_beta2=0.99,
        max_grad_norm=1.0,
        seed=recipe.seed,
        use_cpu=True,
        prediction_loss_only=True,
        save_strategy="no",
        logging_steps=log_every,
        report_to=[],
        disable_tqdm=True,
    )


def results(recipe: Recipe, text: str, model: PreTrainedModel, scores: dict[str, float]) -> dict[str, object]:
    """Gather what was run, on what, and what came out."""
    return {
        "recipe": recipe.name,
        "command": " ".join(["python", *sys.argv]),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "scores": {name: round(score, 4) for name, score in scores.items()},
        "unit": "nats per byte",
        "parameters": model.num_parameters(),
        "settings": {**asdict(recipe), "model": recipe.model.to_diff_dict()},
        "text": {"bytes": len(text.encode()), "sha256": sha256(text.encode()).hexdigest()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def save(
    folder: Path, recipe: Recipe, text: str, model: PreTrainedModel, tokenizer: ByT5Tokenizer, report: dict
) -> None:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load without a network."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner alone; a wheel is for everybody
    tokenizer.save_pretrained(folder)
    if recipe.bundles_text:
        passage = excerpt(split(text, recipe)[1], recipe.excerpt_bytes)
        (folder / "text.txt").write_text(passage, encoding="utf-8")
    (folder / "README.md").write_text(card(recipe, report), encoding="utf-8")


def card(recipe: Recipe, report: dict) -> str:
    """Write the model card."""
    words = {**report["settings"], **report["scores"], **report["versions"], **report["text"]}
    return CARD.read_text(encoding="utf-8").format(
        **words,
        command=report["command"],
        parameters=report["parameters"],
        architecture=recipe.model.model_type,
        train_share=1 - recipe.validation_share,
        last=recipe.tokens - 1,
    )


def main(argv: list[str] | None = None) -> None:
    """Train a recipe and write the model, its card and the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="tiny Shakespeare, one UTF-8 file")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="demo")
    parser.add_argument("--out", type=Path, help="folder of the model; default src/rankwise/assets/RECIPE")
    parser.add_argument("--results", type=Path, help="default experiments/results/train_RECIPE.json")
    options = parser.parse_args(argv)
    recipe = RECIPES[options.recipe]()
    text = options.text.read_text(encoding="utf-8")
    model, tokenizer, scores = train(recipe, text)
    report = results(recipe, text, model, scores)
    folder = options.out or ROOT / "src/rankwise/assets" / recipe.name
    save(folder, recipe, text, model, tokenizer, report)
    record = options.results or ROOT / "experiments/results" / f"train_{recipe.name}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"validation loss {scores['validation_loss']:.3f} nats per byte; wrote {folder} and {record}")


if __name__ == "__main__":
    main()
