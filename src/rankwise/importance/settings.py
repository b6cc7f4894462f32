"""Settings for the measurement of importance."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from rankwise.errors import InputError, in_range, one_of, whole_number
from rankwise.importance.losses import LossFunction

LossName = Literal["auto", "causal", "masked", "encoder-decoder", "labels", "own", "output"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
"""Names of the losses that `ImportanceSettings` accepts."""
MANY_CLASSES = 32_000
"""Number of classes above which the loss is read at `FEW_TOKENS` tokens of each sequence."""
FEW_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class ImportanceSettings:
    """Settings of `rankwise.importance.measure_importance`.

    With ``estimates=False``, and not ``exact``, only the loss is measured, without costs of removal.

    Args:
        exact: True also removes heads one by one; for state-space channels, audits remove only measured
            channels. False only estimates. None removes them instead of estimating if that takes at most 50
            forward passes per batch (about 100 heads and blocks), or if no gradients flow.
        estimates: compute gradients.
        tolerance: allowed cost of removing a set of heads together, as a fraction of the loss. If the loss
            measures a change of the output, it is a fraction of the entropy of predictions or of the squared
            norm of the output. If it is None, no set is searched.
        hold_out: choose this set on every second sequence and price it on the others. If False, choose it on
            all sequences, without a price on others.
        loss: a name in `rankwise.importance.LOSSES`, or a function of (output, batch). The function cannot
            read attributes that a run writes into the model, because they are restored before.
        probes: random projections of the output per batch for the curvature, one backward pass each.
        seed: random seed of projections, masked tokens and tokens that are read.
        mask_token: id of the mask token, for masked language models.
        tokens: largest number of tokens of each sequence at which the loss is read, drawn at random among
            tokens with labels, the same in every pass. None reads all if the model has at most 32,000
            classes or if only the loss is measured, otherwise 64.

    Raises:
        InputError: if a value is out of its range.
    """

    exact: bool | None = None
    estimates: bool = True
    tolerance: float | None = 0.01
    hold_out: bool = True
    loss: LossName | LossFunction = "auto"
    probes: int = 4
    seed: int = 0
    mask_token: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.loss):
            one_of("loss", self.loss, LOSSES)
        if self.tolerance is not None:
            in_range("`tolerance`", self.tolerance, "[0, inf)", fix="Take 0.01 for one per cent.")
        whole_number("`probes`", self.probes, 0, fix="Take 4.")
        if self.tokens is not None:
            whole_number("`tokens`", self.tokens, 1, fix="Take 64, or None for the default.")
            in_range("`tokens`", self.tokens, "[1, 1e9]", fix="Take 64, or None for the default.")


ImportanceOption = bool | Literal["exact"] | ImportanceSettings
"""Values of `importance=` of an audit."""


def importance_settings(value: ImportanceOption, tokenizer: Any = None) -> ImportanceSettings | None:
    """Return settings for a value of `importance=`. Return None for False.

    The mask token of the tokenizer is used if the settings have none.
    """
    if value is False:
        return None
    if value is True or value == "exact":
        value = ImportanceSettings(exact=True if value == "exact" else None)
    if not isinstance(value, ImportanceSettings):
        raise InputError(
            "`importance`", expected='True, False, "exact" or ImportanceSettings', got=repr(value),
            fix="See `rankwise.importance.ImportanceSettings` for what can be set.",
        )  # fmt: skip
    mask = getattr(tokenizer, "mask_token_id", None) if value.mask_token is None else value.mask_token
    return replace(value, mask_token=mask)
