"""Queries and keys of all-MiniLM-L6-v2 narrowed: attention KL and retrieval by width, over three splits.

Claim     KQ-SVD (arXiv 2512.05916): the low-rank logits that are best for the data beat factors of weights
          alone. In addition: the effect of widths per head and of a short calibration.
Measured  Mean KL(M‖M') of held-out reviews at mean widths 16, 8 and 4 of K = 32; retrieval of a review's
          second half; latency.
Hardware  one CPU core, about 8 minutes
Expect    at 16 / 8 / 4, each ± 10 %: closed form 0.05 / 0.18 / 0.57; widths per head 0.035 / 0.11 / 0.27;
          calibrated 0.030 / 0.09 / 0.21; weights alone 0.63 / 1.2 / 1.55.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import rankwise as rw
from experiments.rank.rivals import basis_costs, closed_form, weight_moments
from experiments.real_models import require_minilm
from experiments.render import markdown_table, mean_std
from experiments.study import Study
from rankwise.auditing import text_batches
from rankwise.cli.load_data import load_text
from rankwise.compression.width_factors import head_curves
from rankwise.compression.width_find import collect_statistics, find_layers
from rankwise.compression.width_modules import Factors, narrow_layers

WIDTH = 32
"""K of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    tokens: int = 192
    reviews: int = 32
    """Reviews to calibrate on, and as many others to test on."""
    widths: tuple[int, ...] = (16, 8, 4)
    calibrate: int = 60
    pairs: int = 300
    """Reviews whose halves are matched."""
    splits: int = 3


def run_split(recipe: Recipe, folder: Path, train: list[str], test: list[str], split: int) -> dict[str, Any]:
    """Measure KL and retrieval at every width, for one draw of calibration and test reviews.

    After the first split, retrieval is measured at the middle width only.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    generator = torch.Generator().manual_seed(split)
    order = torch.randperm(len(train), generator=generator).tolist()
    drawn = [train[at] for at in order[: 2 * recipe.reviews]]
    calibration, held_out = (
        list(text_batches(part, tokenizer, tokens=recipe.tokens, sequences=recipe.reviews, batch_size=8))
        for part in (drawn[: recipe.reviews], drawn[recipe.reviews :])
    )

    def score(model: nn.Module) -> float:
        return round(retrieval(recipe, model, tokenizer, test), 4)

    found: dict[str, Any] = {"split": split, "curves": rivals(load(folder), calibration, held_out, split)}
    found |= {"widths": {}, "latency": {}}
    for width in recipe.widths:
        model = load(folder)
        record = rw.compress(
            model, calibration, keep={"width": width / WIDTH}, calibrate=recipe.calibrate, held_out=held_out,
            time=split == 0, seed=split,
        )  # fmt: skip
        own: dict[str, Any] = {"calibrated": round(record.attention_kl, 4)}
        own |= {"output_error": round(record.worst.output_error, 4), "parameters": record.parameters_after}
        if split == 0 or width == recipe.widths[len(recipe.widths) // 2]:
            own["retrieval"] = score(model)
        found["widths"][str(width)] = own
        if split == 0:
            milliseconds = {"before": 1e3 * record.seconds_before, "after": 1e3 * record.seconds_after}
            found["latency"][str(width)] = [{"timed": record.timed, **milliseconds}]
        print(f"split {split}, width {width}: {own}", flush=True)
    if split == 0:
        found["original"] = score(load(folder))
        found["weights_alone"] = {
            str(width): score(weights_alone(load(folder), calibration[0], width))
            for width in recipe.widths[:2]
        }
        print(f"original {found['original']}, weights alone {found['weights_alone']}", flush=True)
    return found


def rivals(model: nn.Module, calibration: list[Any], held_out: list[Any], seed: int) -> dict[str, Any]:
    """Return attention KL on held-out reviews by method and mean width, without calibration."""
    found, _ = find_layers(model, calibration[0])
    layers, evaluated = (collect_statistics(model, found, batches) for batches in (calibration, held_out))
    curves = [curve for layer in layers for curve in head_curves(layer)]
    costs = basis_costs(model, layers, evaluated, curves, seed)
    return {
        method: {f"{width:g}": round(kl, 4) for width, kl in points.items()}
        for method, points in costs.items()
    }


def load(folder: Path) -> nn.Module:
    return transformers.AutoModel.from_pretrained(folder).eval()


def weights_alone(model: nn.Module, batch: dict[str, Tensor], width: int) -> nn.Module:
    """Narrow a model by the SVD of W_qᵀ W_k, which ignores data: the null."""
    layers = collect_statistics(model, find_layers(model, batch)[0], [batch])
    plan: list[tuple[Any, Factors]] = []
    for layer in layers:
        found = layer.projections
        moments = [weight_moments(model, found, head) for head in range(found.key_heads)]
        layer.query_moments = torch.stack([query for query, _ in moments])
        layer.key_moments = torch.stack([key for _, key in moments])
        plan.append((found, closed_form(layer, [width] * found.key_heads)))
    narrow_layers(model, plan).apply()
    return model


def retrieval(recipe: Recipe, model: nn.Module, tokenizer: Any, texts: list[str]) -> float:
    """Return the mean reciprocal rank of a review's second half among all second halves.

    Halves are ranked by the cosine of mean states. A review is its first T − 2 tokens, cut in the middle.
    """
    ids = [
        tokenizer(text, add_special_tokens=False, truncation=True, max_length=recipe.tokens - 2)["input_ids"]
        for text in texts[: recipe.pairs]
    ]
    first = embed(model, tokenizer, [tokenizer.decode(one[: len(one) // 2]) for one in ids])
    second = embed(model, tokenizer, [tokenizer.decode(one[len(one) // 2 :]) for one in ids])
    similarity = first @ second.mT
    ranks = (similarity >= similarity.diagonal()[:, None]).sum(1)
    return float((1 / ranks).mean())


def embed(model: nn.Module, tokenizer: Any, texts: list[str]) -> Tensor:
    """Return the means of the last states over real tokens, scaled to norm 1."""
    out = []
    with torch.inference_mode():
        for start in range(0, len(texts), 25):
            batch = tokenizer(texts[start : start + 25], padding=True, truncation=True, return_tensors="pt")
            states = model(**batch).last_hidden_state
            real = batch["attention_mask"][..., None]
            out.append(nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1))
    return torch.cat(out)


def measure(recipe: Recipe, data: Path) -> dict[str, Any]:
    folder = require_minilm()
    train, test = (list(load_text(data / "imdb" / f"{part}.jsonl.gz")) for part in ("train", "test"))
    unit = "attention KL in nats, mean over rows, heads and layers; mean reciprocal rank; milliseconds"
    splits = [run_split(recipe, folder, train, test, split) for split in range(recipe.splits)]
    return {"settings": asdict(recipe), "unit": unit, "splits": splits}


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page: KL and retrieval by width, latency of the first split."""
    settings, splits = report["settings"], report["splits"]
    widths, first = [str(width) for width in settings["widths"]], splits[0]
    costs = {
        way: {width: [one["curves"][way][width] for one in splits] for width in widths}
        for way in first["curves"]
    }
    costs[f"widths per head, calibrated ({settings['calibrate']} steps)"] = {
        width: [one["widths"][width]["calibrated"] for one in splits] for width in widths
    }
    ours = [
        [one["widths"][width]["retrieval"] for one in splits if "retrieval" in one["widths"][width]]
        for width in widths
    ]
    original, alone = f"{first['original']:.3f}", first["weights_alone"]
    retrieved = [
        ("widths per head, calibrated", original, *(mean_std(scores, 3) for scores in ours)),
        (
            "weights alone (SVD)",
            original,
            *(f"{alone[width]:.3f}" if width in alone else "–" for width in widths),
        ),
    ]
    times = [
        (
            *(width, f"{first['widths'][width]['parameters']:,}"),
            one.get("timed") or f"pass, {one['tokens']} tokens",
            *(f"{one['before']:.1f}", f"{one['after']:.1f}", f"{one['after'] / one['before']:.2f}"),
        )
        for width in widths
        for one in first["latency"][width]
    ]
    turns = "mean width", "parameters", "timed", "before, ms", "after, ms", "after/before"
    return {
        "kl": markdown_table(
            ("attention KL, nats, at mean width", *widths),
            [(way, *(mean_std(numbers, 3) for numbers in own.values())) for way, own in costs.items()],
        ),
        "retrieval": markdown_table(("mean reciprocal rank, at mean width", str(WIDTH), *widths), retrieved),
        "latency": markdown_table(turns, times),
        "splits": str(len(splits)),
    }


STUDY = Study("compress_minilm", lambda data: measure(Recipe(), data), "evidence/compress", tables)
