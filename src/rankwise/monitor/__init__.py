"""Watch rank while a model trains: audits of a fixed probe batch, their scalars, and stops."""

from rankwise.monitor.monitor import RankMonitor
from rankwise.monitor.scalars import scalars

__all__ = ["RankMonitor", "scalars"]
