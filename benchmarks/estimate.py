"""Ranks of long contexts without the matrix: accuracy, coverage of the intervals, cost.

    python -m benchmarks estimate --out benchmarks/results/estimate.json
    python -m benchmarks estimate --part cost --tokens 4096 8192
    python -m benchmarks estimate --part coverage --model demo MINILM GEMMA

Claims: at its defaults `estimate_spectrum` (16 probes, 64 steps) is within 2 % of the exact effective and
stable rank at T = 2,048; its 95 % intervals hold the exact number at least at that rate; from T = 4,096 it is
faster than exact ranks. A row of accuracy is one head; a row of coverage is a kind of heads over seeds, with
few products so that chance shows; a row of cost is one causal head, K = 64, in a process of its own. The
heads are random, positional and sharpened, of other mixers, and of trained models (folders or the demo).
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import in_fresh_process, peak_mib, positive
from torch import Tensor
from transformers import AutoTokenizer

import rankwise
from rankwise.cli.load_model import demo_model, demo_text, load_model
from rankwise.measures import rank_summary
from rankwise.measures.estimate import Estimate, estimate_spectrum
from rankwise.operators import DenseMixing, MixingOperator, SoftmaxMixing

REPEATS = 10
DELTAS = (0.3, 0.1, 0.03, 0.01)
MEASURES = ("effective_rank", "stable_rank")
RANKS = (*MEASURES, "sigma_max")
PROBES, STEPS, FEW_STEPS, HEAD_DIM = 16, 64, 16, 64
PARTS = {"accuracy": 2048, "coverage": 512, "cost": 0}
"""Parts, and the length of their heads."""
LONGEST_MATRIX = 8192
Head = tuple[str, MixingOperator]
Row = dict[str, Any]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the parts and the lengths."""
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="default: all")
    parser.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        default=[1024, 2048, 4096, 8192, 16_384, 32_768],
        help="lengths of the cost",
    )
    parser.add_argument("--model", nargs="+", default=["demo"], help="trained models; default: the demo")


def measure(given: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of each part."""
    if given.device != "cpu":
        raise SystemExit("estimate: expected --device cpu, whose seconds it counts")
    torch.set_num_threads(1)
    for part in given.part:
        if part == "cost":
            for tokens in [64] if given.quick else given.tokens:
                for way in ("estimate", "exact"):
                    if way == "estimate" or tokens <= LONGEST_MATRIX:
                        yield {"part": part, **in_fresh_process("estimate", way=way, tokens=tokens)}
            continue
        tokens = 64 if given.quick else PARTS[part]
        generator = torch.Generator().manual_seed(0)
        kinds = {
            "random": random_heads(tokens, generator),
            "positional": positional_heads(tokens, generator),
            "other mixers": other_mixers(tokens, generator),
            **{Path(name).name: trained_heads(name, tokens) for name in given.model},
        }
        for kind, heads in kinds.items():
            if part == "accuracy":
                for name, head in heads:
                    row = {"part": part, "tokens": head.shape[-1], "kind": kind, "head": name}
                    yield row | accuracy(head)
            else:
                yield {"part": part, "tokens": tokens, "kind": kind, **coverage(heads, given.repeats)}


def line(row: Row) -> str:
    """Return the errors of a head, the shares of intervals of a kind, or the cost."""
    if row["part"] == "cost":
        return f"{row['way']} at T = {row['tokens']}: {row['core_seconds']} s, {row['mib']} MiB"
    if row["part"] == "accuracy":
        said = [f"{name} {row[f'{name}_error']:+.1e}" for name in MEASURES]
    else:
        said = [f"{row['heads']} heads", *(f"{name} {share:.1%}" for name, share in row["held"].items())]
    return f"{row['part']}, {row.get('head', row['kind'])}: {', '.join(said)}"


def random_heads(tokens: int, generator: torch.Generator) -> Iterator[Head]:
    """Yield Gaussian queries and keys: nearly uniform to nearly hardmax."""
    for width in (8, 64):
        for sharpness in (0.1, 0.5, 1, 2, 4, 8, 32):
            for causal in (False, True):
                q, k = torch.randn(2, tokens, width, generator=generator)
                name = f"random K={width} sharpness {sharpness:g}{' causal' * causal}"
                yield name, SoftmaxMixing(q * sharpness, k, is_causal=causal)


def positional_heads(tokens: int, generator: torch.Generator) -> Iterator[Head]:
    """Yield patterns of trained heads: windows, sinks, the previous token, the token itself, documents."""
    position = torch.arange(tokens, dtype=torch.float32)
    distance = position[:, None] - position
    sink = torch.zeros(tokens, tokens)
    sink[:, 0] = 10
    biases = {
        "window 4": -((distance / 4) ** 2),
        "window 64": -((distance / 64) ** 2),
        "linear bias 16": -distance.abs() / 16,
        "sink": sink,
        "token before": 10.0 * (distance == 1),
        "itself": 8.0 * (distance == 0),
        "documents": torch.where(position[:, None] // 128 == position // 128, 0, -torch.inf),
    }
    for name, bias in biases.items():
        q, k = torch.randn(2, tokens, HEAD_DIM, generator=generator)
        yield name, SoftmaxMixing(q, k, mask=bias, is_causal=True)
    q, k = torch.randn(2, tokens, 3, generator=generator) * 3
    yield "low-rank scores", SoftmaxMixing(q, k)
    turned, other = (rotary(torch.randn(HEAD_DIM, generator=generator) / 2, tokens) for _ in range(2))
    noise = torch.randn(2, tokens, HEAD_DIM, generator=generator) / 2
    yield "rotary", SoftmaxMixing(2 * turned + noise[0], 2 * other + noise[1], is_causal=True)


def rotary(vector: Tensor, tokens: int) -> Tensor:
    """Return a vector rotated by each position."""
    half = len(vector) // 2
    angle = torch.arange(tokens)[:, None] * 10000 ** (-torch.arange(half) / half)
    x, y = vector[:half], vector[half:]
    return torch.cat([x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()], -1)


def other_mixers(tokens: int, generator: torch.Generator) -> Iterator[Head]:
    """Yield mixing matrices that are not softmax, or its limit."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    yield "decay", DenseMixing(torch.where(distance >= 0, 0.98**distance, 0.0))
    winners = torch.randint(0, tokens, (tokens,), generator=generator)
    yield "hardmax", DenseMixing(torch.nn.functional.one_hot(winners, tokens).float())
    features = torch.randn(2, tokens, 32, generator=generator).exp()
    scores = (features[0] @ features[1].mT).tril()
    yield "linear attention", DenseMixing(scores / scores.sum(-1, keepdim=True))


def trained_heads(name: str, tokens: int) -> Iterator[Head]:
    """Yield the heads of a trained model, on the text of the demo."""
    folder = str(demo_model()) if name == "demo" else name
    model: Any = load_model(folder).model.base_model  # computes no logits
    ids = AutoTokenizer.from_pretrained(folder)(demo_text().read_text("utf-8"))["input_ids"][:tokens]
    with rankwise.capture(model) as trace, torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    for site in trace.mixers:
        for head in range(site.operator.shape[1]):
            yield f"{Path(name).name} layer {site.layer} head {head}", site.operator[0, head]


def holds(estimate: Estimate, exact: float) -> bool:
    """Return whether the interval holds the exact number, which is rounded."""
    slack = 1e-9 * abs(exact)
    return bool(estimate.low - slack <= exact <= estimate.high + slack)


def counted(estimate: Estimate, sigma: Tensor, delta: float) -> Row:
    """Return one count and the exact one."""
    truth, value = int((sigma >= delta).sum()), float(estimate.value)
    return {
        "delta": delta,
        "truth": truth,
        "value": None if math.isnan(value) else round(value, 1),
        "interval": [float(estimate.low), float(estimate.high)],
        "held": holds(estimate, truth),
    }


def accuracy(head: MixingOperator) -> Row:
    """Estimate a head and decompose it."""
    begun = time.process_time()
    estimate = estimate_spectrum(head, PROBES, STEPS)
    row: Row = {"core_seconds": round(time.process_time() - begun, 2)}
    exact = rank_summary(head)
    for name in MEASURES:
        truth, found = float(getattr(exact, name)), getattr(estimate, name)
        row |= {
            name: round(truth, 3),
            f"{name}_error": float(found.value) / truth - 1,
            f"{name}_stderr": float(found.stderr) / truth,
            f"{name}_held": holds(found, truth),
        }
    row["counts"] = [counted(estimate.count(delta), exact.singular_values, delta) for delta in DELTAS]
    return row | {"right": all(abs(row[f"{name}_error"]) <= 0.02 for name in MEASURES)}


def coverage(heads: Iterator[Head], seeds: int) -> Row:
    """Return how often intervals hold the exact number, over heads and seeds, and their median half-width."""
    held: dict[str, list[bool]] = {name: [] for name in (*RANKS, "count", "relative_count")}
    widths, known, number = [], [], 0
    for _, head in heads:
        number += 1
        exact = rank_summary(head, exact=True)
        sigma, relative = exact.singular_values, exact.singular_values / exact.sigma_max
        for seed in range(seeds):
            run = estimate_spectrum(head, PROBES, FEW_STEPS, seed)
            for name in RANKS:
                held[name].append(holds(getattr(run, name), float(getattr(exact, name))))
            for delta in DELTAS:
                counts = counted(run.count(delta), sigma, delta)
                held["count"].append(counts["held"])
                held["relative_count"].append(counted(run.relative_count(delta), relative, delta)["held"])
                known.append(counts["value"] is not None)
            rank = run.effective_rank
            widths.append(float((rank.high - rank.low) / 2 / rank.value))
    return {
        "steps": FEW_STEPS,
        "seeds": seeds,
        "heads": number,
        "held": {name: sum(which) / len(which) for name, which in held.items()},
        "effective_rank_half_width": statistics.median(widths),
        "counts_with_value": sum(known) / len(known),
    }


def peak(way: str, tokens: int) -> Row:
    """Return time, MiB and ranks of one causal head, in a process that has done nothing before."""
    torch.set_num_threads(1)
    q, k = torch.randn(2, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    torch.linalg.svd(torch.randn(64, 64, dtype=torch.float64) @ torch.randn(64, 64, dtype=torch.float64))
    head = SoftmaxMixing(q, k, is_causal=True)
    row: Row = {"way": way, "tokens": tokens}

    def run() -> None:
        if way == "exact":
            row["effective_rank"] = float(rank_summary(head).effective_rank)
        else:
            estimate = estimate_spectrum(head, PROBES, STEPS)
            row["products"] = int(estimate.products)
            row["effective_rank"] = [round(float(x), 2) for x in estimate.effective_rank]
            row["stable_rank"] = [round(float(x), 4) for x in estimate.stable_rank]
            count = estimate.count(0.01)
            row["count_above_0.01"] = [None if x.isnan() else round(float(x), 1) for x in count]

    begun = time.process_time()
    row["mib"] = peak_mib(run, torch.device("cpu"))
    return row | {"core_seconds": round(time.process_time() - begun, 2)}
