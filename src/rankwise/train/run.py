"""Train a recipe with Hugging Face's Trainer, from the first step or from the last whole checkpoint."""

import os
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel, Trainer, TrainingArguments, set_seed

from rankwise.cli.load_model import check_device
from rankwise.data.tasks import Task
from rankwise.errors import InputError, RankwiseError, TrainingError
from rankwise.monitor import RankMonitor
from rankwise.train.callbacks import Clock, LastEvaluation, Lines, LogAtCheckpoints
from rankwise.train.checkpoints import (
    checkpoints,
    find_best_beside,
    identity,
    last_whole,
    mark,
    refuse_foreign,
    refuse_other,
    remove_broken,
)
from rankwise.train.checks import check_batch, check_copies, check_installed, check_mixed
from rankwise.train.damage import check_readable
from rankwise.train.health import HealthCheck
from rankwise.train.lock import alone
from rankwise.train.models import build_model
from rankwise.train.optimiser import make_optimiser
from rankwise.train.provenance import commit
from rankwise.train.results import RESULTS, gather, write
from rankwise.train.saving import MarkingTrainer, full_disk_told, saving
from rankwise.train.scores import accuracy, right_and_asked
from rankwise.train.settings import Recipe
from rankwise.train.stream import Stream
from rankwise.train.tasks import make_task

AUDITS = "rank"
"""Where a monitor writes, in the folder of a run."""
PROBE = 2
"""Validation examples that a monitor audits."""


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Train a recipe; write the best checkpoint as a model, its card and results.json.

    A run that was killed goes on with ``resume`` from its last whole checkpoint, and ends with the weights it
    would have had in one piece. Under ``torchrun`` the sequences of a step are shared by the processes.

    Args:
        recipe: the configuration.
        out: folder to write to.
        resume: whether to go on from what is there.
        progress: whether to show a progress bar; lines of text otherwise.

    Returns:
        What results.json holds.

    Raises:
        TrainingError: if the folder holds another run or one that is going on, a checkpoint is damaged, a
            loss is no number or far from a healthy one, or a checkpoint cannot be written; checkpoints
            before it stay.
        InputError: if there is no such device, data are missing, or the model cannot be built.
    """
    out = Path(out)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if recipe.device != "auto":
        check_device(recipe.device, "`device`")
    check_batch(recipe, processes)
    check_installed()
    task = make_task(recipe)
    with alone(out) if _first() else nullcontext():
        return _train(recipe, task, out, resume, processes, progress)


def _train(
    recipe: Recipe, task: Task, out: Path, resume: bool, processes: int, progress: bool
) -> dict[str, Any]:
    content, source = identity(recipe, task.provenance.to_dict()), commit()
    start = _starting_point(out, content, resume)
    if start is not None:
        check_readable(start)
        if _first():
            find_best_beside(start)
    set_seed(recipe.seed)
    model = _model(recipe, task)
    arguments = _arguments(recipe, out, processes, progress)
    _use_one_gpu(arguments)
    trainer = MarkingTrainer(
        content,
        model=model,
        args=arguments,
        train_dataset=Stream(task.train, recipe.steps * recipe.batch, recipe.seed),
        eval_dataset=_validation(recipe, task),
        data_collator=task.collate,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=right_and_asked,
        optimizers=(make_optimiser(model, recipe.optimiser), None),
    )
    check_copies(trainer)
    check = HealthCheck(recipe, task.provenance.sha256, task.num_labels or task.vocab_size or 2)
    _set_callbacks(trainer, [check, LastEvaluation(), LogAtCheckpoints(), Clock()], progress)
    watched = recipe.monitor or recipe.monitor_stop_on
    monitor = _monitor(recipe, trainer, task, out) if watched else None
    if watched and _first():
        (out / AUDITS).mkdir(exist_ok=True)
        mark(out / AUDITS, content)
    with full_disk_told(out):
        trainer.train(resume_from_checkpoint=None if start is None else str(start))
    if check.error is not None:
        raise check.error
    if monitor is not None and monitor.stopped_by is not None:
        finding = monitor.stopped_by
        raise TrainingError(
            f"step {monitor.history.steps[-1]}",
            expected=f"no finding of monitor_stop_on ({', '.join(recipe.monitor_stop_on)})",
            got=f"{finding.code} at {finding.where}: {finding.meaning.rstrip('.')}",
            fix=f"Look at {out / AUDITS}; without monitor_stop_on the training goes on all the same.",
        )
    results = gather(recipe, trainer, task, monitor, source)
    results["warnings"] = check.warnings(trainer.state.log_history)
    if trainer.is_world_process_zero():
        with saving(out):
            write(out, trainer.model, results, task.tokenizer)
    return results


def _starting_point(out: Path, content: dict[str, Any], resume: bool) -> Path | None:
    """The checkpoint to go on from; nothing that is there is written over unasked."""
    if (out / RESULTS).exists():
        raise TrainingError(
            f"--out {out}",
            expected="a folder without a finished run",
            got=f"one with {RESULTS}",
            fix="Choose another --out, or remove that folder to train again.",
        )
    refuse_foreign(out)
    unfinished = [*checkpoints(out), *sorted((out / AUDITS).glob("step-*/audit.json"))]
    if unfinished and not resume:
        raise TrainingError(
            f"--out {out}",
            expected="a folder without checkpoints and audits",
            got=f"{unfinished[-1].relative_to(out)} of a run that did not finish",
            fix="Go on from it with --resume, or choose another --out.",
        )
    start = last_whole(out, content)
    if unfinished and start is None:
        refuse_other(out / AUDITS, content, "audits")
    if _first():
        remove_broken(out)
    return start


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _model(recipe: Recipe, task: Task) -> PreTrainedModel:
    """Build it; what the model's own classes refuse is told by the settings it came from."""
    try:
        return build_model(recipe.model, task, _positions(recipe, task))
    except RankwiseError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError, StrictDataclassError) as error:
        given = recipe.model.model_dump(exclude_none=True)
        raise InputError(
            "`model`",
            expected=f"settings that {recipe.model.name} can be built with",
            got=f"{', '.join(f'{name}={value!r}' for name, value in given.items())} "
            f"({' '.join(str(error).split()) or type(error).__name__})",
            fix="Change model.width, model.heads or model.options.",
        ) from error


def _positions(recipe: Recipe, task: Task) -> int:
    return recipe.task.tokens if task.kind == "image" else task.length


def _validation(recipe: Recipe, task: Task) -> Any:
    data: Any = task.test if task.validation is None else task.validation
    most = recipe.evaluation.examples
    if most is None or most >= len(data):
        return data
    if task.num_labels is not None:
        check_mixed([int(data[at]["labels"]) for at in range(len(data))], most)
    return torch.utils.data.Subset(data, range(most))


def _arguments(recipe: Recipe, out: Path, processes: int, progress: bool) -> TrainingArguments:
    """The recipe in the Trainer's words."""
    each, optimiser = recipe.batch // processes, recipe.optimiser
    return TrainingArguments(
        output_dir=str(out),
        max_steps=recipe.steps,
        per_device_train_batch_size=each,
        per_device_eval_batch_size=each,
        train_sampling_strategy="sequential",  # the stream has its own order
        learning_rate=optimiser.learning_rate,
        lr_scheduler_type=optimiser.schedule,
        warmup_steps=optimiser.warmup,
        max_grad_norm=optimiser.clip,
        seed=recipe.seed,
        use_cpu=recipe.device == "cpu" or torch.accelerator.current_accelerator(check_available=True) is None,
        bf16=recipe.dtype == "bfloat16",
        eval_strategy="steps",
        eval_steps=recipe.evaluation.every,
        save_strategy="steps",
        save_steps=recipe.evaluation.every,
        load_best_model_at_end=True,
        metric_for_best_model=recipe.evaluation.metric,
        greater_is_better=recipe.evaluation.metric == "accuracy",
        restore_callback_states_from_checkpoint=True,
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,  # a loss that is no number is to be seen
        ddp_find_unused_parameters=False,
        report_to=["tensorboard"] if find_spec("tensorboard") else [],
        disable_tqdm=not progress,
        dataloader_pin_memory=torch.cuda.is_available() and recipe.device != "cpu",
    )


def _use_one_gpu(arguments: TrainingArguments) -> None:
    """Keep the Trainer from copying the model to each GPU at every step, with ``batch`` for each of them."""
    if arguments.n_gpu > 1:
        print(
            f"one of {arguments.n_gpu} GPUs is used; all are by: "
            f"torchrun --nproc-per-node {arguments.n_gpu} -m rankwise train …",
            file=sys.stderr,
            flush=True,
        )
        arguments._n_gpu = 1


def _set_callbacks(trainer: Trainer, callbacks: list[Any], progress: bool) -> None:
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    for callback in [*callbacks, *([] if progress else [Lines()])]:
        trainer.add_callback(callback)


def _monitor(recipe: Recipe, trainer: Trainer, task: Task, out: Path) -> RankMonitor:
    data: Any = trainer.eval_dataset
    probe = dict(task.collate([data[at] for at in range(min(PROBE, len(data)))]))
    device = trainer.args.device
    moved = {
        name: (tensor[:, : recipe.monitor_tokens] if tensor.ndim == 2 else tensor).to(device)
        for name, tensor in probe.items()
    }
    monitor = RankMonitor(
        moved,
        every=recipe.monitor_every,
        stop_on=recipe.monitor_stop_on,
        folder=out / AUDITS,
        resume=True,  # from the checkpoint, or from step 0 where a run was killed before its first
    )
    monitor.attach(trainer)
    return monitor
