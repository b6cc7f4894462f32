"""Figures of docs/evidence/index.md, from kept results: loss by time, time by length."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.figures import BLUE, GRAY, ORANGE, Panel, chart
from experiments.tost.language import BY_CONTEXT, LANGUAGE

SIDES = {
    "tost-scan": ("start", 8, 12),
    "tost-scan-hybrid": ("end", -8, -3),
    "mamba2": ("end", -8, 12),
    "tost": ("start", 8, -2),
    "tost-uniform": ("start", 8, 12),
}
"""Anchor of a label, and its distance from its dot; the others are on the right."""
METHODS = {
    "rankwise": (BLUE, "rw.ops.tssa"),
    "eager": (ORANGE, "the same formula in eager PyTorch"),
    "sdpa": (GRAY, "softmax attention, fused"),
}


def figures() -> dict[str, str]:
    """Return the figures by their names in docs/images."""
    return {
        "loss-time.svg": loss_by_time(_rows("language")),
        "tssa-length.svg": time_by_length(_rows("tssa_lengths")),
    }


def _rows(name: str) -> Any:
    return json.loads(BY_CONTEXT.with_name(f"{name}.json").read_text(encoding="utf-8"))["rows"]


def loss_by_time(rows: Iterable[Mapping[str, Any]]) -> str:
    """Draw the loss of each mixer against the time of its training step at 256 tokens."""
    panel, table = Panel((0.6, 1.6), (1.7, 2.6)), LANGUAGE.table()
    across = [(at / 10, f"{at / 10:g}") for at in range(6, 17, 2)]
    parts = panel.axes(
        across, [1.8, 2, 2.2, 2.4, 2.6], "time of a training step; transformer: 1", "loss, nats per byte"
    )
    times = {row["model"]: row["time"][0] for row in rows if row["tokens"] == 256}
    for model in sorted(set(table) & set(times)):
        time, loss, spread = times[model], table[model].mean("loss"), table[model].std("loss")
        anchor, right, down = SIDES.get(model, ("start", 8, 4))
        color = ORANGE if model.startswith("tost") else BLUE
        parts += [panel.line([(time, loss - spread), (time, loss + spread)], color)]
        parts += [panel.dot(time, loss, color), panel.text(time, loss, model, anchor, right, down)]
    return chart("Loss in nats per byte against time", parts)


def time_by_length(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw the time of a forward pass against length, both axes logarithmic."""
    times = {
        row["tokens"]: row["fastest_milliseconds"]
        for row in rows
        if row.get("causal") is False and not row["backward"]
    }
    unit = times[256]["rankwise"]
    panel = Panel((8, math.log2(max(times))), (0, 5.5), left=64, width=420)
    across = [(math.log2(tokens), f"{tokens:,}") for tokens in times]
    parts = panel.axes(across, [], "tokens", "time; 1: rw.ops.tssa at 256 tokens")
    parts += [panel.text(8, power, f"{10**power:,}", "end", -6, 4) for power in range(6)]
    for at, (name, (color, words)) in enumerate(METHODS.items()):
        points = [(math.log2(tokens), math.log10(one[name] / unit)) for tokens, one in times.items()]
        parts += [panel.line(points, color), *(panel.dot(*point, color) for point in points)]
        parts += [panel.dot(8.3, 5.3 - at / 3, color), panel.text(8.4, 5.3 - at / 3, words, "start", 4, 4)]
    return chart("Time of a forward pass against length", parts)
