"""Head width: where rank at initialisation and accuracy after training stop growing."""

import statistics
from collections.abc import Sequence

from experiments.experiment import Expectation, Experiment, Row, Table, Verdict, has_learned, margin
from experiments.trained.reading import by_layer, markdown

WIDTHS = (1, 2, 4, 8, 16, 32)
TIED = {False: "D ≠ HK", True: "D = HK"}
NEARLY = 0.95
"""Share of the largest value from which on a curve counts as saturated."""


def label(width: int, tied: bool) -> str:
    return f"{TIED[tied]}, K={width}"


def saturated(values: list[float]) -> int:
    """The first width whose value is nearly the largest."""
    return next(width for width, value in zip(WIDTHS, values, strict=True) if value >= NEARLY * max(values))


def curves(table: Table, tied: bool) -> tuple[list[float], list[float]]:
    """Mean effective rank of heads at the start, and accuracy, by width."""
    rows = [row for width in WIDTHS if (row := table.get(label(width, tied)))]
    ranks = [statistics.fmean(by_layer(row, "heads_effective_rank", 0)) for row in rows]
    return ranks, [row.mean("accuracy") for row in rows]


def places(rows: Sequence[Row], table: Table) -> tuple[int, int]:
    """Between which widths accuracy begins to be nearly the largest, within `margin`."""
    bar = NEARLY * max(row.mean("accuracy") for row in rows)
    above = {width: row.mean("accuracy") - bar for width, row in zip(WIDTHS, rows, strict=True)}
    sure = {width: margin([row], "accuracy", table) for width, row in zip(WIDTHS, rows, strict=True)}
    least = next(width for width in WIDTHS if above[width] >= -sure[width])
    most = next((width for width in WIDTHS if above[width] >= sure[width]), WIDTHS[-1])
    return least, most


def same_place(tied: bool) -> Expectation:
    """Rank and accuracy saturate at one width."""

    def judge(table: Table) -> Verdict:
        rows = [table[label(width, tied)] for width in WIDTHS]
        rank = saturated(curves(table, tied)[0])
        least, most = places(rows, table)
        possible = [width for width in WIDTHS if least <= width <= most]
        said = f"rank at K={rank}, accuracy at K={least}{f' to {most}' if most > least else ''}"
        if not has_learned(rows, "accuracy"):
            return None, said
        if rank == WIDTHS[0] or most == WIDTHS[0]:  # at its largest everywhere: no agreement
            return False, f"{said}: a curve that is flat from the first K on has no place of saturation"
        answers = {WIDTHS[0] < width and rank / 2 <= width <= 2 * rank for width in possible}
        return answers.pop() if len(answers) == 1 else None, said

    says = (
        f"{TIED[tied]}: rank at the start and accuracy are at 95 % of their largest at the same K, to a "
        "factor of 2"
    )
    return Expectation(says, [label(width, tied) for width in WIDTHS], judge)


def told(table: Table) -> str:
    rows = []
    for tied in TIED:
        labels = [name for name in (label(width, tied) for width in WIDTHS) if name in table]
        for name, rank, score in zip(labels, *curves(table, tied), strict=True):
            rows.append((name, f"{rank:.2f}", f"{score:.3f}"))
    return "\n".join(markdown(("", "effective rank of heads at the start", "accuracy"), rows))


def experiment(task: str, title: str) -> Experiment:
    return Experiment(
        name=f"saturation-{task}",
        title=title,
        source="“On the Limitation and Redundancy of Transformers”: accuracy and rank saturate at one K, "
        "CIFAR-10 and IMDB, D = H·K and D ≠ H·K",
        recipe="saturation",
        rows={
            label(width, tied): {"task": task, "head_dim": width, "tied": tied}
            for tied in TIED
            for width in WIDTHS
        },
        metric="accuracy",
        expectations=[same_place(tied) for tied in TIED],
        notes="D = HK: 64 / K heads of width K. D ≠ HK: K is the width of queries and keys, 4 heads and "
        "their values stay. Initial weights have the scale D^−1/2; at 0.02, the usual value for wide models, "
        "all heads begin with rank 1.0 (`rankwise train saturation model.options.initializer_range=0.02 "
        "task.path=cifar10`). Effective rank of the probe's sequences, the mean over layers and heads that "
        "mix tokens.",
        more=told,
    )


SATURATION_IMAGES = experiment("images", "Head width, CIFAR-10 patches")
SATURATION_TEXT = experiment("text", "Head width, IMDB bytes")
