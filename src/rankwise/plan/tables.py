"""The tables of a plan: the same for the console and the page."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from rankwise._internals.records import format_number
from rankwise.plan.records import HeadDimPlan, Option


class PlanTable(NamedTuple):
    """A titled table of words."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


def headline(plan: HeadDimPlan) -> str:
    """What was found, in one sentence."""
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


def setting_words(plan: HeadDimPlan) -> str:
    """What was simulated."""
    heat = "hardmax" if plan.temperature == 0 else f"softmax, τ = {plan.temperature:g}·√K, δ = {plan.delta:g}"
    places = "" if plan.positions == "none" else f"{plan.positions} positions · "
    deep = "" if len(plan.layers) == 1 else f"{len(plan.layers)} layers ({plan.block}) · "
    return (
        f"{plan.tokens:,} tokens · {plan.mask} mask · {plan.inputs} inputs · {places}{deep}{heat} · "
        f"{plan.trials} trials"
    )


def plan_tables(plan: HeadDimPlan) -> Iterator[PlanTable]:
    """All tables that the plan has numbers for."""
    yield _curve(plan)
    if plan.options:
        yield PlanTable(
            "Settings of one attention layer",
            ["setting", "heads", "K", "V", "rank/T", "all heads"],
            [_setting(option) for option in plan.options],
            "Heads / key heads; K of queries and keys, V of values. All heads: H × rank/T."
            + _unsure(plan.options),
        )
        timed = f"Timed on this machine, T = {plan.latency_tokens:,}, float32"
        at = timed if plan.latency_tokens else "Not timed"
        yield PlanTable(
            "What they cost",
            ["setting", "parameters", "GFLOP", "cache B/token", "prefill ms", "decode ms"],
            [_cost(option) for option in plan.options],
            f"{at}; *: narrower widths filled up with zeros, which was faster. Cache at 2 bytes a number.",
        )
    if plan.fixed_width:
        yield PlanTable(
            f"Heads × width at D = {plan.width}",
            ["heads × K", "rank/T of a head", "all heads"],
            [[f"{option.heads} × {option.head_dim}", *_ranks(option, 2)] for option in plan.fixed_width],
            "Equal parameters, FLOPs and cache where values are as wide as keys." + _unsure(plan.fixed_width),
        )  # fmt: skip
    if plan.law is not None and plan.law.points:
        law = plan.law
        none = [float("nan")] * len(law.points)  # too few points for a line
        residuals, halves = law.residuals or none, law.half or none
        yield PlanTable(
            f"K* = {law.intercept:.2f} + {law.slope:.2f}·ln T (R² {law.explained:.2f})",
            ["T", "K*", "95 % interval", "residual", "half of the barrier at K"],
            [[f"{t:,}", str(k), f"{low} to {high}", f"{r:+.2f}", format_number(half, 1)]
             for (t, k, low, high), r, half in zip(law.points, residuals, halves, strict=True)],
            "Hardmax heads on orthonormal tokens."
            + (f" Not saturated: T = {law.unsaturated}." if law.unsaturated else "")
            + "".join(f" {note}" for note in law.notes),
        )  # fmt: skip
    if plan.trained:
        yield _trained(plan)


def _curve(plan: HeadDimPlan) -> PlanTable:
    wanted = {2**power for power in range(10)} | {plan.head_dim, plan.curve[0][0], plan.curve[-1][0]}
    rows = []
    for at, (width, _, _) in enumerate(plan.curve):
        if width in wanted:
            cells = [layer.points[at] for layer in plan.layers]
            rows.append([str(width), *(f"{mean:.3f} ± {std:.3f}" for _, mean, std in cells)])
    columns = ["K", *(f"layer {layer.layer}, K* = {layer.head_dim}" for layer in plan.layers)]
    return PlanTable("Rank/T at random weights", columns, rows, "± one standard deviation over trials.")


def _setting(option: Option) -> list[str]:
    heads = str(option.heads) if option.heads == option.kv_heads else f"{option.heads} / {option.kv_heads}"
    return [option.name, heads, str(option.head_dim), str(option.value_dim), *_ranks(option, 1)]


def _ranks(option: Option, digits: int) -> list[str]:
    about = "≈ " if option.interpolated else ""
    return [about + format_number(option.rank_share, 3), about + format_number(option.rank_sum, digits)]


def _unsure(options: list[Option]) -> str:
    interpolated = any(option.interpolated for option in options)
    unknown = any(math.isnan(option.rank_share) for option in options)
    return (" ≈: interpolated between the next widths tried." if interpolated else "") + (
        " –: outside the widths tried." if unknown else ""
    )


def _cost(option: Option) -> list[str]:
    mark = "*" if option.padded else ""
    sizes = [f"{option.parameters:,}", format_number(option.flops / 1e9, 2), f"{option.cache_bytes:,}"]
    return [
        option.name,
        *sizes,
        format_number(option.prefill_ms, 1) + mark,
        format_number(option.decode_ms, 2) + mark,
    ]


def _trained(plan: HeadDimPlan) -> PlanTable:
    layers: dict[tuple[str, int], list[int]] = {}
    for at, head in enumerate(plan.trained):
        layers.setdefault((head.stack, head.layer), []).append(at)
    rows = []
    for (stack, layer), places in layers.items():
        heads = [plan.trained[at] for at in places]
        needed = [head.needed for head in heads]
        mean = sum(head.effective_rank for head in heads) / len(heads)
        sizes = [str(len(heads)), str(heads[0].width), f"{min(needed)} to {max(needed)}"]
        means = [
            format_number(sum(needed) / len(needed), 1),
            format_number(mean, 1),
            format_number(heads[0].tokens, 0),
        ]
        rows.append([f"{stack} {layer}".strip(), *sizes, *means])
    return PlanTable(
        "What the trained heads use, measured",
        ["layer", "heads", "K", "K needed", "mean", "effective rank", "tokens"],
        rows,
        f"K needed: least width whose best logits keep the attention within {plan.tolerance:g} nats (KL) on "
        "these tokens. Effective rank: of the attention matrix.",
    )
