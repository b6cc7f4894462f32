"""`rankwise audit`."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rankwise.cli.optional_value import BARE

if TYPE_CHECKING:
    from rankwise.auditing import Audit
    from rankwise.cli.audit_job import AuditTask
    from rankwise.cli.torchrun import Processes
    from rankwise.importance import ImportanceSettings

HELP = """Measure the rank of every head and the collapse of tokens through depth.

If tokens collapse or the model has λ-skips, the first batch runs again for a recommended λ.

Without a model it audits the bundled demo. Writes audit.json, index.html (one file, works offline) and the
tables heads.csv and layers.csv. Several models, such as the checkpoints of a run, are audited one after the
other on the same data, each into a folder of its own, with a page of curves over the steps beside them.
Started by torchrun, several processes share the sequences, each with a copy of the model.

[bold]Examples[/bold]

  rankwise audit

  rankwise audit gpt2 --text book.txt --tokens 512

  rankwise audit ./my-bert --dataset imdb:test:text --sequences 32 --baseline

  rankwise audit google/vit-base-patch16-224 --images photos/

  rankwise audit gpt2 --text book.txt --importance exact --importance-tolerance 0.02

  rankwise audit model.py:build --text book.txt --fail-on COLLAPSE --fail-on NONFINITE

  rankwise audit run/checkpoint-* --text book.txt --out run-audits

  rankwise audit meta-llama/Llama-3.1-70B --text book.txt --device-map auto --offload-folder offload/

  torchrun --nproc-per-node gpu -m rankwise audit gpt2 --text book.txt --sequences 4096 --device cuda

  rankwise audit --merge first/audit.json second/audit.json --out both
"""
FOUND = 3
"""Exit status where a code of --fail-on was found."""


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Hugging Face name, folder, or module.py:factory; several give a history. The bundled demo "
            "by default. With --merge, audits.",
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text file, or .jsonl(.gz) with one text a line.")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of pictures, or one picture.")] = None,
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
    importance: Annotated[
        str | None,
        typer.Option(
            metavar="[auto|estimate|exact|none]",
            help="What the model loses without each head: estimated from gradients (an order: large costs "
            "can come out far too small), or also by removing heads one by one (exact). Of the demo it is "
            "exact, of other models an estimate.",
        ),
    ] = None,
    importance_tolerance: Annotated[
        float, typer.Option(help="Share of the loss that a set of heads may cost which goes together.")
    ] = 0.01,
    importance_ablation: Annotated[
        str, typer.Option(help="What replaces a removed head: zero, or its mean over tokens.")
    ] = "zero",
    importance_loss: Annotated[
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
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu (by default), cuda, cuda:1, mps, …; under torchrun cuda is the GPU of each process."
        ),
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(
            help="Spread the model over devices and memory: auto, balanced, sequential, a device, or JSON."
        ),
    ] = None,
    offload_folder: Annotated[
        Path | None, typer.Option(help="Where weights go that the device map puts on the disk.")
    ] = None,
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
    merge: Annotated[
        bool, typer.Option("--merge", help="Join audits of one model on other data each into one.")
    ] = False,
) -> None:
    """Audit a model, or several one after the other; see `HELP`."""
    from rankwise._internals.files import writable_folder
    from rankwise.auditing import AuditSettings, check_codes
    from rankwise.cli.audit_history import audit_each
    from rankwise.cli.audit_job import AuditTask
    from rankwise.cli.audit_one import audit_one
    from rankwise.cli.output import command_line, quiet_libraries
    from rankwise.cli.torchrun import from_environment

    processes = from_environment()
    _check_processes(processes, models or [], device_map)
    codes = check_codes(fail_on or [])
    how = AuditSettings.of(delta=delta, method=method, matrices=matrices).method  # type: ignore[arg-type]
    is_demo = not models and not merge
    source, text = _demo(text, images, dataset) if is_demo else ("", text)
    task = AuditTask(
        model=source,
        text=text,
        images=images,
        dataset=dataset,
        tokens=tokens,
        sequences=sequences,
        batch_size=batch_size,
        delta=delta,
        method=how,
        matrices="all" if is_demo and matrices is None else matrices,
        importance=_importance(
            importance, is_demo, importance_tolerance, importance_ablation, importance_loss
        ),
        baseline=baseline_seeds or baseline or is_demo,
        device=device,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        revision=revision,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
    )
    if merge:
        _refuse_with_merge(task)
        _fail_on([merge_files(models or [], out)], codes)
        return
    if processes.first:
        writable_folder(out)
    quiet_libraries()
    facts = {"command": command_line()}

    def audit_model(model: str, folder: Path, brief: bool = False) -> "Audit":
        return audit_one(replace(task, model=model), folder, processes, facts=facts, brief=brief)

    with processes.joined():
        if models and len(models) > 1:
            _fail_on(audit_each(models, out, audit_model), codes)
        else:
            _fail_on([audit_model(models[0] if models else source, out)], codes)


def _check_processes(processes: "Processes", models: Sequence[str], device_map: str | None) -> None:
    """Refuse what several processes cannot share."""
    from rankwise.errors import InputError

    several = f"{processes.world} processes"
    wrong = {
        "several models": (len(models) > 1, "Audit them one after the other, or by `rankwise sweep`."),
        "--device-map": (device_map is not None, "One process spreads the model over all devices."),
    }
    for what, (asked, fix) in wrong.items():
        if processes.several and asked:
            raise InputError(several, expected=f"an audit without {what}", got=what, fix=fix)


def _refuse_with_merge(task: "AuditTask") -> None:
    """Refuse options of an audit: what was measured stands in the files."""
    from rankwise.errors import InputError

    if options := task.options:
        raise InputError(
            "--merge",
            expected="saved audits and --out, nothing that says how to audit",
            got=", ".join(options),
            fix="Leave it out: audits are joined as they were measured.",
        )


def merge_files(paths: Sequence[str], out: Path) -> "Audit":
    """Join audits that were saved, and write the report of all of them.

    Args:
        paths: of the files, or the folders they lie in.
        out: the folder of the report.

    Raises:
        InputError: if the audit of the report would replace one of them.
    """
    from rankwise.auditing import Audit
    from rankwise.cli.output import new_folder, write_report
    from rankwise.errors import InputError

    audits = [Audit.load(path) for path in paths]
    written = out / "audit.json"
    for path in paths:
        read = Path(path) / "audit.json" if Path(path).is_dir() else Path(path)
        if written.exists() and written.samefile(read):
            raise InputError(
                f"--out {out}",
                expected="a folder whose audit.json is none of those to merge",
                got=f"that of {path}",
                fix="Name another folder: the merged audit would replace it.",
            )
    with new_folder(out):
        merged = Audit.merge(audits, [str(path) for path in paths])
        write_report(merged, out)
    return merged


def _importance(
    how: str | None, is_demo: bool, tolerance: float, ablation: str, loss: str
) -> "ImportanceSettings | Literal[False]":
    """What was asked for; of the demo, which is small, everything."""
    from rankwise.errors import InputError, did_you_mean, one_of
    from rankwise.importance.settings import ABLATIONS, LOSSES, ImportanceSettings

    values = BARE["--importance"]
    if how is not None and how not in values:
        raise InputError("--importance", expected=" or ".join(values), got=how, fix=did_you_mean(how, values))
    settings = ImportanceSettings(
        exact=how == "exact" or (how in (None, "auto") and is_demo),
        tolerance=tolerance,
        ablation=one_of("--importance-ablation", ablation, ABLATIONS),  # type: ignore[arg-type]
        loss=one_of("--importance-loss", loss, LOSSES),  # type: ignore[arg-type]
    )
    return False if how == "none" or (how is None and not is_demo) else settings


def _demo(text: Path | None, images: Path | None, dataset: str | None) -> tuple[str, Path | None]:
    from rankwise.cli.load_model import demo_model, demo_text
    from rankwise.errors import InputError

    if images is not None:
        raise InputError(
            "--images",
            expected="a model that reads pictures",
            got="the text demo",
            fix="Name the model first.",
        )
    return str(demo_model()), demo_text() if text is None and dataset is None else text


def _fail_on(results: "Sequence[Audit]", codes: list[str]) -> None:
    found = sorted({finding.code for result in results for finding in result.findings} & set(codes))
    if found:
        print(f"rankwise: found {', '.join(found)} (--fail-on)", file=sys.stderr)
        raise typer.Exit(FOUND)
