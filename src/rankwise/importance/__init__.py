"""Cost of removing heads and blocks, estimated by gradients or measured by removal."""

from typing import TYPE_CHECKING

from rankwise._internals.lazy import lazy_names

if TYPE_CHECKING:
    from rankwise.importance.ablation import AblationCost, ablation_cost, measure, sort_by_cost
    from rankwise.importance.gated_passes import NotDifferentiableError
    from rankwise.importance.records import (
        BlockImportance,
        HeadImportance,
        Importance,
        ImportanceRecord,
        RemovableSet,
    )
    from rankwise.importance.settings import LOSSES, ImportanceSettings

__all__ = [
    "LOSSES",
    "AblationCost",
    "BlockImportance",
    "HeadImportance",
    "Importance",
    "ImportanceRecord",
    "ImportanceSettings",
    "NotDifferentiableError",
    "RemovableSet",
    "ablation_cost",
    "measure",
    "sort_by_cost",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ablation": ("AblationCost", "ablation_cost", "measure", "sort_by_cost"),
        "gated_passes": ("NotDifferentiableError",),
        "records": ("BlockImportance", "HeadImportance", "Importance", "ImportanceRecord", "RemovableSet"),
        "settings": ("LOSSES", "ImportanceSettings"),
    },
)
