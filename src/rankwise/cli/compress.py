"""`rankwise compress`."""

import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rankwise.compression import Compression

SENTENCE_MODULES = (
    "Modules of sentence-transformers were copied along ({names}): after "
    "`from rankwise.compression import load_compressed`, SentenceTransformer loads the folder."
)
HELP = """Narrow what a trained model's attention does not need, with its price and its gain measured.

The folder gets the compressed model, compression.json and index.html; the original is left alone. Every
other sequence of the data calibrates, the rest, held out, gives the prices. Ctrl-C while calibrating keeps
what is done.

[bold]Examples[/bold]

  rankwise compress gpt2 --text book.txt --keep 0.5 --out gpt2-half

  rankwise compress ./my-bert --text train.jsonl --tolerance 0.01 --calibrate 200

  rankwise compress ./my-llama --text book.txt --keep 0.25 --parts kv

  rankwise compress ./my-vit --images photos/ --keep 0.75
"""


def command(
    model: Annotated[str, typer.Argument(help="Hugging Face name or folder, or module.py:factory.")],
    text: Annotated[
        Path | None, typer.Option(help="Text to calibrate on: a file, or .jsonl of rows.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="Folder of pictures, for models that read them.")
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option(help="Share to keep of each part, such as 0.5: of the width, the heads or the cache."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Or the largest cost of each part: qk and rotary, attention KL in nats; kv, KL of the "
            "outputs in nats; heads, a share of the loss."
        ),
    ] = None,
    parts: Annotated[str, typer.Option(help="Parts, with commas between.")] = "qk",
    calibrate: Annotated[
        int, typer.Option(help="Steps of Adam for each layer, of qk and rotary; 200 is good.")
    ] = 0,
    tokens: Annotated[int, typer.Option(min=2, help="Longest sequence.")] = 256,
    sequences: Annotated[
        int, typer.Option(min=1, help="Sequences to calibrate on, and as many held out.")
    ] = 32,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 8,
    time: Annotated[bool, typer.Option("--time", help="Measure latency before and after.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of calibration and random directions.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")] = "auto",
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the result: new or empty.")] = Path(
        "rankwise-compressed"
    ),
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code that comes with the model run.")
    ] = False,
) -> None:
    """Compress a model; see `HELP`."""
    from rankwise.cli.load_model import load_model
    from rankwise.cli.output import command_line, new_folder, quiet_libraries, show_progress
    from rankwise.compression import compress, save_compressed
    from rankwise.compression.companions import copy_companions
    from rankwise.compression.store import RECORD
    from rankwise.compression.structure import structure_of
    from rankwise.errors import CompressionError

    names = tuple(name.strip() for name in parts.split(",") if name.strip())
    _check(out, keep, tolerance)
    with new_folder(out):
        quiet_libraries()
        subject = load_model(
            model, revision=revision, dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )
        batches, held_out, notes = _data(subject, text, images, tokens, sequences, batch_size)
        with show_progress() as on_step, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*became slower")  # the record's notes say so, too
            record = compress(
                subject.model,
                batches,
                keep=keep,
                tolerance=tolerance,
                parts=names,
                calibrate=calibrate,
                held_out=held_out or None,
                time=time,
                seed=seed,
                on_step=on_step,
            )
        about = {
            **record.about,
            "command": command_line(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "source": subject.name,
            "folder": str(out),
        }
        record = record.model_copy(
            update={"model": subject.name, "about": about, "notes": [*record.notes, *subject.notes, *notes]}
        )
        config: Any = getattr(subject.model, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = True  # it was off while whole texts ran
        if not structure_of(subject.model).changes:
            _show(record, [])
            raise CompressionError(
                f"model {subject.name}",
                expected="something that can go",
                got="nothing, at what was asked for",
                fix="Raise --tolerance, lower --keep, or choose other --parts. Nothing was written.",
            )
        save_compressed(subject.model, out, record)
        if subject.source:
            behind = copy_companions(subject.source, subject.revision or "main", out)
            said = [SENTENCE_MODULES.format(names=", ".join(behind))] if behind else []
            record = record.model_copy(update={"notes": [*record.notes, *said]})
            record.save(out / RECORD)
        page = record.to_html(out / "index.html")
        _show(record, [out, page])
        if not record.complete:
            raise typer.Exit(130)


def _check(out: Path, keep: float | None, tolerance: float | None) -> None:
    from rankwise.cli.output import check_unused
    from rankwise.errors import CompressionError

    if keep is not None and tolerance is not None:
        raise CompressionError(
            "--keep and --tolerance", expected="one of them", got="2", fix="Leave the other out."
        )
    check_unused(out)


def _data(
    subject: Any, text: Path | None, images: Path | None, tokens: int, sequences: int, batch_size: int
) -> tuple[list[Any], list[Any], list[str]]:
    """Batches to calibrate on, others to measure on, and what their reader must know."""
    from rankwise.cli.load_data import load_data
    from rankwise.compression.request import every_other_sequence

    if subject.batches is not None and text is None and images is None:
        every = list(subject.batches)
        half = (len(every) + 1) // 2
        return every[:half], every[half:], []
    inputs = load_data(
        subject, text=text, images=images, tokens=tokens, sequences=2 * sequences, batch_size=2 * batch_size
    )
    every = list(inputs.batches)
    # every other sequence of each batch, so that both see all of the text
    own = [half for batch in every if (half := every_other_sequence(batch, 0)) is not None]
    others = [half for batch in every if (half := every_other_sequence(batch, 1)) is not None]
    said = "every other sequence was held out" if others else "one sequence, none was held out"
    return own, others, [f"Data: {inputs.data}; {said}.", *inputs.notes]


def _show(record: "Compression", written: list[Path]) -> None:
    from contextlib import suppress
    from dataclasses import replace

    from rich.console import Console

    from rankwise.cli.output import print_path
    from rankwise.report import print_document
    from rankwise.report.compression_report import compression_document

    console = Console()
    document = compression_document(record)
    if not written:  # the next steps need the folder
        document = replace(document, sections=[x for x in document.sections if x.name != "next"])
    with suppress(BrokenPipeError):
        print_document(document, console)
        for kind, path in zip(("model", "page"), written, strict=False):
            print_path(kind, path, console)
