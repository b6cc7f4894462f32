"""Command `rankwise compress`: make a trained model smaller, and measure costs and savings."""

import json
import shlex
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rankwise._internals.files import check_unused
from rankwise.cli import options
from rankwise.compression import DEFAULT_PARTS, PARTS
from rankwise.errors import CompressionError, InputError

SENTENCE_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json")
"""Files of sentence-transformers: the list of modules after the model, and how texts are read."""
MODULE_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
"""Files of each module after the model, such as a pooling module."""
HELP = """Make a trained model smaller, and measure the costs and the savings.

The folder gets the compressed model, compression.json and index.html; the original stays unchanged. Costs are
measured on data that are held out: the second half of one text, or every second text or image.

[bold]Examples[/bold]

  rankwise compress gpt2 --text book.txt --keep 0.5 --out gpt2-half
  rankwise compress ./my-llama --text book.txt --parts blocks --remove 4
  rankwise compress ./my-bert --text train.jsonl --tolerance 0.01 --calibration-steps 200
  rankwise compress ./my-llama --text book.txt --keep heads=0.9 --keep kv=0.5
  rankwise compress ./my-vit --images photos/ --keep 0.75
"""


def command(
    context: typer.Context,
    model: options.Model,
    text: options.Text = None,
    images: options.Images = None,
    dataset: options.Dataset = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Fraction to keep, such as 0.5 (default), or kv=0.5 for a part; can be repeated."),
    ] = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(
            help="Largest cost, instead of --keep, for all parts or one part (width=0.01): KL of the "
            "attention in nats for width, KL of the outputs in nats for kv, share of the loss for blocks, "
            "heads and key-heads."
        ),
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            help=f"Parts, separated by commas: {', '.join(PARTS)}; by default {' and '.join(DEFAULT_PARTS)}, "
            "if the model allows them."
        ),
    ] = None,
    remove: Annotated[
        int | None, typer.Option(min=1, help="Number of blocks to remove, instead of --keep, for blocks.")
    ] = None,
    uniform: Annotated[
        bool,
        typer.Option(
            "--uniform", help="For heads: remove as many from each layer, for a plain configuration."
        ),
    ] = False,
    calibration_steps: Annotated[int, typer.Option(min=0, help="Steps of Adam per layer, for width.")] = 0,
    tokens: options.Tokens = 256,
    sequences: Annotated[int, typer.Option(min=1, help="Calibrate on this many, and hold out as many.")] = 32,
    held_out_tokens: Annotated[
        int,
        typer.Option(
            min=2,
            help="Measure costs also on held-out windows of this many tokens, or as many as text, model and "
            "memory allow.",
        ),
    ] = 2048,
    batch_size: options.BatchSize = 8,
    time: Annotated[
        bool, typer.Option("--time", help="Measure seconds per decoding step, or per pass, before and after.")
    ] = False,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    out: Annotated[Path, typer.Option(help="Folder for the results, new or empty.")] = Path(
        "rankwise-compressed"
    ),
    preview: Annotated[
        bool, typer.Option("--preview", help="Change nothing: print what each way would cost and save.")
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Compress a model; `HELP` describes the command."""
    from rankwise.cli import output
    from rankwise.cli.load_data import check_data
    from rankwise.cli.load_model import load_model
    from rankwise.compression.run import compress, part_targets
    from rankwise.compression.save import is_changed, loading_line, save_compressed
    from rankwise.report.compression_report import compression_document
    from rankwise.skips.save import FACTS, NUMBERS

    shares, tolerances = _target("--keep", keep), _target("--tolerance", tolerance)
    names = None if parts is None else [name.strip() for name in parts.split(",") if name.strip()]
    part_targets(names, shares, tolerances, remove)
    check_data([model], context, text=text, images=images, dataset=dataset)
    data: dict[str, Any] = {"text": text, "images": images, "dataset": dataset}
    sizes: dict[str, Any] = {"tokens": tokens, "sequences": sequences, "batch_size": batch_size}
    if any((Path(model) / name).is_file() for name in (FACTS, NUMBERS)):
        fix = "Compress the model without them, then run `rankwise skip` on the result."
        raise InputError(f"model {model}", expected="a model without λ-skips", got="saved λ-skips", fix=fix)
    if preview:
        load = partial(load_model, model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        _preview(context, load, lambda subject: _data(subject, data, sizes, held_out_tokens), names, seed)
        return
    check_unused(out)
    with output.new_folder(out):
        with output.show_progress() as on_progress:
            subject = load_model(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
            batches, held_out, notes = _data(subject, data, sizes, held_out_tokens)
            record = compress(
                subject.model,
                batches,
                shares,
                tolerances,
                names,
                remove=remove,
                uniform=uniform,
                calibrate=calibration_steps,
                held_out=held_out or None,
                time=time,
                seed=seed,
                on_progress=on_progress,
            )
        about = {
            **record.about,
            "command": output.command_line(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "load": loading_line(subject.model, str(out), subject.name),
        }
        record = record.model_copy(
            update={"model": subject.name, "about": about, "notes": [*record.notes, *subject.notes, *notes]}
        )
        subject.restore_use_cache()
        if not is_changed(subject.model):
            raise CompressionError(
                f"model {subject.name}",
                expected="something to remove",
                got="nothing, at the given targets",
                fix="Nothing was written. Lower --keep or raise --tolerance.",
            )
        save_compressed(subject.model, out, record)
        if subject.source:
            _copy_side_files(subject.source, subject.revision or "main", out)
        written = [("model", out), ("page", record.to_html(out / "index.html"))]
        output.print_results(compression_document(record), written)


def _preview(context: typer.Context, load: Any, data: Any, parts: list[str] | None, seed: int) -> None:
    """Print the preview of all ways, or of the ways that were finished if the command is stopped."""
    from rankwise.cli import output
    from rankwise.compression.records import Preview
    from rankwise.compression.ways import preview
    from rankwise.report.compression_report import preview_document

    words = ["rankwise", "compress", context.params["model"]]
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if param.name in ("model", "preview", "parts") or source is None or source.name != "COMMANDLINE":
            continue
        if param.name in ("keep", "tolerance", "remove", "uniform", "calibration_steps", "out", "time"):
            fix = "Omit it: a preview has its own shares, changes nothing and measures time."
            raise InputError("--preview", expected=f"no {param.opts[0]}", got=param.opts[0], fix=fix)
        value = context.params[param.name or ""]
        words += [param.opts[0]] if value is True else [param.opts[0], str(value)]
    previews, notes = list[Preview](), list[str]()
    try:
        with output.show_progress() as on_progress:
            subject = load()
            batches, held_out, notes = data(subject)
            preview(
                subject.model, batches, held_out=held_out or None, parts=parts, seed=seed,
                on_progress=on_progress, on_row=previews.append,
            )  # fmt: skip
    finally:
        if previews:
            output.print_results(preview_document(previews[-1], shlex.join(words), notes))


def _target(option: str, values: list[str] | None) -> float | dict[str, float] | None:
    """Return the value of an option as a number or {part: number}. Return None if it was not given."""
    numbers: dict[str, float] = {}
    for value in values or ():
        name, named, number = value.rpartition("=")
        try:
            given = float(number if name or not named else value)
        except ValueError:
            fix = f"For example: {option} 0.5, or {option} heads=0.9 {option} kv=0.5."
            expected = "a number, or PART=NUMBER"
            raise InputError(option, expected=expected, got=value, fix=fix) from None
        if name in numbers or (numbers and "" in {name, *numbers}):
            expected, got = "one number, or one PART=NUMBER per part", " and ".join(values or ())
            raise InputError(option, expected=expected, got=got, fix="Omit the others.")
        numbers[name] = given
    return numbers.get("", numbers or None)


def _data(
    subject: Any, data: dict[str, Any], sizes: dict[str, Any], longest: int
) -> tuple[list[Any], list[Any], list[str]]:
    """Return batches for calibration, batches for measuring costs, and notes on the data.

    Costs of text are also measured on windows of `longest` tokens, or as many as text, model and memory
    allow, if these are at least twice as long as the windows for calibration.
    """
    from rankwise._internals.batches import tensors_in
    from rankwise.auditing.batches import longest_sequence
    from rankwise.cli.load_data import load_data, split_held_out

    if subject.batches is not None and not any(data.values()):
        every = list(subject.batches)
        half = (len(every) + 1) // 2
        return every[:half], every[half:], []
    if data["images"]:
        doubled = {name: size if name == "tokens" else 2 * size for name, size in sizes.items()}
        inputs = load_data(subject, **data, **doubled)
        calibration, held_out = split_held_out(list(inputs.batches))
        note = "every other sequence was held out" if held_out else "one sequence, none was held out"
        return calibration, held_out, [f"Data: {inputs.data}; {note}.", *inputs.notes]
    inputs, others = (load_data(subject, **data, **sizes, half=half) for half in (0, 1))
    held_out, tokens = list(others.batches), sizes["tokens"]
    longest = min(longest, longest_sequence(subject.model) or longest)
    reads_longer = longest >= 2 * tokens
    note = "the second half of the text, or every second text, was held out"
    while longest >= 2 * tokens:
        more: dict[str, Any] = {"sequences": max(4, sizes["sequences"] * tokens // longest)}
        more |= {"tokens": longest, "batch_size": max(1, sizes["batch_size"] * tokens // longest)}
        with suppress(InputError):  # the text is too short, or memory too small
            batches = load_data(subject, **data, **more, half=1).batches
            if long := [batch for batch in batches if tensors_in(batch)[0].shape[1] >= 2 * tokens]:
                held_out += long
                break
        longest //= 2
    else:
        if reads_longer:
            note += f"; no {2 * tokens:,} tokens in a row were held out: longer windows were not measured"
    return list(inputs.batches), held_out, [f"Data: {inputs.data}; {note}.", *inputs.notes]


def _copy_side_files(source: str, revision: str, folder: Path) -> None:
    """Copy the tokenizer, the image processor and the modules of sentence-transformers."""
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.utils import cached_file

    from rankwise.cli.load_gguf import gguf_location, read_once

    def copy(name: str) -> None:
        with suppress(OSError):
            file = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
            if file:
                shutil.copyfile(file, folder / name)

    home, gguf_file = gguf_location(source)
    for kind in (AutoTokenizer,) if gguf_file else (AutoTokenizer, AutoImageProcessor):
        with suppress(Exception), read_once(source):  # a model may lack the tokenizer or the image processor
            kind.from_pretrained(home, revision=revision, **gguf_file).save_pretrained(folder)
    if gguf_file:
        return  # files next to it may belong to other models
    for name in SENTENCE_FILES:
        copy(name)
    modules = folder / "modules.json"
    if not modules.exists():
        return
    names = [str(module.get("path", "")) for module in json.loads(modules.read_text(encoding="utf-8"))]
    inside = [name for name in names if name and Path(name).parts == (Path(name).name,) and name != ".."]
    for name in inside:
        (folder / name).mkdir(exist_ok=True)  # modules without files, such as normalization, need a folder
        for file in MODULE_FILES:
            copy(f"{name}/{file}")
