"""Train the bundled models: byte-level causal transformers of 714,000 weights on tiny Shakespeare.

Claim     `rankwise audit` without a model audits a trained one: 16 heads that have learned.
Hardware  two CPU cores (AMD EPYC, 2.6 GHz), float32, about 12 minutes; the kept run shared its cores
          and took 38
Expect    validation loss 1.49 ± 0.03 nats per byte; two runs on one machine end with the same bits

`train_demo_tost` and `train_demo_tost_decayed` train the demo's frame with TSSA in place of attention. The
bundled models are written to src/rankwise/assets, the third to runs/.
"""

import tempfile
import time
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
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

from experiments.study import DOCS, Study
from experiments.tasks.text import cut
from rankwise.models import ToSTConfig
from rankwise.ops import half_lives

ASSETS = "../src/rankwise/assets"
"""From docs."""
TOKENIZER = {"extra_ids": 0, "model_max_length": 256}
FRAME = {
    "vocab_size": 259,  # ByT5Tokenizer: <pad>, </s>, <unk>, 256 bytes
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


LLAMA = LlamaConfig(**FRAME, intermediate_size=272, bos_token_id=None, tie_word_embeddings=True)
"""Architecture of the demo: as many parameters as fit in 3 MB of float32."""


def tost(**changes: Any) -> ToSTConfig:
    """Return the demo's frame with causal TSSA in place of attention, and as many parameters within 0.1 %."""
    return ToSTConfig(**FRAME, **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    name: str
    model: PreTrainedConfig = field(default_factory=lambda: LLAMA)
    """A causal language model over the 259 tokens of ByT5Tokenizer."""
    tokens: int = 256
    steps: int = 1200
    batch: int = 32
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    joined: float = 0.25
    """Share of training windows made of two passages with </s> between them, because the tokenizer closes
    every text with </s>."""
    validation_share: float = 0.1
    excerpt_bytes: int = 40960
    """Maximum size of text.txt, which is cut from the beginning of the validation part."""
    bundles_text: bool = True
    """Write text.txt, which is the same for every model trained on the same text."""
    threads: int = 2
    seed: int = 0


DEMO = Recipe(name="demo")
TWIN = Recipe(name="demo_tost", model=tost(intermediate_size=496), bundles_text=False, threads=1)
"""Causal TSSA as published."""
LIVES = half_lives(4, 4, 256).tolist()
DECAYED = replace(TWIN, name="demo_tost_decayed", model=tost(intermediate_size=500, half_life=LIVES))
"""The twin with statistics that forget: half-lives from 4 tokens to the length of the window."""


def training_windows(ids: Tensor, recipe: Recipe, eos: int) -> list[dict[str, Tensor]]:
    """Draw every window of the run beforehand, so that only the seed decides the data."""
    draw = np.random.default_rng(recipe.seed)
    windows = []
    for _ in range(recipe.steps * recipe.batch):
        start, other = (int(s) for s in draw.integers(0, len(ids) - recipe.tokens + 1, size=2))
        window = ids[start : start + recipe.tokens]
        if draw.random() < recipe.joined:
            end = int(draw.integers(1, recipe.tokens))
            rest = ids[other : other + recipe.tokens - end - 1]
            window = torch.cat([window[:end], ids.new_tensor([eos]), rest])
        windows.append({"input_ids": window, "labels": window})
    return windows


def excerpt(validation: str, size: int) -> str:
    """Return whole speeches from the beginning of the validation part, at most `size` characters."""
    start = validation.index("\n\n") + 2
    end = validation.rindex("\n\n", start, start + size) + 1
    return validation[start:end]


def split(text: str, recipe: Recipe) -> tuple[str, str]:
    boundary = int(len(text) * (1 - recipe.validation_share))
    return text[:boundary], text[boundary:]


def encode(tokenizer: ByT5Tokenizer, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def train(recipe: Recipe, text: str) -> tuple[PreTrainedModel, ByT5Tokenizer, dict[str, float]]:
    """Train a model, and return its losses in nats per byte."""
    torch.set_num_threads(recipe.threads)
    set_seed(recipe.seed)
    tokenizer = ByT5Tokenizer(**TOKENIZER)
    known, held_out = split(text, recipe)
    texts = {"train": known, "validation": held_out, "bundled_text": excerpt(held_out, recipe.excerpt_bytes)}
    ids = {part: encode(tokenizer, one) for part, one in texts.items()}
    model = AutoModelForCausalLM.from_config(deepcopy(recipe.model))
    with tempfile.TemporaryDirectory() as folder:
        data: Any = training_windows(ids["train"], recipe, tokenizer.eos_token_id)
        trainer = Trainer(model, _arguments(recipe, folder), train_dataset=data)
        started = time.perf_counter()
        trainer.train()
        minutes = (time.perf_counter() - started) / 60
        ids["train"] = ids["train"][: len(ids["validation"])]  # as many bytes as in the validation part
        losses = {
            f"{part}_loss": trainer.evaluate(cut(one.numpy(), recipe.tokens, part))["eval_loss"]
            for part, one in ids.items()
        }
    model.config.use_cache = recipe.model.use_cache  # the Trainer turns it off
    return model.eval(), tokenizer, {**losses, "minutes": minutes}


def _arguments(recipe: Recipe, folder: str) -> TrainingArguments:
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
        logging_steps=50,
        report_to=[],
        disable_tqdm=True,
    )


def measure(recipe: Recipe, folder: Path, data: Path) -> dict[str, Any]:
    """Train a model, and write a folder that AutoModelForCausalLM and AutoTokenizer load offline."""
    text = (data / "tiny_shakespeare" / "input.txt").read_text(encoding="utf-8")
    model, tokenizer, scores = train(recipe, text)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner alone; a wheel is for everybody
    tokenizer.save_pretrained(folder)
    if recipe.bundles_text:
        passage = excerpt(split(text, recipe)[1], recipe.excerpt_bytes)
        (folder / "text.txt").write_text(passage, encoding="utf-8")
    return {
        "recipe": recipe.name,
        "scores": {name: round(score, 4) for name, score in scores.items()},
        "unit": "nats per byte",
        "parameters": model.num_parameters(),
        "settings": {**asdict(recipe), "model": recipe.model.to_diff_dict()},
        "text": {"bytes": len(text.encode()), "sha256": sha256(text.encode()).hexdigest()},
    }


def card(report: dict[str, Any]) -> dict[str, str]:
    settings, scores = report["settings"], report["scores"]
    return {
        **{name: str(settings[name]) for name in ("name", "batch", "tokens", "seed", "threads")},
        **{name: f"{scores[name]:.3f}" for name in ("train_loss", "validation_loss", "bundled_text_loss")},
        "architecture": settings["model"]["model_type"],
        "parameters": f"{report['parameters']:,}",
        "validation_share": f"{settings['validation_share']:.0%}",
        "train_share": f"{1 - settings['validation_share']:.0%}",
        "last": str(settings["tokens"] - 1),
        "steps": f"{settings['steps']:,}",
        "minutes": f"{scores['minutes']:.0f}",
        "joined": f"{settings['joined']:.0%}",
        "bytes": f"{report['text']['bytes']:,}",
        "sha256": report["text"]["sha256"],
    }


def study(recipe: Recipe, *, bundled: bool) -> Study:
    """Return the study that trains a model; the card of a bundled one is its page."""
    folder = DOCS / ASSETS / recipe.name if bundled else Path("runs") / recipe.name
    page = f"{ASSETS}/{recipe.name}/README" if bundled else ""

    def run(data: Path) -> dict[str, Any]:
        return measure(recipe, folder, data)

    return Study(f"train_{recipe.name}", run, page, card, template="demo-card")


STUDIES = study(DEMO, bundled=True), study(TWIN, bundled=True), study(DECAYED, bundled=False)
