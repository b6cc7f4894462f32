"""A monitor stops a deep model that has collapsed, names the layer, and a larger λ trains.

A post-norm transformer of 48 layers whose attention is added to λ x with λ = 0.5 loses the differences of its
tokens. The monitor audits a probe batch before the first step and stops the run there. The same model, same
seeds, is then trained past the finding with λ = 0.5, 1 and 2, and with the advice of
`rankwise.skips.recommend` to the stopped model. "command": the λ of its command, in the layers that it names,
all if it names none. "bound": the λ of its bound in all layers, which the command rounds up to two digits.

Setting   ToSTForCausalLM with softmax attention, 48 layers, D = 64, 4 heads, feed-forward width 128,
          post-norm, weights N(0, 0.2²); bytes of the bundled text, 64 at a time, 8 per step; AdamW, 3e-4;
          120 steps; seeds 0, 1, 2
Hardware  one CPU core, about ten minutes
Expect    λ = 0.5: COLLAPSE at step 0, between layers 20 and 30; λ = 1: none then, one by step 40;
          λ = 2: none, and a loss lower by half a nat per byte; the bound (2.7 to 3.8) and the command
          (2.7 to 3.9 in all layers): as λ = 2 or better
"""

import shlex
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import set_seed

import rankwise as rw
from experiments.study import Study
from rankwise.cli.load_model import demo_text
from rankwise.models import ToSTConfig, ToSTForCausalLM


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    depth: int = 48
    tokens: int = 64
    batch: int = 8
    steps: int = 120
    every: int = 40
    rate: float = 3e-4
    scales: tuple[float, ...] = (0.5, 1.0, 2.0)
    seeds: tuple[int, ...] = (0, 1, 2)


def build(recipe: Recipe, scale: float, seed: int) -> ToSTForCausalLM:
    """Return the model, with the same weights for every λ."""
    set_seed(seed)
    config = ToSTConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=recipe.depth,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=recipe.tokens,
        layer_types="softmax",
        norm_position="post",
        skip="fixed",
        skip_init=scale,
        initializer_range=0.2,
        pad_token_id=0,
    )
    return ToSTForCausalLM(config)


def windows(recipe: Recipe, seed: int, count: int) -> list[Tensor]:
    ids = torch.tensor(list(demo_text().read_bytes()))
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - recipe.tokens + 1, (count, recipe.batch, 1), generator=draw)
    return list(ids[starts + torch.arange(recipe.tokens)])


def probe_of(recipe: Recipe, seed: int) -> dict[str, Tensor]:
    """Return two windows for the audits, which are drawn apart from the training windows."""
    return {"input_ids": windows(recipe, 10_000 + seed, 1)[0][:2]}


def with_skips(recipe: Recipe, scale: float, seed: int) -> ToSTForCausalLM:
    """Return the same model with λ of `rankwise.add_lambda_skip`, because advice names sites of such λ."""
    model = build(recipe, 1.0, seed)
    rw.add_lambda_skip(model, scale, learnable=False, example=probe_of(recipe, seed))
    return model


def advice(recipe: Recipe, scale: float, seed: int) -> tuple[float, float, list[str]]:
    """Return the λ of the bound, and the λ and the sites of the command, before the first step."""
    model, probe = with_skips(recipe, scale, seed).eval(), probe_of(recipe, seed)
    audit = rw.audit(model, [probe], provenance={"arguments": [["model"]]})  # so that the advice is a command
    found = rw.skips.recommend(audit, model, probe).findings
    collapse = next(finding for finding in found if finding.code == "COLLAPSE")
    words = shlex.split(collapse.remedy)
    sites = [value for option, value in pairwise(words) if option == "--sites"]
    return collapse.evidence["lambda_proved"], float(words[words.index("--init") + 1]), sites


def advised(recipe: Recipe, seed: int, source: str) -> tuple[ToSTForCausalLM, float, int]:
    """Return the model with the advised λ, that λ, and the number of layers that have it."""
    start = recipe.scales[0]
    bound, scale, sites = advice(recipe, start, seed)
    if source == "bound":
        return build(recipe, bound, seed), bound, recipe.depth
    model = with_skips(recipe, start, seed)
    skips = rw.skips.skips_of(model)
    with torch.no_grad():
        for site in sites or skips:
            skips[site].fill_(scale)
    return model, scale, len(sites) or recipe.depth


def train(recipe: Recipe, scale: float, seed: int, stop: bool, source: str = "given") -> dict[str, Any]:
    """Train and monitor one model; `source` names the origin of λ: "given", "command" or "bound"."""
    if source == "given":
        model, layers = build(recipe, scale, seed), recipe.depth
    else:
        model, scale, layers = advised(recipe, seed, source)
    monitor = rw.RankMonitor(probe_of(recipe, seed), recipe.every, stop_on=("COLLAPSE",) if stop else ())
    optimizer = torch.optim.AdamW(model.parameters(), recipe.rate)
    losses, began = [], time.perf_counter()
    for step, batch in enumerate(windows(recipe, seed, recipe.steps)):
        monitor.step(model, step)
        if monitor.stopped_by:
            break
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    last = losses[-max(recipe.steps // 10, 1) :]
    return {
        "scale": scale,
        "source": source,
        "layers": layers,
        "seed": seed,
        "stopped": monitor.stopped_by is not None,
        "steps": len(losses),
        "loss": statistics.fmean(last) if last else None,
        "collapse": {
            step: next((f.where.layer for f in audit.findings if f.code == "COLLAPSE"), None)
            for step, audit in monitor.history
        },
        "relative_spread": {step: audit.layers[-1].relative_spread for step, audit in monitor.history},
        "audits_share": monitor.seconds / (time.perf_counter() - began),
        "seconds_an_audit": monitor.seconds / len(monitor.history),
        "seconds_a_step": (time.perf_counter() - began - monitor.seconds) / max(len(losses), 1),
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the runs as lines of docs/how-to/monitor.md."""
    lines = [
        "   λ  from     layers  seed  stopped  steps    loss  COLLAPSE at layer, by step      "
        "μ/‖Y‖ at the end, by step"
    ]
    for run in runs:
        loss = "–" if run["loss"] is None else f"{run['loss']:.3f}"
        layers = ", ".join(f"{step}: {layer or 'none'}" for step, layer in run["collapse"].items())
        spread = ", ".join(f"{step}: {value:.3f}" for step, value in run["relative_spread"].items())
        stopped = "yes" if run["stopped"] else "no"
        start = f"{run['scale']:4.3g}  {run['source']:8} {run['layers']:6d} {run['seed']:5d} {stopped:>8}"
        lines.append(f"{start} {run['steps']:6d} {loss:>7}  {layers:30} {spread}")
    return "\n".join(lines)


def measure(recipe: Recipe) -> dict[str, Any]:
    """Train every model of the claim, the stopped one first."""
    runs = [train(recipe, recipe.scales[0], recipe.seeds[0], stop=True)]
    for seed in recipe.seeds:
        runs += [train(recipe, scale, seed, stop=False) for scale in recipe.scales]
        runs += [train(recipe, 0.0, seed, stop=False, source=source) for source in ("command", "bound")]
    return {"settings": asdict(recipe), "threads": torch.get_num_threads(), "runs": runs}


STUDY = Study(
    "monitor_collapse", lambda data: measure(Recipe()), tables=lambda report: {"runs": table(report["runs"])}
)
