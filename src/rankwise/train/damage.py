"""Files of a checkpoint that cannot be read, found before a training goes on from it."""

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import safe_globals

from rankwise._internals.files import parse_json
from rankwise.errors import TrainingError, first_line
from rankwise.train.checkpoints import STATE

WEIGHTS = "model.safetensors"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError)
"""What readers of torch and of JSON raise for bytes that are not what they expect."""


def check_readable(checkpoint: Path) -> None:
    """See that every file that a training goes on from is there and can be read.

    What is cut short, empty or of another format is found; a bit that has flipped inside a tensor is not.
    Cost: the headers of the weights, and one more reading of the optimiser's state, mapped, not copied.

    Args:
        checkpoint: its folder.

    Raises:
        TrainingError: naming the file, also where it is of the best checkpoint before this one.
    """
    states = [
        file.name for file in sorted(checkpoint.glob("rng_state*.pth"))
    ]  # as many as processes wrote it
    _check_weights(checkpoint / WEIGHTS, _remove(checkpoint))
    for name in ("optimizer.pt", "scheduler.pt", *(states or ["rng_state.pth"])):
        _check(checkpoint / name, _load, _remove(checkpoint))
    kept = _check(checkpoint / STATE, _state, _remove(checkpoint))
    if kept.best_model_checkpoint is not None:
        best = checkpoint.with_name(Path(kept.best_model_checkpoint).name)
        if best != checkpoint:
            fix = f"{checkpoint.name} needs it, as the best so far: remove both, and start again."
            _check_weights(best / WEIGHTS, fix)


def _remove(checkpoint: Path) -> str:
    return (
        f"Remove the folder {checkpoint}: --resume goes on from the checkpoint before it, if there is one, "
        "or starts again."
    )


def _check_weights(path: Path, fix: str) -> None:
    if (path.parent / f"{WEIGHTS}.index.json").is_file():  # several files, as the index says
        for name in _check(path.parent / f"{WEIGHTS}.index.json", _parts, fix):
            _check(path.parent / name, _open, fix)
    else:
        _check(path, _open, fix)


def _check(path: Path, read: Any, fix: str) -> Any:
    try:
        return read(path)
    except (*UNREADABLE, SafetensorError) as error:
        raise TrainingError(
            f"checkpoint file {path}",
            expected="a file that can be read",
            got="none" if isinstance(error, FileNotFoundError) else first_line(error),
            fix=fix,
        ) from error


def _open(path: Path) -> None:
    with safe_open(path, framework="pt"):  # its header says how long the file must be
        pass


def _load(path: Path) -> Any:
    with safe_globals():
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _json(path: Path) -> Any:
    return parse_json(path.read_text(encoding="utf-8"))


def _parts(index: Path) -> list[str]:
    content = _json(index)
    if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
        raise ValueError("no weight_map in it")
    return sorted({str(name) for name in content["weight_map"].values()})


def _state(path: Path) -> TrainerState:
    _json(path)
    return TrainerState.load_from_json(str(path))
