"""Where the rank of random heads saturates: the rank paper's curves, tables and real data, next to ours.

Claim     "On the Limitation and Redundancy of Transformers: A Rank Perspective": rank grows with the head
          width K and saturates at K* = Ω(log T); in layers 2 and 4 of a text model at random initialization
          it saturates at the same K for widths 32 to 512 (two tables of the rebuttal).
Question  Can the tables be reproduced, and how does saturation look in real classes on real data?
Hardware  one CPU core, about 3 minutes
Expect    K* = a + b·ln T to within about one unit of width over T = 64 … 8,192. The rebuttal names neither
          length, text preparation, positions, number of heads, kind of block nor δ: all but the heads are
          varied, and the nearest variant is shown.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import rankwise as rw
from experiments.figures import BLUE, ORANGE, Panel, chart
from experiments.rank.random_layers import embed_randomly, fit_log_law, gaussian, layer_ranks, scaled, stream
from experiments.render import markdown_table
from experiments.study import Report, Study
from rankwise.cli.load_data import load_text
from rankwise.plan.planner import DENSE_WIDTHS, saturation
from rankwise.plan.ranks import RandomHead, count_winners, hardmax_ranks

MEASURES = {"hardmax": 0.0, "softmax": 1.0}
"""Different winners, or singular values ≥ 0.01 of the softmax at τ = √K: temperature in units of √K."""
GAUSSIAN_WIDTH = 64
HEAD_DIMS = (2, 3, 4, 8, 16)
REBUTTAL_ROWS = {
    2: {
        32: "0.0609 0.0026 0.127  0.0055 0.2032 0.0083 0.2539 0.0137 0.2584 0.0186",
        128: "0.0591 0.0014 0.132  0.0037 0.2033 0.0063 0.2593 0.0096 0.2667 0.0101",
        256: "0.0588 0.0018 0.1347 0.0051 0.2105 0.0074 0.261  0.0137 0.2661 0.0143",
        512: "0.0596 0.001  0.134  0.0036 0.209  0.0061 0.2609 0.0106 0.2612 0.0108",
    },
    4: {
        32: "0.0518 0.0042 0.1177 0.0038 0.1925 0.0115 0.2584 0.0161 0.267  0.0137",
        128: "0.0521 0.0023 0.1201 0.002  0.196  0.0049 0.2572 0.0131 0.2527 0.0097",
        256: "0.0523 0.0021 0.121  0.0034 0.1953 0.0058 0.2677 0.0146 0.2551 0.0081",
        512: "0.053  0.0021 0.1202 0.0056 0.1946 0.0066 0.2567 0.0134 0.2598 0.0139",
    },
}
REBUTTAL = {
    (layer, width, head_dim): (float(cells.split()[2 * at]), float(cells.split()[2 * at + 1]))
    for layer, rows in REBUTTAL_ROWS.items()
    for width, cells in rows.items()
    for at, head_dim in enumerate(HEAD_DIMS)
}
"""Mean and standard deviation of rank/T by layer, width and K: tables 1 and 2 of the authors' rebuttal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    lengths: tuple[int, ...] = (50, 200, 800)
    law: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    text_lengths: tuple[int, ...] = (128, 256, 512)
    text_widths: tuple[int, ...] = (32, 128, 256, 512)
    text_head_dims: tuple[int, ...] = HEAD_DIMS
    model_width: int = 192
    model_layers: int = 6
    model_head_dims: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
    text_tokens: int = 256
    trials: int = 10
    seed: int = 0


@dataclass(frozen=True)
class Variant:
    """Choices that the rebuttal leaves open."""

    tokens: int
    padded: bool
    """Reviews cut or filled up with equal padding to T; otherwise the first T words of longer reviews."""
    positions: str
    """"learned": a Gaussian row as long as a token's on average, as usual models initialize both tables."""
    block: str


def synthetic(settings: Settings) -> list[dict[str, Any]]:
    """Return rank/T of hardmax heads on orthonormal and Gaussian tokens."""
    kinds = [("full", "orthonormal"), ("causal", "orthonormal"), ("full", "gaussian")]
    found = []
    for (mask, inputs), tokens in product(kinds, settings.lengths):
        shares = np.stack(
            [synthetic_shares(mask, inputs, tokens, trial, settings) for trial in range(settings.trials)]
        )
        at, interval = saturation(DENSE_WIDTHS, shares, 0.01, settings.seed)
        points = [
            (k, float(mean), float(std))
            for k, mean, std in zip(DENSE_WIDTHS, shares.mean(0), shares.std(0, ddof=1), strict=True)
            if k & (k - 1) == 0
        ]
        found.append(
            {
                "mask": mask, "inputs": inputs, "tokens": tokens,
                "barrier": rw.theory.rank_barrier(tokens, mask) / tokens,
                "head_dim": DENSE_WIDTHS[at], "interval": interval, "points": points,
            }
        )  # fmt: skip
    return found


def synthetic_shares(mask: str, inputs: str, tokens: int, trial: int, settings: Settings) -> np.ndarray:
    """Return rank/T at each width; Gaussian tokens have width 64 and are not normalized."""
    if inputs == "orthonormal":
        return RandomHead(tokens, mask=mask, seed=settings.seed).trial(DENSE_WIDTHS, trial)
    states = scaled(torch.randn(tokens, GAUSSIAN_WIDTH, generator=stream(settings.seed, trial, 1)))
    weights, widest = stream(settings.seed, trial, 2), DENSE_WIDTHS[-1]
    scale = math.sqrt(widest / GAUSSIAN_WIDTH)
    query, key = (states @ (gaussian(weights, widest, GAUSSIAN_WIDTH) * scale).mT for _ in range(2))
    return np.array(hardmax_ranks(query, key, DENSE_WIDTHS, mask)) / tokens


def word_ids(path: Path, tokens: int, padded: bool, sequences: int) -> Tensor:
    """Return word ids of reviews, 0 for padding."""
    names: dict[str, int] = {}
    rows = []
    for text in load_text(path):
        words = re.findall(r"\w+|[^\w\s]", text.lower().replace("<br />", " "))[:tokens]
        if len(words) == tokens or padded:
            ids = [names.setdefault(word, len(names) + 1) for word in words]
            rows.append(ids + [0] * (tokens - len(ids)))
        if len(rows) == sequences:
            break
    return torch.tensor(rows)


def text_ranks(variant: Variant, width: int, settings: Settings, ids: Tensor) -> dict[str, dict[str, Any]]:
    """Return mean and spread of rank/T in layers 2 and 4 of random blocks, by measure, layer and K."""
    embedded = embed_randomly(ids, width, settings.seed)
    found: dict[str, dict[str, Any]] = {name: {"2": {}, "4": {}} for name in MEASURES}
    for head_dim in settings.text_head_dims:
        trials = []
        for trial in range(settings.trials):
            states = scaled(embedded[trial % len(ids)])
            if variant.positions == "learned":
                states = states + torch.randn(states.shape, generator=stream(settings.seed, trial, 1))
            weights = stream(settings.seed, trial, 3, head_dim)
            trials.append(layer_ranks(states, head_dim, variant.block, weights, tuple(MEASURES.values())))
        ranks = np.stack(trials) / variant.tokens
        for (at, name), layer in product(enumerate(MEASURES), (2, 4)):
            share = ranks[:, layer - 1, at]
            found[name][f"{layer}"][f"{head_dim}"] = [float(share.mean()), float(share.std(ddof=1))]
    return found


def rebuttal(settings: Settings, text: Path) -> dict[str, Any]:
    """Measure every variant at width 128, then all widths of the nearest variant."""
    tried = []
    quick = replace(settings, trials=max(2, settings.trials // 3))
    choices = product(settings.text_lengths, (False, True), ("none", "learned"), ("pre", "post"))
    for variant in (Variant(*choice) for choice in choices):
        ids = word_ids(text, variant.tokens, variant.padded, quick.trials)
        for measure, cells in text_ranks(variant, 128, quick, ids).items():
            tried.append({**asdict(variant), "measure": measure, "error": distance({"128": cells})})
    tried.sort(key=lambda one: one["error"])
    best = Variant(**{name: tried[0][name] for name in Variant.__dataclass_fields__})
    ids = word_ids(text, best.tokens, best.padded, settings.trials)
    measure = tried[0]["measure"]
    return {
        "nearest": {**asdict(best), "measure": measure},
        "different": sum(len(row.unique()) for row in ids) / ids.numel(),
        "tables": {
            f"{width}": text_ranks(best, width, settings, ids)[measure] for width in settings.text_widths
        },
        "tried": tried,
    }


def distance(tables: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the mean distance of measured means, by width, layer and K, from the means of the rebuttal."""
    away = [
        abs(tables[str(width)][str(layer)][str(head_dim)][0] - mean)
        for (layer, width, head_dim), (mean, _) in REBUTTAL.items()
        if str(width) in tables
    ]
    return sum(away) / len(away)


def models(settings: Settings, batches: Mapping[str, dict[str, Tensor]]) -> list[dict[str, Any]]:
    """Return hardmax rank/T by layer of a ViT on pictures and a BERT on reviews, as initialized, D = H·K."""
    return [
        {"model": name, "head_dim": k, **layer_means(name, k, settings, batch)}
        for name, batch in batches.items()
        for k in settings.model_head_dims
    ]


def layer_means(name: str, head_dim: int, settings: Settings, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return the mean rank/T of all heads and sequences of each layer, and its spread over seeds."""
    shape = {
        "hidden_size": settings.model_width, "num_hidden_layers": settings.model_layers,
        "num_attention_heads": settings.model_width // head_dim,
        "intermediate_size": 4 * settings.model_width,
    }  # fmt: skip
    runs, tokens = [], 0
    for trial in range(max(2, settings.trials // 3)):
        torch.manual_seed(settings.seed + trial)
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
            tokens = query.shape[1]
            ranks = [count_winners(*pair) for pair in zip(query, key, strict=True)]
            layers.append(sum(ranks) / len(ranks) / tokens)
        runs.append(layers)
    found = np.array(runs)
    return {"tokens": tokens, "mean": found.mean(0).tolist(), "std": found.std(0, ddof=1).tolist()}


def rounded(value: Any) -> Any:
    """Return a report with floats rounded to five digits, and null in place of NaN."""
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def measure(data: Path) -> Report:
    settings, text = Settings(), data / "imdb" / "test.jsonl.gz"
    pixels = np.load(data / "cifar10" / "cifar10.npz")["x_test"][:4].astype(np.float32) / 127.5 - 1
    pictures = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    words = word_ids(text, settings.text_tokens, padded=False, sequences=4)
    report: Report = rounded(
        {
            "settings": asdict(settings),
            "synthetic": synthetic(settings),
            "law": {mask: fit_log_law(mask, settings.law, seed=settings.seed) for mask in ("full", "causal")},
            "rebuttal": rebuttal(settings, text),
            "models": models(settings, {"ViT": {"pixel_values": pictures}, "BERT": {"input_ids": words}}),
        }
    )
    return report


def tables(report: Report) -> dict[str, str]:
    found = report["rebuttal"]
    return {
        "synthetic": "\n\n".join(synthetic_tables(report["synthetic"])),
        "quick": str(max(2, report["settings"]["trials"] // 3)),
        "laws": "\n\n".join(law_table(mask, law) for mask, law in report["law"].items()),
        "rebuttal": "\n\n".join(rebuttal_tables(found["tables"])),
        "nearest": nearest_words(found),
        "tried": tried_table(found["tried"]),
        "error": f"{distance(found['tables']):.3f}",
        "models": "\n\n".join(model_tables(report["models"])),
    }


def synthetic_tables(curves: Sequence[Report]) -> Iterable[str]:
    """Return a table per kind of tokens."""
    head = ["T \\ K", *(str(2**power) for power in range(9)), "barrier", "K*"]
    for mask, inputs in dict.fromkeys((one["mask"], one["inputs"]) for one in curves):
        rows = []
        for one in (one for one in curves if (one["mask"], one["inputs"]) == (mask, inputs)):
            cells = [f"{mean:.3f}" for _, mean, _ in one["points"]]
            low, high = one["interval"]
            rows.append(
                [str(one["tokens"]), *cells, f"{one['barrier']:.3f}", f"{one['head_dim']} ({low} to {high})"]
            )
        yield f"{mask} mask, {inputs} tokens\n\n{markdown_table(head, rows)}"


def law_table(mask: str, law: Report) -> str:
    """Return K* by length, and the residuals of the line."""
    head = [f"{mask}: T", *(f"{point[0]:,}" for point in law["points"])]
    found = ["K* (95 %)", *(f"{k} ({low} to {high})" for _, k, low, high in law["points"])]
    left = ["residual", *(f"{one:+.2f}" for one in law["residuals"])]
    half = ["half of the barrier at K", *(f"{one:.1f}" for one in law["half"])]
    line = f"K* = {law['intercept']:.2f} + {law['slope']:.2f}·ln T, R² = {law['explained']:.2f}"
    return f"{markdown_table(head, [found, left, half])}\n\n{mask} mask: {line}"


def rebuttal_tables(widths: Mapping[str, Report]) -> Iterable[str]:
    """Return a table per layer; each cell has the published number, then ours."""
    head = ["width", *(f"K = {k}" for k in HEAD_DIMS)]
    for layer in REBUTTAL_ROWS:
        rows = []
        for width, cells in widths.items():
            pairs = [(*REBUTTAL[layer, int(width), k], *cells[str(layer)][str(k)]) for k in HEAD_DIMS]
            rows.append([width, *("{:.3f} ± {:.3f} / {:.3f} ± {:.3f}".format(*pair) for pair in pairs)])
        yield f"Layer {layer}, rank/T: theirs / ours\n\n{markdown_table(head, rows)}"


def nearest_words(found: Report) -> str:
    one = found["nearest"]
    filled = "reviews padded" if one["padded"] else "windows of longer reviews"
    return (
        f"T = {one['tokens']}, {filled}, positions: {one['positions']}, {one['block']}-norm blocks, "
        f"{one['measure']}; {found['different']:.0%} of the tokens of a sequence differ"
    )


def tried_table(tried: Sequence[Report]) -> str:
    """Return the five nearest variants and the farthest."""
    rows = [
        [str(one["tokens"]), "yes" if one["padded"] else "no", one["positions"], one["block"], one["measure"],
         f"{one['error']:.3f}"]
        for one in [*tried[:5], tried[-1]]
    ]  # fmt: skip
    return markdown_table(["T", "padded", "positions", "block", "rank of", "mean distance"], rows)


def model_tables(found: Sequence[Report]) -> Iterable[str]:
    for name in dict.fromkeys(one["model"] for one in found):
        own = [one for one in found if one["model"] == name]
        rows = []
        for one in own:
            layers = zip(one["mean"], one["std"], strict=True)
            rows.append([str(one["head_dim"]), *(f"{mean:.3f} ± {std:.3f}" for mean, std in layers)])
        head = ["K", *(f"layer {at + 1}" for at in range(len(own[0]["mean"])))]
        yield f"{name}, T = {own[0]['tokens']}, rank/T\n\n{markdown_table(head, rows)}"


def figures(report: Report) -> dict[str, str]:
    """Draw K* against ln T with its intervals, and the fitted line."""
    law = report["law"]["full"]
    points = [(math.log(tokens), *rest) for tokens, *rest in law["points"]]
    panel = Panel((points[0][0], points[-1][0]), (0, 1.15 * max(high for *_, high in points)))
    across = [(x, f"{math.exp(x):,.0f}") for x, *_ in points]
    parts = panel.axes(across, [0, 5, 10, 15], "tokens T", "K*, with its 95 % interval")
    parts.append(panel.line([(x, law["intercept"] + law["slope"] * x) for x in panel.x], ORANGE))
    for x, width, low, high in points:
        parts += [panel.line([(x, low), (x, high)], BLUE), panel.dot(x, width, BLUE)]
    return {"rank-saturation.svg": chart("K* against length", parts)}


STUDY = Study("rank_saturation", measure, "evidence/rank-saturation", tables, figures)
