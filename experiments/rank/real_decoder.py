"""Measures and conclusions on a real decoder, Gemma 3 270M, and a real encoder, all-mpnet-base-v2.

Question  Does COLLAPSE see tokens that are made equal by force? How well do estimated importance, rank, and
          sets of removable heads do on a model with 268 million weights?
Models    Gemma 3 270M, dequantized from Q4_K_M and saved in bfloat16; all-mpnet-base-v2, if it is installed
Hardware  one CPU core, about 40 minutes
Expect    token spread is as without force, direction spread falls to 0, COLLAPSE is found; estimates sort
          heads (Spearman near 0.8); sets chosen at 1 % of the loss cost several times as much on others
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Tensor, nn

import rankwise as rw
from experiments.rank.importance import RANKS, spearman
from experiments.rank.rank_saturation import rounded
from experiments.real_models import mpnet, require_gemma
from experiments.render import markdown_table
from experiments.study import Report, Study
from rankwise.auditing import Audit
from rankwise.auditing.measure_table import HEAD_MEASURES
from rankwise.cli.load_data import load_data
from rankwise.cli.load_model import load_model
from rankwise.importance import ImportanceSettings, ablation_cost, measure_importance

TEXTS = {
    "wikitext-2": "wikitext2/valid.txt",
    "Shakespeare": "tiny_shakespeare/input.txt",
    "IMDB": "imdb/test.jsonl.gz",
}
STATES = {
    "spread": ("token spread", ".3f"),
    "direction_spread": ("direction spread", ".3f"),
    "largest_norm_ratio": ("largest norm / median", ".1f"),
    "largest_norm_share": ("its share of ‖Y‖²", ".2f"),
    "massive_tokens": ("massive tokens", ".1f"),
    "largest_position": ("position of the largest", "d"),
    "effective_rank": ("rank of states", ".1f"),
    "effective_rank_without_massive": ("without massive tokens", ".1f"),
}
"""Heading and format of measures of states."""
MEASURES = [measure for measure in HEAD_MEASURES if measure.name in RANKS]
DTYPES = ("float32", "bfloat16")
WAYS = ("exact", "estimate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    lengths: tuple[int, ...] = (512, 1024)
    """Tokens of the sequences of audits, up to 1,024 together."""
    tokens: int = 256
    """Tokens of sequences for importance and forced collapse."""
    calibration: int = 4
    """Sequences on which heads are measured and chosen."""
    held_out: int = 8
    """Sequences of each text on which chosen heads are priced."""
    forced: int = 2
    """Sequences in which tokens are made equal."""
    depths: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Blocks after which tokens are made equal, as shares of all blocks."""
    kept: tuple[float, ...] = (0.0, 0.02, 0.05)
    """Share of the tokens, from the first, that are left alone; at least one."""


def sequences(subject: Any, text: Path, tokens: int, count: int) -> list[Any]:
    """Return evenly spaced sequences of a text, one per batch."""
    return list(load_data(subject, text=text, tokens=tokens, sequences=count, batch_size=1).batches)


@contextmanager
def equal_tokens(block: nn.Module, kept: float) -> Iterator[None]:
    """Replace the tokens that leave a block by their mean, except the first ones."""

    def equalize(module: nn.Module, arguments: Any, output: Any) -> Any:
        states: Tensor = output if isinstance(output, Tensor) else output[0]
        first = max(1, round(kept * states.shape[1]))
        equal = states.clone()
        equal[:, first:] = states[:, first:].mean(1, keepdim=True)
        return equal if isinstance(output, Tensor) else (equal, *output[1:])

    handle = block.register_forward_hook(equalize)
    try:
        yield
    finally:
        handle.remove()


def summary(audit: Audit) -> Report:
    """Return the findings of an audit, means of head measures by layer, and measures of the states."""
    layers = {
        layer: [head for head in audit.heads if head.layer == layer]
        for layer in sorted({head.layer for head in audit.heads})
    }
    return {
        "loss": audit.importance.value if audit.importance else None,
        "findings": sorted({finding.code for finding in audit.findings}),
        "layers": [
            {measure.name: mean(measure.value(head) for head in heads) for measure in MEASURES}
            | {"largest_logit": max(head.largest_logit for head in heads)}
            for heads in layers.values()
        ],
        "states": [
            {name: getattr(state, name) for name in STATES}
            for state in sorted(audit.states, key=lambda state: state.blocks)
        ],
    }


def forced(model: nn.Module, blocks: Any, batches: Sequence[Any], settings: Settings) -> list[Report]:
    """Audit the model as it is, and with equal tokens after some blocks."""

    def audited(after: int, kept: float) -> Report:
        found = summary(rw.audit(model, batches, loss=hasattr(model, "lm_head")))
        del found["layers"]
        return {"after": after, "kept": kept, **found}

    reports = [audited(0, 1.0)]
    for after in (round(depth * len(blocks)) for depth in settings.depths):
        for kept in settings.kept:
            with equal_tokens(blocks[after - 1], kept):
                reports.append(audited(after, kept))
    return reports


def costs(
    model: nn.Module, batches: Sequence[Any], tolerance: float | None, ways: Sequence[str] = WAYS
) -> tuple[Report, dict[str, Any]]:
    """Measure every head in each way; return a report, and the removable heads of each way."""
    audit = rw.audit(model, batches)
    heads = [[head.layer, head.head] for head in audit.heads]
    ranks = {measure.name: [measure.value(head) for head in audit.heads] for measure in MEASURES}
    report: Report = {"heads": heads, "ranks": ranks}
    removable = {}
    for way in ways:
        settings = ImportanceSettings(exact=way == "exact", estimates=way == "estimate", tolerance=tolerance)
        begun = time.process_time()
        found = measure_importance(model, batches, settings)
        seconds, record = time.process_time() - begun, found.record
        share = {(at.layer, at.head): record.share(head.cost) for at, head in found.heads.items()}
        report[way] = {
            "costs": [share[layer, head] for layer, head in heads],
            "seconds": seconds,
            "forward": record.forward / len(batches),
            "backward": record.backward / len(batches),
        }
        if record.removable is not None:
            removable[way] = record.removable
    return report, removable


def on_texts(subject: Any, texts: dict[str, Path], settings: Settings) -> list[Report]:
    """Choose removable heads on each text, on the first also by estimates; price them on every text."""
    count = settings.calibration + settings.held_out
    every = {name: sequences(subject, text, settings.tokens, count) for name, text in texts.items()}
    step = count // settings.calibration
    held_out = {name: [one for at, one in enumerate(own) if at % step] for name, own in every.items()}
    reports = []
    for name, own in every.items():
        report, removable = costs(subject.model, own[::step], 0.01, WAYS[: 1 if reports else 2])
        sets = [
            {
                "by": way,
                "heads": [[head.layer, head.head] for head in chosen.heads],
                "chosen": chosen.chosen_relative,
                "priced": [chosen.relative, chosen.low, chosen.high],
                "elsewhere": {
                    other: ablation_cost(subject.model, batches, chosen.heads).relative
                    for other, batches in held_out.items()
                },
            }
            for way, chosen in removable.items()
        ]
        reports.append({"text": name, **report, "sets": sets})
    return reports


def by_length(subject: Any, text: Path, settings: Settings) -> list[Report]:
    """Audit a language model on sequences of several lengths."""
    longest = max(settings.lengths)
    return [
        {"tokens": tokens, **summary(rw.audit(subject.model, batches, loss=True))}
        for tokens in settings.lengths
        for batches in [sequences(subject, text, tokens, longest // tokens)]
    ]


def measure(data: Path) -> Report:
    settings, folder = Settings(), require_gemma()
    texts = {name: data / file for name, file in TEXTS.items()}
    text = next(iter(texts.values()))
    models: dict[str, Report] = {}
    for dtype in DTYPES:
        subject = load_model(str(folder), dtype=dtype)
        model: Any = subject.model
        batches = sequences(subject, text, settings.tokens, settings.forced)
        models[name := f"Gemma 3 270M, {dtype}"] = {
            "audits": by_length(subject, text, settings),
            "forced": forced(model, model.model.layers, batches, settings),
        }
    models[name]["importance"] = on_texts(subject, texts, settings)  # of the dtype that is saved
    if (encoder := mpnet()) is not None:
        subject, last = load_model(str(encoder)), list(texts)[-1]
        model = subject.model.base_model  # its output layer was not trained with it
        batches = sequences(subject, texts[last], settings.tokens, 1)
        models["all-mpnet-base-v2"] = {
            "audits": [{"tokens": settings.tokens, **summary(rw.audit(model, batches))}],
            "forced": forced(model, model.encoder.layer, batches, settings),
            "importance": [{"text": last, **costs(model, batches, None)[0]}],
        }
    return {"settings": asdict(settings), "models": rounded(models)}


def number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def audit_table(models: dict[str, Report]) -> str:
    """Return a row per audit: means over layers, and extremes over the states after blocks."""
    rows = []
    for name, model in models.items():
        for audit in model["audits"]:
            means = {rank: mean(layer[rank] for layer in audit["layers"]) for rank in RANKS}
            states = audit["states"][1:]
            row = [
                name,
                f"{audit['tokens']:,}",
                number(audit["loss"], ".3f"),
                number(means["numerical_rank"]),
            ]
            row += [number(means["effective_rank"], ".1f"), number(means["first_token_mass"])]
            row.append(number(min(state["direction_spread"] for state in states), ".3f"))
            row.append(number(max(state["largest_norm_ratio"] for state in states), ".1f"))
            row.append(number(max(layer["largest_logit"] for layer in audit["layers"]), ".0f"))
            rows.append([*row, ", ".join(audit["findings"]) or "none"])
    heads = ("model", "tokens", "loss, nats", "rank share", "effective rank", "first-token mass")
    extremes = ("lowest direction spread", "largest norm / median", "largest logit")
    return markdown_table((*heads, *extremes, "findings"), rows)


def state_table(audit: Report) -> str:
    """Return a row per state of an audit, with mean rank share and largest logit of the block before it."""
    own = {"numerical_rank": ".2f", "largest_logit": ".0f"}
    before = [[number(layer.get(name), own[name]) for name in own] for layer in [{}, *audit["layers"]]]
    rows = [
        [str(at), *block, *(number(state[name], form) for name, (_, form) in STATES.items())]
        for at, (block, state) in enumerate(zip(before, audit["states"], strict=True))
    ]
    heads = ("blocks", "rank share", "largest logit", *(title for title, _ in STATES.values()))
    return markdown_table(heads, rows)


def forced_table(models: dict[str, Report]) -> str:
    """Return a row per audit with equal tokens; first the model as it is, where its tokens are most alike."""
    rows = []
    for name, model in models.items():
        for run in model["forced"]:
            states, after = run["states"][1:], run["after"]
            there = states[after - 1] if after else min(states, key=lambda state: state["direction_spread"])
            alone = "only the first" if run["kept"] == 0 else f"the first {run['kept']:.0%}"
            row = [name, str(after or "none"), alone if after else "all", number(run["loss"], ".3f")]
            row += [number(there[spread], ".3f") for spread in ("spread", "direction_spread")]
            row += [number(there["effective_rank"], ".1f"), number(states[-1]["direction_spread"], ".3f")]
            rows.append([*row, "yes" if "COLLAPSE" in run["findings"] else "no"])
    heads = ("model", "equal after block", "left alone", "loss, nats", "token spread there")
    more = ("direction spread there", "rank of states there", "direction spread at the end", "COLLAPSE")
    return markdown_table((*heads, *more), rows)


def importance_table(models: dict[str, Report]) -> str:
    """Return a row per model and text: agreement of estimates and ranks with exact costs, and the passes."""
    rows = []
    for name, model in models.items():
        for own in model.get("importance", ()):
            exact, estimate = own["exact"], own.get("estimate")
            order = sorted(range(len(exact["costs"])), key=exact["costs"].__getitem__)
            ranks = [spearman(values, exact["costs"]) for values in own["ranks"].values()]
            row = [name, own["text"], str(len(order)), f"{min(ranks):.2f} to {max(ranks):.2f}"]
            row += [f"{exact['costs'][head]:+.1%}" for head in (order[0], order[-1])]
            row.append(f"{exact['forward']:.0f}")
            if estimate:
                row.append(number(spearman(estimate["costs"], exact["costs"])))
                row += [f"{estimate['costs'][head]:+.1%}" for head in (order[0], order[-1])]
                row.append(f"{estimate['forward']:.0f} and {estimate['backward']:.0f}")
                row.append(number(estimate["seconds"] / exact["seconds"]))
            rows.append([*row, *[""] * (12 - len(row))])
    heads = ("model", "text", "heads", "Spearman of ranks", "cheapest head", "costliest head", "passes")
    more = (
        "Spearman of estimates",
        "cheapest",
        "costliest",
        "forward and backward passes",
        "seconds / exact",
    )
    return markdown_table((*heads, *more), rows)


def set_table(own: Sequence[Report], columns: Sequence[str]) -> str:
    """Return a row per set of removable heads, and its costs on other sequences of each text."""
    rows = [
        [text["text"], chosen["by"], str(len(chosen["heads"])), f"{chosen['chosen']:+.1%}"]
        + ["{:+.1%} ({:+.1%} to {:+.1%})".format(*chosen["priced"])]
        + [f"{chosen['elsewhere'][other]:+.1%}" for other in columns]
        for text in own
        for chosen in text["sets"]
    ]
    heads = ("chosen on", "sorted by", "heads", "cost where chosen", "stated price and its interval")
    return markdown_table((*heads, *columns), rows)


def agreement(own: Sequence[Report]) -> str:
    """Return Spearman's correlation of exact costs on each two texts."""
    exact = {text["text"]: text["exact"]["costs"] for text in own}
    pairs = combinations(exact, 2)
    rows = [(f"{one} and {other}", number(spearman(exact[one], exact[other]))) for one, other in pairs]
    return markdown_table(("exact costs on", "Spearman"), rows)


def tables(report: Report) -> dict[str, str]:
    models = report["models"]
    on_texts = models["Gemma 3 270M, bfloat16"]["importance"]
    return {
        "audits": audit_table(models),
        "states": state_table(models["Gemma 3 270M, float32"]["audits"][0]),
        "forced": forced_table(models),
        "importance": importance_table(models),
        "sets": set_table(on_texts, [own["text"] for own in on_texts]),
        "agreement": agreement(on_texts),
        **{name: str(report["settings"][name]) for name in ("tokens", "calibration", "held_out")},
    }


STUDY = Study("real_decoder", measure, "evidence/real-decoder", tables)
