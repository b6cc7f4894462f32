"""Build the report on a plan of the query/key width of heads."""

import math

from rankwise._internals.records import format_number, grouped
from rankwise._internals.statistics import WIDTH_TOLERANCE, mean
from rankwise.auditing.records import Verdict
from rankwise.plan.record import HeadDimPlan
from rankwise.report.document import Document, Figure, Section, Table, nonempty
from rankwise.report.figures import banded_line
from rankwise.report.format import count

_SPREAD = "± one standard deviation over trials."
_KEPT = (
    "In recorded training runs (3 seeds; K* on orthonormal tokens) narrower queries and keys raised the loss "
    "by less than its spread: on bytes 1.852 ± 0.001 at K = 32, 1.856 ± 0.008 at K* = 12; on CIFAR-10 (K* = "
    "9) 1.301 ± 0.023 at 16, 1.308 ± 0.040 at 8, 1.319 ± 0.034 at 1."
)


def plan_document(plan: HeadDimPlan) -> Document:
    """Return the report on a plan: K*, what it saves, and widths that trained heads require."""
    return Document(
        command="Rankwise plan",
        heading=f"Head width for {plan.tokens:,} tokens",
        setting=_setting_words(plan),
        verdict=Verdict(sentence=_headline(plan), no_action=_evidence(plan)),
        sections=nonempty(
            Section("costs", "Costs and trained heads", tables=[_costs(plan), _trained(plan)]),
            Section("curve", "Rank against width", figures=[_figure(plan)], tables=[_curve(plan)]),
        ),
        notes=plan.notes,
        origin=list(plan.about.items()),
        complete=plan.complete,
    )


def _share_at_star(plan: HeadDimPlan) -> float:
    return next((mean for width, mean, _ in plan.curve if width == plan.head_dim), math.nan)


def _headline(plan: HeadDimPlan) -> str:
    """Return K* and what queries and keys of that width save, in one sentence."""
    if not plan.saturated:
        last = max(width for width, *_ in plan.curve if 2 * width <= plan.head_dim)
        return (
            f"Not saturated: if K = {last} is doubled, rank/T at random weights still grows by "
            f"{plan.tolerance:g} or more per added channel, so no width follows."
        )
    low, high = plan.interval
    rank = f"At {count(plan.heads or 0, 'head')}, rank" if plan.costs else "Rank"
    star = (
        f"{rank} at random weights saturates at K* = {plan.head_dim} (95 % interval {low} to {high}): if a "
        f"width of K* or more is doubled, rank/T grows by less than {plan.tolerance:g} per added channel"
    )
    share = f"rank/T is {_share_at_star(plan):.2f} at K*"
    if not plan.costs:
        return f"{star}. R{share[1:]}. With heads and a model width, a plan counts what a width of K* saves."
    present = plan.costs[0]
    if present.head_dim <= plan.head_dim:
        return f"{star}. Queries and keys are {present.head_dim} wide, so there is nothing to save."
    narrow, now = plan.costs[1], format_number(present.rank_share, 2)
    return (
        f"{star}. Queries and keys of width {plan.head_dim} in place of {present.head_dim}, with the same "
        f"values, save {present.parameters - narrow.parameters:,} parameters in each layer and, if keys are "
        f"cached, {present.cache_bytes - narrow.cache_bytes:,} bytes per token. R{share[1:]}, {now} at "
        f"{present.head_dim}."
    )


def _evidence(plan: HeadDimPlan) -> str:
    """Return the widths that trained heads require and the losses of recorded training runs."""
    trained = "15 to 30 of 32 channels in the bundled demo and in all-MiniLM-L6-v2, whose K* is 8."
    if required := [one.required for one in plan.trained if math.isfinite(one.required)]:
        wider = sum(width > plan.head_dim for width in required)
        average = f"{mean(required):.1f} channels on average in this model"
        trained = f"{average}; {wider} of {len(required)} require more than K*."
    words = f"Trained heads require {trained}"
    saves = plan.saturated and all(cost.head_dim > plan.head_dim for cost in plan.costs[:1])
    return f"Do not choose K* without training. {words} {_KEPT}" if saves else words


def _setting_words(plan: HeadDimPlan) -> str:
    heat = "hardmax" if plan.temperature == 0 else f"softmax, τ = {plan.temperature:g}·√K, δ = {plan.delta:g}"
    inputs = plan.inputs if " " in plan.inputs else f"{plan.inputs} token states"
    places = "" if plan.positions == "none" else f"{plan.positions} positions · "
    return f"{plan.tokens:,} tokens · {plan.mask} mask · {inputs} · {places}{heat} · {plan.trials} trials"


def _figure(plan: HeadDimPlan) -> Figure:
    """Draw rank/T against query/key width K: the mean with its spread, the hardmax barrier, and K*."""
    widths, means, spreads = (list(numbers) for numbers in zip(*plan.curve, strict=True))
    stds = [std if math.isfinite(std) else 0.0 for std in spreads]
    upper, lower = (
        [max(0.0, mean + side * std) for mean, std in zip(means, stds, strict=True)] for side in (1, -1)
    )
    hover = [f"K = {k}: {mean:.3f} ± {format_number(std, 3)}" for k, mean, std in plan.curve]
    barrier, star = plan.barrier / plan.tokens, plan.head_dim
    dashed = {"type": "scatter", "mode": "lines", "hoverinfo": "text", "meta": {"muted": True}}
    data = [
        dashed
        | {"x": [widths[0], widths[-1]], "y": [barrier] * 2, "name": "barrier", "line": {"dash": "dash"}}
        | {"hovertext": f"barrier {barrier:.2f}: hardmax, winners at random"},
        *banded_line(0, "random heads", widths, means, upper, lower, hover),
        dashed
        | {"x": [star] * 2, "y": [0, _share_at_star(plan)], "name": f"K* = {star}"}
        | {"line": {"dash": "dot"}, "hovertext": f"K* = {star}"},
    ]
    powers = [2**power for power in range(14) if widths[0] <= 2**power <= widths[-1]]
    axis = {"type": "log", "title": {"text": "query/key width K of a head"}, "tickvals": powers}
    layout = {
        "height": 340,
        "xaxis": axis | {"ticktext": [str(power) for power in powers]},
        "yaxis": {"title": {"text": "rank/T"}, "rangemode": "tozero", "automargin": True},
        "showlegend": True,
    }
    return Figure("curve", "Rank/T against width", data, layout, _SPREAD)


def _curve(plan: HeadDimPlan) -> Table:
    shown = {2**power for power in range(10)} | {plan.head_dim, plan.curve[0][0], plan.curve[-1][0]}
    rows = [[str(k), f"{mean:.3f} ± {format_number(std, 3)}"] for k, mean, std in plan.curve if k in shown]
    return Table("Rank/T at random weights", ["K", "rank/T"], rows, note=_SPREAD)


def _costs(plan: HeadDimPlan) -> Table:
    tried = {width for width, _, _ in plan.curve}
    rows = []
    for at, cost in enumerate(plan.costs):
        about = "≈ " if cost.head_dim not in tried and math.isfinite(cost.rank_share) else ""
        rows.append(
            [
                "present" if at == 0 else "K*" if cost.head_dim == plan.head_dim else "upper end of K*",
                str(cost.head_dim),
                about + format_number(cost.rank_share, 3),
                f"{cost.parameters:,}",
                format_number(cost.flops / 1e9),
                f"{cost.cache_bytes:,}",
            ]
        )
    groups = "" if plan.heads == plan.kv_heads else f" and {plan.kv_heads} key heads"
    return Table(
        f"Queries and keys of one layer with {plan.heads} heads{groups}, D = {plan.width}",
        ["width", "K", "rank/T", "parameters", "GFLOP", "cache B/token"],
        rows,
        note="Rank/T of one head; ≈ interpolated, – outside the widths tried. Parameters of W_q and W_k, "
        "without biases. Cache of keys at 2 bytes per number. GFLOP of both projections "
        "and of the scores; no time follows: fused attention can require values of the same width.",
    )


def _trained(plan: HeadDimPlan) -> Table:
    rows = []
    for layer, heads in grouped(plan.trained, lambda one: str(one.head.at(None))).items():
        required = [one.required for one in heads if math.isfinite(one.required)] or [math.nan]
        span = f"{format_number(min(required))} to {format_number(max(required))}"
        rows.append([layer, str(len(heads)), str(heads[0].width), span, format_number(mean(required), 1)])
    return Table(
        "Widths that trained heads require",
        ["layer", "heads", "K", "required K", "mean"],
        rows,
        note="Smallest width whose best logits keep the attention on these tokens within "
        f"{WIDTH_TOLERANCE:g} nats, to second order, as `required_head_dim` of an audit.",
    )
