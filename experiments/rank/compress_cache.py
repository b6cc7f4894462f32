"""Keys and values of the bundled demo as one latent: loss by bytes of the cache, over three splits.

Claim     A joint low-rank map from tokens to keys (before rotation) and values, found from data, keeps a
          rotary model's loss at half and at a quarter of the bytes of its cache.
Measured  Loss and output KL on held-out text at 1/2, 1/4 and 1/8 of the bytes, positions included; the same
          for a map found from tokens alone, and from weights alone; processor time of prefill and decode, and
          resident memory of the cache while decoding.
Data      text.txt of the demo, on which the model was not trained: 32 windows drawn from the first 100 to
          calibrate on, the last 59 held out.
Hardware  one CPU core, about 5 minutes
Expect    loss added, nats per byte: 0.0000 at 1/2, 0.001 ± 0.0005 at 1/4, 0.018 ± 0.005 at 1/8; a step
          of decoding 1.0 to 1.3 times as long for one sequence, two to three times for 8, prefill the same.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import rankwise as rw
from experiments.rank.rivals import latent_costs
from experiments.real_models import demo, demo_windows, draw_windows
from experiments.render import markdown_table, mean_std
from experiments.study import Study
from rankwise.cli.load_model import demo_model
from rankwise.compression import save_compressed
from rankwise.compression.kv_find import find_cached_layers
from rankwise.compression.kv_solve import collect_moments, weighted_svd


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    tokens: int = 256
    calibrate: int = 32
    """Windows to calibrate on."""
    drawn_from: int = 100
    """Number of first windows from which these are drawn; all others are held out."""
    keeps: tuple[float, ...] = (0.5, 0.25, 0.125)
    splits: int = 3
    sizes: tuple[tuple[int, int], ...] = ((1, 1024), (1, 4096), (8, 4096))
    """Sequences and tokens at which time and memory are measured; the model was trained with 256 tokens."""
    rounds: int = 21


def run_split(recipe: Recipe, split: int) -> dict[str, Any]:
    """Measure every budget for one draw of calibration windows."""
    calibration, held_out = draw_windows(split, recipe.calibrate, recipe.drawn_from, recipe.tokens)
    found: dict[str, Any] = {"split": split, "keeps": {}, "curves": rivals(calibration, held_out[:1], split)}
    for keep in recipe.keeps:
        model = demo()
        record = rw.compress(
            model, calibration, keep=keep, parts=("kv",), held_out=held_out, time=False, seed=split
        )
        found["keeps"][str(keep)] = {
            "loss_before": round(record.worst.loss_before, 5),
            "loss_after": round(record.worst.loss_after, 5),
            "cache_bytes_before": record.kept_cache.before // record.kept_cache.tokens,  # per token
            "cache_bytes_after": record.kept_cache.after // record.kept_cache.tokens,  # per token
            "parameters_before": record.parameters_before,
            "parameters_after": record.parameters_after,
            "ranks": [one.rank for one in record.latents],
            "predicted_nats": float(f"{sum(one.output_kl for one in record.latents):.3g}"),
            "steps": steps(recipe, model) if split == 0 and keep == max(recipe.keeps) else [],
        }
        print(f"split {split}, keep {keep}: {found['keeps'][str(keep)]}", flush=True)
    return found


def rivals(calibration: list[Any], compared: list[Any], seed: int) -> dict[str, dict[str, float]]:
    """Return output KL by method and share of the cache."""
    model = demo()
    layers, _ = find_cached_layers(model, calibration[0])
    moments = collect_moments(model, layers, calibration, seed, lambda step, done: None)
    ours = [weighted_svd(own.weight, own.tokens, own.gradients) for own in moments]
    costs = latent_costs(model, compared, layers, moments, ours)
    return {
        method: {str(share): float(f"{kl:.4g}") for share, kl in points.items()}
        for method, points in costs.items()
    }


def steps(recipe: Recipe, model: nn.Module) -> list[dict[str, Any]]:
    """Return processor time and memory of the original and a compressed model, which take turns."""
    found = []
    with TemporaryDirectory() as folder, torch.inference_mode():
        save_compressed(model, f"{folder}/half")
        models: dict[str, tuple[Any, str]] = {"before": (demo(), str(demo_model()))}
        models["after"] = model, f"{folder}/half"
        for batch, tokens in recipe.sizes:
            ids = demo_windows(recipe.tokens).flatten()[:tokens].expand(batch, tokens)
            prefill, caches = {}, {}
            times: dict[str, list[float]] = {name: [] for name in models}
            for name, (each, _) in models.items():
                started = time.process_time()
                caches[name] = each(ids, use_cache=True, logits_to_keep=1).past_key_values
                prefill[name] = time.process_time() - started
            for _ in range(recipe.rounds):
                for name, (each, _) in models.items():
                    started = time.process_time()
                    each(ids[:, -1:], past_key_values=caches[name], use_cache=True)
                    times[name].append(time.process_time() - started)
            del caches
            row: dict[str, Any] = {"batch": batch, "tokens": tokens}
            for name, (_, where) in models.items():
                row[f"prefill_{name}"] = round(1e3 * prefill[name], 1)
                row[f"step_{name}"] = round(1e3 * median(times[name]), 2)
                # freed memory is returned, so that resident memory is that of live tensors
                os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    row[f"memory_{name}"] = process.submit(cache_memory, where, batch, tokens).result()
            found.append(row)
    return found


def cache_memory(folder: str, batch: int, tokens: int) -> int:
    """Return the bytes by which resident memory grows until a step after these tokens, at its highest."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids, seen = demo_windows(256).flatten()[:tokens].expand(batch, tokens), []
    with torch.inference_mode():
        model(ids[:1, :2], use_cache=True)
        start, cache = psutil.Process().memory_info().rss, None
        for part in ids.split(128, 1):
            cache = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        for module in model.modules():
            module.register_forward_hook(lambda *_: seen.append(psutil.Process().memory_info().rss))
        model(ids[:, -1:], past_key_values=cache, use_cache=True)
    return max(seen) - start


def measure(recipe: Recipe) -> dict[str, Any]:
    unit = "loss and KL in nats a byte; bytes a token; milliseconds of the processor; bytes of memory"
    splits = [run_split(recipe, split) for split in range(recipe.splits)]
    return {"settings": asdict(recipe), "unit": unit, "splits": splits}


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page: loss by budget, KL by method, steps of the first split."""
    settings, splits = report["settings"], report["splits"]
    keeps = [str(keep) for keep in settings["keeps"]]
    first = splits[0]["keeps"][keeps[0]]
    whole = [f"{first[name]:,}" for name in ("cache_bytes_before", "parameters_before")]
    losses = [["1", whole[0], f"{first['loss_before']:.4f}", "–", "–", whole[1], "–"]]
    for keep in keeps:
        own = [one["keeps"][keep] for one in splits]
        cells = [mean_std([one["loss_after"] for one in own], 4)]
        cells += [mean_std([one["loss_after"] - one["loss_before"] for one in own], 5)]
        cells += [mean_std([one["predicted_nats"] for one in own], 5), f"{own[0]['parameters_after']:,}"]
        cells += [", ".join(map(str, own[0]["ranks"]))]
        losses.append([keep, f"{own[0]['cache_bytes_after']:,}", *cells])
    shares = sorted({share for one in splits for points in one["curves"].values() for share in points})
    curves = [
        (way, *(mean_std([one["curves"][way][share] for one in splits], 5) for share in shares))
        for way in splits[0]["curves"]
    ]
    times = [
        (
            *(keep, str(row["batch"]), f"{row['tokens']:,}"),
            *(f"{row['prefill_after'] / row['prefill_before']:.2f}", f"{row['step_before']:.2f}"),
            *(f"{row['step_after']:.2f}", f"{row['step_after'] / row['step_before']:.2f}"),
            *(f"{row[f'memory_{name}'] / 2**20:.1f}" for name in ("before", "after")),
        )
        for keep in keeps
        for row in splits[0]["keeps"][keep]["steps"]
    ]
    budget = "share of cache", "bytes per token", "loss", "loss added", "predicted", "parameters"
    step = "step before, ms", "step after, ms", "after/before", "memory before, MB", "memory after, MB"
    turns = "share of the cache", "sequences", "tokens", "prefill after/before", *step
    return {
        "loss": markdown_table((*budget, "ranks, split 0"), losses),
        "curves": markdown_table(("output KL, nats per byte, at a share of", *shares), curves),
        "latency": markdown_table(turns, times),
        "splits": str(len(splits)),
    }


STUDY = Study("compress_cache", lambda data: measure(Recipe()), "evidence/compress-cache", tables)
