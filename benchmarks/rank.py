"""Ranks of attention heads: Rankwise against torch, numpy and the matrix-free estimate, in one run.

    python benchmarks/rank.py --quick
    python benchmarks/rank.py --out rank.json
    python benchmarks/rank.py --device cuda

Two questions: the numerical rank alone ("count"), and the whole record of a head (numerical, effective and
stable rank, σ_1). The heads go in small blocks; every contender has each block in turn, so that whatever else
the machine does hits all of them. Answers are compared with float64 singular values in the same run. The
limit is the time of the product M Mᵀ alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from harness import machine, peak_mib, timed
from torch import Tensor

import rankwise.measures as rm

try:
    from rankwise.measures.estimate import estimate_spectrum
except ImportError:
    estimate_spectrum = None

GRID = [(144, 64), (144, 128), (144, 256), (144, 512), (24, 1024)]
QUICK = [(64, 128), (16, 256), (8, 512)]
OURS, TRUTH, LIMIT = "rankwise", "svdvals float64", "limit: M @ M.mT"
FREE = "matrix-free"
MEMORY_HEADS = 16
KEY_WIDTH = 64

Answer = tuple[Tensor, ...]
Contender = Callable[[Tensor, float], Answer | None]


def heads(count: int, tokens: int, mask: str, device: str) -> Tensor:
    """Softmax heads from Gaussian queries and keys, from nearly uniform to nearly hardmax.

    A "sink" mask is a causal one under which every query likes the first key best.
    """
    generator = torch.Generator().manual_seed(tokens)
    query, key = torch.randn(2, count, tokens, KEY_WIDTH, generator=generator, dtype=torch.float64)
    sharpness = torch.logspace(-1, 1, count, dtype=torch.float64)[torch.randperm(count, generator=generator)]
    logits = query @ key.mT * (sharpness[:, None, None] / KEY_WIDTH**0.5)
    if mask == "sink":
        logits[..., 0] += 10
    if mask != "full":
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        logits = logits.masked_fill(~seen, -torch.inf)
    return logits.softmax(-1).to(device)


def record(sigma: Tensor, delta: float) -> Answer:
    """Counts, effective and stable ranks from singular values."""
    sigma = sigma.double()
    entropy = torch.special.entr(sigma / sigma.sum(-1, keepdim=True)).sum(-1)
    return (sigma >= delta).sum(-1), entropy.exp(), (sigma / sigma[..., :1]).square().sum(-1)


def ours(m: Tensor, delta: float) -> Answer:
    summary = rm.rank_summary(m, delta)
    return summary.numerical_rank, summary.effective_rank, summary.stable_rank


def matrix_free(m: Tensor, delta: float, whole: bool) -> Answer:
    estimate = estimate_spectrum(m)
    counts = estimate.count(delta).value
    return (counts, estimate.effective_rank.value, estimate.stable_rank.value) if whole else (counts,)


def product(m: Tensor, delta: float) -> None:
    m @ m.mT


def contenders(question: str, device: str) -> dict[str, Contender]:
    """Who answers a question; the first is ours, the second the truth."""
    svdvals = torch.linalg.svdvals
    whole = question == "record"
    if whole:
        named: dict[str, Contender] = {
            OURS: ours,
            TRUTH: lambda m, delta: record(svdvals(m), delta),
            "svdvals float32": lambda m, delta: record(svdvals(m.float()), delta),
        }
    else:
        named = {
            OURS: lambda m, delta: (rm.numerical_rank(m, delta),),
            TRUTH: lambda m, delta: ((svdvals(m) >= delta).sum(-1),),
            "torch matrix_rank": lambda m, delta: (torch.linalg.matrix_rank(m, atol=delta, rtol=0),),
        }
    if device == "cpu":
        named["numpy svd"] = lambda m, delta: record(
            torch.from_numpy(np.linalg.svd(m.numpy(), compute_uv=False)), delta
        )[: 3 if whole else 1]
    if estimate_spectrum is not None:
        named[FREE] = lambda m, delta: matrix_free(m, delta, whole)
    return named | {LIMIT: product}


def race(question: str, m: Tensor, delta: float, repeats: int) -> dict[str, dict[str, float]]:
    """Every contender on every block: ms a head, times ours, and how far its answers are from the truth."""
    named = contenders(question, m.device.type)
    blocks = m.split(max(1, 2 * (1024 // m.shape[-1]) ** 2))
    for contender in named.values():
        contender(blocks[0][:1], delta)  # libraries load on the first call
    seconds: dict[str, list[list[float]]] = {name: [] for name in named}
    answers: dict[str, list[Answer | None]] = {name: [] for name in named}
    for at, block in enumerate(blocks):
        taking_part = [name for name in named if name != FREE or at == 0]  # slow at these sizes: one block
        for name in taking_part:
            seconds[name].append([])
        for turn in range(repeats):
            order = taking_part[turn % len(taking_part) :] + taking_part[: turn % len(taking_part)]
            for name in order:
                took, answer = timed(lambda run=named[name], m=block: run(m, delta), m.device)
                seconds[name][at].append(took / len(block))
                if turn == 0:
                    answers[name].append(answer)
    return {name: score(name, seconds, answers, blocks) for name in named}


def score(
    name: str,
    seconds: dict[str, list[list[float]]],
    answers: dict[str, list[Answer | None]],
    blocks: tuple[Tensor, ...],
) -> dict[str, float]:
    mine, theirs = seconds[OURS], seconds[name]
    sizes = [len(block) for block in blocks[: len(theirs)]]
    best = [sum(min(s) * n for s, n in zip(times, sizes, strict=False)) for times in (theirs, mine)]
    pairs = [t / o for ts, os_ in zip(theirs, mine, strict=False) for t, o in zip(ts, os_, strict=True)]
    out = {
        "ms_per_head": 1e3 * best[0] / sum(sizes),
        "ratio_of_best": best[0] / best[1],
        "ratio_median": statistics.median(pairs),
        "heads": sum(sizes),
    }
    if answers[name][0] is not None:
        out |= agreement([a for a in answers[name] if a], [a for a in answers[TRUTH] if a])
    return out


def agreement(got: list[Answer], wanted: list[Answer]) -> dict[str, float]:
    """Heads counted differently; worst relative errors of the effective and the stable rank."""
    pairs = list(zip(got, wanted, strict=False))
    out: dict[str, float] = {"different_counts": float(sum((g[0] != w[0]).sum() for g, w in pairs))}
    for at, name in enumerate(("effective_error", "stable_error")[: len(got[0]) - 1], start=1):
        out[name] = float(max(((g[at] - w[at]).abs() / w[at]).max() for g, w in pairs))
    return out


def peak_in_fresh_process(
    question: str, name: str, row: tuple[int, int, str], args: argparse.Namespace
) -> float | None:
    child = json.dumps([question, name, min(row[0], MEMORY_HEADS), row[1], row[2]])
    command = [sys.executable, __file__, "--peak", child, "--device", args.device, "--delta", str(args.delta)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def show(row: dict[str, object]) -> None:
    print(f"\n{row['question']}, {row['mask']}, {row['heads']} heads, T = {row['tokens']}")
    print(f"  {'':20}{'ms/head':>10}{'× ours':>9}{'median':>9}{'MiB':>8}  agreement with float64")
    for name, result in row["results"].items():
        memory = result.get("peak_mib")
        numbers = f"{result['ms_per_head']:10.3f}{result['ratio_of_best']:9.2f}{result['ratio_median']:9.2f}"
        numbers += " " * 8 if memory is None else f"{memory:8.0f}"
        print(f"  {name:20}{numbers}  {said(result)}", flush=True)


def said(result: dict[str, float]) -> str:
    if "different_counts" not in result:
        return ""
    parts = [f"{result['different_counts']:.0f} counts differ"]
    for name in ("effective", "stable"):
        if f"{name}_error" in result:
            parts.append(f"{name} {result[f'{name}_error']:.1e}")
    return ", ".join(parts)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--delta", type=float, default=rm.DELTA)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--grid", help="HEADSxTOKENS, comma-separated, such as 144x512,24x1024")
    parser.add_argument("--masks", default="causal,full,sink", help="of causal, full, sink")
    parser.add_argument("--questions", default="count,record")
    parser.add_argument("--quick", action="store_true", help="a minute: a small grid, no memory")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.peak:
        question, name, count, tokens, mask = json.loads(args.peak)
        m, run = heads(count, tokens, mask, args.device), contenders(question, args.device)[name]
        run(m[:1, :100, :100], args.delta)
        print(json.dumps(peak_mib(lambda: run(m, args.delta), m.device)))
        return
    grid = QUICK if args.quick else GRID
    if args.grid:
        grid = [tuple(int(n) for n in pair.split("x")) for pair in args.grid.split(",")]
    report = {
        "machine": machine(torch.device(args.device)),
        "delta": args.delta,
        "repeats": args.repeats,
        "rows": [],
    }
    print(json.dumps(report["machine"]))
    for question in args.questions.split(","):
        for count, tokens in grid:
            for mask in args.masks.split(","):
                m = heads(count, tokens, mask, args.device)
                results = race(question, m, args.delta, args.repeats)
                if not args.quick:
                    for name in results:
                        results[name]["peak_mib"] = peak_in_fresh_process(
                            question, name, (count, tokens, mask), args
                        )
                row = {
                    "question": question,
                    "mask": mask,
                    "heads": count,
                    "tokens": tokens,
                    "results": results,
                }
                report["rows"].append(row)
                show(row)
                if args.out:
                    args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
