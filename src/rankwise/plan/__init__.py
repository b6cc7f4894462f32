"""Choose a query/key width before training: beyond K*, heads with random weights gain almost no rank."""

from typing import TYPE_CHECKING

from rankwise._internals.lazy import lazy_names

if TYPE_CHECKING:
    from rankwise.plan.planner import plan_head_dim
    from rankwise.plan.record import HeadDimPlan, QKCost, TrainedWidth
    from rankwise.plan.trained_heads import trained_widths

__all__ = ["HeadDimPlan", "QKCost", "TrainedWidth", "plan_head_dim", "trained_widths"]

__getattr__, __dir__ = lazy_names(__name__)
