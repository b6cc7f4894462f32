"""`rankwise skip`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from rankwise.cli.load_data import LoadedData
    from rankwise.cli.load_model import LoadedModel
    from rankwise.skips import Skips

HELP = """Put λ-skips into a model: the skip connection around every mixer becomes λ·x.

With --learn-on, λ alone is fitted, everything else frozen. The model folder it writes is the model as it was
with skips.json and skips.safetensors beside it; `rankwise audit` reads both.

[bold]Examples[/bold]

  rankwise skip gpt2 --init 1 --learn-on book.txt --steps 100 --out gpt2-skips

  rankwise skip gpt2-skips --text book.txt --certify

  rankwise skip ./my-bert --init 2 --sites "bert.encoder.layer.[89]" --text book.txt --out my-bert-2
"""


def command(
    model: Annotated[str, typer.Argument(help="Hugging Face name, or folder, with or without λ-skips.")],
    init: Annotated[
        float | None, typer.Option(help="λ to start from: 1 for new ones; those saved stay as they are.")
    ] = None,
    learn_on: Annotated[
        Path | None, typer.Option(help="Text to fit λ on; every fifth sequence is kept for the report.")
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Steps of the fit.")] = 50,
    lr: Annotated[float, typer.Option(help="Learning rate of λ.")] = 0.02,
    text: Annotated[Path | None, typer.Option(help="Text to measure on, where nothing is learnt.")] = None,
    sites: Annotated[
        list[str] | None,
        typer.Option(help="Modules whose λ to put in, set or fit, with wildcards; may be repeated."),
    ] = None,
    per: Annotated[
        str | None, typer.Option(help="One λ for each layer or channel: layer, or as those saved.")
    ] = None,
    certify: Annotated[bool, typer.Option("--certify", help="Say what λ guarantees.")] = False,
    share: Annotated[float, typer.Option("--a", help="Part of μ² that each layer is to keep.")] = 0.5,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 128,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences in all.")] = 40,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 4,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, …")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16, float16.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the model and its skips.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code that comes with the model run.")
    ] = False,
) -> None:
    """Put in, fit and certify λ-skips; see `HELP`."""
    from rich.console import Console

    from rankwise._internals.files import writable_folder
    from rankwise.cli.load_data import load_data
    from rankwise.cli.load_model import load_model
    from rankwise.cli.output import command_line, quiet_libraries
    from rankwise.report import print_document
    from rankwise.report.skip_report import certificate_document, skip_document
    from rankwise.skips import certify_skip, load_skips, mean_loss, skips_of, spread_by_layer

    _check(out, certify, per, lr, share, learn_on, text)
    if out is not None:
        writable_folder(out)
    quiet_libraries()
    subject = load_model(
        model, revision=revision, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    inputs = load_data(
        subject,
        text=learn_on or text,
        tokens=tokens,
        sequences=sequences,
        batch_size=1 if learn_on else batch_size,
    )
    learning, held = _split(inputs, subject, learn=learn_on is not None, batch_size=batch_size)
    skips = _skips(subject, init, per, sites)
    report: dict[str, Any] = {"command": command_line(), "data": inputs.data}
    mask = _mask_token(subject)
    report["collapse"] = [spread_by_layer(subject.model, held)]
    if learn_on is not None:
        report["loss"] = [mean_loss(subject.model, held, mask)]
        report["scales"] = _fit(subject, learning, steps, lr, mask)
        report["loss"].append(mean_loss(subject.model, held, mask))
        report["collapse"].append(spread_by_layer(subject.model, held))
    console = Console()
    now = {name: [float(value.detach().mean())] * 2 for name, value in skips.items()}
    print_document(skip_document(now | report.get("scales", {}), report, skips.notes), console)
    if out is not None:
        _say(console, _write(subject, out, report))
    if not certify:
        return
    if out is not None and not skips_of(subject.model):  # taken off to save the model
        load_skips(subject.model, out)
    certificate = certify_skip(subject.model, held[0], share)
    print_document(certificate_document(certificate), console)
    if out is not None:
        _say(console, [certificate.save(out / "certificate.json")])


def _say(console: "Console", written: list[Path]) -> None:
    for path in written:
        console.print(f"wrote: {path}", highlight=False, markup=False, soft_wrap=True)


def _check(
    out: Path | None,
    certify: bool,
    per: str | None,
    lr: float,
    share: float,
    learn_on: Path | None,
    text: Path | None,
) -> None:
    from rankwise.errors import InputError, did_you_mean
    from rankwise.skips.certify import check_share
    from rankwise.skips.fit import check_rate

    check_rate("--lr", lr)
    check_share(share)
    if learn_on is not None and text is not None:
        raise InputError(
            f"--learn-on {learn_on} --text {text}",
            expected="one of the two: a fit is measured on every fifth sequence of what it learns from",
            got="both",
            fix="Leave --text out; to measure on it, run again on the folder of --out, with --text alone.",
        )
    if per not in (None, "layer", "channel"):
        raise InputError(
            "--per", expected="layer or channel", got=per, fix=did_you_mean(per, ["layer", "channel"])
        )
    if out is None and not certify:
        raise InputError(
            "what to do",
            expected="--out DIR, --certify, or both",
            got="neither",
            fix="Say where the changed model goes, or ask what its λ guarantees.",
        )


def _split(
    inputs: "LoadedData", subject: "LoadedModel", learn: bool, batch_size: int
) -> tuple[list[Any], list[Any]]:
    """Return batches to learn on, and batches to measure on: every fifth sequence."""
    import torch

    from rankwise.errors import InputError

    device = next(subject.model.parameters()).device
    given = list(inputs.batches)
    if not all(isinstance(batch, Mapping) for batch in given):
        raise InputError(
            f"model {subject.name}",
            expected="a model that takes its inputs by name, as those of transformers do",
            got="one that takes a tensor",
            fix="Put λ-skips in with `rw.add_lambda_skip(model, example=batch)`.",
        )
    batches = [{name: value.to(device) for name, value in batch.items()} for batch in given]
    if not learn:
        return [], batches
    if len(batches) < 2:
        raise InputError(
            "--learn-on",
            expected="two sequences or more: one to learn from, one to measure on",
            got=f"{len(batches)}",
            fix="Give a longer text, or fewer --tokens.",
        )
    held = batches[::5]
    rest = [batch for at, batch in enumerate(batches) if at % 5]
    alike = len({batch["input_ids"].shape for batch in rest}) == 1
    if not alike:
        return rest, held
    joined = [
        {name: torch.cat([sequence[name] for sequence in rest[at : at + batch_size]]) for name in rest[0]}
        for at in range(0, len(rest), batch_size)
    ]
    return joined, held


def _skips(subject: "LoadedModel", init: float | None, per: str | None, sites: list[str] | None) -> "Skips":
    """Return the λ-skips of a model; the chosen ones, by default all, can learn."""
    import torch

    from rankwise.errors import InputError
    from rankwise.skips import add_lambda_skip, apply_saved_skips
    from rankwise.skips.add import add_missing_skips, check_lambda, match_sites

    saved = apply_saved_skips(subject.model, subject.source) if subject.source else None
    if saved is None:
        return add_lambda_skip(
            subject.model,
            init=1.0 if init is None else init,
            per="channel" if per == "channel" else "layer",
            sites=sites,
        )
    kind = "channel" if any(value.numel() > 1 for value in saved.values()) else "layer"
    if per not in (None, kind):
        raise InputError(
            f"--per {per}",
            expected=f"--per {kind}, as the λ saved in {subject.source}",
            got=str(per),
            fix="Leave it out, or delete skips.json and skips.safetensors to start anew.",
        )
    skips = saved if sites is None else add_missing_skips(subject.model, sites)
    chosen = {site.name for site in match_sites(list(skips.sites.values()), sites)}
    if init is not None:
        check_lambda("--init", init)
        with torch.no_grad():
            for name in chosen:
                skips[name].fill_(init)
    for name, parameter in skips.items():
        parameter.requires_grad_(name in chosen)
    return skips


def _mask_token(subject: "LoadedModel") -> int | None:
    if not type(subject.model).__name__.endswith("ForMaskedLM"):
        return None
    return _tokenizer(subject).mask_token_id if subject.source else None


def _tokenizer(subject: "LoadedModel") -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        subject.source, revision=subject.revision or "main", trust_remote_code=subject.trust_remote_code
    )


def _fit(
    subject: "LoadedModel", batches: list[Any], steps: int, lr: float, mask: int | None
) -> dict[str, list[float]]:
    from rich.console import Console
    from rich.progress import Progress

    from rankwise.skips import fit_skips

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("fitting λ", total=steps)

        def update(step: int, loss: float) -> None:
            progress.update(task, completed=step, description=f"fitting λ: loss {loss:.3f}")

        return fit_skips(subject.model, batches, steps, lr, mask, update).scales


def _write(subject: "LoadedModel", out: Path, report: dict[str, Any]) -> list[Path]:
    """Write the λ-skips, remove them from the model, write the model, and return the paths."""
    from rankwise.skips import remove_lambda_skip, save_skips

    written = [*save_skips(subject.model, out, fitted=report)]
    (out / "certificate.json").unlink(missing_ok=True)  # of the λ that were here before
    if subject.source:
        remove_lambda_skip(subject.model)
        transformed: Any = subject.model
        older = {path: path.stat().st_mtime_ns for path in out.iterdir()}
        transformed.save_pretrained(out)
        weights = [path for path in out.glob("*model*") if path.stat().st_mtime_ns != older.get(path)]
        written.extend(sorted(weights))  # one file, or shards and their index
        _tokenizer(subject).save_pretrained(out)
    return written
