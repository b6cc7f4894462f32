"""`rankwise audit`."""

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rankwise.cli.optional_value import BARE

if TYPE_CHECKING:
    from torch import nn

    from rankwise.audit import Audit
    from rankwise.audit.numbers import Method
    from rankwise.surgery import Skips
    from rankwise.worth import WorthSettings

HELP = """Measure the rank of every head and the collapse of tokens through depth.

Where tokens collapse, or λ-skips or LayerScale are there, the first batch runs again to advise on them.

Without a model it audits the bundled demo. Writes audit.json, index.html (one file, works offline) and the
tables heads.csv and layers.csv. Several models, such as the checkpoints of a run, are audited one after the
other on the same data, each into a folder of its own, with a page of curves over the steps beside them.

[bold]Examples[/bold]

  rankwise audit

  rankwise audit gpt2 --text book.txt --tokens 512

  rankwise audit ./my-bert --dataset imdb:test:text --sequences 32 --baseline

  rankwise audit google/vit-base-patch16-224 --images photos/

  rankwise audit gpt2 --text book.txt --worth exact --worth-tolerance 0.02

  rankwise audit model.py:build --text book.txt --fail-on COLLAPSE --fail-on NONFINITE

  rankwise audit run/checkpoint-* --text book.txt --out run-audits
"""
FOUND = 3
"""Exit status where a code of --fail-on was found."""


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Hugging Face name, folder, or module.py:factory; several give a history. The bundled demo "
            "by default.",
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text file, or .jsonl(.gz) with one text a line.")] = None,
    images: Annotated[
        Path | None, typer.Option(help="Folder of pictures, one picture, or FILE.npz[:array].")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="NAME[:split:column], from the Hub or a folder.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 256,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences or pictures in all.")] = 8,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 4,
    delta: Annotated[float, typer.Option(help="Singular values below it count as zero.")] = 1e-2,
    method: Annotated[
        str,
        typer.Option(help="Of the ranks: exact, estimate, or auto (exact up to 8,192 tokens)."),
    ] = "auto",
    matrices: Annotated[
        str | None,
        typer.Option(
            help="Heads whose matrix the page shows, with the words of two sequences: flagged (by a "
            "finding), all, or layer:head,… Of the demo all are shown."
        ),
    ] = None,
    worth: Annotated[
        str | None,
        typer.Option(
            metavar="[estimate|exact|none]",
            help="What the model loses without each head: estimated from gradients, or also by removing "
            "heads one by one (exact). Of the demo it is exact.",
        ),
    ] = None,
    worth_tolerance: Annotated[
        float, typer.Option(help="Share of the loss that a set of heads may cost which goes together.")
    ] = 0.01,
    worth_removal: Annotated[
        str, typer.Option(help="What takes a removed head's place: zero, or its mean over tokens.")
    ] = "zero",
    worth_loss: Annotated[
        str,
        typer.Option(
            help="auto, causal, masked, encoder-decoder, labels, own, or output (how far it moves)."
        ),
    ] = "auto",
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline",
            help="Audit the same architecture at fresh weights too, and show both side by side. Of the demo "
            "that is done.",
        ),
    ] = False,
    baseline_seeds: Annotated[
        int | None, typer.Option(min=1, help="Copies at fresh weights, 3 by default; implies --baseline.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, …")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16, float16.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or name of the tokenizer, where the model has none beside it.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("rankwise-audit"),
    fail_on: Annotated[
        list[str] | None,
        typer.Option(help=f"Leave with status {FOUND} if this code is found; may be given more than once."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code that comes with the model run.")
    ] = False,
) -> None:
    """Audit a model, or several one after the other; see `HELP`."""
    from rankwise.audit import check_codes, check_method, chosen_heads
    from rankwise.cli.audit_history import audit_each
    from rankwise.cli.output import prepare_folder, quiet_libraries
    from rankwise.measures import check_delta

    codes = check_codes(fail_on or [])
    check_delta(delta)
    how = check_method(method)
    chosen_heads(matrices)
    worthwhile = _worth(worth, models[0] if models else None, worth_tolerance, worth_removal, worth_loss)
    prepare_folder(out)
    quiet_libraries()
    audit_model = partial(
        _audit_one,
        text=text,
        images=images,
        dataset=dataset,
        tokens=tokens,
        sequences=sequences,
        batch_size=batch_size,
        delta=delta,
        how=how,
        matrices=matrices,
        worth=worthwhile,
        baseline=baseline if baseline_seeds is None else baseline_seeds,
        device=device,
        dtype=dtype,
        revision=revision,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
    )
    if models and len(models) > 1:
        _fail_on(audit_each(models, out, audit_model), codes)
    else:
        _fail_on([audit_model(models[0] if models else None, out)], codes)


def _audit_one(
    model: str | None,
    out: Path,
    *,
    text: Path | None,
    images: Path | None,
    dataset: str | None,
    tokens: int,
    sequences: int,
    batch_size: int,
    delta: float,
    how: "Method",
    matrices: str | None,
    worth: "WorthSettings | Literal[False]",
    baseline: bool | int,
    device: str,
    dtype: str,
    revision: str | None,
    tokenizer: str | None,
    trust_remote_code: bool,
    brief: bool = False,
) -> "Audit":
    """Audit one model and write what was found; Ctrl-C and failures leave the command when that is done."""
    from rankwise.assets import demo_text
    from rankwise.audit import AuditError, audit
    from rankwise.cli.output import show_progress, write_report
    from rankwise.subject_inputs import inputs_for
    from rankwise.subjects import load_subject
    from rankwise.surgery import apply_saved_skips

    pictured = "all" if model is None and matrices is None else matrices
    source, text = _demo(model, text, images, dataset)
    subject = load_subject(
        source,
        revision=revision,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        tokenizer=tokenizer,
    )
    skipped = apply_saved_skips(subject.model, Path(subject.source)) if subject.source else None
    inputs = inputs_for(
        subject,
        text=text,
        images=images,
        dataset=dataset,
        tokens=tokens,
        sequences=sequences,
        batch_size=batch_size,
    )
    facts = {
        "model": "the bundled demo" if model is None else subject.name,
        "revision": subject.revision,
        "data": inputs.data.replace(str(demo_text()), "the bundled text"),
        "command": shlex.join(["rankwise", *sys.argv[1:]]),
        "notes": [*subject.notes, *_skip_notes(skipped), *inputs.notes],
    }
    first: list[Any] = []
    failure, stopped = None, False
    try:
        with show_progress() as say:
            result = audit(
                subject.model,
                _keeping_first(inputs.batches, first),
                delta,
                method=how,
                matrices=pictured,
                baseline=baseline or model is None,
                tokenizer=inputs.tokenizer,
                worth=worth,
                provenance=facts,
                on_progress=lambda done, site: say(_doing(done, sequences, site)),
            )
            if result.complete:
                result, stopped = _advised(result, subject.model, first[0], say)
    except AuditError as error:
        if error.audit is None:
            raise
        result, failure = error.audit, error
    write_report(result, out, brief=brief)
    if failure is not None:
        raise failure
    if stopped or not result.complete:
        raise typer.Exit(130)
    return result


def _doing(done: int, sequences: int, what: str) -> str:
    return what if what.startswith("worth") else f"batch {done + 1} (of {sequences} sequences): {what}"


def _worth(
    how: str | None, model: str | None, tolerance: float, removal: str, loss: str
) -> "WorthSettings | Literal[False]":
    """What was asked for; of the demo, which is small, everything."""
    from rankwise.errors import InputError, did_you_mean
    from rankwise.worth import WorthSettings, check_removal
    from rankwise.worth.choice import check_loss

    values = BARE["--worth"]
    if how is not None and how not in values:
        raise InputError("--worth", wanted=" or ".join(values), got=how, fix=did_you_mean(how, values))
    settings = WorthSettings(
        exact=how == "exact" or (how is None and model is None),
        tolerance=tolerance,
        removal=check_removal(removal),
        loss=check_loss(loss),
    )
    return False if how == "none" or (how is None and model is not None) else settings


def _keeping_first(batches: Iterable[Any], first: list[Any]) -> Iterator[Any]:
    """The batches; the first is kept for what looks at the model once more."""
    for batch in batches:
        first[:] = first or [batch]
        yield batch


def _advised(
    result: "Audit", model: "nn.Module", batch: Any, say: Callable[[str], None]
) -> "tuple[Audit, bool]":
    """The audit with advice on its skip connections; the audit alone, and True, where Ctrl-C came first.

    What of it fails does not cost the audit: the notes of the report say it.
    """
    from rankwise.surgery import advise

    try:
        return advise(result, model, batch, lambda what: say(f"on the first batch: {what}"), say), False
    except KeyboardInterrupt:
        notes = [*result.provenance.notes, "skip connections not looked at: interrupted from the keyboard"]
        about = result.provenance.model_copy(update={"notes": notes})
        return result.model_copy(update={"provenance": about}), True


def _skip_notes(skips: "Skips | None") -> list[str]:
    return [] if skips is None else [f"with the {len(skips)} λ-skips saved beside the model"]


def _demo(
    model: str | None, text: Path | None, images: Path | None, dataset: str | None
) -> tuple[str, Path | None]:
    from rankwise.assets import demo_model, demo_text
    from rankwise.errors import InputError

    if model is not None:
        return model, text
    if images is not None:
        raise InputError(
            "--images", wanted="a model that reads pictures", got="the text demo", fix="Name the model first."
        )
    return str(demo_model()), demo_text() if text is None and dataset is None else text


def _fail_on(results: "Sequence[Audit]", codes: list[str]) -> None:
    found = sorted({finding.code for result in results for finding in result.findings} & set(codes))
    if found:
        print(f"rankwise: found {', '.join(found)} (--fail-on)", file=sys.stderr)
        raise typer.Exit(FOUND)
