"""Command `rankwise audit`: audit one model, several models, or one model in several processes."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rankwise.cli.options import (
    BatchSize,
    Dataset,
    Dtype,
    Images,
    Revision,
    Sequences,
    Text,
    Tokens,
    TrustRemoteCode,
)
from rankwise.errors import InputError, RankwiseError, one_of

if TYPE_CHECKING:
    from rankwise.auditing import Audit
    from rankwise.cli.audit_job import AuditJob
    from rankwise.cli.torchrun import Processes
    from rankwise.importance import ImportanceSettings

HELP = """Measure the rank of every head and the collapse of token states through depth.

If token states collapse or the model has λ-skips, the first batch runs again for a recommended λ.

Without a model, the command audits the bundled demo. It writes audit.json, index.html (one file that works
offline) and the tables heads.csv and layers.csv. Several models, such as the checkpoints of a run, are
audited on the same data, one after the other or as tasks of a Ray cluster. Each has a folder of its own, and
index.html shows curves over the models. Under torchrun, several processes share the sequences of one model.

[bold]Examples[/bold]

  rankwise audit

  rankwise audit gpt2 --text book.txt --tokens 512

  rankwise audit ./my-bert --dataset imdb:test:text --sequences 32 --baseline

  rankwise audit google/vit-base-patch16-224 --images photos/

  rankwise audit gpt2 --text book.txt --importance exact --importance-tolerance 0.02

  rankwise audit model.py:build --text book.txt --fail-on COLLAPSE --fail-on NONFINITE

  rankwise audit run/checkpoint-* --text book.txt --out run-audits --resume

  rankwise audit EleutherAI/pythia-70m@step1000 EleutherAI/pythia-70m@step143000 --text book.txt --ray

  rankwise audit meta-llama/Llama-3.1-70B --text book.txt --device-map auto --offload-folder offload/

  torchrun --nproc-per-node gpu -m rankwise audit gpt2 --text book.txt --sequences 4096 --device cuda

  rankwise audit --merge first/audit.json second/audit.json --out both
"""
FOUND = 3
"""Exit status of the command if an audit has a finding of --fail-on."""
INTERRUPTED = 130


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Hugging Face NAME or NAME@REVISION, folder, or module.py:factory; the bundled demo by "
            "default. With --merge, saved audits.",
        ),
    ] = None,
    text: Text = None,
    images: Images = None,
    dataset: Dataset = None,
    tokens: Tokens = 256,
    sequences: Sequences = 8,
    batch_size: BatchSize = 4,
    delta: Annotated[float, typer.Option(help="Count singular values above this threshold as rank.")] = 1e-2,
    method: Annotated[
        str,
        typer.Option(help="Compute ranks exactly, by estimate, or by auto (exact up to 8,192 tokens)."),
    ] = "auto",
    matrices: Annotated[
        str | None,
        typer.Option(
            help="Show the matrices of these heads with the words of two sequences: flagged (by a finding), "
            "all, or layer:head,… For the demo, all are shown."
        ),
    ] = None,
    importance: Annotated[
        str | None,
        typer.Option(
            metavar="[auto|estimate|exact|none]",
            help="Measure what the model loses without each head: estimate uses gradients (it sorts heads; "
            "large losses can come out far too small), exact removes heads one by one, auto is exact for the "
            "demo and an estimate for other models.",
        ),
    ] = None,
    importance_tolerance: Annotated[
        float, typer.Option(help="Largest share of the loss that heads removed together may cost.")
    ] = 0.01,
    importance_ablation: Annotated[
        str, typer.Option(help="Replace a removed head by zero, or by its mean over tokens.")
    ] = "zero",
    importance_loss: Annotated[
        str,
        typer.Option(
            help="Loss that measures importance: auto, causal, masked, encoder-decoder, labels, own, or "
            "output (distance that the output moves)."
        ),
    ] = "auto",
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline",
            help="Also audit the same architecture at initialization, and show both side by side. The demo "
            "always has a baseline.",
        ),
    ] = False,
    baseline_seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of initializations, 3 by default; implies --baseline.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Run on this device: cpu (default), cuda, cuda:1, mps, …; under torchrun, cuda is the GPU "
            "of each process."
        ),
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(
            help="Spread the model over devices and memory: auto, balanced, sequential, a device, or JSON."
        ),
    ] = None,
    offload_folder: Annotated[
        Path | None, typer.Option(help="Folder for weights that the device map puts on the disk.")
    ] = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or name of a tokenizer, for models without one.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Write the report to this folder.")] = Path("rankwise-audit"),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Keep finished audits in --out: those of the same command and unchanged files."
        ),
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Run one Ray task per model. ADDRESS is auto, local, HOST:PORT or ray://HOST:PORT; by "
            "default RAY_ADDRESS, a running cluster, or a local one.",
        ),
    ] = None,
    cpus: Annotated[
        float | None, typer.Option(min=0, help="With --ray: reserve this many CPUs per model, 1 by default.")
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="With --ray: reserve this many GPUs or this share of one per model; 1 by default with "
            "--device cuda, else 0.",
        ),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(help=f"Exit with status {FOUND} if this code is found; can be repeated."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Merge saved audits of one model on different data into one."),
    ] = False,
) -> None:
    """Audit one model or several models; `HELP` describes the command."""
    from rankwise._internals.files import writable_folder
    from rankwise.auditing import AuditSettings, check_codes
    from rankwise.cli.audit_job import AuditJob
    from rankwise.cli.load_model import DTYPES
    from rankwise.cli.output import command_line, quiet_libraries
    from rankwise.cli.torchrun import audit_shards, from_environment

    models = models or []
    processes = from_environment()
    single = {"--device-map": device_map, "--ray": ray, "--resume": resume or None}
    _check_processes(processes, models, single)
    codes = check_codes(fail_on or [])
    ranks = AuditSettings.of(delta=delta, method=method, matrices=matrices).method  # type: ignore[arg-type]
    is_demo = not models and not merge
    source, text = _demo(text, images, dataset) if is_demo else ("", text)
    one_of("--dtype", dtype, ["auto", *DTYPES])
    _check_data(text, images, dataset)
    costs = _importance(importance, is_demo, importance_tolerance, importance_ablation, importance_loss)
    job = AuditJob(
        model=source, revision=revision, text=text, images=images, dataset=dataset, tokens=tokens,
        sequences=sequences, batch_size=batch_size, delta=delta, method=ranks,
        matrices="all" if is_demo and matrices is None else matrices, importance=costs,
        baseline=baseline_seeds or baseline or is_demo, device=device, device_map=device_map,
        offload_folder=offload_folder, dtype=dtype, tokenizer=tokenizer, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    _check_ray_options(ray, cpus, gpus, job)
    if merge:
        _refuse_with_merge([*job.options, *["--ray"] * (ray is not None), *["--resume"] * resume])
        _fail_on([merge_files(models, out)], codes)
        return
    quiet_libraries()
    if len(models) > 1 or resume or ray is not None:
        each = models or [source]
        audits, error = _audit_many(job, each, out, resume=resume, ray=ray, cpus=cpus, gpus=gpus)
        _fail_on(audits, codes, error)
        return
    if processes.is_main:
        writable_folder(out)
    with processes.process_group():
        one = job.for_model(models[0]) if models else job
        audit, error = audit_shards(one, out, processes, {"command": command_line()})
    _fail_on([audit], codes, error)


def _check_processes(processes: "Processes", models: Sequence[str], options: Mapping[str, object]) -> None:
    """Raise if torchrun started several processes, but the arguments are for a single process."""
    given = ["several models"] * (len(models) > 1)
    given += [name for name, value in options.items() if value is not None]
    if processes.several and given:
        several, expected = f"{processes.world} processes", f"an audit without {given[0]}"
        raise InputError(several, expected=expected, got=given[0], fix="Start this command without torchrun.")


def _check_data(text: Path | None, images: Path | None, dataset: str | None) -> None:
    """Raise if several sources of data are named, or if the name of a data set cannot be parsed."""
    from rankwise.cli.load_data import parse_dataset

    given = {"--text": text, "--images": images, "--dataset": dataset}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        expected, got = f"one of {', '.join(given)}", " and ".join(chosen)
        raise InputError("data", expected=expected, got=got, fix="Audit one after the other, and merge.")
    if dataset is not None:
        parse_dataset(dataset)


def _check_ray_options(ray: str | None, cpus: float | None, gpus: float | None, job: "AuditJob") -> None:
    """Raise if --cpus or --gpus reserve processors that no Ray task would use."""
    for option, value in (("--cpus", cpus), ("--gpus", gpus)):
        if value is not None and ray is None:
            fix = "Add --ray, or leave it out: models then run one after the other."
            raise InputError(f"{option} {value:g}", expected="--ray next to it", got="no --ray", fix=fix)
    if gpus and job.device_map is None and (job.device or "cpu").startswith("cpu"):
        got, fix = f"--device {job.device or 'cpu'}", "Pass --device cuda, or leave --gpus out."
        raise InputError(f"--gpus {gpus:g}", expected="audits that use their GPUs", got=got, fix=fix)


def _audit_many(
    job: "AuditJob", models: Sequence[str], out: Path, *, resume: bool, ray: str | None, cpus: float | None,
    gpus: float | None,
) -> "tuple[list[Audit], Exception | None]":  # fmt: skip
    """Audit each model into its own folder; return all audits and what to raise if a model failed."""
    from rankwise.cli.audit_many import audit_many, jobs_of, run_here
    from rankwise.cli.output import new_folder, show_progress
    from rankwise.cli.ray_jobs import run_on_ray

    if gpus is None:
        gpus = float((job.device or "").startswith("cuda"))
    if (out / "audit.json").exists():
        expected, got = "a folder for one audit per model", "the audit of one model"
        fix = "Choose another folder, or audit one model without --resume and --ray."
        raise InputError(f"--out {out}", expected=expected, got=got, fix=fix)
    with new_folder(out), show_progress() as say:
        on_ray = partial(run_on_ray, address=ray or None, cpus=1 if cpus is None else cpus, gpus=gpus)
        runner = partial(run_here, say=say) if ray is None else on_ray
        outcome = audit_many(jobs_of(job, models), out, runner, resume=resume)
        if outcome.interrupted:
            print("rankwise: stopped; `--resume` audits the models that are left", file=sys.stderr)
            raise typer.Exit(INTERRUPTED)
        if not outcome.audits and not outcome.partial:
            raise outcome.failures[0]
    new = len(outcome.audits) - outcome.kept
    if outcome.audits:
        print(f"audited {new}, kept {outcome.kept}, failed {len(outcome.failures)}: {out}")
    error = typer.Exit(1) if outcome.audits else outcome.failures[0]
    return [*outcome.audits.values(), *outcome.partial], error if outcome.failures else None


def _refuse_with_merge(options: Sequence[str]) -> None:
    """Raise if options of an audit are combined with --merge, which does not measure anything again."""
    if options:
        expected, got = "saved audits and --out, without options of an audit", ", ".join(options)
        fix = "Leave it out: audits are merged as they were measured."
        raise InputError("--merge", expected=expected, got=got, fix=fix)


def merge_files(paths: Sequence[str], out: Path) -> "Audit":
    """Merge saved audits (files or their folders), and write the report of the merged audit.

    Raise `InputError` if the report would replace one of these audits.
    """
    from rankwise.auditing import Audit
    from rankwise.cli.output import new_folder, write_report

    audits = [Audit.load(path) for path in paths]
    written = out / "audit.json"
    for path in paths:
        read = Path(path) / "audit.json" if Path(path).is_dir() else Path(path)
        if written.exists() and written.samefile(read):
            expected, got = "a folder whose audit.json is none of those to merge", f"that of {path}"
            fix = "Name another folder: the merged audit would replace it."
            raise InputError(f"--out {out}", expected=expected, got=got, fix=fix)
    with new_folder(out):
        merged = Audit.merge(audits, [str(path) for path in paths])
        write_report(merged, out)
    return merged


def _importance(
    how: str | None, is_demo: bool, tolerance: float, ablation: str, loss: str
) -> "ImportanceSettings | Literal[False]":
    """Return the settings for importance, or False if it is not measured; the demo's is exact by default."""
    from rankwise.errors import one_of
    from rankwise.importance.settings import ABLATIONS, LOSSES, ImportanceSettings

    if how is not None:
        one_of("--importance", how, ("auto", "estimate", "exact", "none"))
    settings = ImportanceSettings(
        exact=how == "exact" or (how in (None, "auto") and is_demo),
        tolerance=tolerance,
        ablation=one_of("--importance-ablation", ablation, ABLATIONS),  # type: ignore[arg-type]
        loss=one_of("--importance-loss", loss, LOSSES),  # type: ignore[arg-type]
    )
    return False if how == "none" or (how is None and not is_demo) else settings


def _demo(text: Path | None, images: Path | None, dataset: str | None) -> tuple[str, Path | None]:
    """Return the folder of the demo model, and the demo's text unless the user named other data."""
    from rankwise.cli.load_model import demo_model, demo_text

    if images is not None:
        expected, fix = "a model that reads pictures", "Name the model first."
        raise InputError("--images", expected=expected, got="the text demo", fix=fix)
    return str(demo_model()), demo_text() if text is None and dataset is None else text


def _fail_on(audits: "Sequence[Audit]", codes: Sequence[str], error: Exception | None = None) -> None:
    """Exit with status `FOUND` if an audit has a finding with one of these codes; else raise the error."""
    found = sorted({finding.code for audit in audits for finding in audit.findings} & set(codes))
    if found:
        if isinstance(error, RankwiseError):
            print(f"rankwise: {error}", file=sys.stderr)
        print(f"rankwise: found {', '.join(found)} (--fail-on)", file=sys.stderr)
        raise typer.Exit(FOUND)
    if error is not None:
        raise error
