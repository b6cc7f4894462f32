"""Model and inputs → `Trace`: what mixes tokens, and what the tokens become."""

from rankwise.tracing.changes import BlockOutput, Changes, HeadOutputs
from rankwise.tracing.checks import compiled_modules
from rankwise.tracing.context import SiteAdapter, capture
from rankwise.tracing.trace import MixerSite, StateSite, Trace, UncapturedModule

__all__ = [
    "BlockOutput",
    "Changes",
    "HeadOutputs",
    "MixerSite",
    "SiteAdapter",
    "StateSite",
    "Trace",
    "UncapturedModule",
    "capture",
    "compiled_modules",
]
