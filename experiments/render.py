"""Pages of results: tables in Markdown, and verdicts, those that do not hold first."""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from experiments.experiment import Experiment
from experiments.results import RESULTS, Run
from experiments.training.cost import needs
from experiments.verdicts import BYTE_LOSS, Row, Table, bytes_per_token, evaluated_examples

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "evidence" / "results.md"
PAGES = Path(__file__).with_name("pages")
HOLDS = {False: "no", None: "unclear", True: "yes"}
"""Words of a verdict, in the order of the page."""
HEADINGS = ("", "loss", "accuracy", "in the paper", "seeds", "weights", "minutes")
VERDICT = ("expected", "holds", "numbers", "seeds")


def pages(experiments: Sequence[Experiment], folder: Path = RESULTS) -> dict[Path, str]:
    """Return docs/evidence/results.md and one page per experiment."""
    tables = {one.name: one.table(folder) for one in experiments}
    links = {one.name: f"[{one.title}](results/{one.name}.md)" for one in experiments}
    found = {one.name: verdicts(one, tables[one.name]) for one in experiments}
    counts = Counter((name, row[1]) for name, rows in found.items() for row in rows)
    summary = [(link, *(str(counts[name, word]) for word in HOLDS.values())) for name, link in links.items()]
    marks = {"experiments": markdown_table(("experiment", "does not hold", "unclear", "holds"), summary)}
    for word in ("no", "yes"):
        rows = [
            (links[name], said, *numbers)
            for name, own in found.items()
            for said, holds, *numbers in own
            if holds == word
        ]
        marks[word] = markdown_table(("experiment", "expected", *VERDICT[2:]), rows)
    files = {PAGE: fill_page("evidence/results", marks)}
    for one in experiments:
        if tables[one.name]:
            files[PAGE.with_suffix("") / f"{one.name}.md"] = page(one, tables[one.name], found[one.name])
    return files


def verdicts(experiment: Experiment, table: Table) -> list[tuple[str, ...]]:
    """Return the verdict on each expectation whose rows have runs; what does not hold comes first."""
    rows = []
    for one in experiment.expectations:
        if all(label in table for label in one.needs):
            holds, numbers = one.decide(table)
            seeds = " and ".join(dict.fromkeys(str(len(table[label].runs)) for label in one.needs))
            rows.append((one.statement, HOLDS[holds], numbers, seeds))
    return sorted(rows, key=lambda row: list(HOLDS.values()).index(row[1]))


def page(experiment: Experiment, table: Table, decided: Sequence[Sequence[str]]) -> str:
    """Return the page of an experiment from pages/results/NAME.md: conclusions, verdicts, runs, setting."""
    rows = [cells(row, experiment.published.get(label, "–")) for label, row in table.items()]
    runs = [markdown_table(HEADINGS, rows), origin(experiment, table)]
    if missing := [label for label in experiment.rows if label not in table]:
        runs.append(f"Rows without a run: {'; '.join(missing)}.")
    held = [markdown_table(VERDICT, decided)]
    if waiting := len(experiment.expectations) - len(decided):
        held.append(f"Expectations that wait for runs: {waiting}.")
    source = f"Source of the claim: {experiment.source}."
    if experiment.large:
        some, required = next(iter(experiment.large)), needs(experiment.large.values())
        said = f"{len(experiment.large)} rows at the size of the paper, such as “{some}”, {required}"
        source += f" Not run here (`--large`): {said}."
    own = {"title": experiment.title, "verdicts": "\n\n".join(held), "runs": "\n\n".join(runs)}
    return fill_page(f"results/{experiment.name}", {**own, "source": source, **experiment.tables(table)})


def fill_page(name: str, tables: Mapping[str, str], origin: Mapping[str, str] = MappingProxyType({})) -> str:
    """Fill the marks of pages/NAME.md; raise if a mark is left over, or a table has no mark.

    `origin` holds what a page may say of its report.
    """
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    marks = set(re.findall(r"\{\{(\w+)\}\}", text))
    if not set(tables) <= marks <= {*origin, *tables}:
        raise ValueError(f"pages/{name}.md: expected the marks {sorted(tables)}, got {sorted(marks)}")
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: {**origin, **tables}[mark[1]], text)


def mean_std(numbers: Sequence[float], digits: int = 4) -> str:
    """Return mean ± standard deviation; the mean alone of one number."""
    around = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.{digits}f}{around}"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (headings, ["---"] * len(headings), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(row: Row, published: str) -> tuple[str, ...]:
    return (
        row.label,
        loss(row),
        row_mean_std(row, "accuracy", 3),
        published,
        ", ".join(str(run["seed"]) for run in row.runs),
        f"{row.mean('parameters'):,.0f}",
        f"{row.mean('cpu_seconds') / 60:.1f}",
    )


def row_mean_std(row: Row, name: str, digits: int) -> str:
    """Return the mean of a row over its seeds ± its standard deviation."""
    return mean_std(row.scores(name), digits)


def loss(row: Row) -> str:
    """Return the loss in nats; for a model on tokens also in nats per byte."""
    told = row_mean_std(row, "loss", 3)
    return (
        told if bytes_per_token(row.runs[0]) == 1 else f"{told} per token, {row.mean(BYTE_LOSS):.3f} per byte"
    )


def origin(experiment: Experiment, table: Table) -> str:
    """Return the command of the runs, their length, machines and data."""
    runs = [run for row in table.values() for run in row.runs]
    machines = sorted(
        {
            f"{one['hardware'].get('gpu', one['hardware']['processor'])}, {one['hardware']['threads']} "
            f"threads at most, torch {one['torch']}, transformers {one['transformers']}"
            for one in (run["provenance"] for run in runs)
        }
    )
    lengths = sorted({(run["settings"]["steps"], run["settings"]["batch"]) for run in runs})
    length = "; ".join(f"{steps:,} steps of {batch}" for steps, batch in lengths)
    data = "; ".join(sorted({data_of(run) for run in runs}))
    command = f"`python -m experiments run {experiment.name} --data DATA`"
    return f"{command}: {length}. On {'; '.join(machines)}. Data: {data}."


def data_of(run: Run) -> str:
    about, chance = run["values"]["data"], run["values"]["chance"]
    examples = f"{about['train']:,} training examples, {evaluated_examples(run):,} for evaluation"
    common = "" if chance is None else f" (the most common answer is right in {chance:.3f})"
    return f"{about['source']}, {examples}{common}"
