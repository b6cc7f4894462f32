"""Command `rankwise plan`: plan the query/key width of heads before training."""

import math
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankwise._internals.files import check_unused
from rankwise.cli.options import Images, Seed, Text
from rankwise.errors import INTERRUPTED, InputError

if TYPE_CHECKING:
    from rankwise.cli.load_data import LoadedData
    from rankwise.cli.load_model import LoadedModel
    from rankwise.plan import HeadDimPlan

HELP = """Plan the query/key width of heads before training: where the rank of random heads saturates.

The width K* is a lower limit for random weights. With --model, the width that trained heads require is
measured too. Output: plan.json and index.html. Ctrl-C keeps finished trials.

[bold]Examples[/bold]

  rankwise plan --tokens 2048 --mask causal
  rankwise plan --tokens 2048 --mask causal --hidden-size 768 --heads 12
  rankwise plan --tokens 1024 --positions rope --hidden-size 512 --heads 8 --kv-heads 2
  rankwise plan --tokens 256 --mask causal --model gpt2 --text book.txt --out gpt2-plan
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
    model: Annotated[
        str | None, typer.Option(help="Measure the heads of this trained model: name, folder or factory.")
    ] = None,
    text: Text = None,
    images: Images = None,
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
    from rankwise.cli.load_data import check_data, load_data
    from rankwise.cli.load_model import load_model
    from rankwise.plan import plan_head_dim
    from rankwise.plan.planner import check_arguments, present_head_dim
    from rankwise.report.plan_report import plan_document

    check_unused(out, fix="Choose another name.")
    if model is not None:
        check_data([model], text=text, images=images)
    elif text is not None or images is not None:
        fix = "Add --model, or omit the data: K* is computed for orthonormal tokens."
        raise InputError("data", expected="a trained model that reads them", got="no --model", fix=fix)
    check_arguments(tokens, mask, positions, least_gain, trials, seed)
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "hidden_size": hidden_size}
    present_head_dim(positions, head_dim=None, **sizes)
    with output.new_folder(out):
        loaded = data = None
        if model is not None:
            with output.show_progress():
                loaded = load_model(model)
                data = load_data(loaded, text=text, images=images, tokens=tokens)
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
        if plan.complete and loaded is not None and data is not None:
            with output.show_progress("measuring the widths of the model"):
                plan = with_trained_widths(plan, loaded, data)
        written = [("plan", plan.save(out / "plan.json")), ("page", plan.to_html(out / "index.html"))]
        output.print_results(plan_document(plan), written)
        if not plan.complete:
            raise typer.Exit(INTERRUPTED)


def with_trained_widths(plan: "HeadDimPlan", loaded: "LoadedModel", data: "LoadedData") -> "HeadDimPlan":
    """Return the plan with the widths that an audit of a trained model measures, incomplete after Ctrl-C."""
    from rankwise.auditing import audit
    from rankwise.plan import TrainedWidth

    try:
        result = audit(loaded.model, data.batches)
    except KeyboardInterrupt:
        notes = [*plan.notes, "Interrupted before the trained heads were measured."]
        return plan.model_copy(update={"complete": False, "notes": notes})
    trained = [
        TrainedWidth(head=head.id, head_dim=head.head_dim, required_head_dim=head.required_head_dim)
        for head in result.heads
        if head.head_dim is not None and not head.cross
    ]
    notes = [*plan.notes, *loaded.notes, *data.notes, f"Trained heads: {loaded.name} on {data.data}."]
    if not trained:
        notes.append("No softmax attention was captured: the width that heads require is unknown.")
    elif broken := sum(math.isnan(head.required_head_dim) for head in trained):
        notes.append(
            f"NaN or infinity in {broken} of {len(trained)} heads: the width they require is unknown."
        )
    return plan.model_copy(update={"trained": trained, "notes": notes, "complete": result.complete})
