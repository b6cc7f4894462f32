"""Heads, token states and audits made by hand, with nothing to find unless a test changes a number."""

from collections.abc import Sequence
from typing import Any

from rankwise.auditing import HeadRecord, LayerRecord, Provenance, Unseen
from rankwise.auditing.findings import diagnose
from rankwise.auditing.records import RankAt, thresholds
from rankwise.auditing.result import Audit


def band(fields: dict[str, Any], **at: dict[int, float]) -> list[RankAt]:
    """Return the same ranks at every threshold, except values that are given by number of the threshold."""
    rank, unknown = fields["numerical_rank"], float("nan")
    same = {"numerical_rank": rank, "rank_low": fields.get("rank_low", rank)}
    same["rank_high"] = fields.get("rank_high", rank)
    same |= {name: fields.get(name, unknown) for name in ("hardmax_rank", "random_rank", "uniform_rank")}
    points = [RankAt(delta=delta, **same) for delta in thresholds(0.01)]
    for name, values in at.items():
        for step, value in values.items():
            points[step] = points[step].model_copy(update={name: value})
    return points


def head(**changes: Any) -> HeadRecord:
    usual: dict[str, Any] = {
        "stack": "h", "site": "h.0.attn", "layer": 0, "head": 0, "kind": "softmax", "mask": "full",
        "sequences": 2, "tokens": 32, "sources": 32, "numerical_rank": 20, "effective_rank": 12,
        "stable_rank": 3, "sigma_max": 1.4, "row_entropy": 2, "first_token_mass": 0.1, "max_token_mass": 0.2,
        "row_distance": 0.7, "identity_distance": 0.8, "hardmax_rank": 20.4, "nearest_head": 1,
        "nearest_distance": 0.7,
    }  # fmt: skip
    fields = usual | changes
    return HeadRecord(**({"band": band(fields)} | fields))


def heads(*changes: dict[str, Any], **all_of_them: Any) -> list[HeadRecord]:
    """Return heads 0, 1, … of a mixer."""
    return [head(**({"head": at} | all_of_them | change)) for at, change in enumerate(changes)]


def layer(number: int, relative: float, **changes: Any) -> LayerRecord:
    usual: dict[str, Any] = {
        "stack": "h", "site": f"h.{number}", "layer": number, "sequences": 2, "tokens": 32, "width": 16,
        "norm": 10, "token_spread": 10 * relative, "relative_spread": relative,
        "mean_cosine": 1 - relative**2, "effective_rank": 8,
    }  # fmt: skip
    return LayerRecord(**(usual | changes))


def layers(*relative: float, **changes: Any) -> list[LayerRecord]:
    return [layer(number, value, **changes) for number, value in enumerate(relative)]


def audit(
    *mixers: Sequence[HeadRecord], layers: Sequence[LayerRecord] = (), uncaptured: Sequence[Unseen] = ()
) -> Audit:
    """Return an audit with the findings of its records."""
    measured = [head for mixer in mixers for head in mixer]
    return Audit(
        provenance=Provenance(model="m", delta=0.01),
        heads=measured,
        layers=list(layers),
        findings=diagnose(measured, layers, uncaptured),
        uncaptured=list(uncaptured),
    )
