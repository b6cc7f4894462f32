"""Command `rankwise convert`: convert a released ToST checkpoint into a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

HELP = """Convert a released ToST checkpoint, language (.pt) or vision (.pth), into a Hugging Face folder.

The sizes of the model are read from the weights. No code in the file is run.

[bold]Examples[/bold]

  rankwise convert ckpt.pt --out tost-base
  rankwise convert checkpoint.pth --out tost-s12-p16

In Python: import rankwise.models; then AutoModelForCausalLM.from_pretrained("tost-base").
"""


def command(
    path: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Released checkpoint file.")],
    out: Annotated[Path, typer.Option(help="Write the model to this folder; it is created if necessary.")],
    tokens_norm: Annotated[
        bool, typer.Option(help="Vision only: the model was trained with tokens_norm, as all released sizes.")
    ] = True,
) -> None:
    """Convert a checkpoint; `HELP` describes the command."""
    from rankwise.cli.output import new_folder, print_results, quiet_libraries
    from rankwise.models import load_released_tost, save_model

    quiet_libraries()
    with new_folder(out):
        model = load_released_tost(path, tokens_norm=tokens_norm)
        written = save_model(model, out)
    config = model.config
    print(
        f"{type(model).__name__}: {config.num_hidden_layers} layers, width {config.hidden_size}, "
        f"{config.num_attention_heads} heads, {model.num_parameters():,} parameters"
    )
    print_results(None, [("wrote", file) for file in written])
