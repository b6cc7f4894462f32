"""The errors users meet: subject, what was wanted, what came, the fix."""

from collections.abc import Iterable
from difflib import get_close_matches


class RankwiseError(ValueError):
    """Base of every error Rankwise raises for something its user can mend.

    Args:
        subject: the thing that is wrong, by the name its user knows it by.
        wanted: what would have been right.
        got: what came instead.
        fix: what to do about it.
    """

    def __init__(self, subject: str, *, wanted: str, got: str, fix: str) -> None:
        self.subject, self.wanted, self.got, self.fix = subject, wanted, got, fix
        super().__init__(f"{subject}: wanted {wanted}, got {got}. {fix}")


class ShapeError(RankwiseError):
    """A tensor or operator of the wrong shape or kind."""


class CaptureError(RankwiseError):
    """A model whose mixing operators could not be captured."""


class SkipError(RankwiseError):
    """λ-skips that cannot be put in, taken out, saved or loaded."""


class ReplacementError(RankwiseError):
    """Attention that cannot be replaced by another mixer, or a replacement that cannot be saved or loaded."""


class CompressionError(RankwiseError):
    """A model that cannot be compressed, or compressed weights that cannot be saved or loaded."""


class InputError(RankwiseError):
    """A text, image, data set, model or folder that cannot be used."""


class TrainingError(RankwiseError):
    """A training that cannot start, cannot go on, or cannot be resumed; what it has written stays."""


class RecordError(RankwiseError):
    """A saved file that is not what it should be."""


def first_line(error: BaseException) -> str:
    """Of what an error says; its class where it says nothing.

    Args:
        error: the error.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say which known names are near ``name``, and name them all where they are few.

    Args:
        name: what was asked for.
        known: what there is.

    Returns:
        A sentence for the end of an error, empty where nothing is known.

    Examples:
        >>> did_you_mean("COLAPSE", ["COLLAPSE", "SINK"])
        'Did you mean COLLAPSE? Known: COLLAPSE, SINK.'
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=3, cutoff=0.6)
    guess = f"Did you mean {' or '.join(near)}?" if near else ""
    listing = f"Known: {', '.join(names[:24])}{' …' if len(names) > 24 else ''}." if names else ""
    return " ".join(part for part in (guess, listing) if part)
