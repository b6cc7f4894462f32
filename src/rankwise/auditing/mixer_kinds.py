"""The table of kinds of mixers: what the entries of their matrices are. No torch inside: reports read it."""

from typing import NamedTuple


class MixerKind(NamedTuple):
    """What holds for every matrix of a kind of operator; the default is that of state-space mixers."""

    rows_are_means: bool = False
    """Whether every row is a mean over tokens: random winners under its mask are a null for its rank."""
    scale_is_known: bool = False
    """Whether entries are shares: δ in their unit means the same in every layer. Others have signs."""
    mixes_tokens: bool = True
    """Whether a row has more than its own token: if not, measures of rows follow from the kind alone."""
    state_space: bool = True
    """Whether there may be a matrix for every channel, thousands, alike by the dozen: some are measured."""


_ATTENTION = MixerKind(rows_are_means=True, scale_is_known=True, state_space=False)

MIXER_KINDS = {
    "softmax": _ATTENTION,
    "dense": _ATTENTION,
    "linear": _ATTENTION,
    "diagonal": MixerKind(scale_is_known=True, mixes_tokens=False, state_space=False),
}
"""By `MixingOperator.kind`, which records hold; all others are as the default."""


def mixer_kind(kind: str) -> MixerKind:
    """What holds for a kind of operator.

    Args:
        kind: as a record holds it.

    Examples:
        >>> mixer_kind("softmax").rows_are_means, mixer_kind("selective").rows_are_means
        (True, False)
    """
    return MIXER_KINDS.get(kind, MixerKind())
