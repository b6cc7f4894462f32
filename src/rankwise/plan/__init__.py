"""Head widths planned before training: where the rank of random heads saturates, and what that buys."""

from rankwise.plan.planner import embedded, plan_head_dim
from rankwise.plan.prices import with_prices
from rankwise.plan.records import HeadDimPlan, LayerCurve, LogLaw, Option, TrainedHead
from rankwise.plan.saturation import fit_log_law
from rankwise.plan.trained import trained_widths, with_trained

__all__ = [
    "HeadDimPlan",
    "LayerCurve",
    "LogLaw",
    "Option",
    "TrainedHead",
    "embedded",
    "fit_log_law",
    "plan_head_dim",
    "trained_widths",
    "with_prices",
    "with_trained",
]
