"""Where the rank of random heads saturates: the rank paper's curves, tables and real data, beside ours.

Claim     "On the Limitation and Redundancy of Transformers: A Rank Perspective": rank grows with the head
          width K and saturates at K* = Ω(log T); in layers 2 and 4 of a text model at random initialisation
          it does so at the same K for widths 32 to 512 (two tables of the rebuttal).
Asked     Whether the tables come out again, and what saturation looks like in real classes on real data.
Hardware  one CPU core, about 3 minutes
Expect    K* = a + b·ln T to within about one unit of width over T = 64 … 8,192. The rebuttal names neither
          length, text preparation, positions, number of heads, kind of block nor δ: all but the heads are
          varied, and the nearest variant is shown.

    python -m experiments run rank_saturation
"""

import math
import re
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import rankwise as rw
from experiments.rank.random_layers import (
    Setting,
    embed_randomly,
    fit_log_law,
    gaussian,
    layer_ranks,
    token_states,
)
from experiments.rank_saturation_page import REBUTTAL, figures, tables
from experiments.study import Study
from rankwise.cli.load_data import load_text
from rankwise.plan.planner import DENSE_WIDTHS, saturation
from rankwise.plan.ranks import RandomHead, hardmax_ranks

HEADS = 8
"""Of the text model: the rebuttal's widths are no multiples of K = 3, so its D was not H·K."""

MEASURES = {"hardmax": 0.0, "softmax": 1.0}
"""Different winners, or singular values ≥ 0.01 of the softmax at τ = √K: temperature in units of √K."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides a run."""

    lengths: tuple[int, ...] = (50, 200, 800)
    law: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    text_lengths: tuple[int, ...] = (128, 256, 512)
    text_widths: tuple[int, ...] = (32, 128, 256, 512)
    text_head_dims: tuple[int, ...] = (2, 3, 4, 8, 16)
    model_width: int = 192
    model_layers: int = 6
    model_head_dims: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
    image_tokens: int = 257
    """Patches of 2 × 2 of a 32 × 32 picture, and the class token."""
    text_tokens: int = 256
    trials: int = 10
    seed: int = 0


@dataclass(frozen=True)
class Variant:
    """What the rebuttal leaves open."""

    tokens: int
    padded: bool
    """Reviews cut or filled up with equal padding to T; else windows of T words of the longer ones."""
    positions: str
    block: str


def synthetic(recipe: Recipe) -> list[dict[str, Any]]:
    """Rank/T of hardmax heads on orthonormal and Gaussian tokens."""
    kinds = [("full", "orthonormal"), ("causal", "orthonormal"), ("full", "gaussian")]
    found = []
    for (mask, inputs), tokens in product(kinds, recipe.lengths):
        barrier = rw.theory.rank_barrier(tokens, mask) / tokens
        shares = np.stack(
            [synthetic_shares(mask, inputs, tokens, trial, recipe) for trial in range(recipe.trials)]
        )
        at, interval = saturation(DENSE_WIDTHS, shares, 0.01, recipe.seed)
        points = [
            (k, float(mean), float(std))
            for k, mean, std in zip(DENSE_WIDTHS, shares.mean(0), shares.std(0, ddof=1), strict=True)
            if k & (k - 1) == 0
        ]
        found.append(
            {
                "mask": mask, "inputs": inputs, "tokens": tokens, "barrier": barrier,
                "head_dim": DENSE_WIDTHS[at], "interval": interval, "points": points,
            }
        )  # fmt: skip
    return found


def synthetic_shares(mask: str, inputs: str, tokens: int, trial: int, recipe: Recipe) -> np.ndarray:
    """Return rank/T at each width; Gaussian tokens have width 64 and are not normalized."""
    if inputs == "orthonormal":
        return RandomHead(tokens, mask=mask, seed=recipe.seed).trial(DENSE_WIDTHS, trial)
    setting = Setting(tokens, mask, inputs="gaussian", width=64, seed=recipe.seed)
    generator, widest = setting.generator(trial, 2), DENSE_WIDTHS[-1]
    states = token_states(setting, trial)
    weights = (gaussian(generator, widest, 64) * math.sqrt(widest / 64) for _ in range(2))
    query, key = (states @ weight.mT for weight in weights)
    return np.array(hardmax_ranks(query, key, DENSE_WIDTHS, mask)) / tokens


def word_ids(path: Path, tokens: int, padded: bool, sequences: int) -> Tensor:
    """Word ids of reviews, 0 for padding."""
    names: dict[str, int] = {}
    rows = []
    texts = load_text(path)
    for text in [texts] if isinstance(texts, str) else texts:
        words = re.findall(r"\w+|[^\w\s]", text.lower().replace("<br />", " "))[:tokens]
        if len(words) == tokens or padded:
            ids = [names.setdefault(word, len(names) + 1) for word in words]
            rows.append(ids + [0] * (tokens - len(ids)))
        if len(rows) == sequences:
            break
    return torch.tensor(rows)


def text_ranks(variant: Variant, width: int, recipe: Recipe, ids: Tensor) -> dict[str, dict[str, Any]]:
    """Mean and spread of rank/T in layers 2 and 4 of random blocks, by measure, layer and K."""
    states = embed_randomly(ids, width, recipe.seed)
    setting = Setting(
        variant.tokens, given=states, heads=HEADS, positions=variant.positions, block=variant.block, layers=4,
        seed=recipe.seed,
    )  # fmt: skip
    found: dict[str, dict[str, Any]] = {name: {"2": {}, "4": {}} for name in MEASURES}
    for head_dim in recipe.text_head_dims:
        ranks = np.stack(
            [
                layer_ranks(setting, head_dim, trial, tuple(MEASURES.values()), heads=2)
                for trial in range(recipe.trials)
            ]
        )
        for (at, name), layer in product(enumerate(MEASURES), (2, 4)):
            share = ranks[:, layer - 1, at] / variant.tokens
            found[name][f"{layer}"][f"{head_dim}"] = [float(share.mean()), float(share.std(ddof=1))]
    return found


def rebuttal(recipe: Recipe, text: Path) -> dict[str, Any]:
    """Every variant at width 128, then all widths of the nearest one."""
    tried = []
    quick = replace(recipe, trials=max(2, recipe.trials // 3))
    choices = product(recipe.text_lengths, (False, True), ("none", "learned"), ("pre", "post"))
    for variant in (Variant(*choice) for choice in choices):
        ids = word_ids(text, variant.tokens, variant.padded, quick.trials)
        for measure, cells in text_ranks(variant, 128, quick, ids).items():
            tried.append({**asdict(variant), "measure": measure, "error": cell_error(cells, 128)})
    tried.sort(key=lambda one: one["error"])
    best = Variant(**{name: tried[0][name] for name in Variant.__dataclass_fields__})
    ids = word_ids(text, best.tokens, best.padded, recipe.trials)
    different = sum(len(row.unique()) for row in ids) / ids.numel()
    measure = tried[0]["measure"]
    return {
        "nearest": {**asdict(best), "measure": measure},
        "different": different,
        "tables": {f"{width}": text_ranks(best, width, recipe, ids)[measure] for width in recipe.text_widths},
        "tried": tried,
    }


def cell_error(cells: dict[str, Any], width: int) -> float:
    """Mean distance to the rebuttal's means."""
    away = [
        abs(cells[f"{layer}"][f"{k}"][0] - REBUTTAL[layer][width][k][0])
        for layer in (2, 4)
        for k in REBUTTAL[layer][width]
        if f"{k}" in cells[f"{layer}"]
    ]
    return sum(away) / len(away)


def models(recipe: Recipe, images: Path | None, text: Path | None) -> list[dict[str, Any]]:
    """Hardmax rank/T by layer of ViT on pictures and BERT on reviews, as initialised, D = H·K."""
    batches: dict[str, dict[str, Tensor]] = {}
    if images is not None:
        pixels = np.load(images)["x_test"][:4].astype(np.float32) / 127.5 - 1
        batches["ViT"] = {"pixel_values": torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()}
    if text is not None:
        batches["BERT"] = {"input_ids": word_ids(text, recipe.text_tokens, padded=False, sequences=4)}
    return [
        {"model": name, "head_dim": k, **layer_means(name, k, recipe, batch)}
        for name, batch in batches.items()
        for k in recipe.model_head_dims
    ]


def layer_means(name: str, head_dim: int, recipe: Recipe, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Mean rank/T of all heads and sequences of each layer, its spread over seeds."""
    runs = []
    for trial in range(max(2, recipe.trials // 3)):
        torch.manual_seed(recipe.seed + trial)
        shape = {
            "hidden_size": recipe.model_width, "num_hidden_layers": recipe.model_layers,
            "num_attention_heads": recipe.model_width // head_dim,
            "intermediate_size": 4 * recipe.model_width,
        }  # fmt: skip
        if name == "ViT":
            model = transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=2, **shape))
        else:
            config = transformers.BertConfig(vocab_size=int(batch["input_ids"].max()) + 1, **shape)
            model = transformers.BertModel(config)
        with torch.no_grad(), rw.capture(model.eval()) as trace:
            model(**batch)
        layers = []
        for site in trace.mixers:
            query, key = site.operator.query.flatten(0, 1), site.operator.key.flatten(0, 1)
            head = RandomHead(query.shape[1])
            ranks = [head.rank(*pair) for pair in zip(query, key, strict=True)]
            layers.append(sum(ranks) / len(ranks) / head.tokens)
        runs.append(layers)
    found = np.array(runs)
    return {
        "tokens": head.tokens, "mean": found.mean(0).tolist(), "std": found.std(0, ddof=1).tolist()
    }  # fmt: skip


def results(recipe: Recipe, images: Path | None, text: Path | None) -> dict[str, Any]:
    """Return everything that is measured."""
    laws = {mask: fit_log_law(mask, lengths=recipe.law, seed=recipe.seed) for mask in ("full", "causal")}
    return {
        "settings": asdict(recipe),
        "synthetic": synthetic(recipe),
        "law": {mask: asdict(law) for mask, law in laws.items()},
        "rebuttal": rebuttal(recipe, text) if text is not None else None,
        "models": models(recipe, images, text),
    }


def rounded(value: Any) -> Any:
    """Return a report with floats rounded to five digits, and null in place of NaN."""
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def measure(data: Path) -> dict[str, Any]:
    """Measure on the pictures and the reviews of the folder."""
    found: dict[str, Any] = rounded(
        results(Recipe(), data / "cifar10" / "cifar10.npz", data / "imdb" / "test.jsonl.gz")
    )
    return found


STUDY = Study("rank_saturation", measure, "rank-saturation", tables, figures)
