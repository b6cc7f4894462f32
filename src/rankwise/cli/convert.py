"""`rankwise convert`."""

from pathlib import Path
from typing import Annotated

import typer

HELP = """Convert a released ToST checkpoint, language (.pt) or vision (.pth), into a Hugging Face folder.

The sizes are read off the weights, which are loaded without running any code the file may hold.

[bold]Examples[/bold]

  rankwise convert ckpt.pt --out tost-base
  rankwise convert checkpoint.pth --out tost-s12-p16

In Python: import rankwise.models; then AutoModelForCausalLM.from_pretrained("tost-base").
"""


def command(
    path: Annotated[Path, typer.Argument(help="The released file.")],
    out: Annotated[Path, typer.Option(help="Folder to write; made if it is not there.")],
    tokens_norm: Annotated[
        bool,
        typer.Option(help="Vision: trained with tokens_norm, as all released sizes are; shapes do not tell."),
    ] = True,
) -> None:
    """Convert a checkpoint; see `HELP`."""
    from rich.console import Console

    from rankwise._internals.files import writable_folder
    from rankwise.cli.output import quiet_libraries
    from rankwise.models import load_released_tost, save_model

    quiet_libraries()
    writable_folder(out)
    model = load_released_tost(path, tokens_norm=tokens_norm)
    written = save_model(model, out)
    config = model.config
    console = Console()
    console.print(
        f"{type(model).__name__}: {config.num_hidden_layers} layers, width {config.hidden_size}, "
        f"{config.num_attention_heads} heads, {model.num_parameters():,} parameters",
        highlight=False,
    )
    for file in written:
        console.print(f"wrote: {file}", highlight=False, markup=False, soft_wrap=True)
