"""Command `rankwise audit`: audit one model, several models, or one model in several processes."""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rankwise.cli import options
from rankwise.errors import InputError, RankwiseError, one_of

if TYPE_CHECKING:
    from rankwise.importance import ImportanceSettings

HELP = """Measure the rank of every head and the collapse of token states through depth.

Without a model, the command audits the bundled demo. It writes audit.json, index.html (one file that works
offline) and the tables heads.csv and states.csv. If token states collapse or the model has λ-skips, part of
the first batch runs again to find a λ.

Several models, such as the checkpoints of a run, are audited on the same data: one after the other, or as
tasks of a Ray cluster. Each gets a folder, and index.html shows curves over the models. Under torchrun,
several processes share the sequences of one model, each with a GPU of its own if the device is cuda.

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


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Hugging Face NAME or NAME@REVISION, folder, or module.py:factory; the bundled demo by "
            "default. With --merge, saved audits.",
        ),
    ] = None,
    text: options.Text = None,
    images: options.Images = None,
    dataset: options.Dataset = None,
    tokens: options.Tokens = 256,
    sequences: options.Sequences = 8,
    batch_size: options.BatchSize = 4,
    delta: Annotated[float, typer.Option(help="Count singular values above this threshold as rank.")] = 1e-2,
    method: Annotated[
        str, typer.Option(help="Method for ranks: exact, estimate, or auto (exact up to 8,192 tokens).")
    ] = "auto",
    matrices: Annotated[
        str | None, typer.Option(help="Attention maps to show: flagged (with findings), all, or layer:head,…")
    ] = None,
    importance: Annotated[
        str | None,
        typer.Option(
            metavar="[auto|estimate|exact|loss|none]",
            help="Measure the loss without each head. exact: remove heads one by one. estimate: use "
            "gradients, which sort heads; large losses can come out far too small. auto: exact for the demo, "
            "else estimate. loss: measure the whole model only.",
        ),
    ] = None,
    importance_tolerance: Annotated[
        float, typer.Option(help="Largest relative rise of the loss for removing a set of heads.")
    ] = 0.01,
    importance_ablation: Annotated[
        str, typer.Option(help="Replace a removed head by zero, or by its mean over tokens.")
    ] = "zero",
    importance_loss: Annotated[
        str,
        typer.Option(help="Loss: auto, causal, masked, encoder-decoder, labels, own or output (its change)."),
    ] = "auto",
    loss: Annotated[
        bool, typer.Option("--loss", help="Measure the loss of the model only: one forward pass.")
    ] = False,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Also audit the model at initialization; the demo always does.")
    ] = False,
    baseline_seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of initializations, 3 by default; implies --baseline.")
    ] = None,
    device: options.Device = None,
    device_map: Annotated[
        str | None, typer.Option(help="Spread over devices: auto, balanced, sequential, a device, or JSON.")
    ] = None,
    offload_folder: Annotated[
        Path | None, typer.Option(help="Folder for weights that the device map puts on the disk.")
    ] = None,
    dtype: options.Dtype = "auto",
    revision: options.Revision = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or name of a tokenizer, for models without one.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Write the report to this folder.")] = Path("rankwise-audit"),
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep finished audits in --out if command and files are the same."),
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
        float | None, typer.Option(min=0, help="With --ray: CPUs per model, 1 by default.")
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option(min=0, help="With --ray: GPUs or share of one per model; 1 with --device cuda, else 0."),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(help=f"Exit with status {FOUND} if this code is found; can be repeated."),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print all findings and numbers.")] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge saved audits of one model on different data.")
    ] = False,
) -> None:
    """Audit one model or several models; `HELP` describes the command."""
    from rankwise.auditing import Audit, AuditSettings, check_codes
    from rankwise.cli import output
    from rankwise.cli.audit_job import AuditJob, audit_shards
    from rankwise.cli.audit_many import audit_many, jobs_of, run_here
    from rankwise.cli.load_data import check_data
    from rankwise.cli.load_model import check_loading, demo_model, demo_text
    from rankwise.cli.ray_jobs import run_on_ray
    from rankwise.cli.torchrun import from_environment

    models = models or []
    processes = from_environment()
    single = {"several models": len(models) > 1, "--device-map": device_map, "--ray": ray, "--resume": resume}
    for name in (name for name, value in single.items() if processes.several and value not in (None, False)):
        several, fix = f"{processes.world} processes", "Start this command without torchrun."
        raise InputError(several, expected=f"an audit without {name}", got=name, fix=fix)
    codes = check_codes(fail_on or [])
    ranks = AuditSettings.of(delta=delta, method=method, matrices=matrices).method  # type: ignore[arg-type]
    is_demo = not models and not merge
    if is_demo and images is None and dataset is None:
        text = text or demo_text()
    how = "loss" if loss and importance is None else importance
    costs = parse_importance(how, is_demo, importance_tolerance, importance_ablation, importance_loss)
    job = AuditJob(
        model=str(demo_model()) if is_demo else "", revision=revision, text=text, images=images,
        dataset=dataset, tokens=tokens, sequences=sequences, batch_size=batch_size, delta=delta, method=ranks,
        matrices="all" if is_demo and matrices is None else matrices,
        importance=costs,
        baseline=baseline_seeds or baseline or is_demo, device=device, device_map=device_map,
        offload_folder=offload_folder, dtype=dtype, tokenizer=tokenizer, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    for option, value in (("--cpus", cpus), ("--gpus", gpus)):
        if value is not None and ray is None:
            fix = "Add --ray, or leave it out: models then run one after the other."
            raise InputError(f"{option} {value:g}", expected="--ray next to it", got="no --ray", fix=fix)
    if gpus and device_map is None and (device or "cpu").startswith("cpu"):
        got, fix = f"--device {device or 'cpu'}", "Pass --device cuda, or leave --gpus out."
        raise InputError(f"--gpus {gpus:g}", expected="audits that use their GPUs", got=got, fix=fix)
    if not merge:
        check_data(models, text=text, images=images, dataset=dataset)
    is_many, has_one = len(models) > 1 or resume or ray is not None, (out / "audit.json").exists()
    if output.is_of_audit(out / "index.html") and (merge or is_many == has_one):
        expected, fix = "a folder without other audits", "Choose another folder: its page would be replaced."
        got = "the audit of one model" if has_one else "audits of several models"
        raise InputError(f"--out {out}", expected=expected, got=got, fix=fix)
    error: Exception | None = None
    if merge:
        if options := [*job.options, *["--ray"] * (ray is not None), *["--resume"] * resume]:
            expected, got = "saved audits and --out, without options of an audit", ", ".join(options)
            fix = "Leave it out: audits are merged as they were measured."
            raise InputError("--merge", expected=expected, got=got, fix=fix)
        parts = [Audit.load(path) for path in models]
        with output.new_folder(out):
            audits = [Audit.merge(parts, models)]
            output.write_report(audits[0], out, verbose=verbose)
    elif is_many:
        if gpus is None:
            gpus = float((device or "").startswith("cuda"))
        with output.show_progress() as say:
            on_ray = partial(run_on_ray, address=ray or None, cpus=1 if cpus is None else cpus, gpus=gpus)
            runner = partial(run_here, say=say) if ray is None else on_ray
            jobs = jobs_of(job, models or [job.model])
            cluster = dict.fromkeys(() if ray is None else ("device", "device_map", "offload_folder"))
            for one in jobs:
                check_loading(one.model, **one.loading | cluster)  # the devices of a cluster are unknown
            by_folder, error = audit_many(jobs, out, runner, resume=resume)
        audits = [*by_folder.values()]
    else:
        with output.new_folder(out) if processes.is_main else nullcontext(), processes.process_group():
            one = job.for_model(models[0]) if models else job
            about = {"command": output.command_line()}
            audit, error = audit_shards(one, out, processes, about, verbose=verbose)
        audits = [audit]
    found = sorted({finding.code for audit in audits for finding in audit.findings} & set(codes))
    if found and isinstance(error, RankwiseError):
        print(f"rankwise: {error}", file=sys.stderr)
    if found:
        print(f"rankwise: found {', '.join(found)} (--fail-on)", file=sys.stderr)
        raise typer.Exit(FOUND)
    if error is not None:
        raise error


def parse_importance(
    how: str | None, is_demo: bool, tolerance: float, ablation: str, loss: str
) -> "ImportanceSettings | Literal[False]":
    """Return the settings for importance, or False if it is not measured; the demo's is exact by default."""
    from rankwise.importance.settings import ABLATIONS, LOSSES, ImportanceSettings

    if how is not None:
        one_of("--importance", how, ("auto", "estimate", "exact", "loss", "none"))
    settings = ImportanceSettings(
        exact=how == "exact" or (how in (None, "auto") and is_demo),
        estimates=how != "loss",
        tolerance=tolerance,
        ablation=one_of("--importance-ablation", ablation, ABLATIONS),  # type: ignore[arg-type]
        loss=one_of("--importance-loss", loss, LOSSES),  # type: ignore[arg-type]
    )
    return False if how == "none" or (how is None and not is_demo) else settings
