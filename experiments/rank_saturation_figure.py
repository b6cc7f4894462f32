"""Figures of a plan as SVG: rank against width, and K* against length."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from experiments.rank.random_layers import LogLaw
from rankwise.plan import HeadDimPlan

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520.0, 300.0, 48.0, 22.0, 14.0, 40.0
COLOURS = ("#1d5ba6", "#c2500f", "#0b7a5c", "#9a3b8c", "#7a6200", "#4a5563")

Scale = Callable[[float], float]


def curve_figure(plan: HeadDimPlan) -> str:
    """Draw rank/T against K with one standard deviation, the barrier and K*."""
    widths, means = [point[0] for point in plan.curve], [point[1] for point in plan.curve]
    highest = max(mean + std for _, mean, std in plan.curve)
    top = max(plan.barrier / plan.tokens, highest) * 1.08
    x = _scale(math.log2(widths[0]), math.log2(widths[-1]), LEFT, WIDTH - RIGHT)
    y = _scale(0.0, top, HEIGHT - BOTTOM, TOP)
    parts = [_axis(y(0)), _text(WIDTH / 2, HEIGHT - 6, "query/key width K of a head", "middle")]
    for power in range(10):
        if widths[0] <= 2**power <= widths[-1]:
            parts.append(_text(x(float(power)), HEIGHT - 22, str(2**power), "middle"))
    step = 0.1 if top <= 0.75 else 0.2
    for mark in range(int(top / step) + 1):
        parts.append(_text(LEFT - 6, y(mark * step) + 4, f"{mark * step:.1f}", "end"))
    barrier = y(plan.barrier / plan.tokens)
    parts.append(_line([(LEFT, barrier), (WIDTH - RIGHT, barrier)], "currentColor", dash="5 4"))
    parts.append(_text(LEFT + 4, barrier - 5, "barrier: hardmax, winners at random", "start"))
    parts += _line_with_spread(plan, COLOURS[0], x, y)
    at = x(math.log2(plan.head_dim))
    parts.append(
        _line(
            [(at, y(0)), (at, y(float(np.interp(plan.head_dim, widths, means))))],
            COLOURS[0],
            dash="2 3",
        )
    )
    parts.append(_text(at + 5, y(0) - 6, f"K* = {plan.head_dim}", "start"))
    return _svg(parts, "rank/T against head width")


def _line_with_spread(plan: HeadDimPlan, colour: str, x: Scale, y: Scale) -> list[str]:
    places = [(x(math.log2(width)), mean, std) for width, mean, std in plan.curve]
    upper = [(at, y(mean + std)) for at, mean, std in places]
    lower = [(at, y(max(0.0, mean - std))) for at, mean, std in reversed(places)]
    area = " ".join(f"{a:.1f},{b:.1f}" for a, b in upper + lower)
    return [
        f'<polygon points="{area}" fill="{colour}" opacity="0.18"/>',
        _line([(at, y(mean)) for at, mean, _ in places], colour),
        _text(places[-1][0], y(places[-1][1]) + 20, "layer 1", "end", colour),
    ]


def law_figure(law: LogLaw) -> str:
    """K* against ln T with its intervals, and the line fitted."""
    lengths = [point[0] for point in law.points]
    x = _scale(math.log2(lengths[0]), math.log2(lengths[-1]), LEFT, WIDTH - RIGHT)
    y = _scale(0.0, max(point[3] for point in law.points) * 1.15, HEIGHT - BOTTOM, TOP)
    parts = [_axis(y(0)), _text(WIDTH / 2, HEIGHT - 6, "tokens T", "middle")]
    ends = [(lengths[0], 0.0), (lengths[-1], 0.0)]
    line = [(x(math.log2(t)), y(law.intercept + law.slope * math.log(t))) for t, _ in ends]
    parts.append(_line(line, COLOURS[1]))
    for tokens, width, low, high in law.points:
        at = x(math.log2(tokens))
        parts.append(_line([(at, y(low)), (at, y(high))], COLOURS[0]))
        parts.append(f'<circle cx="{at:.1f}" cy="{y(width):.1f}" r="3.5" fill="{COLOURS[0]}"/>')
        parts += [_text(at, y(high) - 6, str(width), "middle"), _text(at, HEIGHT - 22, str(tokens), "middle")]
    return _svg(parts, "K* against length")


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _axis(y: float) -> str:
    return _line([(LEFT, y), (WIDTH - RIGHT, y)], "currentColor")


def _line(points: Sequence[tuple[float, float]], colour: str, dash: str = "") -> str:
    places = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.6"{dashed}/>'


def _text(x: float, y: float, words: str, anchor: str, colour: str = "currentColor") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def _svg(parts: Sequence[str], title: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" '
        f'aria-label="{title}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, f"<title>{title}</title>", *parts, "</svg>", ""])
