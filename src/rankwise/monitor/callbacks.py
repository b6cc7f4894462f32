"""Callbacks that run a `RankMonitor` in transformers' Trainer and in Lightning."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rankwise.errors import InputError
from rankwise.monitor.monitor import RankMonitor, continues, logged_numbers

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def trainer_callback(monitor: RankMonitor, trainer: "Trainer") -> "TrainerCallback":
    """Return a callback of a transformers Trainer that audits, logs numbers and can stop training."""
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback

    def step(state: Any, control: Any, model: Any) -> None:
        audit = monitor.step(model, state.global_step)
        if audit is not None:
            should_log = control.should_log  # `trainer.log` clears this flag, which is restored below
            handler = trainer.callback_handler
            every = handler.callbacks  # numbers per layer are for loggers; a console would print all of them
            handler.callbacks = [
                callback for callback in every if not isinstance(callback, PrinterCallback | ProgressCallback)
            ]
            try:
                with continues("Trainer.log"):
                    trainer.log(logged_numbers(audit))
            finally:
                handler.callbacks, control.should_log = every, should_log
        if monitor.stopped_by is not None:
            control.should_training_stop = True

    class RankCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step(state, control, kwargs["model"])

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # The trainer checks for a stop only after a step. If the audit before the first step stops
            # training, dropping gradients keeps the weights. A float16 loss scaler requires gradients.
            if monitor.stopped_by is not None and trainer.accelerator.scaler is None:
                kwargs["model"].zero_grad(set_to_none=True)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step(state, control, kwargs["model"])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            monitor.finish()

    return RankCallback()


def lightning_callback(monitor: RankMonitor) -> Any:
    """Return a Lightning callback that audits after batches, logs numbers and can stop training.

    Raise `InputError` if Lightning is not installed.
    """
    package = next((name for name in LIGHTNING if find_spec(name.split(".")[0])), None)
    if package is None:
        raise InputError(
            "`RankMonitor.lightning`",
            expected="Lightning",
            got="an environment without it",
            fix="pip install lightning, or call `monitor.step(model, step)` in your own loop.",
        )
    base: Any = import_module(package).Callback

    class RankCallback(base):
        def __reduce__(self) -> Any:  # Lightning pickles the callback for processes that it spawns
            return lightning_callback, (monitor,)

        def on_train_start(self, trainer: Any, module: Any) -> None:
            audit = monitor.step(module, trainer.global_step)
            if audit is not None and trainer.is_global_zero:
                for logger in trainer.loggers:
                    with continues("log_metrics"):
                        logger.log_metrics(logged_numbers(audit), step=trainer.global_step)
            if monitor.stopped_by is not None:
                trainer.should_stop = True

        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            self.on_train_start(trainer, module)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            monitor.finish()

    return RankCallback()
