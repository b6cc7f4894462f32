"""Softmax layers replaced by TSSA or linear attention: does importance or rank say which layer first?

Claim     Not of a paper: layers whose attention has low importance, or low rank, can be replaced first.
Question  Loss on held-out text against the number of replaced layers, for every order of layers. Compared are
          the orders by importance (loss without the attention of the layer, lowest first), by effective
          rank (lowest first), by swap (loss with the distilled layer alone, on the evaluation text), first to
          last, and last to first.
How       Each replaced layer learns the outputs of the attention layer from its inputs in the trained model;
          then all weights of the model are tuned for a few steps. All sets of layers are tried, so that every
          order is known, and the best set of each size.
Data      tiny Shakespeare: windows drawn from the first 90 %, which the demo was trained on, to audit, distil
          and tune; the bundled text, which it has not read, to evaluate.
Hardware  one CPU core, about 1 minute per kind of mixer and seed
Expect    the first layer adds most by far (0.75 nats per byte, the others 0.1 to 0.2); importance and
          effective rank have the same order, which leaves it for last and is near the best; all four layers
          add 1.2 ± 0.1 by TSSA, 1.1 ± 0.1 by linear attention
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, combinations, permutations
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ByT5Tokenizer

import rankwise as rw
from experiments.real_models import Batch, demo_windows, loss
from experiments.real_models import demo as load_demo
from experiments.render import markdown_table, mean_std
from experiments.study import Report, Study
from experiments.tost.replaced_attention import replace_attention
from experiments.tost.train_demo import DEMO, TOKENIZER, encode, split
from rankwise.importance import ImportanceSettings, ablation_cost, measure_importance
from rankwise.ops import half_lives
from rankwise.tracing import Address

KINDS = {"tssa": "TSSA", "linear": "Linear attention"}
SEEDS = (0, 1, 2)
GUIDES = {
    "importance": "importance, lowest first",
    "rank": "effective rank, lowest first",
    "swap": "the distilled layer alone, on the text measured",
}
Run = Mapping[str, Any]
Order = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    tokens: int = 128
    guide_windows: int = 16
    """Windows to audit and to measure importance on."""
    distil_windows: int = 64
    distil_steps: int = 160
    distil_batch: int = 8
    distil_rate: float = 3e-3
    tune_steps: int = 40
    tune_batch: int = 4
    tune_rate: float = 3e-4
    """At 1e-3, 30 steps made the model without a replaced layer worse by 0.12."""
    held_out: int = 64
    """Windows at the start of the bundled text."""


def run(settings: Settings, text: str, kind: str, seed: int) -> Report:
    """Measure one kind of mixer at one seed: guides of the orders, and the loss of every set of layers."""
    begun = time.process_time()
    torch.manual_seed(seed)
    reader = Reader(text, settings.tokens, seed)
    held_out = batches(demo_windows(settings.tokens)[: settings.held_out], 16)
    model = load_demo()
    layers = range(len(model.model.layers))
    guide = guides(model, batches(reader.draw(settings.guide_windows), 8))
    mixers, errors = distil(settings, reader.draw(settings.distil_windows), kind)
    tuning = reader.draw(settings.tune_steps * settings.tune_batch).split(settings.tune_batch)
    sets = {}
    for chosen in chain.from_iterable(combinations(layers, size) for size in range(len(layers) + 1)):
        sets[key(chosen)] = replaced(settings, chosen, kind, mixers, tuning, held_out)
        print(f"seed {seed}, {kind}, layers {chosen}: {sets[key(chosen)]}", flush=True)
    guide["swap"] = [sets[key((layer,))]["distilled"] for layer in layers]
    return {
        "kind": kind,
        "seed": seed,
        "sets": sets,
        "guides": guide,
        "distillation": errors,
        "cpu_seconds": round(time.process_time() - begun),
    }


def key(layers: Iterable[int]) -> str:
    """Return the name of a set of layers in a report, such as "0 2"."""
    return " ".join(map(str, sorted(layers)))


class Reader:
    """Random windows of the training text of the demo."""

    def __init__(self, text: str, tokens: int, seed: int) -> None:
        self.ids = encode(ByT5Tokenizer(**TOKENIZER), split(text, DEMO)[0])
        self.tokens = tokens
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> Tensor:
        """Return windows, (count, tokens)."""
        starts = torch.randint(len(self.ids) - self.tokens + 1, (count,), generator=self.generator)
        return torch.stack([self.ids[start : start + self.tokens] for start in starts.tolist()])


def batches(ids: Tensor, size: int) -> list[Batch]:
    return [{"input_ids": part} for part in ids.split(size)]


def guides(model: nn.Module, given: list[Batch]) -> dict[str, list[float]]:
    """Return, by layer, the loss without its attention, and the mean effective rank of its heads."""
    settings = ImportanceSettings(exact=False, tolerance=None, probes=0)
    mixers: dict[Address, list[Address]] = {}
    for head in measure_importance(model, given[:1], settings).heads:
        mixers.setdefault(head.at(None), []).append(head)
    sites = sorted(mixers.values(), key=lambda heads: heads[0].layer or 0)
    heads = rw.audit(model, given).heads
    ranks = [[head.effective_rank for head in heads if head.layer == layer] for layer in range(len(sites))]
    return {
        "importance": [ablation_cost(model, given, site).cost for site in sites],
        "rank": [sum(own) / len(own) for own in ranks],
    }


def replace_by(model: Any, layers: Sequence[int], kind: str, settings: Settings) -> None:
    """Replace attention; statistics of TSSA decay as in the demo's ToST twin."""
    heads = model.config.num_attention_heads
    options = {"half_life": half_lives(heads, 4, settings.tokens).tolist()} if kind == "tssa" else {}
    replace_attention(model, layers, kind, **options)


def distil(
    settings: Settings, ids: Tensor, kind: str
) -> tuple[list[dict[str, Tensor]], list[dict[str, float]]]:
    """Teach a mixer per layer the outputs of the attention that it replaces; return weights and errors."""
    model = load_demo()
    attention = [layer.self_attn for layer in model.model.layers]
    inputs: list[list[Tensor]] = [[] for _ in attention]
    outputs: list[list[Tensor]] = [[] for _ in attention]

    def record(at: int) -> Any:
        def hook(_module: nn.Module, _args: Any, kwargs: Any, output: Any) -> None:
            inputs[at].append(kwargs["hidden_states"])
            outputs[at].append(output[0])

        return hook

    hooks = [
        module.register_forward_hook(record(at), with_kwargs=True) for at, module in enumerate(attention)
    ]
    with torch.no_grad():
        for part in ids.split(settings.distil_batch):
            model(input_ids=part, use_cache=False)
    for hook in hooks:
        hook.remove()
    replace_by(model, range(len(attention)), kind, settings)
    mixers = [layer.self_attn.mixer for layer in model.model.layers]
    errors = [teach(settings, *one) for one in zip(mixers, inputs, outputs, strict=True)]
    return [{name: value.detach() for name, value in one.state_dict().items()} for one in mixers], errors


def teach(
    settings: Settings, mixer: nn.Module, inputs: list[Tensor], targets: list[Tensor]
) -> dict[str, float]:
    """Fit a mixer to an attention layer; return the error ‖ours − theirs‖²/‖theirs‖² before and after."""
    scale = float(torch.cat(targets).square().mean())

    def error() -> float:
        with torch.no_grad():
            pairs = zip(inputs, targets, strict=True)
            return sum(float((mixer(x).output - y).square().mean()) for x, y in pairs) / scale / len(inputs)

    before = error()
    optimizer = torch.optim.Adam(mixer.parameters(), lr=settings.distil_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, settings.distil_steps)
    for step in range(settings.distil_steps):
        at = step % len(inputs)
        optimizer.zero_grad()
        ((mixer(inputs[at]).output - targets[at]).square().mean() / scale).backward()
        optimizer.step()
        schedule.step()
    return {"before": round(before, 4), "after": round(error(), 4)}


def replaced(
    settings: Settings,
    chosen: Sequence[int],
    kind: str,
    mixers: list[dict[str, Tensor]],
    tuning: Sequence[Tensor],
    held_out: list[Batch],
) -> dict[str, float]:
    """Return the held-out loss with a set of layers replaced, as distilled and after tuning all weights."""
    model = load_demo()
    replace_by(model, chosen, kind, settings)
    for layer in chosen:
        model.model.layers[layer].self_attn.mixer.load_state_dict(mixers[layer])
    distilled = round(loss(model, held_out), 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.tune_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(tuning))
    for ids in tuning:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return {"distilled": distilled, "tuned": round(loss(model, held_out), 4)}


def measure_kinds(settings: Settings, data: Path) -> Report:
    torch.set_num_threads(1)
    text = (data / "tiny_shakespeare" / "input.txt").read_text(encoding="utf-8")
    runs = [run(settings, text, kind, seed) for kind in KINDS for seed in SEEDS]
    return {"settings": asdict(settings), "unit": "nats a byte", "runs": runs}


def orders(run: Run) -> dict[str, Order]:
    """Return the compared orders, layers from the first replaced."""
    layers = range(len(run["guides"]["importance"]))
    guided = {
        name: tuple(sorted(layers, key=run["guides"][guide].__getitem__)) for guide, name in GUIDES.items()
    }
    return {**guided, "first to last": tuple(layers), "last to first": tuple(reversed(layers))}


def losses(run: Run, order: Sequence[int], stage: str = "tuned") -> list[float]:
    """Return the loss with none, one, … all layers replaced in an order."""
    return [run["sets"][key(order[:count])][stage] for count in range(len(order) + 1)]


def better(run: Run, order: Order, others: Iterable[Order]) -> int:
    """Count the orders with a lower mean loss over 1 … L − 1 replaced layers."""
    bar = mean(losses(run, order)[1:-1]) - 1e-9
    return sum(mean(losses(run, other)[1:-1]) < bar for other in others)


def adds(run: Run, layer: int) -> float:
    """Return the loss that replacing a layer adds, mean over all sets of the other layers."""
    sets = run["sets"]
    without = [name for name in sets if str(layer) not in name.split()]
    return mean(
        sets[key([*map(int, name.split()), layer])]["tuned"] - sets[name]["tuned"] for name in without
    )


def among_last(run: Run) -> tuple[int, int]:
    """Count other orders that end with the layer that adds most, those better than importance first."""
    importance = orders(run)[GUIDES["importance"]]
    most = max(importance, key=lambda layer: adds(run, layer))
    others = [order for order in permutations(importance) if order[-1] == most and order != importance]
    return better(run, importance, others), len(others)


def tables(report: Report) -> dict[str, str]:
    settings, runs = report["settings"], report["runs"]
    by_kind = {kind: [run for run in runs if run["kind"] == kind] for kind in KINDS}
    minutes = sum(run["cpu_seconds"] for run in runs) / 60
    return {
        "verdicts": "\n".join(f"- {line}" for kind, own in by_kind.items() for line in verdicts(kind, own)),
        "seeds": f"Seeds of data and training: {', '.join(map(str, sorted({run['seed'] for run in runs})))}.",
        "distil": f"{settings['distil_steps']} steps of Adam on {settings['distil_windows']} windows",
        "tune": f"{settings['tune_steps']} steps of AdamW at a rate of {settings['tune_rate']:g}, "
        f"{settings['tune_batch']} windows each",
        "tokens": str(settings["tokens"]),
        "held": str(settings["held_out"]),
        "minutes": f"{minutes:.1f}",
        "kinds": "\n\n".join(part for kind, own in by_kind.items() for part in section(kind, own)),
    }


def verdicts(kind: str, runs: Sequence[Run]) -> list[str]:
    layers = range(len(runs[0]["guides"]["importance"]))
    none, every = ([run["sets"][key(chosen)] for run in runs] for chosen in ((), layers))
    added = [one["tuned"] - whole["tuned"] for one, whole in zip(every, none, strict=True)]
    alone = [one["tuned"] - one["distilled"] for one in none]
    same = [orders(run)[GUIDES["importance"]] == orders(run)[GUIDES["rank"]] for run in runs]
    return [
        f"{KINDS[kind]} in all {len(layers)} layers adds {mean_std(added, 2)} nats per byte. "
        f"Tuning alone, with no layer replaced, adds {mean_std(alone, 3)}.",
        f"{KINDS[kind]}: importance and effective rank have the same order in {sum(same)} of {len(runs)} "
        f"seeds. Better orders, by the mean loss with one to {len(layers) - 1} layers replaced: "
        f"{places(runs)}.",
        f"{KINDS[kind]}: of the orders that replace the most expensive layer last, better than by "
        f"importance: {', '.join('{} of {}'.format(*among_last(run)) for run in runs)}.",
    ]


def places(runs: Sequence[Run]) -> str:
    """Return the number of orders that are better than each compared order, per seed, the most first."""
    every = list(permutations(range(len(runs[0]["guides"]["importance"]))))
    found = {name: [better(run, orders(run)[name], every) for run in runs] for name in orders(runs[0])}
    by_place = sorted(found.items(), key=lambda one: -mean(one[1]))
    return "; ".join(f"{name} {', '.join(map(str, own))} of {len(every) - 1}" for name, own in by_place)


def section(kind: str, runs: Sequence[Run]) -> Iterable[str]:
    layers = range(len(runs[0]["guides"]["importance"]))

    def row(name: str, digits: int, value: Any) -> list[str]:
        return [name, *(mean_std([value(run, layer) for run in runs], digits) for layer in layers)]

    rows = [
        row("nats lost without its attention", 3, lambda run, layer: run["guides"]["importance"][layer]),
        row("effective rank, mean of heads", 1, lambda run, layer: run["guides"]["rank"][layer]),
        row("loss with it alone replaced, distilled", 3, lambda run, layer: run["guides"]["swap"][layer]),
        row(
            "relative error of its outputs, before distillation", 2,
            lambda run, layer: run["distillation"][layer]["before"],
        ),
        row("after", 2, lambda run, layer: run["distillation"][layer]["after"]),
        row("nats it adds, mean over all sets of the others, tuned", 3, adds),
    ]  # fmt: skip
    yield f"## {KINDS[kind]}"
    yield "Guides of the orders, by layer:\n\n" + markdown_table(["", *map(str, layers)], rows)
    for stage, name in (("tuned", "after tuning"), ("distilled", "distilled, not tuned")):
        yield f"Loss by share of layers replaced, {name}:\n\n" + order_table(runs, stage)


def order_table(runs: Sequence[Run], stage: str) -> str:
    """Return the loss by order and number of replaced layers."""
    layers = len(runs[0]["guides"]["importance"])
    rows = []
    for name in orders(runs[0]):
        own = [orders(run)[name] for run in runs]
        shown = "; ".join(dict.fromkeys("–".join(map(str, order)) for order in own))
        curves = [losses(run, order, stage) for run, order in zip(runs, own, strict=True)]
        rows.append([f"{name} ({shown})", *(mean_std(one, 3) for one in zip(*curves, strict=True))])
    every = list(permutations(range(layers)))
    found = [list(zip(*(losses(run, order, stage) for order in every), strict=True)) for run in runs]
    by_count = list(zip(*found, strict=True))  # number of layers, seed, order
    for name, pick in (
        (f"all {len(every)} orders, with their spread", chain.from_iterable),
        ("best set of each size", lambda seeds: map(min, seeds)),
        ("worst set", lambda seeds: map(max, seeds)),
    ):
        rows.append([name, *(mean_std(list(pick(seeds)), 3) for seeds in by_count)])
    return markdown_table(["order", *(f"{count / layers:.0%}" for count in range(layers + 1))], rows)


STUDY = Study("replacement", lambda data: measure_kinds(Settings(), data), "evidence/replacement", tables)
