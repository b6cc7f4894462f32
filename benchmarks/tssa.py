"""TSSA against eager formulas, softmax attention, flash-linear-attention and a copy, in one run.

    python -m benchmarks tssa --quick
    python -m benchmarks tssa --tokens 8192 --repeats 15 --out tssa.json
    python -m benchmarks tssa --device cuda --dtype bfloat16 --out h200.json

A row for each operation, direction and length, and for decoding far into a text. The limit is a copy of w.
Answers are compared with float64. The C library keeps freed memory meanwhile, for all contenders alike. All
lengths take some 20 minutes on two cores.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from benchmarks.harness import in_fresh_process, peak_mib, positive, race, ratio
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

from rankwise.ops import tssa
from rankwise.ops.reference import ENERGY_EPS, MASS_EPS

REPEATS = 9
TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
QUICK = (256, 1024)
OURS, REFERENCE, EAGER, SDPA, COPY, CLONE = "rankwise", "reference", "eager", "sdpa", "copy", "clone"
FLA = {"fla chunk": "chunk_linear_attn", "fla fused chunk": "fused_chunk_linear_attn"}
"""Kernels of flash-linear-attention, by their names here."""
BACKWARD_COPIES = 2.5
"""Copies of w that forward and backward require: w is read twice, the gradient of the output once; the output
and the gradient of w are written."""
PATIENCE = 20.0
"""Softmax attention is left out once its next call, by T², would take more seconds."""
BUDGET = 60.0
"""Seconds for one contender in all its rounds."""

Row = dict[str, Any]


class Inputs(NamedTuple):
    """Tokens for TSSA, and queries, keys and values of the same shape for the others."""

    w: Tensor
    temperature: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool


def options(parser: argparse.ArgumentParser) -> None:
    """Add lengths and dtype."""
    parser.add_argument("--tokens", type=positive, nargs="+", help="lengths (default: 256 to 65,536)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32")


def measure(given: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each operation, direction and length, then one for each position of decoding."""
    dtype, device = getattr(torch, given.dtype), torch.device(given.device)
    lengths = sorted(set(given.tokens or (QUICK if given.quick else TOKENS)))
    repeats = min(given.repeats, 3) if given.quick else given.repeats
    for causal in (False, True):
        for backward in (False, True):
            rows = []
            slow = 0.0  # seconds of softmax attention at the current length
            for length, following in pairwise([*lengths, 0]):
                x = inputs(length, causal, given.device, dtype)
                runs = directed(x, contenders(x), backward)
                if slow > PATIENCE:
                    del runs[SDPA]
                seconds = race(runs, repeats, device, time.perf_counter, BUDGET)
                if SDPA in seconds:
                    slow = min(seconds[SDPA]) * (following / length) ** 2
                rows.append(row_of(x, seconds, backward))
                if not given.quick:
                    job = {"tokens": length, "causal": causal, "backward": backward}
                    job |= {"device": given.device, "dtype": given.dtype}
                    peaks = {name: in_fresh_process("tssa", name=name, **job) for name in (OURS, EAGER)}
                    rows[-1]["peak_mib"] = peaks
                rows[-1]["crossover"] = crossover(rows)
                yield rows[-1]
    for position in (64, 1024) if given.quick else (1024, 65_536):
        yield decoding(position, given.device, dtype, repeats)


def inputs(
    tokens: int, causal: bool, device: str, dtype: torch.dtype, heads: int = 12, width: int = 64
) -> Inputs:
    """Return Gaussian numbers."""
    g = torch.Generator().manual_seed(tokens)
    w, query, key, value = (
        torch.randn(1, tokens, heads, width, generator=g).to(device, dtype) for _ in range(4)
    )
    return Inputs(w, torch.ones(heads, device=device), query, key, value, causal)


def contenders(x: Inputs) -> dict[str, Callable[[], Tensor]]:
    """Return forward passes by name. Kernels of flash-linear-attention are causal and require a GPU."""
    room = torch.empty_like(x.w)

    def attend() -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in (x.query, x.key, x.value))
        return scaled_dot_product_attention(query, key, value, is_causal=x.causal).transpose(1, 2)

    named: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: tssa(x.w, x.temperature, x.causal).output,
        REFERENCE: lambda: tssa(x.w, x.temperature, x.causal, impl="reference").output,
        EAGER: lambda: (eager_causal if x.causal else eager_bidirectional)(x.w, x.temperature),
        SDPA: attend,
        COPY: lambda: room.copy_(x.w.detach()),
        CLONE: lambda: x.w.detach().clone(),
    }
    if x.causal and x.w.device.type == "cuda":
        try:
            kernels = import_module("fla.ops.linear_attn")
        except ImportError as error:
            print(f"flash-linear-attention is left out: {error}")
        else:
            for name, function in FLA.items():
                kernel = partial(getattr(kernels, function), x.query, x.key, x.value, normalize=False)
                named[name] = lambda kernel=kernel: kernel()[0]
    return named


def eager_bidirectional(w: Tensor, temperature: Tensor) -> Tensor:
    """Compute what a released module computes, operation by operation, in its layout (B, H, T, K)."""
    w = w.transpose(1, 2)
    share = normalize(w, dim=-2) ** 2
    membership = (share.sum(-1) * temperature[:, None]).softmax(1)
    weight = membership / (membership.sum(-1, keepdim=True) + MASS_EPS)
    moment = weight[:, :, None] @ w**2
    return -(w * membership[..., None] * (1 / (1 + moment))).transpose(1, 2)


def eager_causal(w: Tensor, temperature: Tensor) -> Tensor:
    """Compute the same for the causal operation, without a bias."""
    w = w.transpose(1, 2)
    energy = w**2
    share = energy / energy.cumsum(-2).clamp(min=ENERGY_EPS)
    membership = (share.sum(-1) * temperature[:, None]).softmax(1)
    mass = membership.cumsum(-1)[..., None] + MASS_EPS
    moment = (energy * membership[..., None]).cumsum(-2) / mass
    return -(w * membership[..., None] * (1 / (1 + moment))).transpose(1, 2)


def directed(
    x: Inputs, runs: dict[str, Callable[[], Tensor]], backward: bool
) -> dict[str, Callable[[], object]]:
    """Return the runs, or forward and backward passes of them, and the copies as they are."""
    if not backward:
        return dict(runs)
    leaves = [leaf.requires_grad_() for leaf in (x.w, x.query, x.key, x.value)]
    cotangent = torch.ones_like(x.w)

    def both(run: Callable[[], Tensor]) -> object:
        return torch.autograd.grad(run(), leaves, cotangent, allow_unused=True)

    return {name: run if name in (COPY, CLONE) else partial(both, run) for name, run in runs.items()}


def row_of(x: Inputs, seconds: dict[str, list[float]], backward: bool) -> Row:
    """Return times, ratios and errors of one size."""
    times_copy = ratio(seconds[OURS], seconds[COPY])
    error = errors(x, backward)
    return {
        "causal": x.causal,
        "backward": backward,
        "tokens": x.w.shape[1],
        "milliseconds": {name: 1e3 * statistics.median(times) for name, times in seconds.items()},
        "fastest_milliseconds": {name: 1e3 * min(times) for name, times in seconds.items()},
        "times_ours": {name: ratio(times, seconds[OURS]) for name, times in seconds.items()},
        "times_copy": times_copy,
        "times_limit": times_copy.median / (BACKWARD_COPIES if backward else 1),
        "error": error,
        "right": is_right(error, x.w.dtype),
    }


def is_right(error: dict[str, float], dtype: torch.dtype) -> bool:
    """Return whether the error is at most twice that of the reference in this dtype plus eight roundings."""
    return error[OURS] <= 2 * error[REFERENCE] + 8 * torch.finfo(dtype).eps


def errors(x: Inputs, backward: bool) -> dict[str, float]:
    """Return the distance of the output, or of w times its gradient, from float64, relative to its norm.

    w times the gradient is the change of the output for a relative change of w, such as rounding; it has the
    size of the output everywhere. The gradient alone grows as 1/w at an entry near zero where a sum begins,
    and the rounding of this entry would hide all other errors.
    """

    def answer(run: Callable[[], Tensor], w: Tensor) -> Tensor:
        if not backward:
            return run()
        g = torch.Generator().manual_seed(1)
        cotangent = torch.randn(w.shape, generator=g).to(w)  # ones would hide errors that cancel in a sum
        return w.detach() * torch.autograd.grad(run(), w, cotangent)[0]

    wide = x._replace(w=x.w.detach().double().requires_grad_(backward), temperature=x.temperature.double())
    with torch.set_grad_enabled(backward):
        truth = answer(contenders(wide)[REFERENCE], wide.w)
        found = {name: answer(contenders(x)[name], x.w).double() for name in (OURS, REFERENCE, EAGER)}
    return {name: float((y - truth).norm() / truth.norm()) for name, y in found.items()}


def peak(name: str, tokens: int, causal: bool, backward: bool, device: str, dtype: str) -> float | None:
    """Return the MiB of one call, after one on a short input."""
    for length in (64, tokens):
        x = inputs(length, causal, device, getattr(torch, dtype))
        x.w.requires_grad_(backward)
        run, cotangent = contenders(x)[name], torch.ones_like(x.w)

        def call(run=run, cotangent=cotangent) -> None:  # type: ignore[no-untyped-def]
            output = run()
            if backward:
                output.backward(cotangent)

        found = peak_mib(call, x.w.device)
    return found


def decoding(position: int, device: str, dtype: torch.dtype, repeats: int) -> Row:
    """Return time and bytes of state for a token far into a text, against attention over cached keys."""
    x = inputs(position, True, device, dtype)
    state = tssa(x.w, x.temperature, True).state
    assert state is not None
    token, query = x.w[:, -1:], x.query[:, -1:].transpose(1, 2)
    key, value = (part.transpose(1, 2).contiguous() for part in (x.key, x.value))
    runs: dict[str, Callable[[], object]] = {
        OURS: lambda: tssa(token, x.temperature, True, state=state),
        SDPA: lambda: scaled_dot_product_attention(query, key, value),
    }
    with torch.no_grad():
        seconds = race(runs, repeats, x.w.device, time.perf_counter)
    return {
        "position": position,
        "microseconds": {name: 1e6 * statistics.median(times) for name, times in seconds.items()},
        "state_bytes": {OURS: sum(part.nbytes for part in state), SDPA: key.nbytes + value.nbytes},
    }


def crossover(rows: list[Row]) -> float | None:
    """Return the length from which on ours is faster than softmax attention, interpolated on log scales.

    It is the shortest length if ours is faster there already, None if it never is.
    """
    points = [(row["tokens"], row["times_ours"][SDPA][0]) for row in rows if SDPA in row["times_ours"]]
    if points and points[0][1] >= 1:
        return float(points[0][0])
    for (low, before), (high, after) in pairwise(points):
        if before < 1 <= after:
            share = -math.log(before) / (math.log(after) - math.log(before))
            return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return None


def line(row: Row) -> str:
    """Return milliseconds of ours, and how many times that the others take."""
    if "position" in row:
        return (
            f"decoding at {row['position']}: microseconds {row['microseconds']}, bytes {row['state_bytes']}"
        )
    way = "forward and backward" if row["backward"] else "forward"
    text = f"{'causal' if row['causal'] else 'bidirectional'}, {way}, T={row['tokens']}: "
    text += f"{row['milliseconds'][OURS]:.2f} ms = {row['times_copy'].median:.1f} copies, "
    text += f"{row['times_limit']:.1f} limits"
    for name, times in row["times_ours"].items():
        if name not in (OURS, COPY, CLONE):
            text += f", {name} {times.median:.1f}x"
    text += f"; error {row['error'][OURS]:.1e} (eager {row['error'][EAGER]:.1e})"
    peaks = {name: mib for name, mib in row.get("peak_mib", {}).items() if mib is not None}
    if peaks:
        text += f"; peak {peaks[OURS]:.1f} MiB (eager {peaks[EAGER]:.1f})"
    if row["crossover"] is not None:
        text += f"; faster than softmax attention from T={row['crossover']:.0f}"
    return text
