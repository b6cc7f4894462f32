"""Command `rankwise audit`: audit one model, several models, or shards of the data of a model."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rankwise.cli import options
from rankwise.errors import InputError, one_of, whole_number

if TYPE_CHECKING:
    from rankwise.importance import ImportanceSettings

HELP = """Measure the rank of every head and the collapse of token states through depth.

Without a model, the command audits the bundled demo. It writes audit.json, index.html (one file that works
offline) and the tables heads.csv and states.csv. If token states collapse or the model has λ-skips, part of
the first batch runs again to find a λ.

Several models, such as the checkpoints of a run, are audited on the same data: one after the other, or as
tasks of a Ray cluster. Each gets a folder, and index.html shows curves over the models. With --shards, each
model is audited in shards of its sequences, which are merged.

[bold]Examples[/bold]

  rankwise audit
  rankwise audit gpt2 --text book.txt --tokens 512
  rankwise audit gemma-3-270m-q4_k_m.gguf --text book.txt
  rankwise audit ./my-bert --dataset imdb:test:text --sequences 32 --at-init
  rankwise audit google/vit-base-patch16-224 --images photos/
  rankwise audit gpt2 --text book.txt --importance exact --importance-tolerance 0.02
  rankwise audit model.py:build --text book.txt --fail-on COLLAPSE --fail-on NONFINITE
  rankwise audit run/checkpoint-* --text book.txt --out run-audits --resume
  rankwise audit EleutherAI/pythia-70m@step1000 EleutherAI/pythia-70m@step143000 --text book.txt --ray
  rankwise audit gpt2 --text book.txt --sequences 4096 --device cuda --ray --shards 8
  rankwise audit meta-llama/Llama-3.1-70B --text book.txt --device-map auto --offload-folder offload/
"""


def command(
    context: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Hugging Face NAME or NAME@REVISION, folder, GGUF file, or module.py:factory; by default "
            "the demo.",
        ),
    ] = None,
    text: options.Text = None,
    images: options.Images = None,
    dataset: options.Dataset = None,
    tokens: options.Tokens = 256,
    sequences: options.Sequences = 8,
    batch_size: options.BatchSize = 4,
    shards: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Split the sequences into N shards, audit each, and merge the audits; with --ray as N "
            "tasks. K/N: audit shard K only, for `rankwise merge`.",
        ),
    ] = None,
    delta: Annotated[float, typer.Option(help="Count singular values of at least this size as rank.")] = 1e-2,
    rank_method: Annotated[
        str, typer.Option(help="Method for ranks: exact, estimate, or auto (exact up to 8,192 tokens).")
    ] = "auto",
    attention_maps: Annotated[
        str | None, typer.Option(help="Attention maps to show: flagged (with findings), all, or layer:head,…")
    ] = None,
    importance: Annotated[
        str | None,
        typer.Option(
            metavar="[auto|estimate|exact|none]",
            help="Measure the loss without each head. exact: remove heads one by one. estimate: use "
            "gradients, which sort heads; large losses can come out far too small. auto: exact up to "
            "about 100 heads and blocks, else estimates.",
        ),
    ] = None,
    importance_tolerance: Annotated[
        float, typer.Option(help="Largest relative rise of the loss for removing a set of heads.")
    ] = 0.01,
    importance_loss: Annotated[
        str,
        typer.Option(help="Loss: auto, causal, masked, encoder-decoder, labels, own or output (its change)."),
    ] = "auto",
    importance_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Read the loss at N random tokens of each sequence; by default at all tokens up to 32,000 "
            "classes, else at 64.",
        ),
    ] = None,
    loss: Annotated[
        bool, typer.Option("--loss", help="Measure the loss of the model only: one forward pass.")
    ] = False,
    at_init: Annotated[
        int | None,
        typer.Option(min=1, metavar="[N]", help="Also audit the model at N initializations, by default 3."),
    ] = None,
    device: options.Device = None,
    device_map: Annotated[
        str | None, typer.Option(help="Spread over devices: auto, balanced, sequential, a device, or JSON.")
    ] = None,
    offload_folder: Annotated[
        Path | None,
        typer.Option(
            help="Leave weights on the disk that exceed half of the free memory, converted in this folder if "
            "necessary. All sequences run in one batch, to read weights once, unless --batch-size is given."
        ),
    ] = None,
    dtype: options.Dtype = "auto",
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
            help="Run one Ray task per model or shard. ADDRESS is auto, local, HOST:PORT or "
            "ray://HOST:PORT; by default RAY_ADDRESS, a running cluster, or a local one.",
        ),
    ] = None,
    cpus: Annotated[float, typer.Option(min=0, help="With --ray: CPUs per task.")] = 1,
    gpus: Annotated[
        float | None,
        typer.Option(min=0, help="With --ray: GPUs or share of one per task; 1 with --device cuda, else 0."),
    ] = None,
    fail_on: options.FailOn = None,
    trust_remote_code: options.TrustRemoteCode = False,
    verbose: options.Verbose = False,
) -> None:
    """Audit one model or several models; `HELP` describes the command."""
    from rankwise.auditing import AuditSettings
    from rankwise.auditing.findings import check_codes
    from rankwise.cli import output
    from rankwise.cli.audit_job import AuditJob, audit_one
    from rankwise.cli.audit_many import audit_many, jobs_of, run_here, run_on_ray
    from rankwise.cli.load_data import check_data
    from rankwise.cli.load_model import check_loading, demo_model, demo_text

    models, is_demo = models or [], not models
    codes = check_codes(fail_on or [])
    settings = AuditSettings.of(delta=delta, rank_method=rank_method, attention_maps=attention_maps)
    if is_demo and images is None and dataset is None:
        text = text or demo_text()
    source = context.get_parameter_source("batch_size")
    if offload_folder is not None and source and source.name == "DEFAULT":
        batch_size = sequences
    costs = parse_importance(
        importance, is_demo, importance_tolerance, importance_loss, importance_tokens, only_loss=loss
    )
    job = AuditJob(
        model=str(demo_model()) if is_demo else "", text=text, images=images,
        dataset=dataset, tokens=tokens, sequences=sequences, batch_size=batch_size, shards=shards,
        delta=delta, rank_method=settings.rank_method,
        attention_maps="all" if is_demo and attention_maps is None else attention_maps, importance=costs,
        at_init=at_init or 3 * (is_demo and shards is None), device=device,
        device_map=device_map, offload_folder=offload_folder, dtype=dtype, tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    is_split, is_many = job.parts != [job], len(models) > 1 or resume or ray is not None or job.parts != [job]
    for forbidden, option, expected, fix in (
        (loss and importance is not None, "--loss", "no --importance", "Omit it: importance has the loss."),
        (is_split and job.at_init, "--at-init", "no --shards", "Omit one of them: audits do not hold enough "
         "to merge differences from initialization."),
    ):  # fmt: skip
        if forbidden:
            raise InputError(option, expected=f"{expected} next to it", got="these options", fix=fix)
    check_data(models, context, text=text, images=images, dataset=dataset)
    output.check_no_audit(out, several=is_many)
    error: Exception | None
    if not is_many:
        with output.new_folder(out):
            one_job = replace(job, model=models[0]) if models else job
            audit, error = audit_one(one_job, out, output.command_line(), verbose=verbose)
        output.exit_if_found([audit], codes, error)
        return
    jobs = jobs_of(job, models or [job.model])
    cluster = dict.fromkeys(() if ray is None else ("device", "device_map", "offload_folder"))
    for model_job in jobs:
        check_loading(model_job.model, **model_job.loading | cluster)  # a cluster's devices are unknown here
    if gpus is None:
        gpus = float((device or "").startswith("cuda"))
    on_ray = partial(run_on_ray, address=ray or None, cpus=cpus, gpus=gpus)
    with output.show_progress() as say:
        runner = partial(run_here, say=say) if ray is None else on_ray
        by_folder, error = audit_many(jobs, out, runner, resume=resume)
    output.exit_if_found(by_folder.values(), codes, error)


def parse_importance(
    how: str | None,
    is_demo: bool,
    tolerance: float,
    loss: str,
    tokens: int | None = None,
    *,
    only_loss: bool = False,
) -> "ImportanceSettings | Literal[False]":
    """Return the settings for importance. Return False if importance is not measured.

    Without an option, importance is measured exactly for the demo, and not at all for other models.
    """
    from rankwise.importance.settings import FEW_TOKENS, LOSSES, ImportanceSettings

    if how is not None:
        one_of("--importance", how, ("auto", "estimate", "exact", "none"))
    if tokens is not None:
        whole_number("--importance-tokens", tokens, 1, fix=f"Take {FEW_TOKENS}, or leave it out.")
    settings = ImportanceSettings(
        tokens=tokens,
        exact={"exact": True, "estimate": False}.get(how or "", (is_demo and not only_loss) or None),
        estimates=not only_loss,
        tolerance=tolerance,
        loss=one_of("--importance-loss", loss, LOSSES),  # type: ignore[arg-type]
    )
    is_measured = how not in (None, "none") or (how is None and is_demo and not only_loss)
    if tokens is not None and not is_measured:
        raise InputError("--importance-tokens", expected="--importance next to it", got="none", fix="Add it.")
    return settings if is_measured or only_loss else False
