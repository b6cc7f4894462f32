"""`rankwise sweep`."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.cli.sweep_jobs import Job, Result

HELP = """Audit many models, revisions and data sets, here or as tasks of a Ray cluster.

Each model is audited on each data set by a job of its own, and its audits are merged into one. An audit is
written as soon as it is there; a job whose worker dies is run again, with --resume what is finished is not.
Writes MODEL/audit.json with its page and tables, MODEL/parts/DATA.json, and of several models index.html;
names.json tells what MODEL and DATA stand for, and a name stays when models or data are added.

[bold]Examples[/bold]

  rankwise sweep gpt2 distilgpt2 --text books.txt --text news.txt --out sweep

  rankwise sweep EleutherAI/pythia-70m --revision step1000 --revision step143000 --text books.txt --out steps

  rankwise sweep run/checkpoint-* --text books.txt --out sweep --ray local --resume

  rankwise sweep meta-llama/Llama-3.1-8B --text books.txt --out sweep --ray auto --gpus 1 --device cuda
"""


def command(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Hugging Face names, folders, or module.py:factory."),
    ],
    text: Annotated[list[Path] | None, typer.Option(help="Text file; may be given more than once.")] = None,
    images: Annotated[
        list[Path] | None, typer.Option(help="Folder of pictures; may be given more than once.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="NAME[:split:column]; may be given more than once.")
    ] = None,
    revision: Annotated[
        list[str] | None, typer.Option(help="Of each model; may be given more than once.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the sweep.")] = Path("rankwise-sweep"),
    resume: Annotated[bool, typer.Option("--resume", help="Keep the audits that are finished.")] = False,
    ray: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster, or local; without it jobs run here in turn.")
    ] = None,
    cpus: Annotated[
        float | None, typer.Option(min=0, help="With --ray: CPUs that each job takes (1 by default).")
    ] = None,
    gpus: Annotated[
        float | None, typer.Option(min=0, help="With --ray: GPUs that each job takes (none by default).")
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option(
            min=0, help="With --ray: how often a job whose worker died is run again (3 by default)."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 256,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of each data set.")] = 8,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 4,
    delta: Annotated[float, typer.Option(help="Singular values below it count as zero.")] = 1e-2,
    method: Annotated[str, typer.Option(help="Of the ranks: exact, estimate, or auto.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu (by default), cuda, mps, …")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16, float16.")] = "auto",
    tokenizer: Annotated[str | None, typer.Option(help="Folder or name, where models have none.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code that comes with a model run.")
    ] = False,
) -> None:
    """Run a sweep; see `HELP`."""
    from rankwise._internals.files import writable_folder
    from rankwise.auditing import AuditSettings
    from rankwise.cli.audit_job import AuditTask
    from rankwise.cli.output import quiet_libraries, show_progress
    from rankwise.cli.sweep_jobs import RETRIES, jobs_of, run_here, sweep, why_again
    from rankwise.cli.sweep_ray import ray_tasks

    if ray is None:
        _refuse_without_ray({"--cpus": cpus, "--gpus": gpus, "--retries": retries})
    cpus, gpus = 1 if cpus is None else cpus, gpus or 0
    if gpus:
        _refuse_idle_gpus(gpus, device)
    retries = RETRIES if retries is None else retries
    settings = AuditSettings.of(delta=delta, method=method)  # type: ignore[arg-type]
    task = AuditTask(
        model="",
        tokens=tokens,
        sequences=sequences,
        batch_size=batch_size,
        delta=delta,
        method=settings.method,
        device=device,
        dtype=dtype,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
    )
    data: list[dict[str, Any]] = [{"text": path.resolve()} for path in text or []]
    data += [{"images": path.resolve()} for path in images or []]
    data += [{"dataset": name} for name in dataset or []]
    jobs = jobs_of(task, [_located(model) for model in models], revision or [], data or [{}], out)
    writable_folder(out)
    quiet_libraries()
    for job in jobs if resume else ():
        if why := why_again(job, out):
            print(f"rankwise: {job.name} is run again: {why}", file=sys.stderr)
    stopped = False
    with (
        show_progress() as say,
        nullcontext(run_here) if ray is None else ray_tasks(ray, cpus, gpus) as runner,
    ):
        teller = _Teller(len(jobs), say)
        try:
            outcome = sweep(jobs, out, runner, resume=resume, retries=retries, on_result=teller.tell)
        except KeyboardInterrupt:
            stopped = True
    unmerged = _write(jobs, out)
    if stopped:
        print(f"rankwise: stopped; `--resume` runs what is missing in {out}", file=sys.stderr)
        raise typer.Exit(130)
    print(f"{len(outcome.done)} audits done, {len(outcome.kept)} kept, {len(outcome.failed)} failed: {out}")
    if outcome.failed or unmerged:
        raise typer.Exit(1)


def _refuse_without_ray(given: dict[str, float | int | None]) -> None:
    """Jobs that run here in turn take what there is, and have no worker that could die alone."""
    from rankwise.errors import InputError

    for option, value in given.items():
        if value is not None:
            raise InputError(
                f"{option} {value:g}",
                expected="--ray beside it, whose tasks it is about",
                got="none",
                fix="Pass --ray local, or leave it out"
                + ("; --device cuda runs each job here on a GPU." if option == "--gpus" else "."),
            )


def _refuse_idle_gpus(gpus: float, device: str | None) -> None:
    """A job on the CPU would hold GPUs that it does not use."""
    from rankwise.errors import InputError

    if device is None or device.startswith("cpu"):
        raise InputError(
            f"--gpus {gpus:g}",
            expected="jobs that use the GPUs they hold",
            got=f"--device {device or 'cpu'}",
            fix="Pass --device cuda, or leave --gpus out.",
        )


def _located(model: str) -> str:
    """A path from the root: workers may run in another folder."""
    path, colon, factory = model.rpartition(":")
    if path.endswith(".py"):
        return f"{Path(path).resolve()}{colon}{factory}"
    return str(Path(model).resolve()) if Path(model).exists() else model


class _Teller:
    """Says how far a sweep is, and at once what fails."""

    def __init__(self, jobs: int, say: "Callable[[str], None]") -> None:
        self._jobs, self._say, self._ended = jobs, say, 0

    def tell(self, job: "Job", result: "Result") -> None:
        """A job has ended."""
        self._ended += 1
        self._say(f"{self._ended} of {self._jobs} audits: {job.name}")
        if not isinstance(result, str):
            print(f"rankwise: {job.name}: {result}", file=sys.stderr)


def _write(jobs: "Sequence[Job]", out: Path) -> int:
    """The report of each model whose audits are all there, and the page of them all; how many have none."""
    from rankwise.auditing import Audit
    from rankwise.cli.audit_history import write_history_page
    from rankwise.cli.output import write_report
    from rankwise.cli.sweep_jobs import merged

    of_models = merged(jobs, out)
    found = {folder: audit for folder, audit in of_models.items() if isinstance(audit, Audit)}
    for folder, audit in of_models.items():
        if not isinstance(audit, Audit):
            print(f"rankwise: no report of {folder}: {audit}", file=sys.stderr)
    for folder, audit in found.items():
        write_report(audit, out / folder, brief=True)
    if len(found) > 1:
        write_history_page([(folder, folder, audit) for folder, audit in found.items()], out)
    return len(of_models) - len(found)
