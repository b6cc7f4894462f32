"""What happens beside a training: a last evaluation, time, a line for the log.

Hooks are given what `transformers.TrainerCallback` says: the arguments of the training, where it is, and
what it does next.
"""

import sys
import time
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


class LastEvaluation(TrainerCallback):
    """Asks for an evaluation at the last step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for it."""
        if state.global_step == state.max_steps:
            control.should_evaluate = True


class LogAtCheckpoints(TrainerCallback):
    """Asks for a log wherever a checkpoint is written.

    The Trainer logs the mean loss since its last log, and no checkpoint holds the part of that mean which
    lies before it: a resumed run would log another one.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for it."""
        if state.global_step % args.save_steps == 0 or state.global_step == state.max_steps:
            control.should_log = True


class Clock(TrainerCallback, ExportableState):
    """Seconds spent in steps, over all processes that the run was resumed in.

    A GPU is waited for before the clock is read: steps that are only queued would take no time.
    """

    def __init__(self, seconds: float = 0.0, cpu_seconds: float = 0.0) -> None:
        self.seconds, self.cpu_seconds = seconds, cpu_seconds
        self._began = (0.0, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the clock."""
        self._began = _read(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read it again, and add the step to the sums."""
        seconds, cpu_seconds = _read(args.device)
        self.seconds += seconds - self._began[0]
        self.cpu_seconds += cpu_seconds - self._began[1]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {}, "attributes": {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}}


def _read(device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter(), time.process_time()


class Lines(TrainerCallback):
    """A line on standard error for each log, where there is no terminal for a bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the losses and the accuracy that are logged; other logs print nothing."""
        names = ("loss", "eval_loss", "eval_accuracy")
        told = [f"{name} {logs[name]:.4f}" for name in names if name in (logs or {})]
        if told and state.is_world_process_zero:
            print(
                f"step {state.global_step}/{state.max_steps}: {', '.join(told)}", file=sys.stderr, flush=True
            )
