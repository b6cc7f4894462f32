"""The width that heads need, from second moments kept over all sequences: O(K²) memory a head."""

import numpy as np

from rankwise.audit.numbers import Floats
from rankwise.capture import MixerSite
from rankwise.measures import LogitMoments, logit_moments, needed_width
from rankwise.operators import SoftmaxMixing


def moments_of(site: MixerSite) -> LogitMoments | None:
    """Moments of all finite sequences of a call, (H, …); None where queries and keys are not known.

    Args:
        site: the call of a mixer.
    """
    if not isinstance(site.operator, SoftmaxMixing):
        return None
    return logit_moments(site.operator, site.valid_tokens, site.valid_sources).whole()


class RunningWidth:
    """What is known so far of the queries and keys of a mixer."""

    def __init__(self) -> None:
        self._moments: LogitMoments | None = None

    def add(self, moments: LogitMoments | None) -> None:
        """Take those of one more call into account.

        Args:
            moments: `moments_of` it.
        """
        if moments is not None:
            self._moments = moments if self._moments is None else self._moments + moments

    @property
    def width(self) -> int | None:
        """K of queries and keys; None where they are not known."""
        return None if self._moments is None else self._moments.query.shape[-1]

    def needed(self, heads: int) -> Floats:
        """`needed_width` of each head; NaN where it is not known.

        Args:
            heads: how many.
        """
        if self._moments is None:
            return np.full(heads, np.nan)
        return needed_width(self._moments).cpu().numpy()
