"""The monitor as a Lightning callback."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rankwise.errors import InputError
from rankwise.monitor.scalars import scalars

if TYPE_CHECKING:
    from rankwise.monitor.monitor import RankMonitor

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def lightning_callback(monitor: "RankMonitor") -> Any:
    """A callback that audits the probe after each optimizer step and logs through Lightning's loggers.

    Args:
        monitor: what audits.

    Raises:
        InputError: if Lightning is not installed.
    """
    package = next((name for name in PACKAGES if find_spec(name.split(".")[0])), None)
    if package is None:
        raise InputError(
            "`RankMonitor.lightning`",
            expected="Lightning",
            got="an environment without it",
            fix="pip install lightning, or call `monitor.step(model, step)` in your own loop.",
        )
    base: Any = import_module(package).Callback

    class RankCallback(base):
        """Audits the probe, logs, and stops the training where a finding says so."""

        def on_train_start(self, trainer: Any, module: Any) -> None:
            _step(monitor, trainer, module)

        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            _step(monitor, trainer, module)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            monitor.finish()

    return RankCallback()


def _step(monitor: "RankMonitor", trainer: Any, module: Any) -> None:
    found = monitor.step(module, trainer.global_step)
    if found is not None and trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(scalars(found), step=trainer.global_step)
    if monitor.stopped_by is not None:
        trainer.should_stop = True
