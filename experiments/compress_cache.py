"""Keys and values of the bundled demo out of one latent: loss against bytes of the cache, over three splits.

Claim     A joint low-rank map from tokens to keys (before rotation) and values, found from data, keeps a
          rotary model's loss at half and at a quarter of the bytes of its cache.
Asked     Loss and output KL on held-out text at 1/2, 1/4 and 1/8 of the bytes, positions counted; the same
          for a map that looks at tokens alone, and at weights alone; latency of prefill and decode.
Data      text.txt of the demo, which the model was not trained on: 32 windows drawn from the first 100 to
          calibrate on, the last 59 held out.
Hardware  one CPU core, about 4 minutes
Expect    loss added, nats a byte: 0.0000 at 1/2, 0.001 ± 0.0005 at 1/4, 0.018 ± 0.005 at 1/8; a step
          of decoding two to four times as long, prefill the same.

    python -m experiments run compress_cache
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import rankwise as rw
from experiments.rank.rivals import latent_costs
from experiments.render import mean_std
from experiments.study import Study, settings_from
from rankwise.cli.load_model import demo_model, demo_text
from rankwise.compression.kv_find import find_latent_layers
from rankwise.compression.kv_solve import collect_moments, weighted_svd


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides a run."""

    tokens: int = 256
    calibrate: int = 32
    """Windows to calibrate on."""
    drawn_from: int = 100
    """The first windows, of which these are drawn; all others are held out."""
    keeps: tuple[float, ...] = (0.5, 0.25, 0.125)
    splits: int = 3
    lengths: tuple[int, ...] = (240, 960)
    """Tokens at which time is measured; beyond the 256 that the model was trained for it is as much work."""
    rounds: int = 60


def windows(recipe: Recipe) -> Tensor:
    """The demo's text as windows of token ids: bytes, behind the three special tokens of ByT5."""
    ids = torch.tensor([byte + 3 for byte in demo_text().read_bytes()])
    count = len(ids) // recipe.tokens
    return ids[: count * recipe.tokens].view(count, recipe.tokens)


def load() -> nn.Module:
    """The demo, in evaluation mode."""
    return transformers.AutoModelForCausalLM.from_pretrained(demo_model()).eval()


def run_split(recipe: Recipe, split: int) -> dict[str, Any]:
    """One draw of calibration windows: every budget, measured on the same held-out windows."""
    every = windows(recipe)
    generator = torch.Generator().manual_seed(split)
    order = torch.randperm(recipe.drawn_from, generator=generator)[: recipe.calibrate]
    calibration = [{"input_ids": part} for part in every[order].split(8)]
    held_out = [{"input_ids": part} for part in every[recipe.drawn_from :].split(16)]
    found: dict[str, Any] = {"split": split, "keeps": {}, "curves": rivals(calibration, held_out[:1], split)}
    for keep in recipe.keeps:
        model = load()
        record = rw.compress(
            model,
            calibration,
            keep=keep,
            parts=("kv",),
            held_out=held_out,
            time=False,
            seed=split,
        )
        found["keeps"][str(keep)] = {
            "loss_before": round(record.loss_before, 5),
            "loss_after": round(record.loss_after, 5),
            "cache_bytes_before": record.cache_bytes_before,
            "cache_bytes_after": record.cache_bytes_after,
            "parameters_before": record.parameters_before,
            "parameters_after": record.parameters_after,
            "ranks": [one.rank for one in record.latents],
            "predicted_nats": float(f"{sum(one.nats for one in record.latents):.3g}"),
            "milliseconds": latency(recipe, model) if split == 0 else [],
        }
        print(f"split {split}, keep {keep}: {found['keeps'][str(keep)]}", flush=True)
    return found


def rivals(calibration: list[Any], compared: list[Any], seed: int) -> dict[str, dict[str, float]]:
    """Return output KL by method and share of the cache."""
    model = load()
    layers, _ = find_latent_layers(model, calibration[0])
    moments = collect_moments(model, layers, calibration, seed, lambda what: None)
    ours = [weighted_svd(own.weight, own.tokens, own.gradients) for own in moments]
    costs = latent_costs(model, compared, layers, moments, ours)
    return {
        method: {str(share): float(f"{kl:.4g}") for share, kl in points.items()}
        for method, points in costs.items()
    }


def latency(recipe: Recipe, model: nn.Module) -> list[dict[str, Any]]:
    """The quickest of some rounds in which the original and a compressed model take turns.

    The quickest, not the median: where other work shares the machine, medians time the scheduler.
    """
    found = []
    models: dict[str, Any] = {"before": load(), "after": model}
    for tokens in recipe.lengths:
        ids = windows(recipe).flatten()[None, :tokens]
        times: dict[str, dict[str, list[float]]] = {
            phase: {name: [] for name in models} for phase in ("prefill", "decode")
        }
        with torch.inference_mode():
            for _ in range(recipe.rounds):
                for name, one in models.items():
                    started = time.perf_counter()
                    cache = one(ids, use_cache=True).past_key_values
                    read = time.perf_counter()
                    one(ids[:, -1:], past_key_values=cache, use_cache=True)
                    times["prefill"][name].append(read - started)
                    times["decode"][name].append(time.perf_counter() - read)
        for phase, own in times.items():
            quickest = {name: round(1e3 * min(numbers), 3) for name, numbers in own.items()}
            found.append({"phase": phase, "tokens": tokens, **quickest})
    return found


def loss_table(recipe: Recipe, splits: list[dict[str, Any]]) -> str:
    """Loss, bytes and ranks by budget, as Markdown."""
    lines = [
        "| share of cache | bytes a token | loss | loss added | predicted | parameters | ranks, split 0 |",
        "| --- |" + " --- |" * 6,
    ]
    first = splits[0]["keeps"][str(recipe.keeps[0])]
    lines.append(
        f"| 1 | {first['cache_bytes_before']:,} | {first['loss_before']:.4f} | | "
        f"| {first['parameters_before']:,} | |"
    )
    for keep in map(str, recipe.keeps):
        own = [one["keeps"][keep] for one in splits]
        added = mean_std([one["loss_after"] - one["loss_before"] for one in own], 5)
        lines.append(
            f"| {keep} | {own[0]['cache_bytes_after']:,} | {mean_std([one['loss_after'] for one in own], 4)} "
            f"| {added} | {mean_std([one['predicted_nats'] for one in own], 5)} "
            f"| {own[0]['parameters_after']:,} | {', '.join(map(str, own[0]['ranks']))} |"
        )
    return "\n".join(lines)


def curve_table(splits: list[dict[str, Any]]) -> str:
    """KL of the outputs of other ways at the same bytes, as Markdown."""
    shares = sorted({share for one in splits for points in one["curves"].values() for share in points})
    lines = [
        "| output KL, nats a byte, at a share of | " + " | ".join(shares) + " |",
        "| --- |" + " --- |" * len(shares),
    ]
    for way in splits[0]["curves"]:
        cells = [mean_std([one["curves"][way][share] for one in splits], 5) for share in shares]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def latency_table(recipe: Recipe, split: dict[str, Any]) -> str:
    """Milliseconds before and after, of the first split, as Markdown."""
    lines = [
        "| share of the cache | phase | tokens | before, ms | after, ms | after/before |",
        "| --- |" + " --- |" * 5,
    ]
    for keep in map(str, recipe.keeps):
        for one in split["keeps"][keep]["milliseconds"]:
            lines.append(
                f"| {keep} | {one['phase']} | {one['tokens']} | {one['before']:.2f} | {one['after']:.2f} "
                f"| {one['after'] / one['before']:.2f} |"
            )
    return "\n".join(lines)


def measure(recipe: Recipe) -> dict[str, Any]:
    """Measure every split."""
    unit = "loss and KL in nats a byte; bytes a token; milliseconds"
    splits = [run_split(recipe, split) for split in range(recipe.splits)]
    return {"settings": asdict(recipe), "unit": unit, "splits": splits}


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page."""
    recipe, splits = settings_from(Recipe, report), report["splits"]
    return {
        "loss": loss_table(recipe, splits),
        "curves": curve_table(splits),
        "latency": latency_table(recipe, splits[0]),
        "splits": str(len(splits)),
    }


STUDY = Study("compress_cache", lambda data: measure(Recipe()), "compress-cache", tables)
