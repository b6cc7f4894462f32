"""What a model loses without each of its heads and blocks, and which heads can go together."""

from rankwise.importance.choice import LOSSES
from rankwise.importance.joint import Together, sort_by_cost
from rankwise.importance.measure import ablation_cost, measure_importance
from rankwise.importance.results import BlockImportance, HeadPlace, Importance, Joint, Removal, SiteImportance
from rankwise.importance.runs import NotDifferentiableError
from rankwise.importance.settings import ImportanceSettings, check_removal

__all__ = [
    "LOSSES",
    "BlockImportance",
    "HeadPlace",
    "Importance",
    "ImportanceSettings",
    "Joint",
    "NotDifferentiableError",
    "Removal",
    "SiteImportance",
    "Together",
    "ablation_cost",
    "check_removal",
    "measure_importance",
    "sort_by_cost",
]
