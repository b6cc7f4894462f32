"""Monitor rank during training: audit a fixed probe batch, log numbers, and stop training on findings."""

from rankwise.monitor.monitor import RankMonitor, logged_numbers

__all__ = ["RankMonitor", "logged_numbers"]
