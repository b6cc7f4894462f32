"""Rotary pairs and heads of the bundled demo: loss on held-out text without them, over three splits.

Claim     None of a paper: how many of a trained rotary model's pairs and heads does its loss need?
Asked     Loss with 12, 8 and 4 of 16 rotary pairs a head on average, chosen and calibrated; of other choices
          the attention KL; loss with the heads that can go together within 1 % and 5 %.
Data      text.txt of the demo, which the model was not trained on: 32 windows drawn from the first 100 to
          calibrate on, the last 59 held out.
Hardware  one CPU core, about 13 minutes beside other programs
Expect    loss added, nats a byte, at 12 / 8 / 4 pairs, each ± 10 %: chosen 0.013 / 0.065 / 0.29, calibrated
          0.002 ± 0.002 / 0.012 / 0.062; one head of 16 goes within 1 %, four within 5 %.

    python -m experiments run compress_demo
"""

from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

import rankwise as rw
from experiments.compress_cache import Recipe as Windows
from experiments.compress_cache import load, windows
from experiments.rank.rivals import pair_costs
from experiments.render import mean_std
from experiments.study import Study, settings_from
from rankwise.compression.layers import Factors
from rankwise.compression.qk_modules import narrow_layers
from rankwise.compression.qk_solve import calibrate
from rankwise.compression.qk_statistics import QueryKeyStatistics, collect_statistics, layer_divergence
from rankwise.compression.rotary_find import find_rotations
from rankwise.compression.rotary_solve import (
    greedy_orders,
    kept_factors,
    pair_widths,
    whole_factors,
)

PAIRS = 16
"""Of each head of the demo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides a run."""

    calibrate: int = 32
    """Windows to calibrate on."""
    drawn_from: int = 100
    """The first windows, of which these are drawn; all others are held out."""
    pairs: tuple[int, ...] = (12, 8, 4)
    steps: int = 60
    tolerances: tuple[float, ...] = (0.01, 0.05)
    splits: int = 3


def run_split(recipe: Recipe, split: int) -> dict[str, Any]:
    """One draw of calibration windows, measured on the same held-out windows."""
    every = windows(Windows())
    order = torch.randperm(recipe.drawn_from, generator=torch.Generator().manual_seed(split))
    calibration = [{"input_ids": part} for part in every[order[: recipe.calibrate]].split(8)]
    held_out = [{"input_ids": part} for part in every[recipe.drawn_from :].split(16)]
    found = {"split": split, "loss": round(loss(load(), held_out), 5)}
    found |= rotary(recipe, calibration, held_out, split)
    found["heads"] = {str(one): heads(calibration, held_out, one) for one in recipe.tolerances}
    print(found, flush=True)
    return found


def rotary(recipe: Recipe, calibration: list[Any], held_out: list[Any], seed: int) -> dict[str, Any]:
    """Loss and attention KL with pairs chosen once, at every budget, before and after calibration."""
    model = load()
    layers = collect_statistics(model, find_rotations(model, calibration[0])[0], calibration)
    wholes = [whole_factors(layer) for layer in layers]
    orders = [greedy_orders(layer, whole, seed) for layer, whole in zip(layers, wholes, strict=True)]
    figures = collect_statistics(model, [layer.projections for layer in layers], held_out)
    found: dict[str, Any] = {"pairs": {}}
    for pairs in recipe.pairs:
        widths = pair_widths(orders, pairs / PAIRS)
        chosen = [
            kept_factors(layer, whole, own, width)
            for layer, whole, own, width in zip(layers, wholes, orders, widths, strict=True)
        ]
        better = [
            calibrate(layer, one, recipe.steps, seed)[0] for layer, one in zip(layers, chosen, strict=True)
        ]
        found["pairs"][str(pairs)] = {
            "kept": [[width // 2 for width in own] for own in widths],
            "chosen": priced(model, figures, chosen, held_out),
            "calibrated": priced(model, figures, better, held_out),
        }
        print(f"split {seed}, {pairs} pairs: {found['pairs'][str(pairs)]}", flush=True)
    costs = pair_costs(layers, figures, wholes, orders, seed)
    found["curves"] = {
        method: {f"{width / 2:g}": round(kl, 4) for width, kl in points.items()}
        for method, points in costs.items()
    }
    return found


def priced(
    model: nn.Module, figures: list[QueryKeyStatistics], factors: list[Factors], held_out: list[Any]
) -> dict[str, float]:
    """Loss on held-out text, and mean attention KL, each layer given what the original gave it."""
    plan = [(layer.projections, one) for layer, one in zip(figures, factors, strict=True)]
    with narrow_layers(model, plan):
        after = loss(model, held_out)
    kl = [layer_divergence(layer.samples, one).mean() for layer, one in zip(figures, factors, strict=True)]
    return {"loss": round(after, 5), "kl": round(float(torch.stack(kl).mean()), 5)}


def heads(calibration: list[Any], held_out: list[Any], tolerance: float) -> dict[str, Any]:
    """What is left where heads go within a tolerance on the calibration windows."""
    model = load()
    options: dict[str, Any] = {"time": False, "parts": ("heads",)}
    record = rw.compress(model, calibration, tolerance=tolerance, held_out=held_out, **options)
    return {
        "gone": [[head.layer, head.head] for head in record.heads if not head.width],
        "loss": round(record.loss_after, 5),
        "parameters_before": record.parameters_before,
        "parameters_after": record.parameters_after,
        "cache_bytes_before": record.cache_bytes_before,
        "cache_bytes_after": record.cache_bytes_after,
    }


def loss(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    """Nats for each byte but the first of a window."""
    total, count = 0.0, 0
    for batch in batches:
        with torch.no_grad():
            logits = model(**batch).logits[:, :-1]
        targets = batch["input_ids"][:, 1:]
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        count += targets.numel()
    return total / count


def measure(recipe: Recipe) -> dict[str, Any]:
    """Measure every split."""
    splits = [run_split(recipe, split) for split in range(recipe.splits)]
    return {"settings": asdict(recipe), "unit": "nats a byte", "splits": splits}


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    recipe, splits = settings_from(Recipe, report), report["splits"]
    return {
        "splits": str(len(splits)),
        "loss": f"{splits[0]['loss']:.4f}",
        "steps": str(recipe.steps),
        "pairs": _pairs(recipe, splits),
        "ways": _ways(splits),
        "heads": _heads(recipe, splits),
    }


def _pairs(recipe: Recipe, splits: list[dict[str, Any]]) -> str:
    lines = [
        "| pairs of 16 | loss added, chosen | loss added, calibrated | attention KL, chosen | calibrated |",
        "| --- | --- | --- | --- | --- |",
    ]
    for pairs in recipe.pairs:
        own = [split["pairs"][str(pairs)] for split in splits]
        cells = [
            mean_std([one[way]["loss"] - split["loss"] for one, split in zip(own, splits, strict=True)])
            for way in ("chosen", "calibrated")
        ]
        cells += [mean_std([one[way]["kl"] for one in own]) for way in ("chosen", "calibrated")]
        lines.append(f"| {pairs} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ways(splits: list[dict[str, Any]]) -> str:
    counts = list(next(iter(splits[0]["curves"].values())))
    lines = [f"| pairs kept | {' | '.join(counts)} |", "| --- |" + " --- |" * len(counts)]
    for method in splits[0]["curves"]:
        cells = [mean_std([split["curves"][method][count] for split in splits], 3) for count in counts]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _heads(recipe: Recipe, splits: list[dict[str, Any]]) -> str:
    lines = [
        "| tolerance | heads that go, by split | loss added | parameters left |",
        "| --- | --- | --- | --- |",
    ]
    for tolerance in recipe.tolerances:
        own = [split["heads"][str(tolerance)] for split in splits]
        added = mean_std([one["loss"] - split["loss"] for one, split in zip(own, splits, strict=True)])
        left = mean(one["parameters_after"] / one["parameters_before"] for one in own)
        gone = ", ".join(str(len(one["gone"])) for one in own)
        lines.append(f"| {tolerance:.0%} | {gone} | {added} | {left:.1%} |")
    return "\n".join(lines)


STUDY = Study("compress_demo", lambda data: measure(Recipe()), "compress-demo", tables)
