"""Monitor rank during training: audit a fixed probe batch, log scalars, and stop training on findings."""

from rankwise.monitor.monitor import RankMonitor, scalars

__all__ = ["RankMonitor", "scalars"]
