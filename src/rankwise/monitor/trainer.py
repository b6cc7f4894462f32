"""The monitor as a callback of Hugging Face's Trainer."""

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from rankwise.monitor.scalars import scalars

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from rankwise.monitor.monitor import RankMonitor


class RankCallback(TrainerCallback):
    """Audits the probe as the trainer steps, logs through the trainer, and stops it where a finding says so.

    Args:
        monitor: what audits.
        trainer: whose loggers get the scalars.
    """

    def __init__(self, monitor: "RankMonitor", trainer: "Trainer") -> None:
        self.monitor, self.trainer = monitor, trainer

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Audit the model before its first step.

        Args:
            args: of the training.
            state: where the training is.
            control: what the trainer does next.
            **kwargs: the model among others.
        """
        self._step(state, control, kwargs["model"])

    def on_pre_optimizer_step(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Drop the gradients of the step that the trainer takes after a stop before the first.

        It asks whether to stop at the end of a step only; without gradients optimizers leave weights as they
        are. A loss scaler (float16) fails without, so there the step is taken.

        Args:
            args: of the training.
            state: where the training is.
            control: what the trainer does next.
            **kwargs: the model among others.
        """
        if self.monitor.stopped_by is not None and self.trainer.accelerator.scaler is None:
            kwargs["model"].zero_grad(set_to_none=True)

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Audit the model if it is time to.

        Args:
            args: of the training.
            state: where the training is.
            control: what the trainer does next.
            **kwargs: the model among others.
        """
        self._step(state, control, kwargs["model"])

    def on_train_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Write the history.

        Args:
            args: of the training.
            state: where the training is.
            control: what the trainer does next.
            **kwargs: the model among others.
        """
        self.monitor.finish()

    def _step(self, state: "TrainerState", control: "TrainerControl", model: Any) -> None:
        found = self.monitor.step(model, state.global_step)
        if found is not None:
            due = control.should_log  # the trainer's own log of this step, which `log` takes for done
            self.trainer.log(scalars(found))
            control.should_log = due
        if self.monitor.stopped_by is not None:
            control.should_training_stop = True
