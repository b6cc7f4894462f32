"""Figures of docs/evidence/index.md, from kept results: loss by time, time by length, price by size."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.figures import BLUE, GRAY, ORANGE, Panel, Point, chart
from experiments.rank import compress_cache, compress_demo, compress_minilm
from experiments.study import Study
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
        "compression-price.svg": price_by_size(),
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


def price_by_size() -> str:
    """Draw what each part of compression costs against the share of it that is kept, a panel per unit."""
    lines: dict[str, tuple[Study, str, Callable[..., Point]]] = {
        "cache": (
            compress_cache.STUDY, "keeps",
            lambda at, one, split: (float(at), one["loss_after"] - one["loss_before"]),
        ),
        "rotary pairs": (
            compress_demo.STUDY, "pairs",
            lambda at, one, split: (int(at) / 16, one["calibrated"]["loss"] - split["loss"]),
        ),
        "heads": (
            compress_demo.STUDY, "heads",
            lambda at, one, split: (1 - len(one["gone"]) / 16, one["loss"] - split["loss"]),
        ),
        "queries and keys": (
            compress_minilm.STUDY, "widths",
            lambda at, one, split: (int(at) / 32, one["calibrated"]),
        ),
    }  # fmt: skip
    units = (0.08, "demo: loss added, nats per byte"), (0.24, "all-MiniLM: attention KL, nats")
    panels = [Panel((1, 0), (0, top), 56 + 374 * at, width=290) for at, (top, _) in enumerate(units)]
    parts, ticks = [], [(at / 8, f"{at / 8:g}") for at in (8, 6, 4, 2, 1)]
    for panel, (top, unit) in zip(panels, units, strict=True):
        parts += panel.axes(ticks, [top * at / 4 for at in range(5)], "share of the part that is kept", unit)
    for (name, (study, group, place)), color in zip(lines.items(), (BLUE, ORANGE, GRAY, BLUE), strict=True):
        splits = study.kept()["splits"]
        by_size = [[place(at, split[group][at], split) for split in splits] for at in splits[0][group]]
        points = [(1.0, 0.0), *((one[0][0], fmean(cost for _, cost in one)) for one in by_size)]
        panel = panels[name == "queries and keys"]
        parts += [panel.line(points, color), *(panel.dot(*point, color) for point in points)]
        parts.append(panel.text(*points[-1], name, right=14, down=-8))
    return chart("What compression costs against the share that is kept", parts, 760)
