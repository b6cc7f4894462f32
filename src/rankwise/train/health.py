"""Whether a training is healthy, by its own log: losses that are far from where they should be."""

import math
import sys
from typing import Any

from transformers import TrainerCallback

from rankwise.errors import TrainingError
from rankwise.train.settings import Recipe


def worst_healthy_loss(choices: int, examples: int) -> float:
    """Mean training loss above which a model is worse than one that knows nothing and hardly says otherwise.

    Formula: ln C + 1/2 + 4/√n. A uniform guess has ln C. Logits drawn from N(0, 1), whatever the label is,
    lose ln Σ exp(zᵢ) − z_y: for many classes ln C + 1/2 in the mean, with standard deviation 1. The last term
    is four standard errors of the mean over n examples, each counted once however many tokens it has.
    Units: nats.

    Args:
        choices: classes, or tokens of the vocabulary, C.
        examples: that the mean is over, n.

    Examples:
        >>> round(worst_healthy_loss(256, 160), 2)
        6.36
    """
    return math.log(choices) + 0.5 + 4 / math.sqrt(examples)


LOSSES = {"loss": "loss", "eval_loss": "held-out loss"}
"""Names in a log of the Trainer, and what an error calls them."""


class HealthCheck(TrainerCallback):
    """Looks at each loss that is logged, and warns of it or ends the run.

    A loss that is no number ends any run, before a checkpoint is written of it. A training loss further from
    the recipe's early number than its tolerance, and one after warmup that is above `worst_healthy_loss`, is
    a warning, or ends the run where ``when_early_fails`` is ``stop``.

    Args:
        recipe: whose numbers hold.
        data: SHA-256 of the data; early numbers of other data are left out.
        choices: classes, or tokens of the vocabulary.
    """

    def __init__(self, recipe: Recipe, data: str, choices: int) -> None:
        known = recipe.early_data in (None, data)
        self.early = {one.step: one for one in recipe.early if known}
        self.recipe, self.choices = recipe, choices
        self.error: TrainingError | None = None
        self._bound_told = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Judge a training loss, and see that a held-out one is a number; other logs are left alone."""
        losses, step = {name: logs[name] for name in LOSSES if name in (logs or {})}, state.global_step
        for name, loss in losses.items():
            if not math.isfinite(loss):
                self.error = TrainingError(
                    f"{LOSSES[name]} at step {step}",
                    expected="a finite number",
                    got=str(loss),
                    fix="Lower optimiser.learning_rate or raise optimiser.warmup, and take another --out; "
                    "checkpoints before it stay.",
                )
        loss = losses.get("loss")
        if self.error is None and loss is not None and (judgement := self._judgement(step, loss)) is not None:
            wanted, fix = judgement
            if self.recipe.when_early_fails == "stop":
                self.error = TrainingError(
                    f"loss at step {step}",
                    expected=wanted,
                    got=f"{loss:.3f}",
                    fix=f"{fix}; when_early_fails=warn goes on all the same.",
                )
            elif state.is_world_process_zero:  # all processes log the same loss
                print(f"warning: {_told(step, loss, wanted)}", file=sys.stderr, flush=True)
        if self.error is not None:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False

    def warnings(self, history: list[dict[str, Any]]) -> list[str]:
        """What was wrong in a whole run, that before it was killed and resumed as well.

        Args:
            history: the log of the Trainer, which its checkpoints keep.
        """
        logged = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
        above = [entry for entry in logged if self._above(*entry)]
        strange = [entry for entry in logged if self._strange(*entry)]
        found = [_told(*entry, self._early_wanted(entry[0])) for entry in strange]
        return found + [
            f"{_told(*entry, self._bound_wanted(entry[0]))}; {len(above)} of {len(logged)} logs are above it"
            for entry in above[:1]
        ]

    def _judgement(self, step: int, loss: float) -> tuple[str, str] | None:
        """What was wanted of an unhealthy loss, and what to do; of those above the bound, of the first."""
        if self._strange(step, loss):
            return self._early_wanted(step), "Look at the data and at what changed"
        if self._above(step, loss) and not self._bound_told:
            self._bound_told = True
            return self._bound_wanted(step), "Lower optimiser.learning_rate"
        return None

    def _strange(self, step: int, loss: float) -> bool:
        expected = self.early.get(step)
        if step - self._logged_before(step) != self.recipe.log_every:  # a mean over other steps
            return False
        return expected is not None and abs(loss - expected.loss) > expected.tolerance

    def _above(self, step: int, loss: float) -> bool:
        return self._logged_before(step) >= self.recipe.optimiser.warmup and loss > self._bound(step)

    def _bound(self, step: int) -> float:
        steps = step - self._logged_before(step)
        return worst_healthy_loss(self.choices, self.recipe.batch * steps)

    def _logged_before(self, step: int) -> int:
        """The step of the log before: a loss is the mean of the steps since."""
        return max((step - 1) // n * n for n in (self.recipe.log_every, self.recipe.evaluation.every))

    def _early_wanted(self, step: int) -> str:
        return (
            f"{self.early[step].loss:g} ± {self.early[step].tolerance:g}, as in the runs that are kept of it"
        )

    def _bound_wanted(self, step: int) -> str:
        return (
            f"at most {self._bound(step):.2f} after warmup (a uniform guess among {self.choices} "
            f"has {math.log(self.choices):.2f})"
        )


def _told(step: int, loss: float, wanted: str) -> str:
    return f"loss at step {step}: expected {wanted}, got {loss:.3f}"
