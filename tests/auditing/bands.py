"""The band of a head that is made by hand."""

from typing import Any

from rankwise.auditing.nulls import thresholds
from rankwise.auditing.records import RankAt


def band(fields: dict[str, Any], **at: dict[int, float]) -> list[RankAt]:
    """The same at every threshold, but for what is said of some by their number.

    Args:
        fields: of the head.
        at: by the name of a field, its values at some thresholds.
    """
    rank, unknown = fields["numerical_rank"], float("nan")
    same = {"numerical_rank": rank, "rank_low": fields.get("rank_low", rank)}
    same["rank_high"] = fields.get("rank_high", rank)
    same |= {name: fields.get(name, unknown) for name in ("hardmax_rank", "random_rank", "uniform_rank")}
    points = [RankAt(delta=delta, **same) for delta in thresholds(0.01)]
    for name, values in at.items():
        for step, value in values.items():
            points[step] = points[step].model_copy(update={name: value})
    return points
