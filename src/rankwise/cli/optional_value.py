"""Options whose value can be left out: `--importance` means `--importance auto`."""

import re
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

BARE = {
    "--importance": ("auto", "auto|estimate|exact|none"),
    "--ray": ("", r"auto|local|ray://\S+|[^\s/]+:\d+"),
}
"""Per option, the value that stands for no value, and a pattern of values; `model.py:build` is no address."""


class OptionalValues(TyperCommand):
    """A command that adds the values that were left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add the values, then parse."""
        return super().parse_args(ctx, add_bare_values(args))


def add_bare_values(args: Sequence[str]) -> list[str]:
    """Return arguments with the value for no value after each option of `BARE` that no value follows.

    Examples:
        >>> add_bare_values(["--importance", "gpt2"]), add_bare_values(["gpt2", "--importance", "exact"])
        (['--importance', 'auto', 'gpt2'], ['gpt2', '--importance', 'exact'])
        >>> add_bare_values(["--ray", "model.py:build"]), add_bare_values(["--ray", "head:6379", "gpt2"])
        (['--ray', '', 'model.py:build'], ['--ray', 'head:6379', 'gpt2'])
    """
    out: list[str] = []
    for at, arg in enumerate(args):
        out.append(arg)
        if arg in BARE:
            default, values = BARE[arg]
            if at + 1 == len(args) or not re.fullmatch(values, args[at + 1]):
                out.append(default)
    return out
