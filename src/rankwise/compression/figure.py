"""Figures of a compression as SVG: widths per head as a map, attention KL against width."""

import html
import math
from collections.abc import Sequence

from rankwise.compression.records import BudgetCurve, Compression, HeadWidth

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 520.0, 300.0, 52.0, 14.0, 40.0
COLOURS = ("#1d5ba6", "#c2500f", "#0b7a5c", "#9a3b8c", "#7a6200", "#4a5563")
CELL = 30.0
MOST_NUMBERS = 32
"""Heads up to which a cell is large enough for its number."""


def width_map(record: Compression) -> str:
    """Layers down, key heads across: what is left of each head's width, darker where more."""
    shown = [head for head in record.heads if head.part != "heads"] or record.heads
    sites = list(dict.fromkeys(head.site for head in shown))
    across = max(head.head for head in shown) + 1
    cell = min(CELL, (WIDTH - LEFT) / across)
    parts = []
    for row, site in enumerate(sites):
        heads = [head for head in shown if head.site == site]
        y = TOP + row * cell
        parts.append(_text(LEFT - 6, y + cell * 0.62, f"layer {heads[0].layer}", "end"))
        parts += [_cell(head, LEFT + head.head * cell, y, cell, across <= MOST_NUMBERS) for head in heads]
    height = TOP + len(sites) * cell + 26
    parts.append(_text(LEFT + across * cell / 2, height - 6, "head", "middle"))
    return _svg(parts, "width of each head", LEFT + across * cell + 4, height)


def _cell(head: HeadWidth, x: float, y: float, size: float, numbers: bool) -> str:
    share = head.width / head.before
    said = f"layer {head.layer}, head {head.head}: {head.width} of {head.before}"
    if not math.isnan(head.kl_calibrated):
        said += f", attention KL {head.kl_calibrated:.4f} nats on the calibration data"
    colour = "#ffffff" if share > 0.6 else "currentColor"
    number = _text(x + size / 2, y + size * 0.62, str(head.width), "middle", colour) if numbers else ""
    return (
        f'<g><title>{html.escape(said)}</title><rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{size - 2:.1f}" '
        f'height="{size - 2:.1f}" rx="3" fill="{COLOURS[0]}" fill-opacity="{0.06 + 0.94 * share:.2f}"/>'
        f"{number}</g>"
    )


def curve_figure(curves: Sequence[BudgetCurve], chosen: tuple[float, float]) -> str:
    """Attention KL against mean width on logarithmic axes, one line for each way.

    Args:
        curves: ours first.
        chosen: mean width and attention KL of the compressed model, a dot.
    """
    points = [(p.width, p.kl) for curve in curves for p in curve.points if p.kl > 0] + [chosen]
    low, high = min(kl for _, kl in points), max(kl for _, kl in points)
    least, most = min(width for width, _ in points), max(width for width, _ in points)

    def x(width: float) -> float:
        return _between(math.log2(width), math.log2(least), math.log2(most), LEFT, WIDTH - 12)

    def y(kl: float) -> float:
        return _between(math.log10(kl), math.log10(low) - 0.1, math.log10(high) + 0.1, HEIGHT - BOTTOM, TOP)

    parts = [_line([(LEFT, HEIGHT - BOTTOM), (WIDTH - 12, HEIGHT - BOTTOM)], "currentColor")]
    parts.append(_text(WIDTH / 2, HEIGHT - 6, "mean width of a head", "middle"))
    parts += [_text(x(point.width), HEIGHT - 22, f"{point.width:g}", "middle") for point in curves[0].points]
    for power in range(math.ceil(math.log10(low) - 0.1), math.floor(math.log10(high) + 0.1) + 1):
        parts.append(_text(LEFT - 6, y(10.0**power) + 4, f"{10.0**power:g}", "end"))
        parts.append(_line([(LEFT, y(10.0**power)), (WIDTH - 12, y(10.0**power))], "currentColor", "1 5"))
    for at, curve in enumerate(curves):
        colour = COLOURS[at % len(COLOURS)]
        line = [(x(point.width), y(point.kl)) for point in curve.points if point.kl > 0]
        parts.append(_line(line, colour, "" if at < 2 else "5 4"))
        parts.append(
            _text(LEFT + 10, HEIGHT - BOTTOM - 8 - 14 * (len(curves) - 1 - at), curve.method, "start", colour)
        )
    parts.append(f'<circle cx="{x(chosen[0]):.1f}" cy="{y(chosen[1]):.1f}" r="4" fill="{COLOURS[0]}"/>')
    return _svg(parts, "attention KL against mean width", WIDTH, HEIGHT)


def _between(value: float, low: float, high: float, start: float, end: float) -> float:
    return start if high == low else start + (value - low) / (high - low) * (end - start)


def _line(points: Sequence[tuple[float, float]], colour: str, dash: str = "") -> str:
    places = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.6"{dashed}/>'


def _text(x: float, y: float, words: str, anchor: str, colour: str = "currentColor") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{html.escape(words)}</text>'


def _svg(parts: Sequence[str], title: str, width: float, height: float) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{title}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, f"<title>{title}</title>", *parts, "</svg>", ""])
