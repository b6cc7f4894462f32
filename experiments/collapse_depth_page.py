"""Tables and figure of `experiments.collapse_depth`."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.render import markdown_table

FIGURE = "collapse-depth.svg"
NORM_NAMES = {"none": "no norm", "pre": "pre-norm", "post": "post-norm"}
COLOURS = {0: "#111111", -2: "#b2182b", -1: "#ef8a62", 0.5: "#92c5de", 1: "#2166ac", 2: "#1b7837"}
"""Of the lines, by λ."""
FLOOR = 1e-6
"""Lowest share that the figure shows."""
PANEL_WIDTH, PANEL_HEIGHT, GAP, LEFT, TOP = 118, 100, 14, 74, 44

Report = dict[str, Any]
Found = dict[str, Any]


def tables(report: Report) -> dict[str, str]:
    """Return the tables of the page, and the numbers of its text."""
    return {
        "command": "python -m experiments run collapse_depth",
        "seconds": str(report["seconds"]),
        "seeds": str(report["settings"]["seeds"]),
        "where": f"torch {report['versions']['torch']}",
        "grid": "\n\n".join(grid_tables(report)),
        "weights": "\n\n".join(weight_tables(report)),
    }


def figures(report: Report) -> dict[str, str]:
    """Return the figure."""
    return {FIGURE: figure(report)}


def grid_of(report: Report, **wanted: Any) -> list[Found]:
    """The curves of the grid of blocks with these settings."""
    usual = {"weights": 1.0, "inputs": 1.0, **wanted}
    return [one for one in report["curves"] if all(one["setting"][name] == usual[name] for name in usual)]


def grid_tables(report: Report) -> Iterator[str]:
    """μ/‖Y‖ and effective rank at the last layer, one table for each norm and gate."""
    skips = list(dict.fromkeys(one["setting"]["skip"] for one in grid_of(report)))
    mixers = list(dict.fromkeys(one["setting"]["mixer"] for one in grid_of(report)))
    for norm, name in NORM_NAMES.items():
        for gate in (False, True):
            rows = []
            for mixer in mixers:
                found = grid_of(report, mixer=mixer, norm=norm, gate=gate)
                by_skip = {one["setting"]["skip"]: cell(one) for one in found}
                rows.append([mixer, *(by_skip[skip] for skip in skips)])
            table = markdown_table(["mixer", *map(skip_name, skips)], rows)
            yield f"{name}, gate {'on' if gate else 'off'}, layer {report['layers'][-1]}\n\n{table}"


def weight_tables(report: Report) -> Iterator[str]:
    """The same without skip, norm and gate, by size of weights and input; then log10 μ."""
    plain = [
        one
        for one in report["curves"]
        if (one["setting"]["skip"], one["setting"]["norm"], one["setting"]["gate"]) == (0, "none", False)
    ]
    sizes = sorted({(one["setting"]["weights"], one["setting"]["inputs"]) for one in plain})
    mixers = list(dict.fromkeys(one["setting"]["mixer"] for one in plain))
    shows: dict[str, Callable[[Found], str]] = {"μ/‖Y‖ (effective rank)": cell, "log10 μ": power}
    for name, show in shows.items():
        rows = []
        for mixer in mixers:
            by_size = {
                (one["setting"]["weights"], one["setting"]["inputs"]): show(one)
                for one in plain
                if one["setting"]["mixer"] == mixer
            }
            rows.append([mixer, *(by_size[size] for size in sizes)])
        head = f"{name} without skip, norm and gate, layer {report['layers'][-1]}, by weights × input"
        table = markdown_table(["mixer", *(f"{weight:g} × {size:g}" for weight, size in sizes)], rows)
        yield f"{head}\n\n{table}"


def cell(one: Found) -> str:
    """Share ± spread (effective rank), or how the states ended."""
    share, spread, rank = (one[name][-1] for name in ("share", "share_std", "rank"))
    if share is None:
        return "∞"
    if rank == 0:
        return "0"
    shown = f"{share:.2f}" if share >= 0.01 else f"{share:.0e}" if share else "0"
    more = f" ± {spread:.2f}" if share >= 0.01 and spread is not None and spread >= 0.005 else ""
    return f"{shown}{more} ({rank:.0f})" if rank is not None else shown


def power(one: Found) -> str:
    """Mean log10 μ, or how the states ended."""
    if one["share"][-1] is None:
        return "∞"
    value = one["log10_mu"][-1]
    return "−∞" if value is None else f"{value:.1f}"


def skip_name(skip: float) -> str:
    """As a column is headed."""
    return f"λ = {skip:g}" if skip else "no skip"


def figure(report: Report) -> str:
    """Small multiples, norms by mixers: μ/‖Y‖ over depth for each λ, gate off."""
    found = grid_of(report, gate=False)
    mixers = list(dict.fromkeys(one["setting"]["mixer"] for one in found))
    width = LEFT + len(mixers) * (PANEL_WIDTH + GAP)
    height = TOP + len(NORM_NAMES) * (PANEL_HEIGHT + GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        "<title>μ/‖Y‖ by depth, mixer, norm and λ</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for column, mixer in enumerate(mixers):
        x = LEFT + column * (PANEL_WIDTH + GAP)
        parts.append(label(x + PANEL_WIDTH / 2, TOP - 8, mixer, "middle"))
        for line, norm in enumerate(NORM_NAMES):
            y = TOP + line * (PANEL_HEIGHT + GAP)
            curves = [one for one in found if one["setting"]["mixer"] == mixer]
            parts += panel(x, y, [one for one in curves if one["setting"]["norm"] == norm])
            if column == 0:
                parts.append(label(4, y + PANEL_HEIGHT / 2, NORM_NAMES[norm], "start"))
                parts += [label(x - 4, y + 9, "1", "end"), label(x - 4, y + PANEL_HEIGHT, "1e-6", "end")]
    for place, (skip, colour) in enumerate(COLOURS.items()):
        at = LEFT + place * 92
        parts.append(f'<rect x="{at}" y="8" width="18" height="4" fill="{colour}"/>')
        parts.append(label(at + 24, 14, skip_name(skip), "start"))
    last = report["layers"][-1]
    parts.append(
        label(LEFT, height - 14, f"μ/‖Y‖ (log scale) at layers 0, 1, 2, 4 … {last}, left to right", "start")
    )
    return "\n".join([*parts, "</svg>", ""])


def panel(x: float, y: float, curves: Sequence[Found]) -> list[str]:
    """A frame, and one line for each λ; a line ends where states are not finite."""
    parts = [
        f'<rect x="{x}" y="{y}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" stroke="#bbbbbb"/>'
    ]
    for one in curves:
        colour = COLOURS[one["setting"]["skip"]]
        step = PANEL_WIDTH / (len(one["share"]) - 1)
        points = [
            f"{x + place * step:.1f},{y + PANEL_HEIGHT * depth_of(share):.1f}"
            for place, share in enumerate(one["share"])
            if share is not None
        ]
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        )
    return parts


def depth_of(share: float) -> float:
    """How far below the top of a panel, 0 to 1."""
    return min(1.0, math.log10(max(share, FLOOR)) / math.log10(FLOOR))


def label(x: float, y: float, text: str, anchor: str) -> str:
    """A text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
