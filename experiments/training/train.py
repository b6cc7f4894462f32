"""Train one row at one seed with the Trainer of transformers, or resume it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from jaxtyping import Int
from torch import Tensor
from torch.optim import AdamW
from transformers import Trainer, TrainingArguments, set_seed

from experiments.provenance import commit, peak_memory, provenance
from experiments.results import Run, audits_to_columns, check_same_data, read_runs, settings_of
from experiments.tasks import load_task
from experiments.tasks.task import IGNORED, Task, collate
from experiments.training.callbacks import LogBeforeSave, StepTimer, StopOnNonFinite
from experiments.training.config import TrainingConfig
from experiments.training.models import build_model
from experiments.training.stream import Stream
from rankwise.models import parameter_groups
from rankwise.monitor import RankMonitor, logged_numbers
from rankwise.skips.lambda_skip import LambdaSkip

PROBE_EXAMPLES, PROBE_TOKENS = 2, 128
"""Size of the probe that the monitor audits: exact ranks cost O(T³)."""


def train_row(
    config: TrainingConfig, label: str, seed: int, data: Path, folder: Path, command: str, results: Path
) -> Run:
    """Train a row at a seed, and return its line of results; `folder` gets a folder for each run.

    Raises:
        RecordError: before the training, if runs in the file `results` are of other data of the same name.
    """
    source = commit()
    task = load_task(config, data)
    run: Run = {
        "row": label,
        "seed": seed,
        "settings": settings_of(config),
        "values": {"data": task.record},
        "provenance": {},
    }
    check_same_data(results, [*read_runs(results), run])
    values = train(config, task, folder / folder_name(config, task, label, seed), seed)
    return {**run, "values": values, "provenance": provenance(command, source)}


def folder_name(config: TrainingConfig, task: Task, label: str, seed: int) -> str:
    """Return a name that differs if the configuration or the data differ."""
    content = json.dumps([settings_of(config), task.record.get("sha256")], sort_keys=True)
    word = "".join(letter if letter.isalnum() or letter in "-_.=" else "_" for letter in label)
    return f"{word}-seed{seed}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def train(config: TrainingConfig, task: Task, folder: Path, seed: int) -> dict[str, Any]:
    """Train, or resume from the last complete checkpoint; return scores and curves.

    A resumed run ends with the same weights as an uninterrupted run on the same machine. The best model is
    written to `folder/model`.

    Raises:
        FloatingPointError: if a loss is not finite; checkpoints before it stay.
        filelock.Timeout: if another process trains in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock", timeout=0):
        set_seed(seed)  # after the data, before the model
        evaluated = range(min(config.evaluate_on or len(task.test), len(task.test)))
        trainer = BestModelTrainer(
            model=build_model(config, task),
            args=training_arguments(config, folder, seed),
            train_dataset=Stream(task.train, config.steps * config.batch, seed),
            eval_dataset=torch.utils.data.Subset(task.test, evaluated),
            data_collator=collate,
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=count_correct,
        )
        trainer.optimizer = AdamW(
            parameter_groups(trainer.model, config.weight_decay), lr=config.learning_rate, betas=config.betas
        )
        stop = StopOnNonFinite()
        for callback in (stop, LogBeforeSave(), StepTimer()):
            trainer.add_callback(callback)
        monitor = _attach_monitor(config, trainer, task, folder) if config.monitor_every else None
        start = last_complete_checkpoint(folder)
        trainer.train(resume_from_checkpoint=None if start is None else str(start))
        if stop.found is not None:
            raise FloatingPointError(f"{folder}: {stop.found}")
        trainer.save_model(str(folder / "model"))
        callbacks = trainer.callback_handler.callbacks  # a resumed run has another timer than the one above
        timer = next(one for one in callbacks if isinstance(one, StepTimer))
        return run_values(config, task, trainer, timer, monitor)


class BestModelTrainer(Trainer):
    """Trainer that loads a checkpoint as `from_pretrained` does.

    The Trainer reads weights by the names in the file. For ViT the model has other names, so that the Trainer
    would keep its initial weights.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        model = self.model if model is None else model
        model.load_state_dict(type(model).from_pretrained(resume_from_checkpoint).state_dict())

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


def last_complete_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint whose trainer_state.json parses.

    The Trainer writes that file last, and removes older checkpoints after it.
    """
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])):
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return path
    return None


def training_arguments(config: TrainingConfig, folder: Path, seed: int) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch,
        per_device_eval_batch_size=config.batch,
        train_sampling_strategy="sequential",  # the stream has its own order
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=config.warmup,
        max_grad_norm=config.clip,
        seed=seed,
        use_cpu=torch.accelerator.current_accelerator(check_available=True) is None,
        eval_strategy="steps",
        eval_steps=config.evaluate_every,
        save_strategy="steps",
        save_steps=config.evaluate_every,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model=config.metric,
        greater_is_better=config.metric == "accuracy",
        restore_callback_states_from_checkpoint=True,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,  # otherwise NaN is logged as the last finite loss
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs in one process would multiply the batch
    return arguments


def _attach_monitor(config: TrainingConfig, trainer: Trainer, task: Task, folder: Path) -> RankMonitor:
    data: Any = trainer.eval_dataset
    probe = collate([data[place] for place in range(min(PROBE_EXAMPLES, len(data)))])
    cut = {
        name: (tensor[:, :PROBE_TOKENS] if tensor.ndim == 2 else tensor).to(trainer.args.device)
        for name, tensor in probe.items()
    }
    monitor = RankMonitor(cut, every=config.monitor_every, folder=folder / "rank", resume=True)
    monitor.attach(trainer)
    return monitor


def count_correct(logits: Any, labels: Int[Tensor, "..."]) -> Int[Tensor, "B 2"]:
    """Return per example how many predictions are right, and how many labels count.

    Labels (B, T) of a language model are the tokens: the logits at t - 1 predict the label at t.
    """
    logits = logits[0] if isinstance(logits, tuple | list) else logits
    if labels.ndim == 2:
        logits, labels = logits[:, :-1], labels[:, 1:]
    counted = labels != IGNORED
    right = (logits.argmax(-1) == labels) & counted
    return torch.stack([one.reshape(len(one), -1).sum(1) for one in (right, counted)], 1)


def accuracy(evaluated: Any) -> dict[str, float]:
    """Return the share of right predictions, from `count_correct`."""
    right, counted = evaluated.predictions.sum(0)
    return {"accuracy": float(right) / max(float(counted), 1.0)}


def run_values(
    config: TrainingConfig, task: Task, trainer: Trainer, timer: StepTimer, monitor: RankMonitor | None
) -> dict[str, Any]:
    history = trainer.state.log_history
    evaluated = [entry for entry in history if "eval_loss" in entry]
    better = max if config.metric == "accuracy" else min
    best = better(evaluated, key=lambda entry: entry[f"eval_{config.metric}"])
    skips = [one for one in trainer.model.modules() if isinstance(one, LambdaSkip) and one.weight is not None]
    audits = [] if monitor is None else zip(monitor.history.steps, monitor.history.audits, strict=True)
    ranks = {
        str(step): {name: round(x, 5) for name, x in logged_numbers(audit).items()} for step, audit in audits
    }
    return {
        "parameters": trainer.model.num_parameters(),
        "scores": {
            "loss": best["eval_loss"],
            "accuracy": best["eval_accuracy"],
            "last_loss": evaluated[-1]["eval_loss"],
        },
        "chance": task.chance,
        "bytes_per_token": task.bytes_per_token,
        "best_step": best["step"],
        "curve": [[entry["step"], round(entry["loss"], 5)] for entry in history if "loss" in entry],
        "evaluations": [[one["step"], one["eval_loss"], one["eval_accuracy"]] for one in evaluated],
        "lambdas": [round(one.current().mean().item(), 5) for one in skips],
        "seconds": timer.seconds,
        "cpu_seconds": timer.cpu_seconds,
        "tokens_per_second": config.steps * config.batch * config.tokens / timer.seconds,
        "peak_memory": peak_memory(),
        "rank": audits_to_columns(ranks),
        "data": dict(task.record),
    }
