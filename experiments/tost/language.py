"""Language models on bytes by mixer, at equal parameters."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.experiment import Experiment, at_paper_size
from experiments.render import markdown_table
from experiments.tost.language_parts import PARAMETERS as NARROW_PARAMETERS
from experiments.training.config import TrainingConfig
from experiments.verdicts import BYTE_LOSS, Table, below, within

MODELS = (
    "transformer",
    "softmax",
    "softmax-rotary",
    "tost",
    "tost-decayed",
    "tost-uniform",
    "tost-hybrid",
    "tost-scan",
    "tost-scan-hybrid",
    "linear",
    "mamba2",
)
PARAMETERS = 820_224
"""Parameters of the transformer, and so of all models."""
SCALE = 0.088
"""Standard deviation of initial weights, 128^(-1/2) for a width of 128; otherwise 0.02, as in GPT-2."""


def config(model: str, **changed: Any) -> TrainingConfig:
    """Return a model on bytes of tiny Shakespeare, with as many parameters as the transformer."""
    row = TrainingConfig(
        model=model,
        parameters=None if model == "transformer" else PARAMETERS,
        task="bytes",
        tokens=256,
        task_options={"windows": 100_000},
        learning_rate=3e-3,
        steps=600,
        batch=8,
        evaluate_every=300,
    )
    return replace(row, **changed)


PAPER: dict[str, Any] = {
    "width": 768,
    "layers": 12,
    "heads": 12,
    "tokens": 1024,
    "learning_rate": 1e-3,
    "warmup": 500,
    "steps": 10_000,
    "batch": 64,
    "evaluate_every": 1000,
}
PAPER_PARAMETERS = 85_152_768
"""Parameters of the transformer at that size."""

BY_CONTEXT = Path(__file__).parents[2] / "benchmarks" / "results" / "language.json"


def by_context(table: Table) -> dict[str, str]:
    """Return time, memory and decoding state by context, as `python -m benchmarks language` measured them."""
    measured = json.loads(BY_CONTEXT.read_text(encoding="utf-8"))
    rows = {(row["model"], row["tokens"]): row for row in measured["rows"]}
    contexts = sorted({tokens for _, tokens in rows})
    lines = [
        (model, *(_measured(rows[model, tokens]) for tokens in contexts))
        for model in dict.fromkeys(name for name, _ in rows)
    ]
    headings = ("", *(f"{tokens:,} tokens" for tokens in contexts))
    return {"contexts": markdown_table(headings, lines), "machine": measured["machine"]["cpu"]}


def _measured(row: Mapping[str, Any]) -> str:
    time = "{:.2f} ({:.2f} to {:.2f})".format(*row["time"])
    if row["state"] is None:
        return time
    return f"{time}, {row['memory']:,.0f} MiB, {row['state'] / 1024:,.0f} KiB"


ROWS = {model: config(model) for model in MODELS}


def scaled(model: str) -> str:
    return f"{model}, weights from {SCALE}"


def narrow(model: str) -> str:
    return f"{model}, width 64"


AT_K_STAR = "softmax-rotary, K=12"
QUERIES = replace(
    ROWS["softmax-rotary"],
    parameters=None,
    model_options={"intermediate_size": 474, "mixer_options": {"softmax": {"query_dim": 12}}},
)
"""Queries and keys of width K*, 12, in place of 32; heads, values and feed-forward part stay."""
NARROW = {
    narrow(model): config(model, width=64, parameters=NARROW_PARAMETERS)
    for model in ("transformer", "tost-decayed", "tost-scan", "tost-scan-hybrid")
}
"""The second size: a quarter of the weights, all else as in the other rows."""
NARROW_GOALS = (
    within(narrow("tost-decayed"), narrow("transformer"), 0.10),
    within(narrow("tost-scan"), narrow("transformer"), 0.10),
    within(narrow("tost-scan-hybrid"), narrow("transformer"), 0.03),
)


LANGUAGE = Experiment(
    name="language",
    title="Language on bytes, by mixer",
    source="Wu et al., “Token Statistics Transformer”, ICLR 2025: validation losses in the README of the "
    "released code (OpenWebText)",
    rows=ROWS
    | {
        scaled(model): config(model, model_options={"initializer_range": SCALE})
        for model in ("transformer", "tost-scan")
    }
    | {AT_K_STAR: QUERIES}
    | NARROW,
    large={
        label: replace(row, parameters=row.parameters and PAPER_PARAMETERS)
        for label, row in at_paper_size(ROWS, **PAPER).items()
    },
    published={
        "transformer": "2.84 (GPT-2 base, 124M, OpenWebText)",
        "tost": "3.20 (110M), 2.88 (304M), 2.72 (655M), OpenWebText",
    },
    expectations=(
        below("transformer", "tost"),
        below("tost-decayed", "tost"),
        within("tost-decayed", "transformer", 0.10),
        within("tost-hybrid", "transformer", 0.03),
        within("tost-scan", "transformer", 0.10),
        within(scaled("tost-scan"), scaled("transformer"), 0.10),
        within("tost-scan-hybrid", "transformer", 0.03),
        below("tost", "tost-uniform"),
        within(AT_K_STAR, "softmax-rotary", 0.01),
        *NARROW_GOALS,
    ),
    tables=by_context,
)

TOKEN_PARAMETERS = 918_144
"""Parameters of the transformer with a vocabulary of 1,024."""
WIKITEXT_FILE = "wikitext2/valid.txt"
WIKITEXT = Experiment(
    name="language-wikitext",
    title="Language on bytes and tokens of WikiText, by mixer",
    source="none: the question is whether the order above holds on another text, and on tokens",
    rows={
        model: config(model, text=WIKITEXT_FILE)
        for model in ("transformer", "tost", "tost-decayed", "tost-scan", "tost-scan-hybrid")
    }
    | {
        f"{model}, tokens": config(model, text=WIKITEXT_FILE, task="tokens", parameters=TOKEN_PARAMETERS)
        for model in ("transformer", "tost-decayed", "tost-scan")
    }
    | {label: replace(row, text=WIKITEXT_FILE) for label, row in NARROW.items()},
    expectations=(
        below("tost-decayed", "tost"),
        within("tost-decayed", "transformer", 0.10),
        within("tost-scan", "transformer", 0.10),
        within("tost-scan-hybrid", "transformer", 0.03),
        within("tost-decayed, tokens", "transformer, tokens", 0.10, BYTE_LOSS),
        within("tost-scan, tokens", "transformer, tokens", 0.10, BYTE_LOSS),
        *NARROW_GOALS,
    ),
)
