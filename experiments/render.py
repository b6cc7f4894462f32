"""Write docs/results.md: every experiment on training, ours beside the paper's, what does not hold first.

    python -m experiments.render

reads experiments/results/*.jsonl, which `python -m experiments.run` writes.
"""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.experiment import BYTE_LOSS, Experiment, Row, Table, bytes_per_token, judged
from experiments.results import RESULTS, Run
from experiments.trained import EXPERIMENTS
from rankwise._internals.files import write_file
from rankwise.errors import RecordError

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
INTRODUCTION = Path(__file__).with_name("results_page.md")
HOLDS = {False: "no", None: "unclear", True: "yes"}
"""Words for a verdict, in the order of the page."""
HEADINGS = ("", "loss", "accuracy", "the paper's", "seeds", "weights", "tokens/s", "minutes", "memory")


def page(experiments: Sequence[Experiment], folder: Path = RESULTS) -> str:
    """The whole page."""
    tables = {experiment.name: experiment.table(folder) for experiment in experiments}
    parts = [INTRODUCTION.read_text(encoding="utf-8"), verdicts(experiments, tables)]
    parts += [section(one, tables[one.name]) for one in experiments if tables[one.name]]
    return "\n".join(parts)


def verdicts(experiments: Sequence[Experiment], tables: Mapping[str, Table]) -> str:
    """Expectations of small runs: those that do not hold, unclear ones, those that hold; those not run."""
    rows: list[tuple[bool | None, str]] = []
    missing: Counter[str] = Counter()
    for experiment in experiments:
        table = tables[experiment.name]
        for one in experiment.expectations:
            if not all(label in table for label in one.needs):
                missing[experiment.name] += 1
                continue
            holds, numbers = one.judge(table)
            seeds = " and ".join(dict.fromkeys(str(len(table[label].runs)) for label in one.needs))
            cells = (experiment.title, one.says, HOLDS[holds], numbers, seeds)
            rows.append((holds, f"| {' | '.join(cells)} |"))
    rows.sort(key=lambda row: list(HOLDS).index(row[0]))
    head = "| experiment | expected | holds | numbers | seeds |\n| --- | --- | --- | --- | --- |\n"
    waiting = ", ".join(f"{name} ({count})" for name, count in missing.items())
    tail = f"\nExpectations that wait for runs, by experiment: {waiting}.\n" if missing else ""
    return head + "\n".join(line for _, line in rows) + "\n" + tail


def section(experiment: Experiment, table: Table) -> str:
    """One experiment."""
    lines = [f"## {experiment.title}, small", "", f"Source: {experiment.source}.", "", experiment.notes, ""]
    lines += [f"| {' | '.join(HEADINGS)} |", f"|{' --- |' * len(HEADINGS)}"]
    lines += [line(row, experiment.paper.get(label, "–")) for label, row in table.items()]
    lines += ["", *commands(table), ""]
    if missing := [label for label in experiment.rows if label not in table]:
        lines += [f"Without a run: {'; '.join(missing)}.", ""]
    if experiment.more is not None and (more := experiment.more(table)):
        lines += [more, ""]
    return "\n".join(lines)


def line(row: Row, paper: str) -> str:
    """One row of a table."""
    cells = (
        row.label,
        loss(row),
        spread(row, "accuracy", 3),
        paper,
        ", ".join(str(run["provenance"]["seed"]) for run in row.runs),
        f"{row.mean('parameters'):,.0f}",
        f"{speed(row):,.0f}",
        f"{row.mean('cpu_seconds') / 60:.1f}",
        f"{row.mean('peak_memory') / 2**20:,.0f} MiB",
    )
    return f"| {' | '.join(cells)} |"


def speed(row: Row) -> float:
    """Tokens per second of training, of CPU time where there is no GPU: other programs change it less."""
    values = [run["values"] for run in row.runs]
    spent = ["seconds" if "gpu" in run["provenance"]["hardware"] else "cpu_seconds" for run in row.runs]
    tokens = sum(one["tokens_per_second"] * one["seconds"] for one in values)
    return tokens / sum(one[name] for one, name in zip(values, spent, strict=True))


def spread(row: Row, name: str, digits: int) -> str:
    """Mean ± standard deviation; the mean alone of one seed."""
    more = f" ± {row.spread(name):.{digits}f}" if len(row.runs) > 1 else ""
    return f"{row.mean(name):.{digits}f}{more}"


def loss(row: Row) -> str:
    """Nats; of a model of tokens nats a byte beside those a token."""
    told = spread(row, "loss", 3)
    return told if bytes_per_token(row.runs[0]) == 1 else f"{told} a token, {row.mean(BYTE_LOSS):.3f} a byte"


def commands(table: Table) -> list[str]:
    """The command of each row's first run, and what they ran on."""
    first: Mapping[str, str] = {label: row.runs[0]["provenance"]["command"] for label, row in table.items()}
    runs = [run["provenance"] for row in table.values() for run in row.runs]
    machines = sorted(
        {
            f"{one['hardware'].get('gpu', one['hardware']['processor'])}, {one['hardware']['threads']} "
            f"threads at most, torch {one['torch']}, transformers {one['transformers']}"
            for one in runs
        }
    )
    read = sorted({data(run) for row in table.values() for run in row.runs})
    configured = [run["settings"] for row in table.values() for run in row.runs]
    trained = sorted({(one["steps"], one["batch"]) for one in configured})
    length = "; ".join(f"{steps:,} steps of {batch}" for steps, batch in trained)
    on = f"{length}. On {'; '.join(machines)}. Data: {'; '.join(read)}."
    folded = [
        '<details markdown="1"><summary>Commands</summary>',
        "",
        "```sh",
        *first.values(),
        "```",
        "",
        "</details>",
    ]
    return [*folded, "", on]


def data(run: Run) -> str:
    """What a run read, and how much of it."""
    about, chance = run["values"]["data"], run["values"]["chance"]
    told = f"{about['source']}, {about['train']:,} examples to draw from, {judged(run):,} to judge by"
    if chance is not None:
        told += f" (always the most common answer: {chance:.3f})"
    return told


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    if not any(chosen.results.glob("*.jsonl")):
        parser.error(f"--results {chosen.results}: no results there; `python -m experiments.run` writes them")
    try:
        written = page(list(EXPERIMENTS.values()), chosen.results)
    except RecordError as error:
        parser.error(str(error))
    write_file(chosen.page, written, "page")
    print(f"wrote {chosen.page}")


if __name__ == "__main__":
    main()
