"""What the simulations check first."""

from rankwise.errors import RankwiseError, ShapeError, did_you_mean
from rankwise.theory.barrier import MASKS


def check_count(name: str, size: int) -> None:
    """Refuse what is not a whole number, at least 1.

    Args:
        name: the argument.
        size: its value.

    Raises:
        ShapeError: if it is none.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ShapeError(
            f"`{name}`", expected="a whole number, at least 1", got=repr(size), fix="Count them."
        )


def check_mask_name(mask: str, wanted: str = "'full' or 'causal'") -> None:
    """Refuse a mask that has no closed form.

    Args:
        mask: its name.
        wanted: what would have done.

    Raises:
        RankwiseError: if it is none of `MASKS`.
    """
    if mask not in MASKS:
        raise RankwiseError("`mask`", expected=wanted, got=repr(mask), fix=did_you_mean(str(mask), MASKS))
