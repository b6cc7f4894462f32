"""What a run leaves: results.json, and the best checkpoint as a model with its card."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import ByT5Tokenizer, PreTrainedModel, Trainer

from rankwise._internals.files import write_file
from rankwise.cli.torchrun import from_environment
from rankwise.data.tasks import Task
from rankwise.data.tasks.language import BYTE_VOCABULARY
from rankwise.monitor import RankMonitor, scalars
from rankwise.skips.modules import LambdaSkip
from rankwise.train.callbacks import Clock
from rankwise.train.card import card
from rankwise.train.checkpoints import MAY_DIFFER, checkpoints, forget_removed, is_ours, remove
from rankwise.train.overrides import beside
from rankwise.train.provenance import peak_memory, provenance, shown
from rankwise.train.recipes import RECIPES
from rankwise.train.settings import Recipe

RESULTS = "results.json"


def gather(
    recipe: Recipe, trainer: Trainer, task: Task, monitor: RankMonitor | None, source: str | None
) -> dict[str, Any]:
    """What a run was, and what came out; every number of it is plain JSON. All processes of a run call it.

    Args:
        recipe: its configuration.
        trainer: that has trained.
        task: what was learned.
        monitor: what watched it.
        source: `rankwise.train.provenance.commit` when it began.
    """
    history = trainer.state.log_history
    evaluated = [entry for entry in history if "eval_loss" in entry]
    better = max if recipe.evaluation.metric == "accuracy" else min
    best = better(evaluated, key=lambda entry: entry[f"eval_{recipe.evaluation.metric}"])
    clock = next(one for one in trainer.callback_handler.callbacks if isinstance(one, Clock))
    processes = from_environment()
    tokens = recipe.steps * recipe.batch * recipe.task.tokens
    configuration = recipe.model_dump(mode="json")
    told = configuration["task"]
    told["path"] = shown("path", told["path"])
    told["options"] = {name: shown(name, value) for name, value in told["options"].items()}
    return {
        "recipe": recipe.name,
        "kind": task.kind,
        "variant": variant(recipe),
        "configuration": configuration,
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
        "lambdas": lambdas(trainer.model),
        "seconds": clock.seconds,
        "cpu_seconds": sum(processes.all_gather(clock.cpu_seconds)),
        "tokens_per_second": tokens / clock.seconds,
        "peak_memory": sum(processes.all_gather(peak_memory())),
        "rank": ranks(monitor),
        "data": task.provenance.to_dict(),
        "provenance": provenance(recipe, source),
    }


def variant(recipe: Recipe) -> dict[str, Any]:
    """The recipe's arguments, and under ``changed`` the other keys that decide the run, where there are any.

    Args:
        recipe: the configuration.
    """
    known = RECIPES.get(recipe.name)
    more = {} if known is None else beside(recipe, known)
    changed = {key: shown(key, value) for key, value in more.items() if key not in MAY_DIFFER}
    return {**recipe.variant, **({"changed": changed} if changed else {})}


def lambdas(model: torch.nn.Module) -> list[float]:
    """Learned λ by layer, the mean over channels where each has its own; empty where none is learned.

    Args:
        model: the model.
    """
    skips = [one for one in model.modules() if isinstance(one, LambdaSkip) and one.weight is not None]
    return [round(one.current().mean().item(), 5) for one in skips]


def ranks(monitor: RankMonitor | None) -> dict[str, dict[str, float]]:
    """What a monitor measured, by step and by the name its loggers see; empty without one.

    Args:
        monitor: of the run.
    """
    if monitor is None:
        return {}
    audits = zip(monitor.history.steps, monitor.history.audits, strict=True)
    return {
        str(step): {name: round(value, 5) for name, value in scalars(audit).items()} for step, audit in audits
    }


def write(out: Path, model: PreTrainedModel, results: dict[str, Any], tokenizer: Any = None) -> None:
    """Write the model, with its tokenizer where it reads text, then the results: they say that all is there.

    Args:
        out: folder of the run.
        model: the best one.
        results: what `gather` gave, and warnings.
        tokenizer: of the task; None where it reads bytes, or no text.
    """
    model.save_pretrained(out / "model")
    if tokenizer is not None:
        tokenizer.save_pretrained(out / "model")
    elif model.config.to_dict().get("vocab_size") == BYTE_VOCABULARY:
        ByT5Tokenizer(extra_ids=0).save_pretrained(out / "model")
    write_file(out / "model" / "README.md", card(results), "model card")
    write_file(out / RESULTS, json.dumps(results, indent=1) + "\n", "results")
    for one in filter(is_ours, checkpoints(out)):
        remove(one)
    forget_removed(out)
