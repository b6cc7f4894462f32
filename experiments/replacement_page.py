"""Tables of `experiments.replacement`: every order of layers, by the sets that it passes through."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, permutations
from statistics import mean
from typing import Any

from experiments.render import markdown_table, mean_std

NAMES = {"tssa": "TSSA", "linear": "Linear attention"}
GUIDES = {
    "importance": "worth, lowest first",
    "rank": "effective rank, lowest first",
    "swap": "the distilled layer alone, on the text measured",
}
Run = Mapping[str, Any]
Order = tuple[int, ...]


def key(layers: Iterable[int]) -> str:
    """A set of layers in a file.

    >>> key((2, 0))
    '0 2'
    """
    return " ".join(map(str, sorted(layers)))


def orders(run: Run) -> dict[str, Order]:
    """The orders that are compared, layers from the one that is replaced first."""
    layers = range(len(run["guides"]["importance"]))
    guided = {
        name: tuple(sorted(layers, key=lambda layer: run["guides"][guide][layer]))
        for guide, name in GUIDES.items()
    }
    return {**guided, "first to last": tuple(layers), "last to first": tuple(reversed(layers))}


def losses(run: Run, order: Sequence[int], stage: str = "tuned") -> list[float]:
    """Loss with none, one, … all layers replaced in an order."""
    return [run["sets"][key(order[:count])][stage] for count in range(len(order) + 1)]


def ranked(run: Run, order: Sequence[int]) -> tuple[int, int]:
    """Return how many orders have a lower mean loss over 1 … L − 1 layers replaced, and of how many."""
    every = [_between(run, one) for one in permutations(order)]
    return sum(other < _between(run, order) - 1e-9 for other in every), len(every)


def adds(run: Run, layer: int) -> float:
    """What replacing a layer adds to the loss, mean over all sets of the other layers."""
    sets = run["sets"]
    without = [name for name in sets if str(layer) not in name.split()]
    return mean(
        sets[key([*map(int, name.split()), layer])]["tuned"] - sets[name]["tuned"] for name in without
    )


def among_last(run: Run) -> tuple[int, int]:
    """Of the other orders that replace last the layer that adds most, how many are better than worth's."""
    importance = orders(run)[GUIDES["importance"]]
    most = max(importance, key=lambda layer: adds(run, layer))
    others = [order for order in permutations(importance) if order[-1] == most and order != importance]
    return sum(_between(run, order) < _between(run, importance) - 1e-9 for order in others), len(others)


def _between(run: Run, order: Sequence[int]) -> float:
    return mean(losses(run, order)[1:-1])


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables and the sentences of the page."""
    settings, runs = report["settings"], report["runs"]
    by_kind = {kind: [run for run in runs if run["kind"] == kind] for kind in NAMES}
    there = {kind: own for kind, own in by_kind.items() if own}
    seeds = sorted({run["seed"] for run in runs})
    minutes = sum(run["cpu_seconds"] for run in runs) / 60
    versions = report["versions"]
    return {
        "verdicts": "\n".join(f"- {line}" for line in verdicts(there)),
        "seeds": f"Seeds of data and training: {', '.join(map(str, seeds))}"
        + ("; differences between sets carry no spread." if len(seeds) == 1 else "."),
        "distil": f"{settings['distil_steps']} steps of Adam on {settings['distil_windows']} windows",
        "tune": f"{settings['tune_steps']} steps of AdamW at a rate of {settings['tune_rate']:g}, "
        f"{settings['tune_batch']} windows each",
        "tokens": str(settings["tokens"]),
        "held": str(settings["held_out"]),
        "command": "python -m experiments run replacement",
        "machine": f"in {minutes:.1f} minutes of one CPU core, torch {versions['torch']}, transformers "
        f"{versions['transformers']}.",
        "kinds": "\n\n".join(part for kind, own in there.items() for part in section(kind, own)),
    }


def verdicts(there: Mapping[str, Sequence[Run]]) -> list[str]:
    """Sentences that the numbers decide: what does not hold first."""
    lines = []
    for kind, runs in there.items():
        layers = range(len(runs[0]["guides"]["importance"]))
        none, every = ([run["sets"][key(chosen)] for run in runs] for chosen in ((), layers))
        added = [one["tuned"] - whole["tuned"] for one, whole in zip(every, none, strict=True)]
        alone = [one["tuned"] - one["distilled"] for one in none]
        same = [orders(run)[GUIDES["importance"]] == orders(run)[GUIDES["rank"]] for run in runs]
        lines += [
            f"{NAMES[kind]} in all {len(layers)} layers adds {mean_std(added, 2)} nats a byte. "
            f"Tuning alone, with no layer replaced, adds {mean_std(alone, 3)}.",
            f"{NAMES[kind]}: worth and effective rank give the same order in {sum(same)} of {len(runs)} "
            f"seeds. How many orders are better than each that is compared, by the mean loss with one to "
            f"{len(layers) - 1} layers replaced: {places(runs)}.",
            f"{NAMES[kind]}: of the orders that leave the layer that adds most for last, better than "
            f"worth's: {', '.join('{} of {}'.format(*among_last(run)) for run in runs)}.",
        ]
    return lines


def places(runs: Sequence[Run]) -> str:
    """Return how many orders are better than each compared one, for each seed, the most first."""
    found = {name: [ranked(run, orders(run)[name]) for run in runs] for name in orders(runs[0])}
    by_place = sorted(found.items(), key=lambda one: -mean(better for better, _ in one[1]))
    return "; ".join(
        f"{name} {', '.join(str(better) for better, _ in own)} of {own[0][1] - 1}" for name, own in by_place
    )


def section(kind: str, runs: Sequence[Run]) -> Iterable[str]:
    """The tables of one kind of mixer."""
    layers = len(runs[0]["guides"]["importance"])
    yield f"## {NAMES[kind]}"
    yield "What guides the orders, by layer:\n\n" + markdown_table(
        ["", *map(str, range(layers))],
        [
            [
                said,
                *(mean_std([run["guides"][guide][layer] for run in runs], digits) for layer in range(layers)),
            ]
            for guide, said, digits in (
                ("importance", "nats lost without its attention", 3),
                ("rank", "effective rank, mean of heads", 1),
                ("swap", "loss with it alone replaced, distilled", 3),
            )
        ]
        + [
            ["relative error of its outputs, before distillation"]
            + [
                mean_std([run["distillation"][layer]["before"] for run in runs], 2) for layer in range(layers)
            ],
            ["after"]
            + [mean_std([run["distillation"][layer]["after"] for run in runs], 2) for layer in range(layers)],
            ["nats it adds, mean over all sets of the others, tuned"]
            + [mean_std([adds(run, layer) for run in runs], 3) for layer in range(layers)],
        ],
    )
    for stage, said in (("tuned", "after tuning"), ("distilled", "distilled, not tuned")):
        yield f"Loss by share of layers replaced, {said}:\n\n" + order_table(runs, stage)


def order_table(runs: Sequence[Run], stage: str) -> str:
    """Loss by order and number of layers."""
    layers = len(runs[0]["guides"]["importance"])
    rows = []
    for name in orders(runs[0]):
        every = [orders(run)[name] for run in runs]
        shown = "; ".join(dict.fromkeys("–".join(map(str, order)) for order in every))
        curves = [losses(run, order, stage) for run, order in zip(runs, every, strict=True)]
        rows.append([f"{name} ({shown})", *(mean_std(list(one), 3) for one in zip(*curves, strict=True))])
    found = [[losses(run, order, stage) for order in permutations(range(layers))] for run in runs]
    by_count = [[[curve[count] for curve in curves] for curves in found] for count in range(layers + 1)]
    many = len(found[0])
    rows.append(
        [
            f"all {many} orders, with their spread",
            *(mean_std(list(chain(*own)), 3) for own in by_count),
        ]
    )
    for said, take in (("best set of each size", min), ("worst set", max)):
        rows.append([said, *(mean_std([take(values) for values in own], 3) for own in by_count)])
    return markdown_table(["order", *(f"{count / layers:.0%}" for count in range(layers + 1))], rows)
