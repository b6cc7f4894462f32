"""Callbacks of a training: log before each checkpoint, time the steps, stop at a loss that is not finite."""

import math
import time
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


class LogBeforeSave(TrainerCallback):
    """Request a log at every checkpoint.

    The Trainer logs the mean loss since its last log, and no checkpoint holds the part before it. A resumed
    run would log another mean.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.save_steps == 0 or state.global_step == state.max_steps:
            control.should_log = True


class StepTimer(TrainerCallback, ExportableState):
    """Seconds spent in steps, over all processes of a resumed run.

    A GPU is synchronized before the clock is read, because queued steps would take no time.
    """

    def __init__(self, seconds: float = 0.0, cpu_seconds: float = 0.0) -> None:
        self.seconds, self.cpu_seconds = seconds, cpu_seconds
        self._began = (0.0, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = _read_clocks(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds, cpu_seconds = _read_clocks(args.device)
        self.seconds += seconds - self._began[0]
        self.cpu_seconds += cpu_seconds - self._began[1]

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}}


def _read_clocks(device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter(), time.process_time()


class StopOnNonFinite(TrainerCallback):
    """Stop at a loss that is not finite, before a checkpoint of it is written."""

    def __init__(self) -> None:
        self.found: str | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name in ("loss", "eval_loss"):
            if not math.isfinite((logs or {}).get(name, 0.0)):
                self.found = f"{name} {logs[name]} at step {state.global_step}"
                control.should_training_stop = True
                control.should_save = control.should_evaluate = False
