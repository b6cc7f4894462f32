"""State-space operators: how the time of M @ V grows with the length, and the memory of a Mamba layer.

    python -m benchmarks state_space --out benchmarks/results/state_space.json

`SemiseparableMixing @ V` (Mamba-2: 24 heads of 64 channels, state 128, one group) and `SelectiveMixing @ V`
(Mamba: 1,536 channels, state 16), the layers of the 130M models, at T = 512 … 8,192: the exponent of T in
time, by least squares on logarithms of the shortest of several runs. Linear is 1. On a CPU these are the
seconds of one core. Then the MiB that the same two need, and one sampled channel's dense matrix, each in a
fresh process.
"""

import argparse
import math
from collections.abc import Iterator
from typing import Any

import torch
from benchmarks.harness import in_fresh_process, peak_mib, positive, race
from torch import Tensor

from rankwise.operators import MixingOperator, SelectiveMixing, SemiseparableMixing, sample_channels

REPEATS = 3
LAYERS = ("Mamba-2", "Mamba")
MEMORY = (*LAYERS, "Mamba, dense of 16 channels")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the lengths."""
    parser.add_argument("--tokens", type=positive, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--memory-tokens", type=positive, default=2048, help="length of the memory")


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row with times for each layer, and one with memory for each piece of work."""
    if given.quick:
        given.tokens, given.memory_tokens = [64, 128, 256], 64
    torch.set_num_threads(1)
    for layer in LAYERS:
        runs = {}
        for tokens in given.tokens:
            operator, values = layer_of(layer, tokens, given.device)
            runs[str(tokens)] = lambda operator=operator, values=values: operator @ values
        taken = race(runs, given.repeats, torch.device(given.device))
        seconds = [min(taken[str(tokens)]) for tokens in given.tokens]
        row = {"layer": layer, "tokens": given.tokens, "seconds": seconds}
        yield row | {"exponent": exponent(given.tokens, seconds)}
    for what in MEMORY:
        mib = in_fresh_process("state_space", what=what, tokens=given.memory_tokens, device=given.device)
        yield {"layer": what, "tokens": given.memory_tokens, "mib": mib}


def line(row: dict[str, Any]) -> str:
    """Return the exponent of T, or the memory."""
    if "exponent" in row:
        return f"{row['layer']} @ V: exponent of T {row['exponent']:.3f}; seconds {row['seconds']}"
    return f"{row['layer']}, T = {row['tokens']}: {row['mib']} MiB"


def layer_of(name: str, tokens: int, device: str) -> tuple[MixingOperator, Tensor]:
    """Return a layer of the shape of Mamba-2 130M or Mamba 130M, and values."""
    torch.manual_seed(0)
    heads, channels, state = (24, 64, 128) if name == "Mamba-2" else (1536, 1, 16)
    c, b = torch.randn(1, 1, tokens, state), torch.randn(1, 1, tokens, state)
    step = torch.nn.functional.softplus(torch.randn(1, heads, tokens) - 4)
    operator: MixingOperator
    if name == "Mamba-2":
        operator = SemiseparableMixing(c, b, -torch.arange(1, heads + 1.0)[:, None] * step, step)
    else:
        operator = SelectiveMixing(c, b, -torch.arange(1, state + 1.0).expand(heads, -1), step)
    return operator.to(device), torch.randn(1, heads, tokens, channels).to(device)


def exponent(lengths: list[int], seconds: list[float]) -> float:
    """Return the slope of log seconds over log length."""
    x, y = torch.tensor([lengths, seconds], dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum()) if len(lengths) > 1 else math.nan


def peak(what: str, tokens: int, device: str) -> float | None:
    """Return the MiB of one piece of work."""
    name, _, part = what.partition(", ")
    small, few = layer_of(name, 64, device)
    small @ few  # what the first call sets up
    operator, values = layer_of(name, tokens, device)
    if part:
        picked = operator[:, sample_channels(operator, 16)]
        return peak_mib(picked.dense, torch.device(device))
    return peak_mib(lambda: operator @ values, torch.device(device))
