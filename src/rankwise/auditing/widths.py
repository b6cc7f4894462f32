"""The width that heads need, from second moments kept over all sequences: O(K²) memory a head."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from rankwise.auditing.numbers import Floats
from rankwise.measures import LogitMoments, logit_moments, required_head_dim
from rankwise.operators import SoftmaxMixing
from rankwise.tracing import MixerSite

HeadMoments = list[LogitMoments | None]
"""Of each head of an audit, in the order of its records; None where queries and keys are not known."""
_KEPT: ContextVar[HeadMoments | None] = ContextVar("moments that an audit leaves", default=None)


@contextmanager
def keeping_moments() -> Iterator[HeadMoments]:
    """Leave the moments behind `required_head_dim`, which records do not hold, of the audit that runs inside.

    Audits of shares of the data are merged with them. Memory: 16 K² bytes a head.
    """
    kept: HeadMoments = []
    token = _KEPT.set(kept)
    try:
        yield kept
    finally:
        _KEPT.reset(token)


def leave_moments(take: Callable[[], HeadMoments]) -> None:
    """Where they are to be kept, take the moments of an audit.

    Args:
        take: gives them.
    """
    kept = _KEPT.get()
    if kept is not None:
        kept[:] = take()


def merged_width(parts: Sequence[LogitMoments | None]) -> float:
    """`required_head_dim` of a head from its moments in each audit; NaN where none of them has any.

    Args:
        parts: of each audit.
    """
    total = RunningWidth()
    for moments in parts:
        total.add(moments)
    return math.nan if total.moments is None else required_head_dim(total.moments).item()


def moments_of(site: MixerSite) -> LogitMoments | None:
    """Moments of all finite sequences of a call, (H, …); None where queries and keys are not known.

    Args:
        site: the call of a mixer.
    """
    if not isinstance(site.operator, SoftmaxMixing):
        return None
    return logit_moments(site.operator, site.valid_tokens, site.valid_sources).sum_sequences()


class RunningWidth:
    """What is known so far of the queries and keys of a mixer."""

    def __init__(self) -> None:
        self.moments: LogitMoments | None = None

    def add(self, moments: LogitMoments | None) -> None:
        """Take those of one more call into account.

        Args:
            moments: `moments_of` it.
        """
        if moments is not None:
            self.moments = moments if self.moments is None else self.moments + moments

    @property
    def width(self) -> int | None:
        """K of queries and keys; None where they are not known."""
        return None if self.moments is None else self.moments.query.shape[-1]

    def of_heads(self, heads: int) -> HeadMoments:
        """The moments of each head alone, in the memory of the CPU.

        Args:
            heads: how many.
        """
        if self.moments is None:
            return [None] * heads
        kept = self.moments
        sums = [part.cpu() for part in (kept.query, kept.key, kept.rows, kept.columns)]
        return [LogitMoments(*(part[head].clone() for part in sums)) for head in range(heads)]

    def needed(self, heads: int) -> Floats:
        """`required_head_dim` of each head; NaN where it is not known.

        Args:
            heads: how many.
        """
        if self.moments is None:
            return np.full(heads, np.nan)
        return required_head_dim(self.moments).cpu().numpy()
