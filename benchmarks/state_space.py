"""State-space operators: time of M @ V by length, and the memory of a Mamba layer of the 130M model.

    python -m benchmarks.state_space

Two questions, each answered by a fit or a mark of the kernel:

- `SemiseparableMixing @ V` (Mamba-2: 24 heads of 64 channels, state 128, one group) and `SelectiveMixing @ V`
  (Mamba: 1,536 channels, state 16) at T = 512 … 8,192: the exponent of T in time, by least squares on
  logarithms, the shortest of several runs each. Linear is 1. Seconds are those of one core, as the system
  counts them for the process, so that other work on the machine has less part in them.
- the same two, and one sampled channel's dense matrix, at T = 2,048: MiB beyond what is there before, each in
  a process of its own.

Writes benchmarks/results/state_space.json; about a minute on one core.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.harness import machine, peak_mib
from torch import Tensor

from rankwise._internals.files import write_file
from rankwise.operators import MixingOperator, SelectiveMixing, SemiseparableMixing, sample_channels

LENGTHS = (512, 1024, 2048, 4096, 8192)
MEMORY_AT = 2048
RESULTS = Path(__file__).with_name("results") / "state_space.json"


def mamba_2(tokens: int) -> tuple[MixingOperator, Tensor]:
    """One layer of the shape of Mamba-2 130M, and values."""
    torch.manual_seed(0)
    heads, channels, state = 24, 64, 128
    c, b = torch.randn(1, 1, tokens, state), torch.randn(1, 1, tokens, state)
    step = torch.nn.functional.softplus(torch.randn(1, heads, tokens) - 4)
    rate = -torch.arange(1, heads + 1.0)
    operator = SemiseparableMixing(c, b, rate[:, None] * step, step)
    return operator, torch.randn(1, heads, tokens, channels)


def mamba(tokens: int) -> tuple[MixingOperator, Tensor]:
    """One layer of the shape of Mamba 130M, and values."""
    torch.manual_seed(0)
    channels, state = 1536, 16
    c, b = torch.randn(1, 1, tokens, state), torch.randn(1, 1, tokens, state)
    step = torch.nn.functional.softplus(torch.randn(1, channels, tokens) - 4)
    rate = -torch.arange(1, state + 1.0).expand(channels, -1)
    return SelectiveMixing(c, b, rate, step), torch.randn(1, channels, tokens, 1)


LAYERS: dict[str, Callable[[int], tuple[MixingOperator, Tensor]]] = {"Mamba-2": mamba_2, "Mamba": mamba}


def exponent(lengths: tuple[int, ...], seconds: list[float]) -> float:
    """Slope of log seconds over log length."""
    x = torch.tensor([math.log(length) for length in lengths], dtype=torch.float64)
    y = torch.tensor([math.log(second) for second in seconds], dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())


def core_seconds(operator: MixingOperator, values: Tensor) -> float:
    """Seconds of one core that M @ V takes."""
    start = time.process_time()
    operator @ values
    return time.process_time() - start


def times(layer: str, lengths: tuple[int, ...], repeats: int) -> dict[str, object]:
    """Shortest time of M @ V at each length, and the exponent."""
    seconds = []
    for tokens in lengths:
        operator, values = LAYERS[layer](tokens)
        operator @ values  # a first time, for what is set up once
        seconds.append(min(core_seconds(operator, values) for _ in range(repeats)))
        print(f"{layer} @ V, T = {tokens}: {seconds[-1]:.4f} s", flush=True)
    return {"lengths": lengths, "seconds": seconds, "exponent": exponent(lengths, seconds)}


def memory(what: str, tokens: int) -> float | None:
    """MiB of one piece of work, in this process."""
    layer, _, part = what.partition(", ")
    operator, values = LAYERS[layer](tokens)
    small, few = LAYERS[layer](64)
    small @ few  # what the first call of all sets up
    if part == "dense of 16 channels":
        picked = operator[:, sample_channels(operator, 16)]
        return peak_mib(lambda: picked.dense(), torch.device("cpu"))
    return peak_mib(lambda: operator @ values, torch.device("cpu"))


MEMORY = ("Mamba-2", "Mamba", "Mamba, dense of 16 channels")


def apart(what: str, tokens: int) -> float | None:
    """The same in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.state_space", "--memory", what, "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=MEMORY_AT, help="length at which memory is measured")
    parser.add_argument("--memory", choices=MEMORY, help="print the MiB of one piece of work, and stop")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if given.memory:
        print(json.dumps(memory(given.memory, given.tokens)))
        return 0
    torch.set_num_threads(1)
    lengths = tuple(given.lengths)
    found = {
        "command": "python -m benchmarks.state_space",
        "machine": machine(torch.device("cpu")),
        "times": {layer: times(layer, lengths, given.repeats) for layer in LAYERS},
        "memory": {"tokens": given.tokens, "mib": {what: apart(what, given.tokens) for what in MEMORY}},
    }
    for layer, measured in found["times"].items():  # type: ignore[attr-defined]
        print(f"{layer} @ V: exponent of T {measured['exponent']:.3f}")
    for what, mib in found["memory"]["mib"].items():  # type: ignore[index]
        print(f"{what}, T = {given.tokens}: {'unknown' if mib is None else f'{mib:.0f} MiB'}")
    write_file(given.out, json.dumps(found, indent=1) + "\n", "results")
    print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
