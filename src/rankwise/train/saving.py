"""Checkpoints on the way to the disk: begun, whole, or refused for want of room."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import Trainer

from rankwise.errors import InputError, TrainingError, first_line
from rankwise.train.checkpoints import begin, mark, remove_broken, remove_old, whole_checkpoints

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a system says where no byte more can be written: no room, the user's share used up, file too large."""
TORCH_WRITER = ("inline_container", "PytorchStreamWriter", "iostream error")
"""Words in what `torch.save` says, in place of the system's error, where its file could not be written: the
last where the end of the file had no room, which C++ keeps back until it closes the file."""


class MarkingTrainer(Trainer):
    """Hugging Face's Trainer, whose checkpoints say that they are its own and when they are whole.

    Args:
        content: `rankwise.train.checkpoints.identity` of the run.
        **settings: of the Trainer.
    """

    def __init__(self, content: dict[str, Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.content = content

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save, then remove old checkpoints; the Trainer has no hook for either, so its own step is wrapped.

        Args:
            *args: of the Trainer.
            **kwargs: of the Trainer.
        """
        out, step = Path(self.args.output_dir), self.state.global_step
        with saving(out):
            if self.is_world_process_zero():
                begin(out, step)
            super()._save_checkpoint(*args, **kwargs)
            if self.is_world_process_zero():
                mark(out / f"checkpoint-{step}", self.content)
                remove_old(out, step, self.state.best_model_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of weights that a checkpoint does not hold, but not of tied ones.

        A checkpoint holds weights that are tied once, and loading writes into the tensor that they share:
        the Trainer's own step warns of the other names as missing all the same.

        Args:
            load_result: missing and unexpected keys.
        """
        weights = dict(self.model.named_parameters(remove_duplicate=False))
        missing = set(load_result.missing_keys)
        loaded = {id(weight) for name, weight in weights.items() if name not in missing}
        truly = [name for name in load_result.missing_keys if id(weights.get(name)) not in loaded]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=truly))


@contextmanager
def saving(out: Path) -> Iterator[None]:
    """Say that a folder cannot be written, and what is left; for nothing but the writing of files.

    Args:
        out: folder of the run.

    Raises:
        TrainingError: where a file cannot be written.
    """
    try:
        yield
    except (OSError, SafetensorError, InputError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(name in str(error) for name in TORCH_WRITER):
            raise
        raise _not_written(out, error) from error


@contextmanager
def full_disk_told(out: Path) -> Iterator[None]:
    """Say that there is no room where other files of a run are written, its logs among them.

    Args:
        out: folder of the run.

    Raises:
        TrainingError: where the system says that there is no room; its other errors are as they are.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise _not_written(out, error) from error


def _not_written(out: Path, error: Exception) -> TrainingError:
    free = shutil.disk_usage(out).free
    remove_broken(out)
    whole = whole_checkpoints(out)
    room = f"room for a checkpoint ({_size(_bytes(whole[-1]))})" if whole else "room for a checkpoint"
    chain = (error, error.__cause__, error.__context__)
    why = next((one.strerror for one in chain if isinstance(one, OSError) and one.strerror), None)
    if why is None and isinstance(error, RuntimeError):
        why = f"a file that torch could not write to its end ({first_line(error)})"
    return TrainingError(
        f"--out {out}",
        expected=f"a folder that can be written, with {room}",
        got=f"{why or first_line(error)}; {_size(free)} were free",
        fix=f"Make room, then go on from {whole[-1].name} with --resume."
        if whole
        else "Make room, or choose another --out, and start again.",
    )


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def _size(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"
