"""Published numbers, tables and figures of `experiments.rank_saturation`."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.rank.random_layers import LogLaw
from experiments.rank_saturation_figure import curve_figure, law_figure
from experiments.render import markdown_table
from rankwise.plan import HeadDimPlan

LAW, BARRIER = "rank-saturation.svg", "rank-barrier.svg"

_HEAD_DIMS = (2, 3, 4, 8, 16)
_MEANS = {
    2: {
        32: "0.0609 0.127 0.2032 0.2539 0.2584",
        128: "0.0591 0.132 0.2033 0.2593 0.2667",
        256: "0.0588 0.1347 0.2105 0.261 0.2661",
        512: "0.0596 0.134 0.209 0.2609 0.2612",
    },
    4: {
        32: "0.0518 0.1177 0.1925 0.2584 0.267",
        128: "0.0521 0.1201 0.196 0.2572 0.2527",
        256: "0.0523 0.121 0.1953 0.2677 0.2551",
        512: "0.053 0.1202 0.1946 0.2567 0.2598",
    },
}
_STDS = {
    2: {
        32: "0.0026 0.0055 0.0083 0.0137 0.0186",
        128: "0.0014 0.0037 0.0063 0.0096 0.0101",
        256: "0.0018 0.0051 0.0074 0.0137 0.0143",
        512: "0.001 0.0036 0.0061 0.0106 0.0108",
    },
    4: {
        32: "0.0042 0.0038 0.0115 0.0161 0.0137",
        128: "0.0023 0.002 0.0049 0.0131 0.0097",
        256: "0.0021 0.0034 0.0058 0.0146 0.0081",
        512: "0.0021 0.0056 0.0066 0.0134 0.0139",
    },
}
REBUTTAL = {
    layer: {
        width: dict(
            zip(
                _HEAD_DIMS,
                zip(map(float, means.split()), map(float, _STDS[layer][width].split()), strict=True),
                strict=True,
            )
        )
        for width, means in rows.items()
    }
    for layer, rows in _MEANS.items()
}
"""Mean and standard deviation of rank/T by layer, width and K: tables 1 and 2 of the authors' rebuttal."""
SYNTHETIC = {
    50: (0.04, 0.16, 0.32, 0.45, 0.54, 0.58, 0.61, 0.61, 0.63),
    200: (0.01, 0.045, 0.17, 0.31, 0.45, 0.52, 0.57, 0.61, 0.61),
    800: (0.002, 0.014, 0.07, 0.20, 0.33, 0.45, 0.52, 0.58, 0.61),
}
"""Rank/T at K = 1, 2, 4 … 256, hardmax, orthonormal tokens: an earlier simulation of this project."""

Report = dict[str, Any]


def tables(report: Report) -> dict[str, str]:
    """Return the tables of the page, and the numbers of its text."""
    rebuttal = report["rebuttal"]
    return {
        "command": "python -m experiments run rank_saturation",
        "seconds": str(report["seconds"]),
        "torch": report["versions"]["torch"],
        "synthetic": "\n\n".join(synthetic_tables(report)),
        "quick": str(max(2, report["settings"]["trials"] // 3)),
        "away": f"{max(synthetic_errors(report)):.3f}",
        "laws": "\n\n".join(law_table(mask, law) for mask, law in report["law"].items()),
        "rebuttal": "\n\n".join(rebuttal_tables(rebuttal)),
        "nearest": nearest_words(rebuttal),
        "tried": tried_table(rebuttal),
        "error": f"{cell_distance(rebuttal):.3f}",
        "models": "\n\n".join(model_tables(report["models"])),
    }


def figures(report: Report) -> dict[str, str]:
    """Return both figures, on white paper."""
    found = {LAW: law_figure(LogLaw(**report["law"]["full"])), BARRIER: barrier_figure(report)}
    paper = '<rect width="100%" height="100%" fill="#ffffff"/>\n<title>'
    return {name: figure.replace("<title>", paper, 1) for name, figure in found.items()}


def barrier_figure(report: Report) -> str:
    """Rank/T against K at the longest length, full mask and orthonormal tokens, as a plan draws it."""
    kept = [one for one in report["synthetic"] if (one["mask"], one["inputs"]) == ("full", "orthonormal")]
    one = max(kept, key=lambda one: one["tokens"])
    plan = HeadDimPlan(
        tokens=one["tokens"],
        mask=one["mask"],
        tolerance=0.01,
        barrier=one["barrier"] * one["tokens"],
        inputs=one["inputs"],
        trials=report["settings"]["trials"],
        curve=one["points"],
        head_dim=one["head_dim"],
        interval=one["interval"],
        saturated=one["head_dim"] < one["points"][-1][0],
    )
    return curve_figure(plan)


def synthetic_tables(report: Report) -> Iterable[str]:
    """Ours, with the earlier number in brackets where there is one."""
    kinds = dict.fromkeys((one["mask"], one["inputs"]) for one in report["synthetic"])
    for mask, inputs in kinds:
        rows = []
        for one in report["synthetic"]:
            if (one["mask"], one["inputs"]) == (mask, inputs):
                known = SYNTHETIC.get(one["tokens"], ()) if (mask, inputs) == ("full", "orthonormal") else ()
                cells = [
                    f"{point[1]:.3f}" + (f" ({known[at]:g})" if at < len(known) else "")
                    for at, point in enumerate(one["points"])
                ]
                low, high = one["interval"]
                ends = [f"{one['barrier']:.3f}", f"{one['head_dim']} ({low} to {high})"]
                rows.append([str(one["tokens"]), *cells, *ends])
        head = ["T \\ K", *(str(2**power) for power in range(9)), "barrier", "K*"]
        yield f"{mask} mask, {inputs} tokens\n\n{markdown_table(head, rows)}"


def synthetic_errors(report: Report) -> list[float]:
    """Distances to the earlier numbers."""
    return [
        abs(point[1] - SYNTHETIC[one["tokens"]][at])
        for one in report["synthetic"]
        if (one["mask"], one["inputs"]) == ("full", "orthonormal") and one["tokens"] in SYNTHETIC
        for at, point in enumerate(one["points"])
    ] or [math.nan]


def law_table(mask: str, law: Report) -> str:
    """K* by length, and what the line leaves over."""
    head = [f"{mask}: T", *(f"{point[0]:,}" for point in law["points"])]
    found = ["K* (95 %)", *(f"{k} ({low} to {high})" for _, k, low, high in law["points"])]
    left = ["residual", *(f"{one:+.2f}" for one in law["residuals"])]
    half = ["half of the barrier at K", *(f"{one:.1f}" for one in law["half"])]
    line = f"K* = {law['intercept']:.2f} + {law['slope']:.2f}·ln T, R² = {law['explained']:.2f}"
    return f"{markdown_table(head, [found, left, half])}\n\n{mask} mask: {line}"


def rebuttal_tables(rebuttal: Report) -> Iterable[str]:
    """Cell by cell: theirs, then ours."""
    for layer in (2, 4):
        rows = []
        for width, cells in rebuttal["tables"].items():
            mine = cells[str(layer)]
            theirs = REBUTTAL[layer][int(width)]
            rows.append(
                [width]
                + [f"{theirs[k][0]:.3f} ± {theirs[k][1]:.3f} / {mine[f'{k}'][0]:.3f} ± {mine[f'{k}'][1]:.3f}"
                   for k in theirs]
            )  # fmt: skip
        head = ["width", *(f"K = {k}" for k in _HEAD_DIMS)]
        yield f"Layer {layer}, rank/T: theirs / ours\n\n{markdown_table(head, rows)}"


def cell_distance(rebuttal: Report) -> float:
    """Mean distance of our means to theirs, over all cells."""
    away = [
        abs(rebuttal["tables"][str(width)][str(layer)][str(k)][0] - theirs[0])
        for layer, rows in REBUTTAL.items()
        for width, cells in rows.items()
        for k, theirs in cells.items()
    ]
    return sum(away) / len(away)


def nearest_words(rebuttal: Report) -> str:
    """The variant shown."""
    one = rebuttal["nearest"]
    filled = "reviews padded" if one["padded"] else "windows of longer reviews"
    return (
        f"T = {one['tokens']}, {filled}, positions: {one['positions']}, {one['block']}-norm blocks, "
        f"{one['measure']}; {rebuttal['different']:.0%} of the tokens of a sequence differ"
    )


def tried_table(rebuttal: Report) -> str:
    """The five nearest variants and the farthest."""
    tried = rebuttal["tried"]
    rows = [
        [str(one["tokens"]), "yes" if one["padded"] else "no", one["positions"], one["block"], one["measure"],
         f"{one['error']:.3f}"]
        for one in [*tried[:5], tried[-1]]
    ]  # fmt: skip
    return markdown_table(["T", "padded", "positions", "block", "rank of", "mean distance"], rows)


def model_tables(found: Sequence[Report]) -> Iterable[str]:
    """Rank/T by K and layer."""
    for name in dict.fromkeys(one["model"] for one in found):
        mine = [one for one in found if one["model"] == name]
        rows = [
            [
                str(one["head_dim"]),
                *(f"{m:.3f} ± {s:.3f}" for m, s in zip(one["mean"], one["std"], strict=True)),
            ]
            for one in mine
        ]
        head = ["K", *(f"layer {at + 1}" for at in range(len(mine[0]["mean"])))]
        yield f"{name}, T = {mine[0]['tokens']}, rank/T\n\n{markdown_table(head, rows)}"
