"""Head width: where rank at initialisation and accuracy after training stop growing."""

import statistics

from recipes.experiment import Expectation, Experiment, Table, Verdict
from recipes.trained.reading import by_layer, markdown

WIDTHS = (1, 2, 4, 8, 16, 32)
NEARLY = 0.95
"""Share of the largest value from which on a curve counts as saturated."""


def label(width: int) -> str:
    return f"K={width}"


def saturated(values: list[float]) -> int:
    """The first width whose value is nearly the largest."""
    return next(width for width, value in zip(WIDTHS, values, strict=True) if value >= NEARLY * max(values))


def curves(table: Table) -> tuple[list[float], list[float]]:
    """Mean effective rank of heads at the start, and accuracy, by width."""
    rows = [table[label(width)] for width in WIDTHS if label(width) in table]
    ranks = [statistics.fmean(by_layer(row, "heads_effective_rank", 0)) for row in rows]
    return ranks, [row.mean("accuracy") for row in rows]


def same_place(table: Table) -> Verdict:
    rank, accuracy = (saturated(values) for values in curves(table))
    said = f"rank at K={rank}, accuracy at K={accuracy}"
    if min(rank, accuracy) == WIDTHS[0]:  # a flat curve is at its largest everywhere, which is no agreement
        return False, f"{said}: what is there at the first K does not saturate at another"
    return max(rank, accuracy) <= 2 * min(rank, accuracy), said


def told(table: Table) -> str:
    rows = [one for width in WIDTHS if (one := label(width)) in table]
    ranks, scores = curves(table)
    lines = markdown(
        ("", "effective rank of heads at the start", "accuracy"),
        [(row, f"{rank:.2f}", f"{score:.3f}") for row, rank, score in zip(rows, ranks, scores, strict=True)],
    )
    return "\n".join(lines)


def experiment(task: str, title: str) -> Experiment:
    return Experiment(
        name=f"saturation-{task}",
        title=title,
        source="“On the Limitation and Redundancy of Transformers”: accuracy and rank saturate at one K, "
        "CIFAR-10 and IMDB, D = H·K and D ≠ H·K",
        recipe="saturation",
        rows={label(width): {"task": task, "head_dim": width} for width in WIDTHS},
        metric="accuracy",
        expectations=(
            Expectation(
                "rank at the start and accuracy are at 95 % of their largest at the same K, to a factor of 2",
                [label(width) for width in WIDTHS],
                same_place,
            ),
        ),
        notes="K is the width of queries and keys; values, heads (4) and model width (64) stay, so D ≠ H·K. "
        "Effective rank of two sequences, the mean over layers and heads.",
        more=told,
    )


SATURATION_IMAGES = experiment("images", "Head width, CIFAR-10 patches")
SATURATION_TEXT = experiment("text", "Head width, IMDB bytes")
