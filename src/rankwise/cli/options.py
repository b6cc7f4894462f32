"""Types of the options that several commands share, and options whose value is optional."""

import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rankwise.errors import RankwiseError

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Hugging Face NAME or NAME@REVISION, folder, GGUF file, or module.py:factory."
    ),
]
Text = Annotated[
    Path | None, typer.Option(help="Read this text file, or a .jsonl(.gz) file with one text per line.")
]
Images = Annotated[Path | None, typer.Option(help="Read the images in this folder, or this image.")]
Dataset = Annotated[
    str | None,
    typer.Option(help=r"Read a data set NAME\[@config][:split[:column]] from the Hub, a file or a folder."),
]
Tokens = Annotated[int, typer.Option(min=2, help="Cut sequences to this number of tokens.")]
Sequences = Annotated[int, typer.Option(min=1, help="Read this many sequences or images in total.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Run this many sequences or images at once.")]
Seed = Annotated[int, typer.Option(min=0, help="Use this random seed.")]
Device = Annotated[
    str | None, typer.Option(help="Run the model on this device: cpu (default), cuda, cuda:1, mps, …")
]
Dtype = Annotated[
    str, typer.Option(help="Type of weights: float32, float16, bfloat16 or float64; auto: as saved.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
FOUND = 3
"""Exit status of a command if an audit has a finding of --fail-on."""
FailOn = Annotated[
    list[str] | None,
    typer.Option(help=f"Exit with status {FOUND} if this code is found; can be repeated."),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print all findings and numbers.")]

BARE = {
    "--at-init": ("3", r"\d+"),
    "--importance": ("auto", "auto|estimate|exact|none"),
    "--ray": ("", r"auto|local|ray://\S+|[^\s/]+:\d+"),
}
"""Options whose value is optional: (default value, regular expression of valid values)."""


class OptionalValues(TyperCommand):
    """Command whose options in `BARE` can be passed without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, after adding default values to options in `BARE` without a value."""
        return super().parse_args(ctx, add_bare_values(args))

    def invoke(self, ctx: Any) -> Any:
        """Run the command. In errors of the library, replace names of parameters by options."""
        try:
            return super().invoke(ctx)
        except RankwiseError as error:
            names = {f"`{param.name}`": param.opts[0] for param in self.params}
            error.args = (re.sub(r"`\w+`", lambda name: names.get(name[0], name[0]), str(error)),)
            raise


def add_bare_values(args: Sequence[str]) -> list[str]:
    """Return the arguments, with the default value inserted after each option of `BARE` without a value.

    Examples:
        >>> add_bare_values(["--importance", "gpt2"]), add_bare_values(["gpt2", "--importance", "exact"])
        (['--importance', 'auto', 'gpt2'], ['gpt2', '--importance', 'exact'])
        >>> add_bare_values(["--ray", "model.py:build"]), add_bare_values(["--ray", "head:6379", "gpt2"])
        (['--ray', '', 'model.py:build'], ['--ray', 'head:6379', 'gpt2'])
    """
    out: list[str] = []
    for arg, following in zip_longest(args, args[1:], fillvalue=""):
        out.append(arg)
        if arg in BARE:
            default, values = BARE[arg]
            if not re.fullmatch(values, following):
                out.append(default)
    return out
