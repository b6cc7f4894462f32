"""Tables from what the monitor kept in the results of runs."""

import statistics
from collections.abc import Callable, Sequence

from experiments.experiment import Row, Table
from experiments.results import Run


def by_layer(row: Row, measure: str, step: int | None = None) -> list[float]:
    """A measure of the monitor by layer, the mean over seeds, at a step or at the last one that was audited.

    Class attention, which reads tokens into one row of rank 1, is left out.

    Args:
        row: of a table.
        measure: such as ``states_relative_spread`` or ``heads_effective_rank``.
        step: of the training.
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
    """The steps at which every run of a row was audited."""
    return sorted(set.intersection(*(_audited(run) for run in row.runs)))


def _audited(run: Run) -> set[int]:
    return {int(step) for column in run["values"]["rank"].values() for step in column["steps"]}


def collapse(table: Table) -> str:
    """How far apart the tokens of the last layer are, and their effective rank, by step."""
    lines = ["By step: μ/‖Y‖ of the last layer's tokens, and their effective rank.", ""]
    rows = each_seed(table)
    audited = sorted({step for row in rows for step in steps(row)})
    lines += markdown(
        ("", *(f"step {step}" for step in audited)),
        [(row.label, *(_last(row, step) if step in steps(row) else "–" for step in audited)) for row in rows],
    )
    return "\n".join(lines)


def each_seed(table: Table) -> list[Row]:
    """A row for each run: the mean of a stack that collapsed and one that did not is neither."""
    return [
        Row(label if len(row.runs) == 1 else f"{label}, seed {run['seed']}", [run])
        for label, row in table.items()
        for run in row.runs
    ]


def _last(row: Row, step: int) -> str:
    share, rank = (by_layer(row, f"states_{name}", step) for name in ("relative_spread", "effective_rank"))
    return f"{share[-1]:.3f}, {rank[-1]:.1f}" if share and rank else "–"


def learned(table: Table) -> str:
    """Learned λ by layer, of each seed; a mean over channels where each has its own."""
    rows = [
        (row.label, str(run["seed"]), ", ".join(f"{value:.2f}" for value in run["values"]["lambdas"]))
        for row in table.values()
        for run in row.runs
        if run["values"]["lambdas"]
    ]
    if not rows:
        return ""
    return "\n".join(
        [
            "Learned λ by layer, of one for each channel the mean over channels:",
            "",
            *markdown(("", "seed", "λ"), rows),
        ]
    )


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *rows)]


def joined(*parts: Callable[[Table], str]) -> Callable[[Table], str]:
    """Several of these, one after the other."""
    return lambda table: "\n\n".join(text for part in parts if (text := part(table)))
