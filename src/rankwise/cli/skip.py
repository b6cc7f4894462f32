"""Command `rankwise skip`: add, save, certify and try λ-skips."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankwise._internals.files import check_unused
from rankwise.cli import options
from rankwise.errors import INTERRUPTED, InputError, in_range

if TYPE_CHECKING:
    from rankwise.cli.load_data import LoadedData
    from rankwise.cli.load_model import LoadedModel
    from rankwise.skips import Skips

HELP = """Add λ-skips to a model: the skip connection around every mixer becomes λ·x.

The folder of --out holds the model with its own weights (in the type of --dtype), and skips.json and
skips.safetensors, which `rankwise audit` reads.

--try-steps trains the unchanged model, the model with each λ, and each --alternative, all with the same seed.
The batches need labels, or the factory's file must define loss(model, batch).

[bold]Examples[/bold]

  rankwise skip gpt2 --lambda 2 --text book.txt --out gpt2-skips
  rankwise skip gpt2-skips --text book.txt --certify
  rankwise skip ./my-bert --lambda 2 --sites "bert.encoder.layer.[89]" --text book.txt --out my-bert-2
  rankwise skip model.py:build --try-steps 100 --alternative model.py:build_pre_norm
"""
CERTIFICATE = ("certificate.json", "certificate.html")


def command(
    context: typer.Context,
    model: options.Model,
    init: Annotated[
        float | None,
        typer.Option("--lambda", help="Start from this λ: by default 1 for new λ-skips, else the saved λ."),
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate for --try-steps.")] = 0.0003,
    try_steps: Annotated[
        int, typer.Option(min=0, help="Train with λ = 2, 4, 8, 16 (or --lambda) for this number of steps.")
    ] = 0,
    alternative: Annotated[
        list[str] | None, typer.Option(help="Train this model as well; can be repeated.")
    ] = None,
    text: options.Text = None,
    dataset: options.Dataset = None,
    sites: Annotated[
        list[str] | None, typer.Option(help="Only the λ of these modules; with wildcards, can be repeated.")
    ] = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="Show how much absolute token spread μ each λ provably keeps.")
    ] = False,
    keep_spread: Annotated[
        float | None, typer.Option(help="Share of μ that each layer should keep: by default √½ = 0.71.")
    ] = None,
    tokens: options.Tokens = 128,
    sequences: options.Sequences = 40,
    batch_size: options.BatchSize = 4,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the model and its λ-skips to this folder.")] = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Add and certify λ-skips, or try several λ; `HELP` describes the command."""
    from rankwise._internals.batches import drop_unused_labels, to_device
    from rankwise._internals.forward import device_of
    from rankwise.cli import output
    from rankwise.cli.load_data import check_data, load_data
    from rankwise.cli.load_model import load_model
    from rankwise.report import write_page
    from rankwise.report.skip_report import certificate_document, skip_document
    from rankwise.skips import certify_skip, choose_lambda, direction_spread_by_layer, load_skips, skips_of
    from rankwise.skips.add import check_lambda
    from rankwise.skips.certify import KEEP_SPREAD
    from rankwise.skips.save import saved_notes

    in_range("--lr", lr, "(0, inf)")
    keep_spread = in_range("--keep-spread", KEEP_SPREAD if keep_spread is None else keep_spread, "(0, 1)")
    other = {"--out": out, "--certify": certify, "--sites": sites, "--alternative": alternative}
    given = [name for name, value in other.items() if value and not (try_steps and name == "--alternative")]
    if given if try_steps else "--alternative" in given or not (out or certify):
        expected = "--out DIR, --certify, or both; or --try-steps N, which can have --alternative"
        got = " and ".join(["--try-steps", *given] if try_steps else given) or "neither"
        raise InputError("what to do", expected=expected, got=got, fix="Change the options.")
    # a folder that this command wrote for the model may be written again
    if out is not None and (out.resolve() == Path(model).resolve() or saved_notes(out).get("model") != model):
        check_unused(out, fix="Choose another name.")
    if init is not None:
        check_lambda("--lambda", init)
    check_data([model], context, text=text, dataset=dataset)
    with nullcontext() if out is None else output.new_folder(out):
        load = partial(load_model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        with output.show_progress():
            loaded = load(model)
            inputs = load_data(
                loaded, text=text, dataset=dataset, tokens=tokens, sequences=sequences, batch_size=batch_size
            )
        if try_steps:
            mask = getattr(inputs.tokenizer, "mask_token_id", None) if loaded.source else None
            how: dict[str, Any] = {"steps": try_steps, "lr": lr, "loss": loaded.loss, "mask_token": mask}
            _try(load, [model, *(alternative or ())], inputs, init, **how)
            return
        device_used = device_of(loaded.model)
        batches = [
            to_device(drop_unused_labels(loaded.model, batch)[0], device_used) for batch in inputs.batches
        ]
        with output.show_progress("adding λ-skips and measuring the states"):
            skips, scales = _add_skips(loaded, init, sites, example=None if loaded.source else batches[0])
            states = direction_spread_by_layer(loaded.model, batches)
        output.print_results(skip_document(scales, states, inputs.data, [*loaded.notes, *skips.notes]))
        made = {"command": output.command_line(), "data": inputs.data, "model": model}
        if out is not None:
            output.print_results(None, [("wrote", path) for path in _write(loaded, inputs, out, made)])
        if out is not None and not loaded.source:  # say how to load λ-skips without a saved model
            code = f"import rankwise as rw; rw.skips.load_skips(model, {str(out)!r}, example=batch)"
            line = f"{code}   # model and batch as {model} makes them"
            output.print_results(None, [("load", line)])
    if not certify:
        return
    if out is not None and not skips_of(loaded.model):  # saving the model removed its λ-skips
        load_skips(loaded.model, out)
    with output.show_progress("certifying the λ-skips"):
        certificate = certify_skip(loaded.model, batches[0], keep_spread)
        choices = [choose_lambda(loaded.model, batches[0], stack) for stack in states]
    document = certificate_document(certificate, choices)
    output.print_results(document)
    if out is not None:
        written = certificate.save(out / CERTIFICATE[0]), write_page(document, out / CERTIFICATE[1])
        output.print_results(None, [("wrote", path) for path in written])


def _try(
    load: Callable[[str], "LoadedModel"], models: list[str], inputs: "LoadedData", init: float | None,
    *, steps: int, lr: float, **loss: Any,
) -> None:  # fmt: skip
    """Train the first model with each λ, and the other models unchanged. Print the losses."""
    from rankwise.cli.output import print_results, show_progress
    from rankwise.report.skip_report import trial_document
    from rankwise.skips import try_lambdas
    from rankwise.skips.observe import TRIED

    values = TRIED[1:] if init is None else (init,)
    builds = {name: partial(lambda name: load(name).model, name) for name in models}
    build = builds.pop(models[0])
    with show_progress() as say:
        runs = try_lambdas(
            build, inputs.batches, values, steps=steps, lr=lr, alternatives=builds,
            on_progress=say, **loss,
        )  # fmt: skip
    print_results(trial_document(runs, f"{inputs.data} · learning rate {lr:g}", steps))
    if len(runs) <= len(values) + len(builds):
        raise typer.Exit(INTERRUPTED)


def _add_skips(
    loaded: "LoadedModel", init: float | None, sites: list[str] | None, example: Any
) -> tuple["Skips", dict[str, list[float]]]:
    """Return the λ-skips of the model, and λ of each site before and after it is set to `init`.

    Only λ-skips at `sites` (by default all) are set. A λ per channel is averaged over channels. At a site
    without a λ-skip, λ was 1.
    """
    from rankwise.skips import add_lambda_skip, skips_of
    from rankwise.skips.add import match_places

    skips = skips_of(loaded.model) or None
    if skips is None or sites is not None:
        per = "channel" if skips and any(value.numel() > 1 for value in skips.values()) else "layer"
        skips = add_lambda_skip(loaded.model, per=per, sites=sites, example=example, exist_ok=bool(skips))  # type: ignore[arg-type]
    scales = {name: [float(value.detach().mean())] * 2 for name, value in skips.items()}
    chosen = {place.name for place in match_places(list(skips.places.values()), sites)}
    if init is not None:
        for name in chosen:
            skips[name].data.fill_(init)
            scales[name][1] = init
    return skips, scales


def _write(loaded: "LoadedModel", inputs: "LoadedData", out: Path, made: dict[str, Any]) -> list[Path]:
    """Write the λ-skips, remove them from the model, write the model, and return the written paths."""
    from rankwise._internals.files import write_files
    from rankwise.compression.save import RECORD, structure_of
    from rankwise.skips import remove_lambda_skip, save_skips

    def write(new: Path) -> None:
        save_skips(loaded.model, new, made=made)
        if loaded.source:
            remove_lambda_skip(loaded.model)
            model: Any = loaded.model
            loaded.restore_use_cache()
            model.save_pretrained(new)
            inputs.tokenizer.save_pretrained(new)
            for name in ("README.md", RECORD) if structure_of(model).changes else ():
                with suppress(FileNotFoundError):  # a compressed model may lack these files
                    shutil.copyfile(Path(loaded.source, name), new / name)

    written = write_files(out, write, "skips")
    older = {out / name for name in CERTIFICATE}  # earlier certificates hold for other λ
    if loaded.source:  # transformers would read old weight files instead of new
        older |= {*out.glob("model.safetensors*"), *out.glob("model-*-of-*.safetensors")}
    for path in older.difference(written):
        path.unlink(missing_ok=True)
    return [path for path in written if path.name.startswith(("skips", "model"))]
