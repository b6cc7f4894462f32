"""Importance of heads next to their rank, cheap estimates next to removal, and sets of removable heads.

Claim     Michel et al., "Are Sixteen Heads Really Better than One?" (2019): the gradient of a gate on a head
          shows the cost of its removal; many heads can be removed.
Question  How well does the estimate sort the heads of two real models? Does rank predict
          importance? Does a set of heads chosen on some texts cost as little on others?
Hardware  one CPU core, about 4 minutes
Expect    The estimate from random projections sorts heads nearly as removal does.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from torch import nn

import rankwise as rw
from experiments.figures import Panel, chart
from experiments.rank.rank_saturation import rounded
from experiments.real_models import minilm
from experiments.render import markdown_table
from experiments.study import Report, Study
from rankwise.auditing.importance_findings import spearman as rank_correlation
from rankwise.auditing.measure_table import HEAD_MEASURES
from rankwise.cli.load_data import load_data
from rankwise.cli.load_model import demo_model, demo_text, load_model
from rankwise.importance import ImportanceSettings, ablation_cost, measure_importance

ESTIMATES = {
    "curvature": "curvature, 8 projections",
    "estimate": "curvature − gradient, 8 projections",
}
RANKS = {
    "numerical_rank": "numerical rank share",
    "effective_rank": "effective rank",
    "stable_rank": "stable rank",
    "row_entropy": "row entropy",
    "first_token_mass": "first-token mass",
    "max_token_mass": "largest token mass",
}
ONE_PROBE, OTHER_TEXTS = "estimate, 1 projection", "exact on other texts"
COMPARED = {
    **ESTIMATES,
    ONE_PROBE: "the same with 1 projection",
    OTHER_TEXTS: "exact costs of splits 1–2, 1–3, 2–3",
}
"""Rows of the table."""
LIGHT, DARK = (158, 196, 224), (16, 58, 96)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    splits: int = 3
    sequences: int = 8
    """Sequences of each split."""
    tokens: int = 64
    demo_tokens: int = 128
    probes: int = 8
    tolerance: float = 0.01
    seed: int = 0


def batches(folder: Path, text: Path, tokens: int, settings: Settings) -> tuple[nn.Module, list[list[Any]]]:
    """Return the model, and one batch of sequences per split; splits share no sequence."""
    subject, size = load_model(str(folder)), settings.sequences
    made = load_data(subject, text=text, tokens=tokens, sequences=size * settings.splits, batch_size=size)
    return subject.model, [[batch] for batch in made.batches]


def one_model(
    name: str, data: str, model: nn.Module, splits: Sequence[list[Any]], settings: Settings
) -> Report:
    """Audit every split with exact importance, then run each set of removable heads on the other splits."""
    probes = {
        "tolerance": settings.tolerance, "probes": settings.probes, "seed": settings.seed, "hold_out": False,
    }  # fmt: skip
    exactly = ImportanceSettings(exact=True, **probes)
    audits = [rw.audit(model, split, importance=exactly) for split in splits]
    records = [audit.importance for audit in audits if audit.importance is not None]
    shown = {one.name: one for one in HEAD_MEASURES}
    sets = []
    for at, (split, record) in enumerate(zip(splits, records, strict=True)):
        assert record.removable is not None
        sets.append(held_out(model, splits, at, "exact", record.removable.heads))
        estimated = measure_importance(
            model, split, ImportanceSettings(exact=False, **probes)
        ).record.removable
        assert estimated is not None
        sets.append(held_out(model, splits, at, "estimate", estimated.heads))
    single = ImportanceSettings(exact=False, probes=1, tolerance=None, seed=settings.seed)
    return {
        "model": name,
        "data": data,
        "loss": records[0].loss,
        "unit": records[0].unit,
        "values": [record.value for record in records],
        "heads": [[head.layer, head.head] for head in audits[0].heads],
        "exact": [[head.removal_cost for head in audit.heads] for audit in audits],
        "estimates": {
            kind: [[getattr(head.importance, kind) for head in audit.heads] for audit in audits]
            for kind in ESTIMATES
        },
        "ranks": {
            name: [[shown[name].value(head) for head in audit.heads] for audit in audits] for name in RANKS
        },
        "one_probe": [
            [head.estimate for head in measure_importance(model, split, single).heads.values()]
            for split in splits
        ],
        "sets": sets,
    }


def held_out(
    model: nn.Module, splits: Sequence[list[Any]], at: int, order: str, heads: Sequence[Any]
) -> Report:
    """Return the cost of a set on the split it was chosen on, and on each other split."""
    costs = [ablation_cost(model, split, heads) for split in splits]
    return {
        "split": at,
        "order": order,
        "heads": [[head.layer, head.head] for head in heads],
        "here": costs[at].relative,
        "loss": costs[at].loss,
        "elsewhere": [cost.relative for other, cost in enumerate(costs) if other != at],
    }


def spearman(first: Iterable[float], second: Iterable[float]) -> float:
    """Return Spearman's rank correlation of pairs without NaN; NaN for fewer than three pairs."""
    pairs = pd.DataFrame({"first": first, "second": second}).dropna().to_numpy()
    return rank_correlation(*pairs.T) if len(pairs) > 2 else math.nan


def correlations(model: Report) -> dict[str, list[float]]:
    """Return Spearman with the exact costs, by split: of estimates, of ranks, of exact costs elsewhere."""
    exact = numbers(model["exact"])
    named = {**model["estimates"], ONE_PROBE: model["one_probe"], **model["ranks"]}
    found = {
        name: [spearman(*both) for both in zip(numbers(values), exact, strict=True)]
        for name, values in named.items()
    }
    pairs = [(a, b) for a in range(len(exact)) for b in range(a + 1, len(exact))]
    return {**found, OTHER_TEXTS: [spearman(exact[a], exact[b]) for a, b in pairs]}


def numbers(rows: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Return rows with NaN in place of null."""
    return [[math.nan if value is None else value for value in row] for row in rows]


def measure_models(data: Path) -> Report:
    settings, text, found = Settings(), data / "imdb" / "test.jsonl.gz", []
    if (weights := minilm()) is not None:
        splits = batches(weights, text, settings.tokens, settings)
        about = f"{text.name}, {settings.tokens} tokens"
        found.append(one_model("all-MiniLM-L6-v2", about, *splits, settings))
    splits = batches(demo_model(), demo_text(), settings.demo_tokens, settings)
    about = f"its text, {settings.demo_tokens} tokens"
    found.append(one_model("the bundled demo", about, *splits, settings))
    for model in found:
        model["correlations"] = correlations(model)
    report: Report = rounded({"recipe": asdict(settings), "models": found})
    return report


def tables(report: Report) -> dict[str, str]:
    return {
        "splits": str(report["recipe"]["splits"]),
        "sequences": str(report["recipe"]["sequences"]),
        "models": "\n\n".join(part for model in report["models"] for part in model_parts(model)),
    }


def figure_name(model: Report) -> str:
    return "importance-" + ("demo" if "demo" in model["model"] else "minilm") + ".svg"


def model_parts(model: Report) -> Iterable[str]:
    values = ", ".join(f"{value:.3f}" for value in model["values"])
    whole = f" The whole model: {values} by split." if any(model["values"]) else ""
    yield f"## {model['model']}"
    yield f"{model['data']}; {len(model['heads'])} heads; loss: {model['loss']}, {model['unit']}.{whole}"
    found = model["correlations"]
    yield "Spearman with the exact costs, by split:\n\n" + correlation_table(found, COMPARED)
    yield ("The estimate as a share of the exact cost, over heads with a cost:\n\n" + size_table(model))
    yield "Rank and other measures against the exact costs:\n\n" + correlation_table(found, RANKS)
    yield f"![Cost of removal against numerical rank](../images/{figure_name(model)})"
    yield "Heads that can be removed together at 1 %:\n\n" + set_table(model["sets"])


def by_split(splits: int, rows: Iterable[Sequence[str]]) -> str:
    return markdown_table(["", *(f"split {at + 1}" for at in range(splits))], rows)


def correlation_table(found: Report, names: dict[str, str]) -> str:
    """Return a row per measure that is known on a split."""
    known = {name: found[name] for name in names if any(value is not None for value in found.get(name, ()))}
    rows = [
        [names[name], *("–" if one is None else f"{one:.2f}" for one in values)]
        for name, values in known.items()
    ]
    width = max(map(len, known.values()))
    return by_split(width, [row + [""] * (width + 1 - len(row)) for row in rows])


def size_table(model: Report) -> str:
    """Return the size of estimates relative to exact costs."""
    splits = zip(model["estimates"]["estimate"], model["exact"], strict=True)
    pairs = [list(zip(*split, strict=True)) for split in splits]
    ratios = [[estimate / exact for estimate, exact in split if exact > 0] for split in pairs]
    largest = [max(split, key=lambda pair: pair[1]) for split in pairs]
    medians = ["median of heads", *(f"{median(split):.2f}" for split in ratios)]
    most = ["the most important head", *(f"{estimate / exact:.2f}" for estimate, exact in largest)]
    return by_split(len(pairs), [medians, most])


def set_table(sets: Sequence[Report]) -> str:
    """Return the sets of removable heads, and their costs."""
    rows = [
        [
            str(one["split"] + 1),
            one["order"],
            str(len(one["heads"])),
            f"{one['here']:+.2%}",
            ", ".join(f"{cost:+.2%}" for cost in one["elsewhere"]),
            "; ".join(f"{layer}.{head}" for layer, head in one["heads"]) or "–",
        ]
        for one in sets
    ]
    head = (
        "chosen on",
        "sorted by",
        "heads",
        "cost, same split",
        "cost, other splits",
        "layer.head",
    )
    return markdown_table(head, rows)


def figures(report: Report) -> dict[str, str]:
    """Return a scatter per model: cost of removal on the first split against numerical rank share."""
    found = {}
    for model in report["models"]:
        shares, costs = model["ranks"]["numerical_rank"][0], model["exact"][0]
        panel = Panel((min(shares), max(shares)), (min(0.0, *costs), max(costs)))
        ticks = [low + (high - low) * step / 4 for low, high in [panel.y] for step in range(5)]
        ends = [(at, f"{at:.2f}") for at in (panel.x[0], sum(panel.x) / 2, panel.x[1])]
        parts = panel.axes(ends, ticks, "numerical rank share", f"cost of removal, {model['unit']}")
        last = max(layer for layer, _ in model["heads"])
        for (layer, head), share, cost in zip(model["heads"], shares, costs, strict=True):
            tone = (round(a + layer / max(last, 1) * (b - a)) for a, b in zip(LIGHT, DARK, strict=True))
            color = "#" + "".join(f"{part:02x}" for part in tone)  # darker in deeper layers
            parts.append(panel.dot(share, cost, color, f"layer {layer}, head {head}"))
        found[figure_name(model)] = chart("Cost of removal against numerical rank", parts)
    return found


STUDY = Study("importance", measure_models, "evidence/importance", tables, figures)
