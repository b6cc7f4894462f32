"""Model and inputs → `Trace`: what mixes tokens, and what the tokens become."""

from rankwise.capture.changes import BlockOutput, Changes, HeadOutputs
from rankwise.capture.checks import compiled_modules
from rankwise.capture.context import SiteAdapter, capture
from rankwise.capture.trace import MixerSite, StateSite, Trace, UnseenModule

__all__ = [
    "BlockOutput",
    "Changes",
    "HeadOutputs",
    "MixerSite",
    "SiteAdapter",
    "StateSite",
    "Trace",
    "UnseenModule",
    "capture",
    "compiled_modules",
]
