"""What tells the mixers of a forward pass apart, from batch to batch."""

import re
from typing import Any, NamedTuple

from rankwise.tracing import MixerSite


class SiteKey(NamedTuple):
    """What tells one mixer of a forward pass from another."""

    stack: str
    layer: int
    site: str
    cross: bool
    occurrence: int
    """From 0, where the same mixer runs more than once in a block."""

    def pattern(self) -> "SiteKey":
        """With ``*`` for the last number of its name: what heads kept as a list of modules have in common."""
        return self._replace(site=re.sub(r"\d+(?=\D*$)", "*", self.site))


HeadKey = tuple[Any, ...]
"""A `SiteKey`, and the number of the head."""


class SiteKeys:
    """Gives each captured mixer its key, and counts calls of the same mixer in a layer of a forward pass."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, str, int, str, bool], int] = {}

    def of(self, site: MixerSite) -> SiteKey:
        """The key of the call that was captured last.

        Args:
            site: the mixer.
        """
        call = (site.forward_pass, site.stack, site.layer, site.name, site.cross)
        self._calls = {
            before: count for before, count in self._calls.items() if before[0] == site.forward_pass
        }
        self._calls[call] = self._calls.get(call, -1) + 1
        return SiteKey(*call[1:], self._calls[call])
