"""`rankwise plan`."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rankwise.plan import HeadDimPlan

HELP = """Plan the width of attention heads before training: where the rank of random heads saturates.

A statement about random weights. With a model, its own token states are used, and what its trained heads use
is measured beside it. Writes plan.json and index.html; Ctrl-C keeps what is done.

[bold]Examples[/bold]

  rankwise plan --tokens 2048 --width 768 --mask causal

  rankwise plan --tokens 1024 --width 512 --positions rope --heads 8 --kv-heads 2

  rankwise plan --tokens 256 --text book.txt --width 256 --layers 4

  rankwise plan --tokens 256 --images photos/ --width 384

  rankwise plan --tokens 256 --model gpt2 --text book.txt --out gpt2-plan
"""


def command(
    tokens: Annotated[int, typer.Option(help="Length of a sequence.")] = 1024,
    width: Annotated[int | None, typer.Option(help="Model width D; prices need it.")] = None,
    mask: Annotated[str | None, typer.Option(help="full or causal; the model's own with --model.")] = None,
    tolerance: Annotated[float, typer.Option(help="Least rank/T that a unit of width is to add.")] = 0.01,
    model: Annotated[
        str | None, typer.Option(help="Hugging Face name or folder: its token states and its heads.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text; without a model through a random embedding.")
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Pictures; without a model their patches.")] = None,
    inputs: Annotated[str | None, typer.Option(help="orthonormal or gaussian, without data.")] = None,
    positions: Annotated[
        str | None, typer.Option(help="none, rope or learned; the model's own with --model.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="In units of √K; 0 counts hardmax winners.")] = 0.0,
    heads: Annotated[int | None, typer.Option(help="Heads of now, for the comparison.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key heads of now.")] = None,
    value_dim: Annotated[
        int | None, typer.Option(help="Width of values of now where it is not that of queries and keys.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers, those after the first follow random blocks.")] = 1,
    block: Annotated[str | None, typer.Option(help="Kind of the blocks: pre, post or attention.")] = None,
    trials: Annotated[int, typer.Option(help="Draws of the weights.")] = 10,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of data.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights.")] = 0,
    law: Annotated[bool, typer.Option(help="Fit K* = a + b·ln T over T = 64 … 8,192.")] = True,
    time: Annotated[bool, typer.Option(help="Time a layer at each setting.")] = True,
    device: Annotated[str, typer.Option(help="Where layers are timed and the model runs.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the plan: new or empty.")] = Path("rankwise-plan"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into a folder with files.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code that comes with the model run.")
    ] = False,
) -> None:
    """Plan a head width; see `HELP`."""
    from rankwise._internals.files import writable_folder
    from rankwise.cli.load_model import checked_device, load_subject
    from rankwise.cli.output import command_line, quiet_libraries, show_trials
    from rankwise.plan import fit_log_law, plan_head_dim, with_prices
    from rankwise.plan.pictures import picture_states
    from rankwise.plan.shape import present_shape
    from rankwise.plan.sources import attention_of, model_states, text_states
    from rankwise.plan.trained import with_trained

    _check(out, overwrite, width, tokens, model, text, images, inputs)
    checked_device(device)
    writable_folder(out)
    quiet_libraries()
    subject = None
    batches: list[Any] = []
    own: dict[str, Any] = {}
    states: Any
    if model is not None:
        subject = load_subject(model, device=device, trust_remote_code=trust_remote_code)
        own = attention_of(subject, width)
        batches, states, said = model_states(subject, text, images, tokens, sequences)
    elif text is not None:
        states, said = text_states(text, width or 768, tokens, sequences, seed)
    elif images is not None:
        states, said = picture_states(images, width or 768, tokens, sequences, seed)
    else:
        states, said = tokens, []
    mask = mask or own.get("mask", "full")
    positions = positions or own.get("positions", "none")
    sizes = own if heads is None else {}  # other heads than the model's have other groups and widths
    shape = {
        "heads": sizes.get("heads", heads),
        "kv_heads": sizes.get("kv_heads") if kv_heads is None else kv_heads,
        "head_dim": sizes.get("head_dim"),
        "value_dim": value_dim,
    }
    dim = width or own.get("width") or (None if isinstance(states, int) else states.shape[-1])
    if dim is not None:
        present_shape(dim, **shape, positions=positions)  # refuse it before the draws, not after
    with show_trials(trials) as on_trial:
        plan = plan_head_dim(
            states,
            mask,
            tolerance,
            inputs=inputs,
            width=width if isinstance(states, int) else None,
            heads=heads,
            kv_heads=kv_heads if heads is not None else None,
            value_dim=value_dim,
            positions=positions,
            layers=layers,
            block=block,
            temperature=temperature,
            trials=trials,
            seed=seed,
            on_trial=on_trial,
        )
    about = {
        "command": command_line(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **_versions(),
    }
    data = {} if isinstance(states, int) else {"inputs": said[0]}
    plan = plan.model_copy(update={"about": about, "notes": [*plan.notes, *said[1:]], **data})
    if plan.complete:
        try:
            if dim is not None:
                plan = with_prices(plan, dim, **shape, device=device, measure=time)
            if law:
                plan = plan.model_copy(update={"law": fit_log_law(mask, tolerance, trials=trials, seed=seed)})
            if subject is not None:
                plan = with_trained(plan, subject.model, batches)
        except KeyboardInterrupt:
            plan = plan.model_copy(update={"complete": False, "notes": [*plan.notes, "Stopped by Ctrl-C."]})
    written = [plan.save(out / "plan.json"), plan.to_html(out / "index.html")]
    _show(plan, written)
    if not plan.complete:
        raise typer.Exit(130)


def _check(
    out: Path,
    overwrite: bool,
    width: int | None,
    tokens: int,
    model: str | None,
    text: Path | None,
    images: Path | None,
    inputs: str | None,
) -> None:
    from rankwise.errors import InputError, ShapeError

    for name, size in (("--width", width), ("--tokens", tokens)):
        least = 2 if name == "--tokens" else 1
        if size is not None and size < least:
            raise ShapeError(name, expected=f"{least} or more", got=str(size), fix="Mend the number.")
    if out.exists() and not overwrite and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            f"--out {out}",
            expected="a folder that is new or empty",
            got="one with files in it" if out.is_dir() else "a file",
            fix="Choose another name, or add --overwrite.",
        )
    if model is not None and text is None and images is None:
        raise InputError(
            "--model", expected="data beside it", got="none", fix="Give --text FILE or --images DIR."
        )
    if text is not None and images is not None:
        raise InputError(
            "--text and --images", expected="one of them", got="both", fix="Plan for one after the other."
        )
    if inputs is not None and (model, text, images) != (None, None, None):
        raise InputError(
            f"--inputs {inputs}",
            expected="no data beside it: it says how token states are drawn where none are given",
            got="--model" if model is not None else "--text" if text is not None else "--images",
            fix="Leave --inputs out, or the data.",
        )


def _versions() -> dict[str, str]:
    import platform

    import torch

    from rankwise import __version__

    return {
        "rankwise": __version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }


def _show(plan: "HeadDimPlan", written: list[Path]) -> None:
    from contextlib import suppress

    from rich.console import Console

    from rankwise.report import print_document
    from rankwise.report.plan_report import plan_document

    console = Console()
    with suppress(BrokenPipeError):
        print_document(plan_document(plan), console)
        for path in written:
            kind = "page" if path.suffix == ".html" else "plan"
            console.print(f"{kind}: {path}", highlight=False, markup=False, soft_wrap=True)
