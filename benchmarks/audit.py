"""What an audit costs next to the forward pass of the model, and next to singular values by hand.

    python -m benchmarks audit
    python -m benchmarks audit --model sentence-transformers/all-MiniLM-L6-v2 --eager

These runs take turns: the forward pass; the pass under `capture`, which does nothing with what it captures;
the measures alone, on operators and states of one pass; the whole audit; and the audit with one thread of
torch. The audit should cost no more than three forward passes plus the measures. Capture must leave the
outputs bit-identical, which is checked in the run.

`--eager` adds what a user would write by hand: eager attention with `output_attentions`, then
`torch.linalg.svdvals` of every matrix and nothing else, in the model's dtype and in float64. The ranks of the
audit are compared with these singular values. The goal is half of that time for all measures together;
decision 004 says where it is reached.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import positive, race, ratio

import rankwise as rw
from rankwise.auditing.measure import measure_heads, measure_states, sampled
from rankwise.auditing.statistics import ModelStatistics
from rankwise.cli.load_data import load_data
from rankwise.cli.load_model import demo_model, demo_text, load_model
from rankwise.measures import DELTA

REPEATS = 5
Batches = list[dict[str, torch.Tensor]]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the model, the text, and its size."""
    parser.add_argument(
        "--model", default=str(demo_model()), help="name or folder (default: the bundled demo)"
    )
    parser.add_argument("--text", type=Path, default=demo_text())
    parser.add_argument("--tokens", type=positive, default=256)
    parser.add_argument("--sequences", type=positive, default=8)
    parser.add_argument("--batch-size", type=positive, default=4)
    parser.add_argument("--eager", action="store_true", help="also eager attention and svdvals, by hand")


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row: the runs, and the cost of the audit without its measures."""
    if given.quick:
        given.tokens, given.sequences, given.batch_size = 32, 2, 2
    subject = load_model(given.model, device=given.device)
    sizes = {"tokens": given.tokens, "sequences": given.sequences, "batch_size": given.batch_size}
    batches = [
        {name: part.to(given.device) for name, part in batch.items()}
        for batch in load_data(subject, text=given.text, **sizes).batches
    ]
    runs = runs_of(subject.model, batches)
    different = None
    if given.eager:
        if any((batch.get("attention_mask", torch.ones(1)) == 0).any() for batch in batches):
            raise SystemExit("--eager: expected no padding, which svdvals would count. Use a longer text")
        by_hand = load_model(given.model, device=given.device).model
        by_hand.set_attn_implementation("eager")
        runs["eager, svdvals"] = lambda: singular_values(by_hand, batches)
        runs["eager, svdvals float64"] = lambda: singular_values(by_hand, batches, torch.float64)
        different = rank_difference(rw.audit(subject.model, batches), runs["eager, svdvals float64"]())
    seconds = race(runs, given.repeats, torch.device(given.device), time.perf_counter)
    own = [audit - measures for audit, measures in zip(seconds["audit"], seconds["measures"], strict=True)]
    yield {
        "model": given.model,
        **sizes,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "in_forward_passes": {name: ratio(times, seconds["forward"]) for name, times in seconds.items()},
        "in_audits": {name: ratio(times, seconds["audit"]) for name, times in seconds.items()},
        "audit_without_measures_in_forward_passes": ratio(own, seconds["forward"]),
        "largest_difference_of_ranks": different,
        "right": different is None or different <= 1,
    }


def runs_of(model: Any, batches: Batches) -> dict[str, Callable[[], Any]]:
    """Return the runs by name; raise if capture changes an output."""
    with rw.capture(model) as trace, torch.no_grad():
        seen = [model(**batch)[0] for batch in batches]

    def forward() -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(**batch)[0] for batch in batches]

    def captured() -> list[torch.Tensor]:
        with rw.capture(model, on_mixer=lambda site: None, on_state=lambda state: None):
            return forward()

    def measures() -> None:
        found = ModelStatistics()
        for site in trace.mixers:
            found.add_heads(measure_heads(*sampled(site), DELTA, "auto"))
        for state in trace.states:
            found.add_states(measure_states(state, None))
        found.head_records()

    def on_one_thread() -> rw.Audit:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return rw.audit(model, batches)
        finally:
            torch.set_num_threads(threads)

    assert all(map(torch.equal, forward(), seen)), "capture changed an output"
    return {
        "forward": forward,
        "capture": captured,
        "measures": measures,
        "audit": lambda: rw.audit(model, batches),
        "audit, torch on one thread": on_one_thread,
    }


@torch.no_grad()
def singular_values(model: Any, batches: Batches, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return the singular values of all heads, (layers, B, H, T) for each batch."""
    maps = [model(**batch, output_attentions=True).attentions for batch in batches]
    return [
        torch.stack([torch.linalg.svdvals(one.to(dtype or one.dtype)) for one in batch]) for batch in maps
    ]


def rank_difference(audit: rw.Audit, sigma: list[torch.Tensor]) -> float:
    """Return the largest difference between ranks of the audit and counts of singular values.

    Fused and eager attention round differently in the model's dtype, so one value in a hundred sequences may
    cross δ.
    """
    counts = torch.cat([(one >= DELTA).sum(-1) for one in sigma], dim=1).double().mean(1).flatten()
    ranks = torch.tensor([head.numerical_rank for head in audit.heads], dtype=torch.float64)
    return (counts.cpu() - ranks).abs().max().item()


def line(row: dict[str, Any]) -> str:
    """Return a line for each run."""
    lines = [
        f"  {name:27}{row['seconds'][name]:9.3f} s{row['in_forward_passes'][name].median:9.2f} × forward"
        f"{row['in_audits'][name].median:8.2f} × audit"
        for name in row["seconds"]
    ]
    own = row["audit_without_measures_in_forward_passes"].median
    lines.append(f"  audit less measures: {own:.2f} forward passes (goal: 3)")
    if row["largest_difference_of_ranks"] is not None:
        lines.append(f"  ranks differ from those by hand by at most {row['largest_difference_of_ranks']:g}")
    return "\n".join(lines)
