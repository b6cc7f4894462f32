"""Option types that commands share; each help text is a sentence that stands alone."""

from pathlib import Path
from typing import Annotated

import typer

Text = Annotated[
    Path | None,
    typer.Option(help="Read this text file, or a .jsonl(.gz) file with one text per line."),
]
Images = Annotated[Path | None, typer.Option(help="Read the pictures in this folder, or this picture.")]
Dataset = Annotated[
    str | None,
    typer.Option(help="Read a data set NAME[@config][:split[:column]] from the Hub, a file or a folder."),
]
Tokens = Annotated[int, typer.Option(min=2, help="Cut sequences to this number of tokens.")]
Sequences = Annotated[int, typer.Option(min=1, help="Read this many sequences or pictures in total.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Run this many sequences or pictures at once.")]
Seed = Annotated[int, typer.Option(min=0, help="Use this random seed.")]
Device = Annotated[str, typer.Option(help="Run the model on this device: cpu, cuda, cuda:1, mps, …")]
Dtype = Annotated[
    str,
    typer.Option(help="Load weights as float32, float16, bfloat16 or float64; auto keeps the saved type."),
]
Revision = Annotated[str | None, typer.Option(help="Load this branch, tag or commit of a model on the Hub.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
