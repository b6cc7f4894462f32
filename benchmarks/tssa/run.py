"""The benchmark: every size, forward and backward, decoding, memory, and whether the answers are right."""

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import exp, log
from statistics import median
from typing import Any

import torch
from benchmarks import harness
from benchmarks.tssa.clock import race
from benchmarks.tssa.contenders import (
    CLONE,
    COPY,
    EAGER,
    OURS,
    REFERENCE,
    SDPA,
    Inputs,
    contenders,
    inputs,
    missing,
)
from benchmarks.tssa.memory import fresh_peak, kept
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rankwise.ops import tssa

TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
QUICK = (256, 1024, 4096)
POSITIONS = (1024, 65_536)
BACKWARD_BYTES = 2.5
"""Copies of w that forward and backward cannot do without: w read twice, the gradient of the output once; the
output and the gradient of w written."""
PATIENCE = 20.0
"""Seconds beyond which one call of softmax attention is not waited for; it grows with T²."""

Row = dict[str, Any]


def machine(device: str, dtype: torch.dtype) -> Row:
    """What a time means nothing without."""
    with kept() as most:
        pass
    return harness.machine(torch.device(device)) | {
        "load": [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else [],
        "tensors_kept_up_to_bytes": most,
        "dtype": str(dtype).removeprefix("torch."),
        "no_linear_attention": {"bidirectional": missing(device, False), "causal": missing(device, True)},
    }


def sizes(
    tokens: tuple[int, ...], device: str, dtype: torch.dtype, repeats: int, memory: bool
) -> Iterator[Row]:
    """One row for each operation, direction and length, as they are measured.

    Args:
        tokens: lengths, rising.
        device: where.
        dtype: of w.
        repeats: rounds.
        memory: whether to measure peak memory, each in a process of its own.

    Yields:
        Milliseconds, ratios to ours and to the copy, errors, bytes; on a CPU with glibc also milliseconds
        where that gives large memory back and fetches it anew, at the limits that it adapts to at most.
    """
    with kept() as limit:
        pass
    for causal in (False, True):
        for backward in (False, True):
            slow = 0.0  # what softmax attention would take at the next length
            for at, length in enumerate(tokens):
                x = inputs(length, causal, device, dtype)
                runs = _directed(x, contenders(x), backward)
                if slow > PATIENCE:
                    del runs[SDPA]
                taken, plain = race(runs, x.w.device, repeats), {}
                if x.w.device.type == "cpu" and limit:
                    both = {name: runs[name] for name in (OURS, EAGER)}
                    plain = medians(race(both, x.w.device, repeats, keep=False))
                if SDPA in taken and at + 1 < len(tokens):
                    slow = min(taken[SDPA]) * (tokens[at + 1] / length) ** 2
                row = _row(x, taken, backward)
                row["milliseconds_refetching"] = {name: 1e3 * each for name, each in plain.items()}
                if memory:
                    row["peak_mib"] = _peaks(x, backward, dtype)
                yield row


def _directed(
    x: Inputs, runs: dict[str, Callable[[], Tensor]], backward: bool
) -> dict[str, Callable[[], object]]:
    if not backward:
        return dict(runs)
    leaves = [x.w, x.query, x.key, x.value]
    for leaf in leaves:
        leaf.requires_grad_()
    given = torch.ones_like(x.w)

    def both(run: Callable[[], Tensor]) -> Callable[[], object]:
        def call() -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(run(), leaves, given, allow_unused=True)

        return call

    return {name: run if name in (COPY, CLONE) else both(run) for name, run in runs.items()}


def medians(taken: dict[str, list[float]]) -> dict[str, float]:
    return {name: median(each) for name, each in taken.items()}


def _row(x: Inputs, taken: dict[str, list[float]], backward: bool) -> Row:
    seconds, fastest = medians(taken), {name: min(each) for name, each in taken.items()}
    ours, copy = seconds[OURS], seconds[COPY]
    row: Row = {"causal": x.causal, "backward": backward, "tokens": x.w.shape[1]}
    row["milliseconds"] = {name: 1e3 * taken for name, taken in seconds.items()}
    row["fastest_milliseconds"] = {name: 1e3 * each for name, each in fastest.items()}
    row["fastest_times_ours"] = {name: each / fastest[OURS] for name, each in fastest.items()}
    row["times_ours"] = {name: taken / ours for name, taken in seconds.items()}
    row["times_copy"] = {name: taken / copy for name, taken in seconds.items()}
    row["times_limit"] = ours / (copy * (BACKWARD_BYTES if backward else 1))
    row["error"] = errors(x, backward)
    row["right"] = right(row["error"], x.w.dtype)
    return row


def right(error: dict[str, float], dtype: torch.dtype) -> bool:
    """At most twice as far from float64 as the formulas in the same dtype, and eight roundings; no NaN."""
    return error[OURS] <= 2 * error[REFERENCE] + 8 * torch.finfo(dtype).eps


def errors(x: Inputs, backward: bool) -> dict[str, float]:
    """Distance of the output, or of w times its gradient, from float64, relative to its norm.

    w times the gradient is what the output changes by where w changes relatively, as rounding does: of the
    size of the output everywhere. The gradient itself grows as 1/w at an entry near zero where a sum begins,
    and the rounding of that entry would be all that is judged.
    """

    def answer(run: Callable[[], Tensor], w: Tensor) -> Tensor:
        if not backward:
            return run()
        g = torch.Generator().manual_seed(1)
        given = torch.randn(w.shape, generator=g).to(w)  # ones would hide what a sum hides
        return w.detach() * torch.autograd.grad(run(), w, given)[0]

    wide = x._replace(w=x.w.detach().double().requires_grad_(backward), temperature=x.temperature.double())
    with torch.set_grad_enabled(backward):
        truth = answer(contenders(wide)[REFERENCE], wide.w)
        found = {name: answer(contenders(x)[name], x.w).double() for name in (OURS, REFERENCE, EAGER)}
    return {name: float((y - truth).norm() / truth.norm()) for name, y in found.items()}


def _peaks(x: Inputs, backward: bool, dtype: torch.dtype) -> dict[str, float | None]:
    job = {"causal": x.causal, "backward": backward, "tokens": x.w.shape[1], "device": x.w.device.type}
    job["dtype"] = str(dtype).removeprefix("torch.")
    return {name: fresh_peak(job | {"name": name}) for name in (OURS, EAGER)}


def decoding(
    device: str, dtype: torch.dtype, repeats: int, positions: tuple[int, ...] = POSITIONS
) -> list[Row]:
    """A token at a time, far into a text: time and bytes of state, against attention over cached keys.

    Args:
        device: where.
        dtype: of w.
        repeats: rounds of ten tokens.
        positions: how far into the text.

    Returns:
        A row for each position.
    """
    rows = []
    for position in positions:
        x = inputs(position, True, device, dtype)
        state = tssa(x.w, x.temperature, True).state
        assert state is not None
        token, query = x.w[:, -1:], x.query[:, -1:].transpose(1, 2)
        key, value = (part.transpose(1, 2).contiguous() for part in (x.key, x.value))

        def ten(run: Callable[[], object]) -> Callable[[], None]:
            def call() -> None:
                for _ in range(10):
                    run()

            return call

        def ours(x: Inputs = x, token: Tensor = token, state: Any = state) -> object:
            return tssa(token, x.temperature, True, state=state)

        def attention(query: Tensor = query, key: Tensor = key, value: Tensor = value) -> object:
            return scaled_dot_product_attention(query, key, value)

        with torch.no_grad():
            seconds = medians(race({OURS: ten(ours), SDPA: ten(attention)}, x.w.device, repeats))
        size = sum(part.numel() * part.element_size() for part in state)
        cached = 2 * key.numel() * key.element_size()
        rows.append(
            {
                "position": position,
                "microseconds": {name: 1e5 * taken for name, taken in seconds.items()},
                "state_bytes": {OURS: size, SDPA: cached},
            }
        )
    return rows


def crossover(rows: list[Row], causal: bool, backward: bool) -> float | None:
    """The length from which on ours is faster than softmax attention, between measured ones on log scales.

    Args:
        rows: from `sizes`.
        causal: which operation.
        backward: which direction.

    Returns:
        Tokens; the shortest length if ours is faster there already; None if it never is.
    """
    chosen = [r for r in rows if (r["causal"], r["backward"]) == (causal, backward)]
    points = [(r["tokens"], r["times_ours"][SDPA]) for r in chosen if SDPA in r["times_ours"]]
    if points and points[0][1] >= 1:
        return float(points[0][0])
    for (low, before), (high, after) in pairwise(points):
        if before < 1 <= after:
            share = -log(before) / (log(after) - log(before))
            return exp(log(low) + share * (log(high) - log(low)))
    return None
