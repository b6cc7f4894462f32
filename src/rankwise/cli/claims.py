"""Command `rankwise claims`: check claims of papers about ranks and attention on a model."""

from collections import Counter
from typing import Annotated

import typer

from rankwise.cli import options

HELP = """Check claims of papers about ranks and attention on a model.

The table shows each claim with the paper's number and yours, and says if the claim holds for this model and
these data, or why it cannot be measured. Definitions and rules follow the table. Without a model, the demo is
checked.

[bold]Examples[/bold]

  rankwise claims gpt2 --text book.txt
  rankwise claims ./my-bert --dataset imdb:test:text --sequences 4
"""


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Hugging Face NAME or NAME@REVISION, folder, GGUF file, or module.py:factory; "
            "by default the demo.",
        ),
    ] = None,
    text: options.Text = None,
    images: options.Images = None,
    dataset: options.Dataset = None,
    tokens: options.Tokens = 256,
    sequences: options.Sequences = 8,
    batch_size: options.BatchSize = 4,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Check claims; `HELP` describes the command."""
    from rankwise.auditing.records import Verdict
    from rankwise.claims import check
    from rankwise.claims.table import CLAIMS
    from rankwise.cli import output
    from rankwise.cli.audit_job import AuditJob, load
    from rankwise.cli.load_data import check_data
    from rankwise.cli.load_model import demo_model, demo_text
    from rankwise.errors import INTERRUPTED
    from rankwise.importance import ImportanceSettings
    from rankwise.report.document import Document, Section, Table

    if model is None and images is None and dataset is None:
        text = text or demo_text()
    check_data([] if model is None else [model], text=text, images=images, dataset=dataset)
    job = AuditJob(
        model=model or str(demo_model()), text=text, images=images, dataset=dataset, tokens=tokens,
        sequences=sequences, batch_size=batch_size, device=device, dtype=dtype,
        trust_remote_code=trust_remote_code, importance=ImportanceSettings(),
    )  # fmt: skip
    with output.show_progress() as on_progress:
        loaded, data = load(job)
        claims = check(loaded.model, data.batches, on_progress=on_progress)
    count = Counter(claim.outcome for claim in claims)
    sentence = f"{count['holds']} of {len(claims)} claims hold, {count['does not hold']} do not, "
    sentence += f"{count['cannot be measured here']} cannot be measured here."
    rows, rules = [], []
    for number, claim in enumerate(claims, 1):
        yours = "; ".join(filter(None, (claim.yours, claim.reason)))
        rows.append([f"{number}. {claim.statement}", claim.theirs, yours, claim.outcome])
        rules.append((f"{number}. {claim.source}", claim.definition))
    document = Document(
        command="Rankwise claims", heading=model or "the bundled demo",
        setting=data.data.replace(str(demo_text()), "the bundled text"), verdict=Verdict(sentence=sentence),
        sections=[
            Section("claims", "", tables=[Table("", ["claim", "theirs", "yours", "outcome"], rows)]),
            Section("rules", "", facts=rules),
        ],
        notes=[*loaded.notes, *data.notes],
    )  # fmt: skip
    output.print_results(document)
    if len(claims) < len(CLAIMS):
        raise typer.Exit(INTERRUPTED)
