"""Tables of the numbers that the monitor kept in the runs."""

import statistics

from experiments.render import markdown_table
from experiments.results import Run
from experiments.verdicts import Row, Table


def by_layer(row: Row, measure: str, step: int | None = None) -> list[float]:
    """Return a measure by layer, the mean over seeds, at a step (None: the last audited step).

    Class attention, whose output is one row of rank 1, is left out.
    """
    layers: dict[str, list[float]] = {}
    for run in row.runs:
        if (column := run["values"]["rank"].get(measure)) is None:
            continue
        at = max(map(int, column["steps"])) if step is None else step
        for place, value in zip(column["places"], column["steps"][str(at)], strict=True):
            if not place.endswith(".cross"):
                layers.setdefault(place, []).append(value)
    return [statistics.fmean(values) for _, values in sorted(layers.items())]


def steps(row: Row) -> list[int]:
    """Return the steps at which every run of a row was audited."""
    return sorted(set.intersection(*(_audited(run) for run in row.runs)))


def _audited(run: Run) -> set[int]:
    return {int(step) for column in run["values"]["rank"].values() for step in column["steps"]}


def collapse(table: Table) -> dict[str, str]:
    """Return token spread and effective rank of the last layer's tokens by step, for each seed."""
    rows = [  # a row for each run: the mean of a collapsed and another stack describes neither
        Row(label if len(row.runs) == 1 else f"{label}, seed {run['seed']}", [run])
        for label, row in table.items()
        for run in row.runs
    ]
    audited = sorted({step for row in rows for step in steps(row)})
    shown = markdown_table(
        ("", *(f"step {step}" for step in audited)),
        [(row.label, *(_last(row, step) if step in steps(row) else "–" for step in audited)) for row in rows],
    )
    return {"collapse": shown}


def _last(row: Row, step: int) -> str:
    share, rank = (by_layer(row, f"states_{name}", step) for name in ("relative_collapse", "effective_rank"))
    return f"{share[-1]:.3f}, {rank[-1]:.1f}" if share and rank else "–"


def learned(table: Table) -> dict[str, str]:
    """Return learned λ by layer for each seed, the mean over channels."""
    rows = [
        (row.label, str(run["seed"]), ", ".join(f"{value:.2f}" for value in run["values"]["lambdas"]))
        for row in table.values()
        for run in row.runs
        if run["values"]["lambdas"]
    ]
    return {"learned": markdown_table(("", "seed", "λ"), rows)}
