"""What an audit of a large model costs on this device, in three minutes.

    python -m benchmarks device --device cuda
    python -m benchmarks device --device mps --out mac.json

Two layers of the shape of Llama 3 8B with random weights: 64 heads of width 128. Audits with exact and with
estimated ranks, and the share of each stage; ranks on the device against singular values in float64 and in
float32; TSSA against softmax attention and eager formulas. On ROCm the device is `cuda`. On MPS, which has
no float64, decompositions run on the CPU. Runs that would not end in time are left out, and say so.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from benchmarks import tssa
from benchmarks.harness import finish, peak_mib, positive, race, ratio
from torch import Tensor
from torch.linalg import svdvals
from transformers import LlamaConfig, LlamaForCausalLM

import rankwise as rw
from rankwise import measures
from rankwise._internals.linalg import float64_device
from rankwise.auditing import run as auditing_run

REPEATS = 1
OURS, TRUTH, LIMIT = "rankwise", "svdvals float64", "limit: M @ M.mT"
KEY_WIDTH = 128
Answer = tuple[Tensor, Tensor]
LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
QUICK = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
STAGES = {
    "decomposition": [(measures, "rank_summary"), (measures, "estimate_spectrum")],
    "rows": [(measures, "compute_measures")],
    "states": [(auditing_run, "measure_states")],
}
"""Functions whose time is one stage of an audit. The forward pass is timed by itself."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add lengths and dtype."""
    parser.add_argument("--tokens", type=positive, nargs="+", help="lengths (default: 2,048 and 4,096)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--heads", type=positive, default=2, help="heads whose ranks are compared")
    parser.add_argument("--only", choices=("audits", "ranks", "TSSA"), help="one part (default: all)")
    parser.add_argument("--seconds", type=float, default=150.0, help="time after which nothing begins")


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield rows of audits by length and method, of ranks, and of TSSA, as long as there is time."""
    device, dtype, start = torch.device(given.device), getattr(torch, given.dtype), time.perf_counter()
    shape, lengths = (QUICK, (128,)) if given.quick else (LLAMA, (2048, 4096))
    torch.manual_seed(0)
    config = LlamaConfig(**shape, num_hidden_layers=2, vocab_size=1000, max_position_embeddings=8192)
    model = LlamaForCausalLM(config).to(device, dtype).eval()
    with torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.int64, device=device))  # load libraries
    before: dict[str, tuple[int, float]] = {}

    def timed(part: str, length: int, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        row: dict[str, Any] = {"part": part, "tokens": length, "dtype": given.dtype}
        earlier, seconds = before.get(part, (length, 0.0))
        seconds *= (length / earlier) ** 3
        if time.perf_counter() - start + seconds > given.seconds:
            return row | {"left_out": f"would take {seconds:.0f} s of the {given.seconds:g} s in all"}
        begun = time.perf_counter()
        row |= run()
        before[part] = length, time.perf_counter() - begun
        return row

    parts: dict[str, dict[str, Callable[[int], dict[str, Any]]]] = {
        "audits": {way: lambda length, way=way: audit(model, length, way) for way in ("exact", "estimate")},
        "ranks": {
            f"ranks, {mask}": lambda length, mask=mask: ranks(length, mask, given)
            for mask in ("causal", "full")
        },
        "TSSA": {"TSSA": lambda length: token_statistics(length, given, dtype)},
    }
    for length in sorted(given.tokens or lengths):
        for part, run in chain(*(runs.items() for name, runs in parts.items() if given.only in (None, name))):
            yield timed(part, length, partial(run, length))


def audit(model: Any, length: int, method: Any) -> dict[str, Any]:
    """Return seconds of an audit of one sequence, per head and by stage, and the MiB that it takes."""
    device = model.device
    ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(1)).to(device)
    stages = dict.fromkeys(("forward", *STAGES), 0.0)

    def clocked(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            finish(device)
            begun = time.perf_counter()
            result = function(*args, **kwargs)
            finish(device)
            stages[stage] += time.perf_counter() - begun
            return result

        return call

    with torch.no_grad():
        clocked("forward", model)(ids)
    found: dict[str, Any] = {}

    def work() -> None:
        begun = time.perf_counter()
        found["audit"] = rw.audit(model, [{"input_ids": ids}], rank_method=method)
        found["seconds"] = time.perf_counter() - begun

    with ExitStack() as stack:
        for stage, functions in STAGES.items():
            for module, name in functions:
                stack.enter_context(patch.object(module, name, clocked(stage, getattr(module, name))))
        memory = peak_mib(work, device)
    heads, seconds = found.pop("audit").heads, found["seconds"]
    stages["rest"] = seconds - sum(stages.values())
    return {
        "seconds": seconds,
        "ms_per_head": 1e3 * seconds / len(heads),
        "shares": {stage: part / seconds for stage, part in stages.items()},
        "peak_mib": memory,
        "right": len(heads) == 2 * model.config.num_attention_heads
        and all(1 <= head.effective_rank <= length for head in heads),
    }


def made_heads(tokens: int, mask: str, heads: int, device: torch.device) -> Tensor:
    """Return softmax heads of Gaussian queries and keys, from nearly uniform to nearly hardmax."""
    generator = torch.Generator().manual_seed(tokens)
    query, key = torch.randn(2, heads, tokens, KEY_WIDTH, generator=generator, dtype=torch.float64)
    sharpness = torch.logspace(-1, 1, heads, dtype=torch.float64)[torch.randperm(heads, generator=generator)]
    logits = query @ key.mT * (sharpness[:, None, None] / KEY_WIDTH**0.5)
    if mask == "causal":
        logits = logits.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), -torch.inf)
    return logits.softmax(-1).to(float64_device(device))


def ranks(length: int, mask: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds per head and times ours of each contender, and differences from float64."""
    device = torch.device(given.device)
    heads = made_heads(length, mask, given.heads, device)

    def ours() -> Answer:
        summary = measures.rank_summary(heads)
        return summary.numerical_rank, summary.effective_rank

    def by_svd(matrices: Tensor) -> Answer:
        sigma = svdvals(matrices).double().to(heads)
        entropy = torch.special.entr(sigma / sigma.sum(-1, keepdim=True)).sum(-1)
        return (sigma >= measures.DELTA).sum(-1), entropy.exp()

    runs: dict[str, Callable[[], Any]] = {
        OURS: ours,
        TRUTH: lambda: by_svd(heads),
        "svdvals float32": lambda: by_svd(heads.to(device, torch.float32)),
        LIMIT: lambda: heads @ heads.mT,
    }
    seconds = race(runs, given.repeats, device, time.perf_counter)
    counts, effective = runs[TRUTH]()
    results: dict[str, dict[str, Any]] = {
        name: {"ms_per_head": 1e3 * min(times) / len(heads), "times_ours": ratio(times, seconds[OURS])}
        for name, times in seconds.items()
    }
    for name in (OURS, "svdvals float32"):
        count, rank = runs[name]()
        results[name]["different_counts"] = int((count != counts).sum())
        results[name]["effective_error"] = float(((rank - effective).abs() / effective).max())
    right = results[OURS]["different_counts"] == 0 and results[OURS]["effective_error"] < 0.01
    return {"mask": mask, "heads": len(heads), "results": results, "right": right}


def token_statistics(length: int, given: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Return times of the forward pass of causal TSSA and of others, divided by the time of its kernel."""
    x = tssa.inputs(length, True, given.device, dtype)
    runs = {name: tssa.contenders(x)[name] for name in (tssa.OURS, tssa.EAGER, tssa.SDPA)}
    seconds = race(runs, max(3, given.repeats), x.w.device, time.perf_counter)
    return {
        "microseconds": {name: 1e6 * min(times) for name, times in seconds.items()},
        "times_ours": {name: ratio(times, seconds[tssa.OURS]) for name, times in seconds.items()},
    }


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    text = f"{row['part']:10}{row['tokens']:6} tokens  "
    if "left_out" in row:
        return text + f"left out: {row['left_out']}"
    if "shares" in row:
        shares = ", ".join(f"{stage} {share:.0%}" for stage, share in row["shares"].items())
        memory = "" if row["peak_mib"] is None else f", {row['peak_mib']:,.0f} MiB"
        return text + f"{row['seconds']:.2f} s, {row['ms_per_head']:.1f} ms per head{memory}: {shares}"
    if "results" in row:
        return text + ", ".join(
            f"{name} {result['ms_per_head']:.1f} ms"
            + (f" ({result['different_counts']:.0f} counts differ)" if "different_counts" in result else "")
            for name, result in row["results"].items()
        )
    return text + ", ".join(f"{name} {micro:,.0f} µs" for name, micro in row["microseconds"].items())
