"""Choose a query/key width before training: beyond K*, heads with random weights gain almost no rank."""

from typing import TYPE_CHECKING

from rankwise._internals import lazy_names

if TYPE_CHECKING:
    from rankwise.plan.planner import plan_head_dim
    from rankwise.plan.records import HeadDimCost, HeadDimPlan

__all__ = ["HeadDimCost", "HeadDimPlan", "plan_head_dim"]

__getattr__, __dir__ = lazy_names(__name__)
