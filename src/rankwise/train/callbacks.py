"""What happens beside a training: early losses, a last evaluation, time, a line for the log."""

import math
import sys
import time
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from rankwise.errors import TrainingError
from rankwise.train.settings import EarlyLoss, Recipe


class EarlyCheck(TrainerCallback):
    """Compares the first losses with those of a healthy run; a loss that is no number ends any run.

    Args:
        recipe: whose ``early`` numbers hold.
        data: SHA-256 of the data; early numbers of other data are left out.
    """

    def __init__(self, recipe: Recipe, data: str) -> None:
        known = recipe.early_data in (None, data)
        self.early = {one.step: one for one in recipe.early if known}
        self.stops = recipe.when_early_fails == "stop"
        self.warnings: list[str] = []
        self.error: TrainingError | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Look at the loss that is logged.

        Args:
            args: of the training.
            state: where it is.
            control: what it does next.
            logs: what is logged.
            **kwargs: not needed.
        """
        loss, step = (logs or {}).get("loss"), state.global_step
        if loss is None:
            return
        if not math.isfinite(loss):
            self.error = TrainingError(
                f"loss at step {step}",
                wanted="a finite number",
                got=str(loss),
                fix="Lower optimiser.learning_rate or raise optimiser.warmup; checkpoints before it stay.",
            )
        expected = self.early.get(step)
        if expected is not None and abs(loss - expected.loss) > expected.tolerance:
            self._away(step, loss, expected)
        if self.error is not None:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False

    def _away(self, step: int, loss: float, expected: EarlyLoss) -> None:
        wanted = f"{expected.loss:g} ± {expected.tolerance:g}, as in a healthy run"
        if self.stops:
            self.error = TrainingError(
                f"loss at step {step}",
                wanted=wanted,
                got=f"{loss:.3f}",
                fix="Look at the data and at what changed; when_early_fails=warn goes on all the same.",
            )
            return
        self.warnings.append(f"loss at step {step}: expected {wanted}, got {loss:.3f}")
        print(f"warning: {self.warnings[-1]}", file=sys.stderr, flush=True)


class LastEvaluation(TrainerCallback):
    """Asks for an evaluation at the last step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate at the last step, too.

        Args:
            args: of the training.
            state: where it is.
            control: what it does next.
            **kwargs: not needed.
        """
        if state.global_step == state.max_steps:
            control.should_evaluate = True


class Clock(TrainerCallback, ExportableState):
    """Seconds spent in steps, over all processes that the run was resumed in."""

    def __init__(self, seconds: float = 0.0, cpu_seconds: float = 0.0) -> None:
        self.seconds, self.cpu_seconds = seconds, cpu_seconds
        self._began = (0.0, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start.

        Args:
            args: of the training.
            state: where it is.
            control: what it does next.
            **kwargs: not needed.
        """
        self._began = (time.perf_counter(), time.process_time())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add up.

        Args:
            args: of the training.
            state: where it is.
            control: what it does next.
            **kwargs: not needed.
        """
        self.seconds += time.perf_counter() - self._began[0]
        self.cpu_seconds += time.process_time() - self._began[1]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {}, "attributes": {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}}


class Lines(TrainerCallback):
    """A line on standard error for each log, where there is no terminal for a bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print it.

        Args:
            args: of the training.
            state: where it is.
            control: what it does next.
            logs: what is logged.
            **kwargs: not needed.
        """
        names = ("loss", "eval_loss", "eval_accuracy")
        told = [f"{name} {logs[name]:.4f}" for name in names if name in (logs or {})]
        if told and state.is_world_process_zero:
            print(
                f"step {state.global_step}/{state.max_steps}: {', '.join(told)}", file=sys.stderr, flush=True
            )
