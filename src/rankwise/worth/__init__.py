"""What a model loses without each of its heads and blocks, and which heads can go together."""

from rankwise.worth.choice import LOSSES
from rankwise.worth.joint import Together, ranked_units
from rankwise.worth.measure import cost_of_removal, measure_worth
from rankwise.worth.results import BlockWorth, HeadPlace, Joint, Removal, SiteWorth, Worth
from rankwise.worth.runs import NotDifferentiableError
from rankwise.worth.settings import WorthSettings, check_removal

__all__ = [
    "LOSSES",
    "BlockWorth",
    "HeadPlace",
    "Joint",
    "NotDifferentiableError",
    "Removal",
    "SiteWorth",
    "Together",
    "Worth",
    "WorthSettings",
    "check_removal",
    "cost_of_removal",
    "measure_worth",
    "ranked_units",
]
