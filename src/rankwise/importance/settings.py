"""How worth is to be measured."""

import math
from dataclasses import dataclass
from typing import Literal

from rankwise.errors import InputError, did_you_mean
from rankwise.importance.choice import LossName, check_loss
from rankwise.importance.losses import LossFunction

RemovalName = Literal["zero", "mean"]
REMOVALS: tuple[RemovalName, ...] = ("zero", "mean")


def check_removal(name: str) -> RemovalName:
    """Refuse what no head can be replaced by.

    Args:
        name: zero or mean.

    Raises:
        InputError: if it is neither.
    """
    for known in REMOVALS:
        if name == known:
            return known
    raise InputError(
        "`removal`", expected="zero or mean", got=repr(name), fix=did_you_mean(str(name), REMOVALS)
    )


@dataclass(frozen=True, kw_only=True)
class ImportanceSettings:
    """How worth is measured.

    Args:
        exact: whether heads are removed one by one as well; of thousands of channels of a state-space mixer
            those in ``channels``.
        estimates: whether gradients are taken; only with ``exact`` can they be left out.
        removal: what takes a removed head's place, ``zero`` or its ``mean`` over the real tokens.
        tolerance: of the set of heads that can go together: a share of the loss, of the entropy of
            the predictions where these are compared, of the squared norm where states are. None: no set is
            looked for, nor where that is 0.
        loss: a name out of `rankwise.importance.LOSSES`, or a function of (output, batch).
        probes: random projections of each batch's output for the curvature: a backward pass each.
        seed: of the projections, and of masked tokens.
        mask_token: id of the mask token, for masked language models.
    """

    exact: bool = False
    estimates: bool = True
    removal: RemovalName = "zero"
    tolerance: float | None = 0.01
    loss: LossName | LossFunction = "auto"
    probes: int = 8
    seed: int = 0
    mask_token: int | None = None

    def __post_init__(self) -> None:
        check_removal(self.removal)
        if not callable(self.loss):
            check_loss(self.loss)
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise InputError(
                "`tolerance`", expected="a share of the loss, at least 0", got=str(self.tolerance),
                fix="Take 0.01 for one per cent.",
            )  # fmt: skip
        if self.probes < 0:
            raise InputError("`probes`", expected="at least 0", got=str(self.probes), fix="Take 8.")
        if not (self.exact or self.estimates):
            raise InputError(
                "importance", expected="estimates, exact, or both", got="neither", fix="Set one of them."
            )
