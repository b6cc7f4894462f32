"""Options whose value may be left out: `--importance` says the same as `--importance auto`."""

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

BARE = {"--importance": ("auto", "estimate", "exact", "none")}
"""Options and the values they take; the first stands where none is given."""


class OptionalValues(TyperCommand):
    """A command that fills in the values that were left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fill them in, then parse."""
        return super().parse_args(ctx, filled_in(args))


def filled_in(args: Sequence[str]) -> list[str]:
    """The arguments, with the first value after each option that none of its values follows.

    Args:
        args: of the command.

    Examples:
        >>> filled_in(["--importance", "gpt2"]), filled_in(["gpt2", "--importance", "exact"])
        (['--importance', 'auto', 'gpt2'], ['gpt2', '--importance', 'exact'])
    """
    out: list[str] = []
    for at, arg in enumerate(args):
        out.append(arg)
        values = BARE.get(arg)
        if values and (at + 1 == len(args) or args[at + 1] not in values):
            out.append(values[0])
    return out
