"""Build the report on a plan of the query/key width of heads."""

import math

from rankwise._internals.records import format_number
from rankwise.auditing.records import Verdict
from rankwise.plan.records import HeadDimPlan
from rankwise.report.document import Document, Figure, Section, Table, nonempty
from rankwise.report.figures import banded_line

_DEVIATION = "± one standard deviation over trials."


def plan_document(plan: HeadDimPlan) -> Document:
    """Return the report on a plan: K*, and the savings at width K*."""
    places = "" if plan.positions == "none" else f"{plan.positions} positions · "
    return Document(
        command="Rankwise plan",
        heading=f"Head width for {plan.tokens:,} tokens",
        setting=f"{plan.tokens:,} tokens · {plan.mask} mask · {places}hardmax · {plan.trials} trials",
        verdict=Verdict(sentence=_headline(plan), no_action=_advice(plan)),
        sections=nonempty(
            Section("costs", "Costs", tables=[_costs(plan)]),
            Section("curve", "Rank against width", figures=[_figure(plan)], tables=[_curve(plan)]),
        ),
        notes=plan.notes,
        origin=list(plan.about.items()),
        complete=plan.complete,
    )


def _headline(plan: HeadDimPlan) -> str:
    """Return a sentence with K* and the savings from queries and keys of width K*."""
    if not plan.saturated:
        last = max(width for width, *_ in plan.curve if 2 * width <= plan.head_dim)
        return (
            f"Not saturated: if K = {last} is doubled, rank/T at random weights still grows by "
            f"{plan.least_gain:g} or more per added channel, so no width follows."
        )
    low, high = plan.interval
    star = (
        f"Rank at random weights saturates at K* = {plan.head_dim} (95 % interval {low} to {high}): if a "
        f"width of K* or more is doubled, rank/T grows by less than {plan.least_gain:g} per added channel. "
        f"Rank/T is {_share_at_star(plan):.2f} at K*"
    )
    if not plan.costs:
        return f"{star}."
    present = plan.costs[0]
    if present.head_dim <= plan.head_dim:
        return f"{star}. Queries and keys are {present.head_dim} wide, so there is nothing to save."
    narrow = plan.costs[1]
    return (
        f"{star}, {format_number(present.rank_share, 2)} at {present.head_dim}. Reducing queries and keys "
        f"from width {present.head_dim} to {plan.head_dim} (values unchanged) saves "
        f"{present.parameters - narrow.parameters:,} parameters per layer and "
        f"{present.cache_bytes - narrow.cache_bytes:,} bytes of cached keys per token."
    )


def _share_at_star(plan: HeadDimPlan) -> float:
    return next(share for width, share, _ in plan.curve if width == plan.head_dim)


def _advice(plan: HeadDimPlan) -> str:
    """Return advice on the use of K*."""
    sentence = (
        "Trained heads require 15 to 30 of 32 channels in the bundled demo (K* = 12) and in all-MiniLM-L6-v2 "
        "(K* = 13)."
    )
    if not plan.saturated or any(cost.head_dim <= plan.head_dim for cost in plan.costs[:1]):
        return sentence
    return (
        f"K* is a lower limit and a second candidate: train at K* and at the present width, and compare the "
        f"losses. {sentence}"
    )


def _figure(plan: HeadDimPlan) -> Figure:
    """Draw rank/T against query/key width K: the mean with its deviation, the hardmax barrier, and K*."""
    widths, means, deviations = (list(numbers) for numbers in zip(*plan.curve, strict=True))
    pairs = [(mean, std if math.isfinite(std) else 0.0) for mean, std in zip(means, deviations, strict=True)]
    upper, lower = [mean + std for mean, std in pairs], [max(0.0, mean - std) for mean, std in pairs]
    hover = [f"K = {k}: {mean:.3f} ± {format_number(std, 3)}" for k, mean, std in plan.curve]
    barrier, star = plan.one_hot_rank / plan.tokens, plan.head_dim
    data = [
        _marker("barrier", "dash", [widths[0], widths[-1]], [barrier] * 2, f"barrier {barrier:.2f}"),
        *banded_line(0, "random heads", widths, means, upper, lower, hover),
        _marker(f"K* = {star}", "dot", [star] * 2, [0.0, _share_at_star(plan)], f"K* = {star}"),
    ]
    powers = [2**power for power in range(14) if widths[0] <= 2**power <= widths[-1]]
    layout = {
        "height": 340,
        "xaxis": {
            "type": "log",
            "title": {"text": "query/key width K of a head"},
            "tickvals": powers,
            "ticktext": [str(power) for power in powers],
        },
        "yaxis": {"title": {"text": "rank/T"}, "rangemode": "tozero", "automargin": True},
        "showlegend": True,
    }
    return Figure("curve", "Rank/T against width", data, layout, _DEVIATION)


def _marker(name: str, dash: str, x: list[int], y: list[float], hover: str) -> dict[str, object]:
    """Return a muted line of a chart."""
    line: dict[str, object] = {
        "type": "scatter",
        "mode": "lines",
        "hoverinfo": "text",
        "meta": {"muted": True},
    }
    return line | {"x": x, "y": y, "name": name, "line": {"dash": dash}, "hovertext": hover}


def _curve(plan: HeadDimPlan) -> Table:
    shown = {2**power for power in range(10)} | {plan.head_dim, plan.curve[0][0], plan.curve[-1][0]}
    rows = [[str(k), f"{mean:.3f} ± {format_number(std, 3)}"] for k, mean, std in plan.curve if k in shown]
    return Table("Rank/T at random weights", ["K", "rank/T"], rows, note=_DEVIATION)


def _costs(plan: HeadDimPlan) -> Table:
    tried = {width for width, _, _ in plan.curve}
    rows = [
        [
            label,
            str(cost.head_dim),
            ("" if cost.head_dim in tried else "≈ ") + format_number(cost.rank_share, 3),
            f"{cost.parameters:,}",
            f"{cost.cache_bytes:,}",
        ]
        for label, cost in zip(("present", "K*"), plan.costs, strict=False)
    ]
    groups = "" if plan.heads == plan.kv_heads else f" and {plan.kv_heads} key heads"
    return Table(
        f"Queries and keys of one layer with {plan.heads} heads{groups}, D = {plan.hidden_size}",
        ["width", "K", "rank/T", "parameters", "cache B/token"],
        rows,
        note="Rank/T of one head; ≈ interpolated, – outside the widths tried. Parameters of W_q and W_k, "
        "without biases. Cache of keys at 2 bytes per number.",
    )
