"""Claim: a monitor stops a deep model that has collapsed, names the layer, and a larger λ trains.

A post-norm transformer of 48 layers whose attention is added to λ x with λ = 0.5 loses what tells its tokens
apart. The monitor audits a probe batch before the first step and stops the run there. The same model, same
seeds, is then trained past the finding, with λ = 0.5, and with λ = 1 and 2, all of them watched; and with
what `rankwise.skips.recommend` says to the stopped model: with the λ of its command in the layers that it
names ("command"), all where it names none, and in all layers with the λ that its bound asks for in that of
the finding ("bound"), which the command rounds up to two digits.

Setting   ToSTForCausalLM with softmax attention, 48 layers, D = 64, 4 heads, feed-forward width 128,
          post-norm, weights N(0, 0.2²); bytes of the bundled text, 64 at a time, 8 a step; AdamW, 3e-4;
          120 steps; seeds 0, 1, 2
Hardware  one CPU core, some ten minutes
Expect    λ = 0.5: COLLAPSE at step 0, between layers 20 and 30; λ = 1: none then, one by step 40;
          λ = 2: none, and a loss lower by half a nat per byte; the bound (2.7 to 3.8) and the command
          (2.7 to 3.9 in all layers): as λ = 2 or better

    python -m experiments run monitor_collapse
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
    """All that decides a run."""

    depth: int = 48
    tokens: int = 64
    batch: int = 8
    steps: int = 120
    every: int = 40
    rate: float = 3e-4
    scales: tuple[float, ...] = (0.5, 1.0, 2.0)
    seeds: tuple[int, ...] = (0, 1, 2)


def model_of(recipe: Recipe, scale: float, seed: int) -> ToSTForCausalLM:
    """The model, at the same weights for every λ."""
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


def windows(recipe: Recipe, ids: Tensor, seed: int, count: int) -> list[Tensor]:
    """Batches of windows of the text."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - recipe.tokens + 1, (count, recipe.batch, 1), generator=draw)
    return list(ids[starts + torch.arange(recipe.tokens)])


def text_ids() -> Tensor:
    """The bytes of the bundled text."""
    return torch.tensor(list(demo_text().read_bytes()))


def probe_of(recipe: Recipe, seed: int) -> dict[str, Tensor]:
    """What the monitor audits: two windows that are drawn apart from those of the training."""
    return {"input_ids": windows(recipe, text_ids(), 10_000 + seed, 1)[0][:2]}


@dataclass(frozen=True)
class Advice:
    """What `rankwise.skips.recommend` says to a collapsed model."""

    bound: float
    """The λ from which on the layer of the finding keeps what tells tokens apart, on the states it read."""
    command: float
    """λ of the command."""
    sites: tuple[str, ...]
    """Where the command puts it; none: in all layers."""


def with_skips(recipe: Recipe, scale: float, seed: int) -> ToSTForCausalLM:
    """The same model with its λ put in by `rankwise.add_lambda_skip`: advice names sites of such λ."""
    model = model_of(recipe, 1.0, seed)
    rw.add_lambda_skip(model, scale, learnable=False, example=probe_of(recipe, seed))
    return model


def advice(recipe: Recipe, scale: float, seed: int) -> Advice:
    """What `rankwise.skips.recommend` says to the model before its first step."""
    model, probe = with_skips(recipe, scale, seed).eval(), probe_of(recipe, seed)
    found = rw.skips.recommend(rw.audit(model, [probe]), model, probe).findings
    collapse = next(finding for finding in found if finding.code == "COLLAPSE")
    words = shlex.split(collapse.remedy)
    sites = [value for option, value in pairwise(words) if option == "--sites"]
    return Advice(collapse.evidence["lambda_proved"], float(words[words.index("--init") + 1]), tuple(sites))


def advised(recipe: Recipe, given: Advice, scale: float, seed: int) -> ToSTForCausalLM:
    """The model after the command of the advice."""
    model = with_skips(recipe, scale, seed)
    skips = rw.skips.skips_of(model)
    with torch.no_grad():
        for site in given.sites or skips:
            skips[site].fill_(given.command)
    return model


def train(recipe: Recipe, scale: float, seed: int, stop: bool, source: str = "given") -> dict[str, Any]:
    """Train and watch one model.

    Args:
        recipe: sizes.
        scale: λ; of the collapsed model, where advice says what to train with.
        seed: of weights and windows.
        stop: whether a COLLAPSE ends the training.
        source: where λ comes from: ``given``; of the advice, its ``command`` or its ``bound``.

    Returns:
        Loss of the last tenth of the steps, the COLLAPSE at each audit, and the time that audits took.
    """
    ids, probe = text_ids(), probe_of(recipe, seed)
    said = None if source == "given" else advice(recipe, scale, seed)
    if said is not None and source == "command":
        model, scale = advised(recipe, said, scale, seed), said.command
        layers = len(said.sites) or recipe.depth
    else:
        layers, scale = recipe.depth, (scale if said is None else said.bound)
        model = model_of(recipe, scale, seed)
    monitor = rw.RankMonitor(probe, recipe.every, stop_on=("COLLAPSE",) if stop else ())
    optimizer = torch.optim.AdamW(model.parameters(), recipe.rate)
    losses, began = [], time.perf_counter()
    for step, batch in enumerate(windows(recipe, ids, seed, recipe.steps)):
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
    """The runs as lines."""
    lines = [
        "   λ  from     layers  seed  stopped  steps    loss  COLLAPSE at layer, by step      "
        "μ/‖Y‖ at the end, by step"
    ]
    for run in runs:
        loss = "–" if run["loss"] is None else f"{run['loss']:.3f}"
        layers = ", ".join(f"{step}: {layer or 'none'}" for step, layer in run["collapse"].items())
        collapse = ", ".join(f"{step}: {value:.3f}" for step, value in run["relative_spread"].items())
        stopped = "yes" if run["stopped"] else "no"
        told = f"{run['scale']:4.3g}  {run['source']:8} {run['layers']:6d} {run['seed']:5d} {stopped:>8}"
        told += f" {run['steps']:6d} {loss:>7}"
        lines.append(f"{told}  {layers:30} {collapse}")
    return "\n".join(lines)


def measure(recipe: Recipe) -> dict[str, Any]:
    """Train every model of the claim, the stopped one first."""
    runs = [train(recipe, recipe.scales[0], recipe.seeds[0], stop=True)]
    for seed in recipe.seeds:
        trained = [(scale, "given") for scale in recipe.scales]
        trained += [(recipe.scales[0], "command"), (recipe.scales[0], "bound")]
        runs += [train(recipe, scale, seed, stop=False, source=source) for scale, source in trained]
    return {"recipe": asdict(recipe), "threads": torch.get_num_threads(), "runs": runs}


STUDY = Study(
    "monitor_collapse",
    lambda data: measure(Recipe()),
    tables=lambda report: {"runs": table(report["runs"])},
)
