"""Watch rank during training: audits of a fixed probe batch, scalars for loggers, and stops."""

from rankwise.monitor.monitor import RankMonitor, scalars

__all__ = ["RankMonitor", "scalars"]
