"""The part ``qk``: factors in closed form, one budget of widths over all heads, and gradient steps.

`rotary_solve` uses the widths and the calibration.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rankwise._internals.forward import out_of_memory
from rankwise._internals.statistics import mean
from rankwise.compression.layers import Factors, Projections, rank_notes
from rankwise.compression.part import Job, Solution
from rankwise.compression.qk_find import find_query_key_layers
from rankwise.compression.qk_modules import narrow_layers
from rankwise.compression.qk_statistics import (
    QueryKeyStatistics,
    Sample,
    collect_statistics,
    divergence,
    first_samples,
    layer_divergence,
    usable_layers,
    width_curves,
)
from rankwise.compression.record import BudgetCurve, BudgetPoint, HeadWidth
from rankwise.errors import CompressionError
from rankwise.measures.required_width import logit_bases

CURVE_SEQUENCES = 16
"""Maximum number of sequences on which a head's curve, attention KL against width, is measured."""
CURVE_POINTS = 32
"""Number of evenly spaced widths of a curve; a wide head's curve also has the widths below the first."""
ATTEMPTS = 6
"""Maximum number of times that widths are chosen for a tolerance."""
RATE = 0.02
"""Learning rate of Adam for factors in whitened coordinates; it falls to zero along a cosine."""
ROWS = 2**20
"""Approximate number of attention entries per step: 2 sequences of 192 tokens with 12 heads."""
SHARES = (0.125, 0.25, 0.5, 0.75)
"""Shares of the full width at which the record lists attention KL."""
Curve = tuple[list[int], list[float]]
"""Widths of a key head, ascending, and its attention KL at each."""
Start = Callable[[QueryKeyStatistics, list[int]], Factors]
"""Function from a layer and the widths of its key heads to factors before calibration."""


def solve(job: Job) -> Solution:
    """Narrow queries and keys: closed form, widths under one budget, then calibration."""
    found, skipped = find_query_key_layers(job.model, job.batches[0])
    statistics = collect_statistics(job.model, found, job.batches, job.on_step)
    layers, skipped = usable_layers(statistics, skipped)
    moments = [stack for layer in layers for stack in (layer.query_moments, layer.key_moments)]
    notes = rank_notes(moments, "queries or keys", min(layer.tokens for layer in layers))
    curves = []
    for layer in layers:
        job.on_step(f"measuring widths of {layer.projections.name}")
        curves.append(head_curves(layer))
    result = narrow_heads("qk", job, layers, curves, closed_form, "closed form, widths per head")
    return replace(result, skipped=skipped, notes=[*notes, *result.notes])


def closed_form(layer: QueryKeyStatistics, widths: list[int]) -> Factors:
    """Return the factors of least squared error of logits, with the given width for each key head.

    Columns of A and B are scaled so that queries and keys have equal size, for low precision.
    """
    groups = layer.projections.groups
    query, key = torch.zeros_like(layer.query_moments), torch.zeros_like(layer.key_moments)
    for head, width in enumerate(widths):
        P, S = layer.query_moments[head], layer.key_moments[head]
        bases = logit_bases(P, S)
        a, b = bases.query[:, :width], bases.key[:, :width]
        size_q = (a * (P / groups @ a)).sum(0).clamp(min=1e-300)
        size_k = (b * (S @ b)).sum(0).clamp(min=1e-300)
        balance = (size_k / size_q) ** 0.25
        query[head, :, :width], key[head, :, :width] = a * balance, b / balance
    return Factors(query.repeat_interleave(groups, 0), key, [list(range(width)) for width in widths])


def head_curves(layer: QueryKeyStatistics) -> list[Curve]:
    """Return attention KL of each key head against width, closed form, on the calibration data."""
    widths = curve_widths(layer.projections.width)
    samples = first_samples(layer.samples, CURVE_SEQUENCES)
    bases = [logit_bases(P, S) for P, S in zip(layer.query_moments, layer.key_moments, strict=True)]
    by_key = width_curves(samples, bases, widths).unflatten(0, (-1, layer.projections.groups)).mean(1)
    return [(widths, losses) for losses in by_key.tolist()]


# --- calibration -----------------------------------------------------------------------------------------


def narrow_heads(
    part: str,
    job: Job,
    layers: list[QueryKeyStatistics],
    curves: list[list[Curve]],
    start: Start,
    method: str,
) -> Solution:
    """Choose widths, calibrate the factors of `start`, measure them, and build the change.

    Curves are of the first sequences. If the cost on all calibration data exceeds the tolerance, curves are
    measured on all of it, and then the tolerance is lowered.
    """
    aim = job.tolerance
    for attempt in range(ATTEMPTS):
        widths = iter(allocate_widths(curves, job.keep, aim, part == "rotary"))
        starts = [start(layer, next(widths)) for layer in layers]
        costs = [_by_key(layer, factors) for layer, factors in zip(layers, starts, strict=True)]
        cost = mean(chain.from_iterable(costs))
        # a share of 1, which `compress` refuses, is a change of basis
        whole = job.keep != 1 and all(len(kept) == len(own.key[0]) for own in starts for kept in own.kept)
        if job.tolerance is None or aim is None or cost <= job.tolerance or whole:
            break
        if attempt == 0:
            job.on_step("measuring widths on all data")
            curves = [_measured(layer, own, start) for layer, own in zip(layers, curves, strict=True)]
        else:
            aim *= 0.9 * job.tolerance / cost
    if whole:  # the model keeps its projections: its costs are 0 rather than those of a change of basis
        costs = [[0.0] * len(own) for own in costs]
    plan: list[tuple[Projections, Factors]] = []
    heads: list[HeadWidth] = []
    stopped = ""
    for layer, factors, before in zip(layers, starts, costs, strict=True):
        found, after = layer.projections, before
        if job.calibrate and not stopped and not whole:
            factors, after, stopped = _calibrated(layer, factors, before, job)
        plan.append((found, factors))
        heads += [
            HeadWidth(
                part=part,
                stack=found.stack,
                site=found.name,
                layer=found.layer,
                head=head,
                before=found.width,
                width=len(kept),
                kl=before[head],
                kl_calibrated=after[head],
            )
            for head, kept in enumerate(factors.kept)
        ]
    factors_of = {found.name: factors for found, factors in plan}
    kl: dict[str, float] = {}
    for own in collect_statistics(job.model, [found for found, _ in plan], job.eval_batches, job.on_step):
        name = own.projections.name
        kl[name] = 0.0 if whole else float(layer_divergence(own.samples, factors_of[name]).mean())
    note = f"Calibration was stopped {stopped}. Earlier layers are calibrated, later layers are not."
    return Solution(
        narrow_layers(job.model, [] if whole else plan),
        heads,
        curves=[budget_curve(method, [*chain.from_iterable(curves)])],
        kl=kl,
        notes=[note] if stopped else [],
        complete=not stopped,
    )


def _calibrated(
    layer: QueryKeyStatistics, start: Factors, before: list[float], job: Job
) -> tuple[Factors, list[float], str]:
    """Calibrate with Adam; return the better factors on the calibration data and their KL.

    Also return the reason if calibration stopped early, otherwise "".
    """
    try:
        factors, stopped = calibrate(layer, start, job)
        after = _by_key(layer, factors)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return start, before, f"for want of memory at {layer.projections.name}, which is not calibrated"
    return (factors, after, stopped) if sum(after) < sum(before) else (start, before, stopped)


def _measured(layer: QueryKeyStatistics, curves: list[Curve], start: Start) -> list[Curve]:
    """Return the curves of the key heads of a layer with attention KL on all calibration data."""
    widths = [own for own, _ in curves]
    losses = [_by_key(layer, start(layer, list(now))) for now in zip(*widths, strict=True)]
    return list(zip(widths, map(list, zip(*losses, strict=True)), strict=True))


def _by_key(layer: QueryKeyStatistics, factors: Factors) -> list[float]:
    """Return mean attention KL of the query heads of each key head."""
    by_head = layer_divergence(layer.samples, factors).unflatten(0, (-1, layer.projections.groups))
    by_key: list[float] = by_head.mean(1).tolist()
    return by_key


def calibrate(layer: QueryKeyStatistics, start: Factors, job: Job) -> tuple[Factors, str]:
    """Improve factors by Adam steps on mean attention KL; also return what stopped them, or "".

    Factors A and B are balanced and stepped in whitened coordinates, so that one rate fits all heads. Each
    step reads a few random sequences. With rotary positions, a kept pair may become any linear map of the
    head's channels before rotation: pairs of similar frequency take over the content of removed pairs.
    """
    groups, device = layer.projections.groups, layer.samples[0].query.device
    steps, name = job.calibrate, layer.projections.name
    rotated = len(layer.projections.pairs) > 0
    white_q, white_k = (whitening(moments) for moments in (layer.query_moments, layer.key_moments))
    white_q = white_q.repeat_interleave(groups, 0)
    a, b = torch.linalg.solve(white_q, start.query), torch.linalg.solve(white_k, start.key)
    # A times this number and B divided by it are equally large, per column; rotation mixes columns
    size_a, size_b = a.square().sum(1).unflatten(0, (-1, groups)).mean(1), b.square().sum(1)
    if rotated:
        size_a, size_b = size_a.sum(-1, keepdim=True), size_b.sum(-1, keepdim=True)
    balance = (size_b.clamp(min=1e-24) / size_a.clamp(min=1e-24))[:, None] ** 0.25
    a, b = a * balance.repeat_interleave(groups, 0), b / balance
    mask = torch.zeros(len(start.key), 1, layer.projections.width)
    for head, channels in enumerate(start.kept):
        mask[head, 0, channels] = 1
    wide = layer.projections.width if rotated else max(map(len, start.kept))  # without more zeros
    kept_k = mask[..., :wide].to(device)
    kept_q = kept_k.repeat_interleave(groups, 0)
    # contiguous, because products of matrices in another layout round differently
    a, b = (factors.contiguous()[..., :wide].float().to(device).requires_grad_() for factors in (a, b))
    to_q, to_k = (factors.float().to(device) for factors in (white_q, white_k))
    optimizer = torch.optim.Adam([a, b], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(job.seed)
    done, stopped = 0, ""
    try:
        with torch.enable_grad():
            while done < steps:
                loss = _loss(_drawn(layer.samples, generator), (to_q @ a) * kept_q, (to_k @ b) * kept_k)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                done += 1
                job.on_step(f"calibrating {name}: {done} of {steps}")
    except KeyboardInterrupt:
        stopped = f"by Ctrl-C after {done} of {steps} steps of {name}, kept if they lowered attention KL"
    query, key = torch.zeros_like(start.query), torch.zeros_like(start.key)
    query[..., :wide] = ((to_q @ a) * kept_q).detach().cpu().double()
    key[..., :wide] = ((to_k @ b) * kept_k).detach().cpu().double()
    return Factors(query, key, start.kept), stopped


def _loss(sample: Sample, a: Float[Tensor, "H K r"], b: Float[Tensor, "G K r"]) -> Tensor:
    with torch.no_grad():
        matrix = sample.operator.dense().float()
    change = sample.logit_change(sample.query.float(), sample.key.float(), a, b)
    real = sample.tokens[:, None].expand(change.shape[:-1])
    return divergence(matrix, change)[real].mean()


def _drawn(samples: list[Sample], generator: torch.Generator) -> Sample:
    sample = samples[int(torch.randint(len(samples), (), generator=generator))]
    batch, heads, tokens, sources = sample.operator.shape
    count = max(1, min(batch, round(ROWS / (heads * tokens * sources))))
    rows = torch.randperm(batch, generator=generator)[:count].to(sample.query.device)
    rotation = None if sample.rotation is None else sample.rotation[rows]
    own = sample.operator[rows], sample.query[rows], sample.key[rows], sample.tokens[rows]
    return Sample(*own, sample.scale, rotation)


def whitening(moments: Float64[Tensor, "G K K"]) -> Float64[Tensor, "G K K"]:
    """Return S^−½, with S the moments divided by their mean eigenvalue; eigenvalues near 0 are raised."""
    values, vectors = torch.linalg.eigh(moments)
    values = values / values.clamp(min=0).mean(-1, keepdim=True).clamp(min=1e-300)
    return (vectors / values.clamp(min=1e-4).sqrt()[:, None]) @ vectors.mT


# --- widths ----------------------------------------------------------------------------------------------


def curve_widths(width: int) -> list[int]:
    """Return the widths of a curve, from 1 to K: all up to 32, otherwise small widths and steps.

    Examples:
        >>> curve_widths(4), len(curve_widths(128)), curve_widths(128)[:6]
        ([1, 2, 3, 4], 35, [1, 2, 3, 4, 8, 12])
    """
    step = -(-width // CURVE_POINTS)
    small = range(1, step) if step > 1 else ()
    return sorted({*small, *range(step, width + 1, step), width})


def hull_steps(curves: list[Curve]) -> list[tuple[int, float]]:
    """Return the steps by one channel along the lower convex hulls of the curves, the largest saving first.

    Each step has its head and the attention KL that it saves. Later steps of a head save less.
    """
    steps: list[tuple[float, int, int]] = []
    for head, (widths, losses) in enumerate(curves):
        at = 0
        while at < len(widths) - 1:
            later = range(at + 1, len(widths))
            gain, to = max(((losses[at] - losses[to]) / (widths[to] - widths[at]), to) for to in later)
            if gain <= 0:
                break
            steps += [(-gain, head, width) for width in range(widths[at], widths[to])]
            at = to
    return [(head, -gain) for gain, head, _ in sorted(steps)]


def _widened(curves: list[Curve], steps: list[tuple[int, float]]) -> list[int]:
    """Return the widths of all heads after some steps from their least widths."""
    added = Counter(head for head, _ in steps)
    return [widths[0] + added[head] for head, (widths, _) in enumerate(curves)]


def allocate_widths(
    curves: list[list[Curve]], keep: float | int | None, tolerance: float | int | None, measured: bool = False
) -> list[list[int]]:
    """Return the width of each key head, by layer, for a share of all widths or for a tolerance.

    If only `measured` widths are possible, others are rounded: down for a share, up for a tolerance.
    """
    every = [*chain.from_iterable(curves)]
    if tolerance is not None:
        found = widths_for_tolerance(every, tolerance)
    else:
        assert keep is not None
        found = widths_under_budget(every, round(keep * sum(widths[-1] for widths, _ in every)))
    if measured:
        found = [
            widths[bisect_right(widths, width) - 1 if tolerance is None else bisect_left(widths, width)]
            for (widths, _), width in zip(every, found, strict=True)
        ]
    each = iter(found)
    return [[next(each) for _ in own] for own in curves]


def widths_under_budget(curves: list[Curve], budget: int) -> list[int]:
    """Return the widths of all heads that sum to a budget, with the least attention KL on the hulls.

    The step that saves most is taken next. On convex curves this greedy choice is optimal.

    Examples:
        >>> widths_under_budget([([1, 2, 4], [1.0, 0.1, 0.0]), ([1, 2, 4], [0.3, 0.2, 0.15])], 4)
        [2, 2]
    """
    least = sum(widths[0] for widths, _ in curves)
    if budget < least:
        raise CompressionError(
            "budget",
            expected=f"a width of at least {math.ceil(least / len(curves))} on average",
            got=f"{budget / max(len(curves), 1):.2f}",
            fix="Keep more.",
        )
    return _widened(curves, hull_steps(curves)[: budget - least])


def widths_for_tolerance(curves: list[Curve], tolerance: float) -> list[int]:
    """Return the least widths, in the order of `widths_under_budget`, with mean attention KL in a tolerance.

    Examples:
        >>> widths_for_tolerance([([1, 2, 4], [1.0, 0.1, 0.0]), ([1, 2, 4], [0.3, 0.2, 0.15])], 0.2)
        [2, 1]
    """
    excess = sum(losses[0] for _, losses in curves) - tolerance * len(curves)
    steps = hull_steps(curves)
    for count, (_, gain) in enumerate(steps):
        if excess <= 1e-9 * gain:
            return _widened(curves, steps[:count])
        excess -= gain
    return _widened(curves, steps)


def budget_curve(method: str, curves: list[Curve]) -> BudgetCurve:
    """Return mean attention KL against mean width; allocated widths are rounded down to measured widths."""
    points = []
    for share in SHARES:
        budget = max(round(share * sum(widths[-1] for widths, _ in curves)), sum(own[0] for own, _ in curves))
        chosen = widths_under_budget(curves, budget)
        places = [bisect_right(own, width) - 1 for (own, _), width in zip(curves, chosen, strict=True)]
        found = [(widths[at], losses[at]) for (widths, losses), at in zip(curves, places, strict=True)]
        width, kl = (sum(numbers) / len(curves) for numbers in zip(*found, strict=True))
        points.append(BudgetPoint(width=width, kl=kl))
    return BudgetCurve(method=method, points=points)
