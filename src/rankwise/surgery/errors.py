"""What can go wrong with changes to a model."""

from rankwise.errors import RankwiseError


class SkipError(RankwiseError):
    """λ-skips that cannot be put in, taken out, saved or loaded."""
