"""Ranks of attention heads: Rankwise against torch, numpy and the matrix-free estimate, in one run.

    python -m benchmarks rank --quick
    python -m benchmarks rank --tokens 1024 --heads 12 --out rank.json

Two questions: the numerical rank alone ("count"), and all ranks of a head (numerical, effective, stable, σ_1;
"record"). Heads come in small blocks, and every contender has each block in turn. Answers are compared with
float64 singular values in the same run. The limit is the time of the product M Mᵀ alone.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from benchmarks.harness import in_fresh_process, peak_mib, positive, race, ratio
from torch import Tensor
from torch.linalg import svdvals

import rankwise.measures as rm
from rankwise.measures.estimate import estimate_spectrum

REPEATS = 3
HEADS = {128: 144, 256: 144, 512: 144, 1024: 24}
QUICK = {64: 4, 128: 2}
OURS, TRUTH, LIMIT, FREE = "rankwise", "svdvals float64", "limit: M @ M.mT", "matrix-free"
MEMORY_HEADS = 16
KEY_WIDTH = 64

Answer = tuple[Tensor, ...]
Contender = Callable[[Tensor, float], Answer]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes and δ."""
    parser.add_argument(
        "--tokens", type=positive, nargs="+", help=f"lengths (default: {', '.join(map(str, HEADS))})"
    )
    parser.add_argument("--heads", type=positive, help="heads at each length")
    parser.add_argument("--delta", type=float, default=rm.DELTA)


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each question, size and mask; memory is left out if `--quick`."""
    sizes = QUICK if given.quick else HEADS
    for question in ("count", "record"):
        for tokens in given.tokens or sizes:
            for mask in ("causal", "full", "sink"):
                job = {
                    "tokens": tokens, "mask": mask, "heads": given.heads or sizes.get(tokens, 24),
                    "device": given.device,
                }  # fmt: skip
                found = compare(question, made_heads(**job), given.delta, given.repeats)
                for name, result in found.items() if not given.quick else ():
                    few = job | {"heads": min(job["heads"], MEMORY_HEADS)}
                    asked = {"question": question, "name": name, "delta": given.delta}
                    result["peak_mib"] = in_fresh_process("rank", **asked, **few)
                yield {"question": question, **job, "results": found, "right": is_right(found[OURS])}


def made_heads(tokens: int, mask: str, heads: int, device: str) -> Tensor:
    """Return softmax heads of Gaussian queries and keys, from nearly uniform to nearly hardmax.

    The mask "sink" is causal, and every query gives the first key the largest weight.
    """
    generator = torch.Generator().manual_seed(tokens)
    query, key = torch.randn(2, heads, tokens, KEY_WIDTH, generator=generator, dtype=torch.float64)
    sharpness = torch.logspace(-1, 1, heads, dtype=torch.float64)[torch.randperm(heads, generator=generator)]
    logits = query @ key.mT * (sharpness[:, None, None] / KEY_WIDTH**0.5)
    if mask == "sink":
        logits[..., 0] += 10
    if mask != "full":
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        logits = logits.masked_fill(~seen, -torch.inf)
    return logits.softmax(-1).to(device)


def contenders(question: str, device: str) -> dict[str, Contender]:
    """Return the contenders by name; each answers (counts,) or (counts, effective rank, stable rank)."""

    def record(sigma: Tensor, delta: float) -> Answer:
        sigma = sigma.double()
        entropy = torch.special.entr(sigma / sigma.sum(-1, keepdim=True)).sum(-1)
        return (sigma >= delta).sum(-1), entropy.exp(), (sigma / sigma[..., :1]).square().sum(-1)

    def ours(m: Tensor, delta: float) -> Answer:
        summary = rm.rank_summary(m, delta)
        return summary.numerical_rank, summary.effective_rank, summary.stable_rank

    def free(m: Tensor, delta: float) -> Answer:
        estimate = estimate_spectrum(m)
        return estimate.count(delta).value, estimate.effective_rank.value, estimate.stable_rank.value

    named: dict[str, Contender] = {
        OURS: ours,
        TRUTH: lambda m, delta: record(svdvals(m), delta),
        "svdvals float32": lambda m, delta: record(svdvals(m.float()), delta),
        FREE: free,
    }
    if device == "cpu":
        named["numpy svd"] = lambda m, delta: record(
            torch.from_numpy(np.linalg.svd(m.numpy(), compute_uv=False)), delta
        )
    if question == "count":
        named = {name: lambda m, delta, run=run: run(m, delta)[:1] for name, run in named.items()}
        del named["svdvals float32"]
        named[OURS] = lambda m, delta: (rm.numerical_rank(m, delta),)
        named[TRUTH] = lambda m, delta: ((svdvals(m) >= delta).sum(-1),)
        named["torch matrix_rank"] = lambda m, delta: (torch.linalg.matrix_rank(m, atol=delta, rtol=0),)
    return named | {LIMIT: lambda m, delta: (m @ m.mT,)}


def compare(question: str, m: Tensor, delta: float, repeats: int) -> dict[str, dict[str, Any]]:
    """Return milliseconds per head, times ours, and differences from the truth, for every contender."""
    named = contenders(question, m.device.type)
    times: dict[str, list[float]] = {name: [] for name in named}
    best, heads = dict.fromkeys(named, 0.0), dict.fromkeys(named, 0)
    answers: dict[str, list[Answer]] = {name: [] for name in named}
    for at, block in enumerate(m.split(max(1, 2 * (1024 // m.shape[-1]) ** 2))):
        part = {name: run for name, run in named.items() if name != FREE or at == 0}  # slow: one block only
        runs = {name: (lambda run=run, block=block: run(block, delta)) for name, run in part.items()}
        for name, seconds in race(runs, repeats, m.device, time.perf_counter).items():
            times[name] += [one / len(block) for one in seconds]
            best[name] += min(seconds)
            heads[name] += len(block)
            answers[name].append(runs[name]())
    found: dict[str, dict[str, Any]] = {}
    for name in named:
        found[name] = {
            "ms_per_head": 1e3 * best[name] / heads[name],
            "times_ours": ratio(times[name], times[OURS]),
            "heads": heads[name],
        }
        if name != LIMIT:
            found[name] |= differences(answers[name], answers[TRUTH])
    return found


def differences(answers: list[Answer], truth: list[Answer]) -> dict[str, float]:
    """Return how many heads are counted differently, and the largest relative errors of the other ranks."""
    pairs = list(zip(answers, truth, strict=False))
    found = {"different_counts": float(sum((got[0] != true[0]).sum() for got, true in pairs))}
    for at, name in enumerate(("effective_error", "stable_error")[: len(answers[0]) - 1], start=1):
        found[name] = float(max(((got[at] - true[at]).abs() / true[at]).max() for got, true in pairs))
    return found


def is_right(result: dict[str, float]) -> bool:
    """Return whether no count differs and the effective rank is within its bound of 1 %."""
    return result["different_counts"] == 0 and result.get("effective_error", 0) < 0.01


def peak(question: str, name: str, delta: float, **job: Any) -> float | None:
    """Return the MiB of one contender."""
    m, run = made_heads(**job), contenders(question, job["device"])[name]
    run(m[:1, :100, :100], delta)  # load libraries
    return peak_mib(lambda: run(m, delta), m.device)


def line(row: dict[str, Any]) -> str:
    """Return a table: one line for each contender."""
    lines = [
        f"\n{row['question']}, {row['mask']}, {row['heads']} heads, T = {row['tokens']}",
        f"  {'':20}{'ms/head':>10}{'× ours':>9}{'MiB':>8}  agreement with float64",
    ]
    for name, result in row["results"].items():
        memory, median = result.get("peak_mib"), result["times_ours"].median
        text = f"  {name:20}{result['ms_per_head']:10.3f}{median:9.2f}"
        text += " " * 8 if memory is None else f"{memory:8.0f}"
        if "different_counts" in result:
            text += f"  {result['different_counts']:.0f} counts differ"
        for kind in ("effective", "stable"):
            if f"{kind}_error" in result:
                text += f", {kind} {result[f'{kind}_error']:.1e}"
        lines.append(text)
    return "\n".join(lines)
