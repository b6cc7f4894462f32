"""Describe a plan of head widths."""

import json
import math
from collections.abc import Sequence
from typing import Any

from rankwise._internals.records import format_number
from rankwise.auditing.records import Verdict
from rankwise.plan.records import HeadDimPlan, LayerCurve, Option
from rankwise.report.document import Document, Figure, Section, Table, nonempty
from rankwise.report.figures import banded_line


def plan_document(plan: HeadDimPlan) -> Document:
    """Describe a plan: K*, rank against width, settings and their costs, widths that trained heads need."""
    chosen = json.dumps(plan.recommended) if plan.recommended else ""
    costs = [_settings(plan), _costs(plan), _fixed_width(plan), _trained(plan)]
    return Document(
        command="Rankwise plan",
        heading=f"Head width for {plan.tokens:,} tokens",
        setting=_setting_words(plan),
        verdict=Verdict(sentence=_headline(plan)),
        warnings=[
            "This is a statement about random weights: what a layer can do before training. Trained heads "
            "can use more or less than it says."
        ],
        sections=nonempty(
            Section("recommended", "Recommended", plan.reason, code=chosen),
            Section("curve", "Rank against width", figures=[_figure(plan)], tables=[_curve(plan)]),
            Section("settings", "Settings and trained heads", tables=costs),
        ),
        notes=plan.notes,
        origin=list(plan.about.items()),
        complete=plan.complete,
    )


def _headline(plan: HeadDimPlan) -> str:
    low, high = plan.interval
    share = plan.deciding.share_at(plan.head_dim)
    if not plan.saturated:
        return (
            f"Not saturated: at K = {plan.head_dim}, the widest tried, a unit of width still adds "
            f"{plan.tolerance:g} of rank/T or more."
        )
    return (
        f"K* = {plan.head_dim} (95 % interval {low} to {high}): from here on a unit of width adds less than "
        f"{plan.tolerance:g} of rank/T at random weights. Rank/T is {share:.2f} there, "
        f"{share * plan.tokens / plan.barrier:.0%} of the barrier {plan.barrier / plan.tokens:.2f}."
    )


def _setting_words(plan: HeadDimPlan) -> str:
    heat = "hardmax" if plan.temperature == 0 else f"softmax, τ = {plan.temperature:g}·√K, δ = {plan.delta:g}"
    places = "" if plan.positions == "none" else f"{plan.positions} positions · "
    deep = "" if len(plan.layers) == 1 else f"{len(plan.layers)} layers ({plan.block}) · "
    return (
        f"{plan.tokens:,} tokens · {plan.mask} mask · {plan.inputs} inputs · {places}{deep}{heat} · "
        f"{plan.trials} trials"
    )


def _figure(plan: HeadDimPlan) -> Figure:
    """Draw rank/T against K: a line with its spread per layer, the barrier, and K*."""
    widths = [point[0] for point in plan.curve]
    ends, barrier = [widths[0], widths[-1]], plan.barrier / plan.tokens
    found = plan.head_dim
    dashed = {"type": "scatter", "mode": "lines", "hoverinfo": "text", "meta": {"muted": True}}
    data = [
        dashed | {"x": ends, "y": [barrier] * 2, "name": "barrier", "line": {"dash": "dash"}}
        | {"hovertext": f"barrier {barrier:.2f}: hardmax, winners at random"},
        *(trace for layer in plan.layers for trace in _layer(layer)),
        dashed | {"x": [found] * 2, "y": [0, plan.deciding.share_at(found)], "name": f"K* = {found}"}
        | {"line": {"dash": "dot"}, "hovertext": f"K* = {found}"},
    ]  # fmt: skip
    powers = [2**power for power in range(14) if widths[0] <= 2**power <= widths[-1]]
    axis = {"type": "log", "title": {"text": "query/key width K of a head"}, "tickvals": powers}
    layout = {
        "height": 340,
        "xaxis": axis | {"ticktext": [str(power) for power in powers]},
        "yaxis": {"title": {"text": "rank/T"}, "rangemode": "tozero", "automargin": True},
        "showlegend": True,
    }
    caption = "One line per layer, ± one standard deviation over trials."
    return Figure("curve", "Rank/T against width", data, layout, caption)


def _layer(layer: LayerCurve) -> list[dict[str, Any]]:
    name = f"layer {layer.layer}"
    spreads = [std if math.isfinite(std) else 0.0 for _, _, std in layer.points]
    y = [mean for _, mean, _ in layer.points]
    upper, lower = (
        [max(0.0, mean + side * std) for mean, std in zip(y, spreads, strict=True)] for side in (1, -1)
    )
    hover = [f"{name}, K = {k}: {mean:.3f} ± {format_number(std, 3)}" for k, mean, std in layer.points]
    return banded_line(layer.layer - 1, name, [k for k, _, _ in layer.points], y, upper, lower, hover)


def _curve(plan: HeadDimPlan) -> Table:
    wanted = {2**power for power in range(10)} | {plan.head_dim, plan.curve[0][0], plan.curve[-1][0]}
    rows = []
    for at, (width, _, _) in enumerate(plan.curve):
        if width in wanted:
            cells = [layer.points[at] for layer in plan.layers]
            rows.append([str(width), *(f"{mean:.3f} ± {format_number(std, 3)}" for _, mean, std in cells)])
    columns = ["K", *(f"layer {layer.layer}, K* = {layer.head_dim}" for layer in plan.layers)]
    note = "± one standard deviation over trials."
    return Table("Rank/T at random weights", columns, rows, note=note)


def _settings(plan: HeadDimPlan) -> Table:
    return Table(
        "Settings of one attention layer",
        ["setting", "heads", "K", "V", "rank/T", "all heads"],
        [_setting(option) for option in plan.options],
        note="Heads / key heads; K of queries and keys, V of values. All heads: H × rank/T."
        + _unsure(plan.options),
    )


def _costs(plan: HeadDimPlan) -> Table:
    timed = f"Timed on this machine, T = {plan.latency_tokens:,}, float32"
    at = timed if plan.latency_tokens else "Not timed"
    return Table(
        "What they cost",
        ["setting", "parameters", "GFLOP", "cache B/token", "prefill ms", "decode ms"],
        [_cost(option) for option in plan.options],
        note=f"{at}; *: narrower widths filled up with zeros, which was faster. Cache at 2 bytes a number.",
    )


def _fixed_width(plan: HeadDimPlan) -> Table:
    return Table(
        f"Heads × width at D = {plan.width}",
        ["heads × K", "rank/T of a head", "all heads"],
        [[f"{option.heads} × {option.head_dim}", *_ranks(option, 2)] for option in plan.fixed_width],
        note="Equal parameters, FLOPs and cache where values are as wide as keys."
        + _unsure(plan.fixed_width),
    )


def _setting(option: Option) -> list[str]:
    heads = str(option.heads) if option.heads == option.kv_heads else f"{option.heads} / {option.kv_heads}"
    return [option.name, heads, str(option.head_dim), str(option.value_dim), *_ranks(option, 1)]


def _ranks(option: Option, digits: int) -> list[str]:
    about = "≈ " if option.interpolated else ""
    return [about + format_number(option.rank_share, 3), about + format_number(option.rank_sum, digits)]


def _unsure(options: Sequence[Option]) -> str:
    interpolated = any(option.interpolated for option in options)
    unknown = any(math.isnan(option.rank_share) for option in options)
    return (" ≈: interpolated between the next widths tried." if interpolated else "") + (
        " –: outside the widths tried." if unknown else ""
    )


def _cost(option: Option) -> list[str]:
    mark = "*" if option.padded else ""
    sizes = [f"{option.parameters:,}", format_number(option.flops / 1e9, 2), f"{option.cache_bytes:,}"]
    times = [format_number(option.prefill_ms, 1) + mark, format_number(option.decode_ms, 2) + mark]
    return [option.name, *sizes, *times]


def _trained(plan: HeadDimPlan) -> Table:
    layers: dict[tuple[str, int], list[int]] = {}
    for at, head in enumerate(plan.trained):
        layers.setdefault((head.stack, head.layer), []).append(at)
    rows = []
    for (stack, layer), places in layers.items():
        heads = [plan.trained[at] for at in places]
        needed = [head.needed for head in heads]
        mean = sum(head.effective_rank for head in heads) / len(heads)
        sizes = [str(len(heads)), str(heads[0].width), f"{min(needed)} to {max(needed)}"]
        means = [(sum(needed) / len(needed), 1), (mean, 1), (heads[0].tokens, 0)]
        rows.append([f"{stack} {layer}".strip(), *sizes, *(format_number(*number) for number in means)])
    return Table(
        "What the trained heads use, measured",
        ["layer", "heads", "K", "K needed", "mean", "effective rank", "tokens"],
        rows,
        note=f"K needed: least width whose best logits keep the attention within {plan.tolerance:g} nats "
        "(KL) on these tokens. Effective rank: of the attention matrix.",
    )
