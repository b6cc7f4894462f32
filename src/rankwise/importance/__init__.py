"""Importance: increase of the loss if a head or block is removed, estimated by gradients or measured."""

from typing import TYPE_CHECKING

from rankwise._internals import lazy_names

if TYPE_CHECKING:
    from rankwise.importance.ablation import (
        AblationCost,
        ablation_cost,
        measure_importance,
        sort_by_cost,
    )
    from rankwise.importance.gated_passes import NotDifferentiableError
    from rankwise.importance.records import Importance
    from rankwise.importance.settings import LOSSES, ImportanceSettings

__all__ = [
    "LOSSES",
    "AblationCost",
    "Importance",
    "ImportanceSettings",
    "NotDifferentiableError",
    "ablation_cost",
    "measure_importance",
    "sort_by_cost",
]

__getattr__, __dir__ = lazy_names(__name__)
