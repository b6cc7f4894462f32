"""Rotary pairs and heads of the bundled demo: loss on held-out text without them, over three splits.

Claim     None of a paper: how many of a trained rotary model's pairs and heads does its loss need?
Measured  Loss with 12, 8 and 4 of 16 rotary pairs per head on average, chosen and calibrated; attention KL of
          other choices; loss without the heads that can be removed together within 1 % and 5 %.
Data      text.txt of the demo, on which the model was not trained: 32 windows drawn from the first 100 to
          calibrate on, the last 59 held out.
Hardware  one CPU core, about 25 minutes
Expect    loss added, nats per byte, at 12 / 8 / 4 pairs, each ± 10 %: chosen 0.013 / 0.065 / 0.29, calibrated
          0.002 ± 0.002 / 0.012 / 0.062; one head of 16 is removed within 1 %, four within 5 %.
"""

from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import rankwise as rw
from experiments.rank.rivals import pair_costs
from experiments.real_models import demo, draw_windows, loss
from experiments.render import markdown_table, mean_std
from experiments.study import Study
from rankwise.compression.width_factors import greedy_orders, whole_factors
from rankwise.compression.width_find import collect_statistics, find_layers

PAIRS = 16
"""Rotary pairs per head of the demo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    calibrate: int = 32
    """Windows to calibrate on."""
    drawn_from: int = 100
    """Number of first windows from which these are drawn; all others are held out."""
    pairs: tuple[int, ...] = (12, 8, 4)
    steps: int = 60
    tolerances: tuple[float, ...] = (0.01, 0.05)
    splits: int = 3


def run_split(recipe: Recipe, split: int) -> dict[str, Any]:
    """Measure one draw of calibration windows on the held-out windows."""
    calibration, held_out = draw_windows(split, recipe.calibrate, recipe.drawn_from)
    found = {
        "split": split,
        "loss": round(loss(demo(), held_out), 5),
        "pairs": {
            str(pairs): keep_pairs(recipe, calibration, held_out, pairs, split) for pairs in recipe.pairs
        },
        "curves": rivals(calibration, held_out, split),
        "heads": {str(one): remove_heads(calibration, held_out, one) for one in recipe.tolerances},
    }
    print(found, flush=True)
    return found


def keep_pairs(
    recipe: Recipe, calibration: list[Any], held_out: list[Any], pairs: int, seed: int
) -> dict[str, Any]:
    """Return loss and attention KL with some pairs per head on average, before and after calibration."""
    found: dict[str, Any] = {}
    for name, steps in (("chosen", 0), ("calibrated", recipe.steps)):
        record = rw.compress(
            demo(), calibration, keep=pairs / PAIRS, parts="width", calibrate=steps, held_out=held_out,
            time=False, seed=seed,
        )  # fmt: skip
        widths: dict[int, list[int]] = {}
        for head in record.heads:
            widths.setdefault(head.layer, []).append(head.width // 2)
        found |= {"kept": list(widths.values())}
        found[name] = {"loss": round(record.worst.loss_after, 5), "kl": round(record.attention_kl, 5)}
    return found


def rivals(calibration: list[Any], held_out: list[Any], seed: int) -> dict[str, dict[str, float]]:
    """Return attention KL of other choices of pairs, by method and mean number of pairs."""
    model = demo()
    layers = collect_statistics(model, find_layers(model, calibration[0])[0], calibration)
    wholes = [whole_factors(layer) for layer in layers]
    orders = [greedy_orders(layer, whole, seed) for layer, whole in zip(layers, wholes, strict=True)]
    evaluated = collect_statistics(model, [layer.projections for layer in layers], held_out)
    return {
        method: {f"{width / 2:g}": round(kl, 4) for width, kl in points.items()}
        for method, points in pair_costs(layers, evaluated, wholes, orders, seed).items()
    }


def remove_heads(calibration: list[Any], held_out: list[Any], tolerance: float) -> dict[str, Any]:
    """Remove the heads that can be removed within a tolerance on the calibration data."""
    record = rw.compress(
        demo(), calibration, tolerance=tolerance, held_out=held_out, time=False, parts=("heads",)
    )
    return {
        "gone": [[head.layer, head.head] for head in record.heads if not head.width],
        "loss": round(record.worst.loss_after, 5),
        "parameters_before": record.parameters_before,
        "parameters_after": record.parameters_after,
        "cache_bytes_before": record.kept_cache.before // record.kept_cache.tokens,  # per token
        "cache_bytes_after": record.kept_cache.after // record.kept_cache.tokens,  # per token
    }


def measure(recipe: Recipe) -> dict[str, Any]:
    splits = [run_split(recipe, split) for split in range(recipe.splits)]
    return {"settings": asdict(recipe), "unit": "nats a byte", "splits": splits}


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page: pairs kept, other choices of pairs, heads removed."""
    settings, splits = report["settings"], report["splits"]

    def added(losses: list[float]) -> str:
        return mean_std([one - split["loss"] for one, split in zip(losses, splits, strict=True)])

    ways = ("chosen", "calibrated")
    pairs = []
    for count in map(str, settings["pairs"]):
        own = [split["pairs"][count] for split in splits]
        cells = [added([one[way]["loss"] for one in own]) for way in ways]
        pairs.append((count, *cells, *(mean_std([one[way]["kl"] for one in own]) for way in ways)))
    counts = list(next(iter(splits[0]["curves"].values())))
    curves = [
        (method, *(mean_std([split["curves"][method][count] for split in splits], 3) for count in counts))
        for method in splits[0]["curves"]
    ]
    heads = []
    for tolerance in settings["tolerances"]:
        own = [split["heads"][str(tolerance)] for split in splits]
        gone = ", ".join(str(len(one["gone"])) for one in own)
        left = mean(one["parameters_after"] / one["parameters_before"] for one in own)
        heads.append((f"{tolerance:.0%}", gone, added([one["loss"] for one in own]), f"{left:.1%}"))
    headings = "pairs of 16", "loss added, chosen", "loss added, calibrated", "attention KL, chosen"
    return {
        "splits": str(len(splits)),
        "loss": f"{splits[0]['loss']:.4f}",
        "steps": str(settings["steps"]),
        "pairs": markdown_table((*headings, "calibrated"), pairs),
        "ways": markdown_table(("pairs kept", *counts), curves),
        "heads": markdown_table(
            ("tolerance", "heads removed, by split", "loss added", "parameters left"), heads
        ),
    }


STUDY = Study("compress_demo", lambda data: measure(Recipe()), "evidence/compress-demo", tables)
