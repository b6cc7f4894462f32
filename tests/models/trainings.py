"""Trainings by the Trainer of transformers, and the same trainings by a loop in float64."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import rankwise as rw
from rankwise.models import (
    ToSTConfig,
    ToSTForCausalLM,
    ToSTForImageClassification,
    ToSTForSequenceClassification,
)

ROWS, TOKENS, RATE = 8, 10, 0.02
"""Rows of a step, tokens of a text, learning rate of SGD."""
SMOOTHING = 0.1
SIZES: dict[str, Any] = {
    "vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": TOKENS, "pad_token_id": 0, "skip": "learned", "initializer_range": 0.2,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A model and its data: class of ToST (None for GPT-2 with λ-skips), number of labels, problem."""

    made: type | None
    labels: int = 0
    problem: str | None = None
    fields: tuple[tuple[str, Any], ...] = ()


KINDS = {
    "language": Kind(ToSTForCausalLM, fields=(("layer_types", ("tssa", "softmax")),)),
    "text": Kind(ToSTForSequenceClassification, 3, "single_label_classification"),
    "text of several labels": Kind(ToSTForSequenceClassification, 4, "multi_label_classification"),
    "image": Kind(ToSTForImageClassification, 3, "single_label_classification"),
    "image of target values": Kind(ToSTForImageClassification, 1, "regression"),
    "GPT-2 with λ-skips": Kind(None),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "label smoothing": {"label_smoothing_factor": SMOOTHING},
    "accumulation": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": ROWS // 4},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "compile": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "LoRA": {},
    "resume": {"save_strategy": "steps"},
    "best model": {"save_strategy": "steps", "eval_strategy": "steps", "load_best_model_at_end": True},
}
"""Arguments of the Trainer, by the name of a training."""


def build(kind: str, lora: bool = False) -> nn.Module:
    """Return a model, from the same random numbers each time."""
    torch.manual_seed(0)
    own = KINDS[kind]
    if own.made is None:
        small = GPT2Config(
            vocab_size=29, n_embd=16, n_layer=2, n_head=4, n_positions=TOKENS, initializer_range=0.2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        model: nn.Module = GPT2LMHeadModel(small)
        rw.add_lambda_skip(model, init=0.9)
    else:
        fields: dict[str, Any] = {**SIZES, **{name: list(value) for name, value in own.fields}}
        if own.labels:
            fields |= {"num_labels": own.labels, "problem_type": own.problem}
        if own.made is ToSTForImageClassification:
            fields |= {"causal": False, "patch_size": 8}
        model = own.made(ToSTConfig(**fields))
    if not lora:
        return model
    import peft

    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False))


@cache
def examples(kind: str, count: int) -> list[dict[str, Tensor]]:
    """Return rows of data: texts that repeat a pattern, some padded, and images, with labels."""
    draw, own = torch.Generator().manual_seed(3), KINDS[kind]
    rows = []
    for _ in range(count):
        pattern = torch.randint(1, 29, (3,), generator=draw)
        ids = pattern.repeat(4)[:TOKENS].clone()
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if own.made is ToSTForImageClassification:
            row = {"pixel_values": torch.randn(3, 16, 24, generator=draw) + pattern.view(3, 1, 1) / 29}
        elif own.labels:
            padding = int(torch.randint(0, 4, (1,), generator=draw))
            ids[:padding], row["attention_mask"][:padding] = 0, 0
        if not own.labels:
            # Trainer counts labels of first tokens, which have no target, as targets of GPT2LMHeadModel
            left_out = int(torch.randint(0 if own.made else 1, 6, (1,), generator=draw))
            row["labels"] = ids.masked_fill(torch.arange(TOKENS) < left_out, -100)
        elif own.problem == "single_label_classification":
            row["labels"] = pattern[0] % own.labels
        elif own.problem == "regression":
            row["labels"] = pattern[0] / 29
        else:
            row["labels"] = (torch.arange(own.labels) < pattern[0] % (own.labels + 1)).float()
        rows.append(row)
    return rows


def summed_loss(kind: str, logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, int]:
    """Return the sum of the losses of all labels, and the number of labels."""
    own = KINDS[kind]
    if not own.labels:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if own.problem == "regression":
        return (logits[:, 0] - labels).square().sum(), len(labels)
    if own.problem == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="sum"), labels.numel()
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    return loss, int((labels != -100).sum())


def by_hand(kind: str, case: str, steps: int) -> list[float]:
    """Return the loss of each step of a loop in float64, whose gradients come from the parts that a step has.

    Batch norm uses the statistics of a part, so parts matter to image classifiers.
    """
    smoothing = SMOOTHING if case == "label smoothing" and _smoothed(kind) else 0.0
    model = build(kind, lora=case == "LoRA").double().train()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=RATE)
    rows, losses = examples(kind, steps * ROWS), []
    part = OPTIONS[case].get("per_device_train_batch_size", ROWS)
    for step in range(steps):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for first in range(step * ROWS, (step + 1) * ROWS, part):
            batch = {name: torch.stack([row[name] for row in rows[first : first + part]]) for name in rows[0]}
            labels = batch.pop("labels")
            batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
            loss, items = summed_loss(kind, model(**batch).logits, labels, smoothing)
            total, count = total + loss, count + items
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    return losses


def _smoothed(kind: str) -> bool:
    """Return True if the Trainer smooths labels, which are classes or tokens."""
    return KINDS[kind].problem in (None, "single_label_classification")


def by_trainer(kind: str, case: str, steps: int, folder: Path) -> tuple[list[float], Trainer]:
    """Return the loss of each step of `Trainer`, and the trainer after the training."""

    def trainer() -> Trainer:
        arguments: dict[str, Any] = {
            "output_dir": str(folder), "max_steps": steps, "logging_steps": 1, "save_steps": steps // 2,
            "eval_steps": steps // 2, "per_device_train_batch_size": ROWS, "per_device_eval_batch_size": ROWS,
            "optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
            "train_sampling_strategy": "sequential", "save_strategy": "no", "report_to": [],
            "disable_tqdm": True, "use_cpu": True,
        }  # fmt: skip
        data = examples(kind, steps * ROWS)
        given = arguments | (OPTIONS[case] if _smoothed(kind) or case != "label smoothing" else {})
        return Trainer(
            build(kind, lora=case == "LoRA"), TrainingArguments(**given), train_dataset=data,
            eval_dataset=data[: 2 * ROWS],
        )  # fmt: skip

    made = trainer()
    made.train()
    if case == "resume":
        made = trainer()
        made.train(resume_from_checkpoint=str(folder / f"checkpoint-{steps // 2}"))
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry], made


def difference(found: list[float], wanted: list[float]) -> float:
    """Return the largest difference of two lists of losses, relative to the expected losses."""
    assert len(found) == len(wanted)
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
