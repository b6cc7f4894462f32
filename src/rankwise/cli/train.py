"""`rankwise train`."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rankwise.train import Recipe

HELP = """Train a recipe: a complete configuration, made to test one claim. Without a recipe, list them.

KEY=VALUE changes an argument of the recipe or a field of its configuration. Writes the best checkpoint
with its card (model/) and results.json; a run that was killed goes on with --resume, as if it had not been.

[bold]Examples[/bold]

  rankwise train

  rankwise train language model=tost seed=1 task.path=shakespeare.txt

  rankwise train language model=tost monitor=true steps=100 task.path=shakespeare.txt --out try

  rankwise train language size=paper model=tost-decayed --show

  rankwise train language model=tost seed=1 task.path=shakespeare.txt --resume
"""


def command(
    recipe: Annotated[str | None, typer.Argument(help="Name of a recipe.")] = None,
    pairs: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What to change.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; default runs/RECIPE-ARGUMENTS[-DIGEST]-seedN.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last whole checkpoint.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the configuration as JSON; train nothing.")
    ] = False,
) -> None:
    """Train a recipe, or list them."""
    from rankwise.cli.output import quiet_libraries

    quiet_libraries()
    from rankwise.train import recipe as make_recipe
    from rankwise.train import train
    from rankwise.train.overrides import parse_pairs

    if recipe is None:
        _list()
        return
    chosen = make_recipe(recipe, **parse_pairs(pairs or []))
    if show:
        print(json.dumps(chosen.model_dump(mode="json"), indent=1))
        return
    folder = out or Path("runs") / _run_name(chosen)
    try:
        results = train(chosen, folder, resume=resume, progress=sys.stderr.isatty())
    except KeyboardInterrupt:
        print(_interrupted(folder), file=sys.stderr)
        raise
    if os.environ.get("RANK", "0") == "0":
        _tell(results, folder)


def _list() -> None:
    """Every recipe, its first sentence and its arguments."""
    import inspect

    from rankwise.train import RECIPES

    for name, function in RECIPES.items():
        arguments = ", ".join(inspect.signature(function).parameters)
        first = (inspect.getdoc(function) or "").partition("\n")[0]
        print(f"{name:14} {first} Arguments: {arguments}.")
    print("\nAll keys of a recipe: rankwise train RECIPE --show")


def _run_name(recipe: "Recipe") -> str:
    """Recipe, its arguments, a digest of what else decides the run where that was changed, seed."""
    import hashlib

    from rankwise.train.results import variant

    told = variant(recipe)
    changed = json.dumps(told.pop("changed", {}), sort_keys=True, default=dict)
    digest = [hashlib.sha256(changed.encode()).hexdigest()[:8]] if changed != "{}" else []
    size = [recipe.size] if recipe.size != "small" else []
    words = [str(value) for value in told.values()]
    name = "-".join([recipe.name, *words, *size, *digest, f"seed{recipe.seed}"])
    return "".join(letter if letter.isalnum() or letter in "-_.+" else "_" for letter in name)


def _interrupted(folder: Path) -> str:
    from rankwise.train.checkpoints import whole_checkpoints

    whole = whole_checkpoints(folder)
    if not whole:
        return f"interrupted before the first checkpoint; nothing to go on from in {folder}"
    return f"interrupted; the same command with --resume goes on from {whole[-1]}"


def _tell(results: dict[str, Any], folder: Path) -> None:
    scores, model = results["scores"], results["configuration"]["model"]["name"]
    print(
        f"{results['recipe']}, {model}, {results['parameters']:,} weights: held-out loss "
        f"{scores['loss']:.4f}, accuracy {scores['accuracy']:.4f} at step {results['best_step']}; "
        f"{results['seconds'] / 60:.1f} minutes, {results['tokens_per_second']:,.0f} tokens/s"
    )
    print(f"wrote {folder / 'model'} and {folder / 'results.json'}")
