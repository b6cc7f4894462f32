"""Readings of token states that tell that a training does not learn: COLLAPSE and the rule of `stop_on`.

The runs of `depth` and some of `skips-image` are trained again with ten audits each after the first. Measures
are compared by the share of pairs of runs that they order right (AUC). A rule is a threshold on the least
direction spread after any block, and a number of audits in a row below it. It is chosen on `depth`, and
checked on `skips-image` and on a model of 24 layers, with λ-skips and without.

Hardware  one CPU core, about 2.5 hours; the command goes on from the runs that are in runs/collapse_rule
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import set_seed

import rankwise as rw
from experiments.experiment import Experiment, run_missing
from experiments.render import markdown_table
from experiments.results import Run, read_runs
from experiments.skips.depth import DEPTH
from experiments.skips.lambda_by_mixer import SKIPS_IMAGE, label
from experiments.study import Report, Study
from experiments.tasks.text import byte_ids, read_text
from rankwise.auditing.findings import COLLAPSE_SPREAD, COLLAPSED_FAILED, COLLAPSED_RUNS
from rankwise.errors import RankwiseError
from rankwise.models import parameter_groups
from rankwise.monitor.monitor import STOP_AUDITS, STOP_SPREAD

AUDITS = 10
"""Audits in a training, after the one before the first step."""
MEASURES = {
    "direction_spread": "direction spread", "spread": "token spread μ/‖Y‖",
    "mean_cosine": "spread of tokens of unit norm (by mean cosine)", "effective_rank": "effective rank",
}  # fmt: skip
"""Measures to compare. The mean cosine orders runs as the spread of tokens scaled to unit norm does."""
BORDERS = {"depth": 3.2, "skips-image": 0.11}
"""A run learned if its last loss is below this number, or its accuracy above it."""
THRESHOLDS, IN_A_ROW = (0.3, 0.1, COLLAPSE_SPREAD, 0.01, 0.001, STOP_SPREAD), (1, 2, 3, 5)
BANDS = (0.0, COLLAPSE_SPREAD, 0.3, 1.0)
FOLDER = Path("runs") / "collapse_rule"
IMAGES = [label(*row) for row in (("softmax", 0), ("linear", 0), ("s4d", 0), ("softmax", 1), ("linear", 1))]
Reading = dict[str, Any]


def with_audits(experiment: Experiment, rows: Sequence[str], seeds: Sequence[int]) -> Experiment:
    """Return some rows of an experiment, with ten audits each after the first."""
    again = {row: replace(one, monitor_every=one.steps // AUDITS) for row, one in experiment.rows.items()}
    return replace(experiment, rows={row: again[row] for row in rows}, seeds=seeds, large={})


AGAIN = with_audits(DEPTH, [*DEPTH.rows], DEPTH.seeds), with_audits(SKIPS_IMAGE, IMAGES, [0])


def reading(name: str, run: Run) -> Reading:
    """Return the score that decides whether a run learned, and its lowest reading by step and measure."""
    columns, scores = run["values"]["rank"], run["values"]["scores"]

    def lowest(measure: str) -> list[list[float]]:
        pick = max if measure == "mean_cosine" else min
        steps = columns[f"states_{measure}"]["steps"]
        return sorted([int(step), pick(values[1:])] for step, values in steps.items())

    return {
        "experiment": name,
        "row": run["row"],
        "seed": run["seed"],
        "score": scores["last_loss" if name == DEPTH.name else "accuracy"],
        "lowest": lowest("direction_spread"),
        "others": {measure: lowest(measure) for measure in MEASURES if measure != "direction_spread"},
    }


def learned(run: Reading) -> bool:
    limit = BORDERS[run["experiment"]]
    return bool(run["score"] < limit if run["experiment"] == DEPTH.name else run["score"] > limit)


def stop_step(run: Reading, threshold: float = STOP_SPREAD, audits: int = STOP_AUDITS) -> int | None:
    """Return the first step with so many audits in a row below the threshold, step 0 left out."""
    row = 0
    for step, value in run["lowest"][1:]:
        row = row + 1 if value < threshold else 0
        if row == audits:
            return int(step)
    return None


def counts(runs: Sequence[Reading], threshold: float, audits: int) -> list[str]:
    """Return failed runs that a rule stops, learned runs that it stops, and what it leaves of a training."""
    good = [run for run in runs if learned(run)]
    stops = [stop_step(run, threshold, audits) for run in runs if run not in good]
    left = [1 - step / runs[0]["lowest"][-1][0] for step in stops if step is not None]
    alarms = sum(stop_step(run, threshold, audits) is not None for run in good)
    saved = f"{statistics.median(left):.0%}" if left else "–"
    return [f"{len(left)} of {len(stops)}", f"{alarms} of {len(good)}", saved]


def in_band(runs: Sequence[Reading], low: float, high: float) -> tuple[int, int]:
    """Return the number of runs whose value halfway is in a band, and how many of them did not learn."""
    some = [run for run in runs if low <= run["lowest"][len(run["lowest"]) // 2][1] < high]
    return len(some), sum(not learned(run) for run in some)


def auc(runs: Sequence[Reading], measure: str, audit: int) -> float:
    """Return the share of pairs of a failed and a learned run in which the failed run is more collapsed."""
    sign = -1 if measure == "mean_cosine" else 1
    values: dict[bool, list[float]] = {True: [], False: []}
    for run in runs:
        steps = run["lowest"] if measure == "direction_spread" else run["others"][measure]
        values[learned(run)].append(sign * steps[audit][1])
    pairs = list(product(values[False], values[True]))
    return statistics.fmean((low < high) + (low == high) / 2 for low, high in pairs)


class Deep(nn.Module):
    """Language model of bytes: 24 layers of PyTorch, weights N(0, 0.2²)."""

    def __init__(self, norm_first: bool, layers: int = 24, width: int = 64, tokens: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(259, width), nn.Linear(width, 259)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=norm_first)
        norm = nn.LayerNorm(width) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(tokens))
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.2)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.encoder(self.embed(ids), self.mask, is_causal=True))


MODELS = {"post-norm": (False, 1.0), "λ = 2": (False, 2.0), "λ = 17": (False, 17.0), "pre-norm": (True, 1.0)}


def train_deep(name: str, text: Tensor, steps: int = 160, layers: int = 24) -> dict[str, Any]:
    """Train one of `MODELS` past the step at which the monitor stops it, with an audit every 20 steps."""
    norm_first, scale = MODELS[name]
    set_seed(0)
    model, draw = Deep(norm_first, layers), torch.Generator().manual_seed(0)
    windows = text[torch.randint(len(text) - 65, (steps + 1, 8, 1), generator=draw) + torch.arange(65)]
    probe = windows[-1, :2, :-1]
    if scale != 1:
        rw.add_lambda_skip(model, scale, learnable=False, example=probe)
    monitor = rw.RankMonitor(probe, 20, stop_on=("COLLAPSE",))
    optimizer, losses, stopped = torch.optim.AdamW(parameter_groups(model, 0.01), 3e-4), [], None
    for step, batch in enumerate(windows[:-1]):
        monitor.step(model, step)
        if monitor.stopped_by is not None and stopped is None:
            stopped = step
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    lowest = [[at, min(one.direction_spread for one in found.states[1:])] for at, found in monitor.history]
    return {"model": name, "stopped": stopped, "loss": statistics.fmean(losses[-16:]), "lowest": lowest}


def measure(data: Path) -> Report:
    for one in AGAIN:
        if not run_missing(one, data, list(one.rows), one.seeds, folder=FOLDER, results=FOLDER):
            raise RankwiseError("runs failed. The same command goes on after them.")
    runs, images = ([reading(one.name, run) for run in read_runs(one.path(FOLDER))] for one in AGAIN)
    text = torch.tensor(byte_ids(read_text(data / next(iter(DEPTH.rows.values())).text)).astype("int64"))
    return {"runs": runs, "images": images, "deep": [train_deep(name, text) for name in MODELS]}


def tables(report: Report) -> dict[str, str]:
    runs, images = report["runs"], report["images"]
    counted = {"both": runs + images, "depth": runs, "skips-image": images}
    at = {"before the first step": 0, "10 %": 1, "20 %": 2, "halfway": 5, "80 %": 8, "end": 10}
    areas = [
        (words, *(f"{auc(runs, measure, audit):.3f}" for audit in at.values()))
        for measure, words in MEASURES.items()
    ]
    bands = [
        (name, *(f"{failed} of {of}" for of, failed in (in_band(own, *band) for band in pairwise(BANDS))))
        for name, own in counted.items()
    ]
    rules = [
        (f"{limit:g}", str(audits), *counts(runs, limit, audits), *counts(images, limit, audits))
        for limit, audits in product(THRESHOLDS, IN_A_ROW)
    ]
    deep = [
        (
            run["model"],
            f"{run['loss']:.3f}",
            "–" if run["stopped"] is None else f"step {run['stopped']}",
            ", ".join(f"{step}: {value:.2g}" for step, value in run["lowest"]),
        )
        for run in report["deep"]
    ]
    low = [run for run in runs + images if run["lowest"][0][1] < COLLAPSE_SPREAD]
    stopped = ("stopped, of failed", "stopped, of learned", "left")
    columns = ("below", "audits in a row", *stopped, *("pictures: " + one for one in stopped))
    return {
        "areas": markdown_table(("", *at), areas),
        "number": f"{len(runs)} runs of `depth` and {len(images)} of `skips-image`",
        "bands": markdown_table(("", *(f"{low:g} to {high:g}" for low, high in pairwise(BANDS))), bands),
        "rules": markdown_table(columns, rules),
        "finding": f"{COLLAPSED_FAILED} of {COLLAPSED_RUNS}",
        "limit": f"{STOP_SPREAD:g} in {STOP_AUDITS} audits in a row",
        "floor": f"{min(value for run in runs if learned(run) for _, value in run['lowest'][1:]):.5f}",
        "found": counts(runs, STOP_SPREAD, STOP_AUDITS)[0],
        "start": f"{sum(not learned(run) for run in low)} of {len(low)} runs",
        "deep": markdown_table(("model", "loss", "stopped", "least direction spread by step"), deep),
    }


STUDY = Study("collapse_rule", measure, page="evidence/collapse-rule", tables=tables)
