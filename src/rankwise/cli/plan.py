"""Command `rankwise plan`: plan the query/key width of heads before training."""

import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from rankwise._internals.files import check_unused
from rankwise.cli.options import Seed
from rankwise.errors import INTERRUPTED

HELP = """Plan the query/key width of heads before training: where the rank of random heads saturates.

The width K* is a lower limit for random weights; an audit measures the width that trained heads require.
Output: plan.json and index.html. Ctrl-C keeps finished trials.

[bold]Examples[/bold]

  rankwise plan --tokens 2048 --mask causal
  rankwise plan --tokens 2048 --mask causal --hidden-size 768 --heads 12
  rankwise plan --tokens 1024 --positions rope --hidden-size 512 --heads 8 --kv-heads 2
"""


def command(
    tokens: Annotated[int, typer.Option(min=2, help="Plan for sequences of this number of tokens.")] = 1024,
    mask: Annotated[str, typer.Option(help="Mask: full or causal.")] = "full",
    positions: Annotated[str, typer.Option(help="Positions: none or rope (rotary).")] = "none",
    hidden_size: Annotated[
        int | None, typer.Option(min=1, help="Width D of the present model, for the costs.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Number of heads of the present model, for the costs.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Number of key heads of the present model.")
    ] = None,
    least_gain: Annotated[
        float, typer.Option(help="Gain in rank/T per added channel, from K to 2K, that K* stays below.")
    ] = 0.01,
    trials: Annotated[int, typer.Option(help="Number of random draws of the weights.")] = 10,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Write the plan to this new or empty folder.")] = Path(
        "rankwise-plan"
    ),
) -> None:
    """Plan a query/key width; `HELP` describes the command."""
    import torch

    from rankwise import __version__
    from rankwise.cli import output
    from rankwise.plan import plan_head_dim
    from rankwise.report.plan_report import plan_document

    check_unused(out, fix="Choose another name.")
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "hidden_size": hidden_size}
    with output.new_folder(out):
        with output.show_progress("drawing random heads") as on_progress:
            plan = plan_head_dim(
                tokens, mask, positions, **sizes, least_gain=least_gain, trials=trials, seed=seed,
                on_progress=on_progress,
            )  # fmt: skip
        about = {
            "command": output.command_line(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "rankwise": __version__,
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        }
        plan = plan.model_copy(update={"about": about})
        written = [("plan", plan.save(out / "plan.json")), ("page", plan.to_html(out / "index.html"))]
        output.print_results(plan_document(plan), written)
        if not plan.complete:
            raise typer.Exit(INTERRUPTED)
