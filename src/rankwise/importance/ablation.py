"""Measure the importance of every head and block, and find a large set of heads to remove together."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rankwise._internals.batches import Batch, each_batch
from rankwise._internals.forward import Progress, preserve_random_state
from rankwise._internals.statistics import t_quantile
from rankwise._internals.threads import exclusive
from rankwise.errors import InputError
from rankwise.importance.gated_passes import Floats, GatedPasses, NotDifferentiableError, quoted
from rankwise.importance.loss_choice import choose_loss
from rankwise.importance.losses import IGNORE_INDEX
from rankwise.importance.output_head import first_pass
from rankwise.importance.records import (
    FEW_PASSES,
    MORE_TRIES,
    BlockImportance,
    HeadImportance,
    Importance,
    ImportanceRecord,
    RemovableSet,
)
from rankwise.importance.settings import ImportanceSettings
from rankwise.tracing import Address, CapturedMixer, CapturedState, OperatorFunction, capture

UNGATED = (
    "its operator was computed from inputs and weights; no module or function returns the heads' outputs"
)
TRAINING = "the model is in training mode: if it has dropout, losses are random; call model.eval()"
UNREACHED = "no gradient, or only a part of it, reached it"
Group = Callable[[Address], Hashable | None]
"""Function from a head to a key. Heads with equal keys are removed together, heads with None never."""


class AblationCost(NamedTuple):
    """Loss of a model without a set of heads, and its increase."""

    loss: float
    cost: float
    """Increase of the loss compared with the whole model."""
    relative: float
    """Cost divided by the reference (usually the loss of the whole model). NaN if the reference is 0."""
    standard_error: float
    """Standard error of the cost, as `HeadImportance.standard_error`."""


@exclusive
def measure_importance(
    model: nn.Module,
    batches: Iterable[Batch],
    settings: ImportanceSettings | None = None,
    *,
    sites: Mapping[str, OperatorFunction] | None = None,
    blocks: str | None = None,
    heads: Mapping[Address, Sequence[int]] | None = None,
    group: Group | None = None,
    on_progress: Progress = lambda step, done: None,
) -> Importance:
    """Measure the cost of removing each head and block, and the largest set of heads removable together.

    Formula: the output M V of head h is multiplied by a gate ξ_h = 1. The loss is L = Σ S_i / N, with S_i the
    summed loss of all tokens of sequence i and N the number of tokens of all sequences. Removal takes ξ_h
    from 1 to 0 and costs ``curvature − ∂L/∂ξ_h`` to second order. Curvature: ½ J_hᵀ (diag p − p pᵀ) J_h / N,
    with J_h the derivative of the logits by ξ_h and p the predictions, or ‖J_h‖² / ‖Y‖² for states Y,
    estimated by random projections. Without projections, half of the empirical Fisher information replaces
    it. ∂L/∂ξ_h is 0 if the loss measures the change of the output.
    Range: costs have the unit of the loss; below 0 the model is better without the head. A set of heads is
    chosen on every second sequence, and its cost is stated on the other half.
    Cost: two forward passes of the first batch (the second finds the output head), and one forward pass per
    batch for the loss. Estimates need ``1 + probes`` backward passes per batch for all heads together, exact
    costs one forward pass per batch for each head and block, which runs only the blocks from the head on,
    about half of them; both together need one more forward pass per batch. The settings decide, or the number
    of passes. The removable set needs log2 of the number of heads passes per batch, and at most 8 more.
    Source: gates as in Michel, Levy, Neubig, "Are Sixteen Heads Really Better than One?", 2019; second order
    as in LeCun, Denker, Solla, "Optimal Brain Damage", 1990.

    Args:
        model: any `torch.nn.Module`; its weights are not changed, and all hooks are removed.
        batches: dicts, tuples or tensors; kept in a list, because they run more than once.
        settings: loss, and which costs to compute.
        sites: as in `rankwise.capture`.
        blocks: as in `rankwise.capture`.
        heads: per mixer (address without a head), indices of heads to remove one by one; all by default.
        group: function from a head to a key. Heads with equal keys are removed together, with None never.
        on_progress: function called with each pass, "pass 34 of about 120: without head 3 of …", and the
            finished share of the passes.

    Raises:
        InputError: if the loss does not fit the model, or is finite for no sequence, or if it only compares
            outputs and the settings request no costs.
        NotDifferentiableError: if no gradient reaches the heads. Exact costs need no gradients.

    Examples:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> importance = measure_importance(layer, [torch.randn(2, 5, 8)], ImportanceSettings(exact=True))
        >>> importance.record.loss, len(importance.heads)
        ('relative squared change of the output', 2)
    """
    settings, every, choice = settings or ImportanceSettings(), list(each_batch(batches)), ""
    decides = settings.exact is None
    capturing: dict[str, Any] = {"sites": sites, "blocks": blocks}
    passes, placed = _start(model, every, settings, capturing, on_progress, heads)
    if decides:
        settings, choice = _choose_method(passes)
        passes.settings = settings
    has_costs = settings.exact or settings.estimates
    if passes.loss.compares_outputs and not has_costs:
        expected = "a language model, or `labels` in the batches"
        fix = "Add labels, leave the loss out, or say that the model predicts the next token: loss 'causal'."
        raise InputError("the loss", expected=expected, got=f"only the {passes.loss.name}", fix=fix)
    notes = [TRAINING] if model.training else []
    notes += [passes.loss.note] if passes.loss.note else []
    try:
        passes.whole(placed, gradients=settings.estimates)
    except NotDifferentiableError as error:
        if not (settings.exact or decides):
            raise
        settings, choice = replace(settings, exact=True, estimates=False), ""
        # sums of the failed run are partial
        passes, placed = _start(model, every, settings, capturing, on_progress, heads)
        notes.append(f"importance without estimates: no gradients flow ({error.got})")
        passes.whole(placed)
    if passes.empty:
        empty = f"{passes.empty} of {passes.sequences} sequences have no label to predict and do not count"
        notes.append(f"{empty}: one token, or labels of {IGNORE_INDEX} alone")
    if passes.draws and (noise := passes.noise()):
        notes.append(
            "the model draws random numbers, the same in every pass; with others, the loss of batch 1 "
            f"changes by {noise:.2g} {passes.loss.unit}: smaller costs may differ too"
        )
    costs, choosing, costs_of_blocks = _estimates(passes, placed, notes) if has_costs else ({}, {}, {})
    removable, complete = None, True
    try:
        if settings.exact:
            notes += passes.check_restarts()
            _remove_each(passes, heads, costs, choosing, costs_of_blocks)
        if settings.tolerance is not None:
            removable = _search(passes, choosing, group, notes)
    except KeyboardInterrupt:
        complete = False
        notes.append("interrupted from the keyboard: not all removals were run")
    record = ImportanceRecord(
        loss=passes.loss.name,
        unit=passes.loss.unit,
        value=passes.mean(passes.losses),
        standard_error=passes.value_error,
        tokens=passes.loss.positions,
        reference=passes.reference(),
        reference_name=passes.loss.reference,
        chance=passes.loss.chance,
        sequences=passes.sequences,
        nonfinite_sequences=passes.nonfinite_sequences,
        counted=float(passes.counts.sum()),
        probes=passes.probes if settings.estimates else 0,
        seed=settings.seed,
        choice=choice,
        blocks=[*costs_of_blocks.values()],
        removable=removable,
        forward=passes.forward,
        backward=passes.backward,
        notes=notes,
    )
    return Importance(record, costs, complete)


@exclusive
def ablation_cost(
    model: nn.Module,
    batches: Iterable[Batch],
    heads: Iterable[Address],
    settings: ImportanceSettings | None = None,
    *,
    sites: Mapping[str, OperatorFunction] | None = None,
    blocks: str | None = None,
) -> AblationCost:
    """Return the loss of a model without a set of heads, and the increase of the loss.

    Cost: two forward passes per batch, and two more of the first batch.

    Arguments are as in `measure_importance`. Use other batches to check the choice of heads. ``heads`` are
    addresses, as in the removable set. Raise `InputError` if the model lacks one of the heads, or in the
    cases of `measure_importance`.

    Examples:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> batches = [torch.randn(2, 5, 8)]
        >>> ablation_cost(layer, batches, [*measure_importance(layer, batches).heads][1:]).cost > 0
        True
    """
    capturing: dict[str, Any] = {"sites": sites, "blocks": blocks}
    every, settings = list(each_batch(batches)), settings or ImportanceSettings()
    passes, _ = _start(model, every, settings, capturing, lambda step, done: None)
    passes.whole()
    losses, reference = passes.without(passes.by_call(heads)), passes.reference()
    cost = passes.mean(losses - passes.losses)
    relative = cost / reference if reference else math.nan
    return AblationCost(passes.mean(losses), cost, relative, passes.standard_error())


def passes_without_blocks(
    model: nn.Module,
    batches: Iterable[Batch],
    seed: int = 0,
    on_progress: Progress = lambda step, done: None,
) -> GatedPasses:
    """Run a model on all batches, and return passes that run it again without blocks: ``without({}, names)``.

    Each pass restarts at the first of its blocks, if this changes no loss.
    """
    settings = ImportanceSettings(exact=True, estimates=False, tolerance=None, seed=seed)
    passes, placed = _start(model, list(each_batch(batches)), settings, {}, on_progress)
    passes.whole(placed)
    passes.check_restarts()
    return passes


def sort_by_cost(
    heads: Mapping[Address, HeadImportance], *, exact: bool, group: Group | None = None
) -> list[list[Address]]:
    """Return groups of heads, cheapest group first. The cost of a group is the sum over its heads.

    Costs are exact if ``exact`` is True, otherwise estimates. Groups with an unknown cost are left out.

    Examples:
        >>> heads = {Address(head=head): HeadImportance(exact=cost) for head, cost in enumerate([0.3, 0.1])}
        >>> [[address.head for address in group] for group in sort_by_cost(heads, exact=True)]
        [[1], [0]]
    """
    members: dict[Hashable, list[Address]] = {}
    costs: dict[Hashable, float] = {}
    for head, importance in heads.items():
        key = head if group is None else group(head)
        if key is not None:
            cost = importance.exact if exact else importance.estimate
            members.setdefault(key, []).append(head)
            costs[key] = costs.get(key, 0.0) + (math.nan if importance.why_not else cost)
    keys = [key for key, cost in costs.items() if not math.isnan(cost)]
    keys.sort(key=lambda key: (costs[key], [head.sort_key for head in members[key]]))
    return [members[key] for key in keys]


def _start(
    model: nn.Module,
    every: Sequence[Batch],
    settings: ImportanceSettings,
    capturing: dict[str, Any],
    on_progress: Progress,
    chosen: Mapping[Address, Sequence[int]] | None = None,
) -> tuple[GatedPasses, dict[str, tuple[str, int]]]:
    """Run the first batch and choose a loss. Return the passes, and the stack and layer of each block.

    ``chosen`` are the heads to remove one by one, as in `measure_importance`.
    """
    on_progress("pass 1: the first batch, to see its output", 0.0)
    placed: dict[str, tuple[str, int]] = {}
    heads: dict[Address, int] = {}

    def count(site: CapturedMixer) -> None:
        heads[site.address()] = len((chosen or {}).get(site.address(), range(site.operator.shape[-3])))

    def note(state: CapturedState) -> None:
        # state i + 1 is the output of block i; a block whose output was not seen cannot be removed
        if state.layer > 0:
            placed[state.name] = state.stack, state.layer - 1

    capturing_all = capture(model, on_mixer=count, on_state=note, **capturing)
    with torch.no_grad(), capturing_all, preserve_random_state(model, 0) as draws:
        first = first_pass(model, every[0], seed=None)
        drawn = draws()
    with torch.no_grad():
        sampled = settings.estimates or settings.exact is not False
        loss, batches = choose_loss(model, every, first, settings, sampled=sampled)
    del first
    passes = GatedPasses(model, batches, loss, settings, capturing, on_progress)
    passes.forward, passes.draws, passes.removals = 1, drawn, sum(heads.values()) + len(placed)
    return passes, placed


def _choose_method(passes: GatedPasses) -> tuple[ImportanceSettings, str]:
    """Return settings that request exact costs or estimates, and the reason.

    Costs are exact if they take at most `FEW_PASSES` forward passes per batch, without the passes that
    estimates need as well. A pass without a head counts as half: it restarts at the block of the head.
    """
    settings = passes.settings
    if not settings.estimates:
        return replace(settings, exact=False), ""
    backward = passes.probes + (not passes.loss.compares_outputs)
    halves = math.ceil(passes.removals / 2)
    exact = halves <= FEW_PASSES
    reason = (
        f"{'exact' if exact else 'estimated'}, because removing each of {passes.removals} heads and blocks "
        f"takes about {halves} forward passes per batch, and costs are exact up to {FEW_PASSES}; estimates "
        f"take {backward} backward passes"
    )
    return replace(settings, exact=exact, estimates=not exact), reason


def _estimates(
    passes: GatedPasses, placed: Mapping[str, tuple[str, int]], notes: list[str]
) -> tuple[dict[Address, HeadImportance], dict[Address, HeadImportance], dict[str, BlockImportance]]:
    """Return the estimates of heads, of heads on the choosing half of the sequences, and of blocks by name.

    Add a note on mixers without estimates.
    """
    heads: dict[Address, HeadImportance] = {}
    choosing: dict[Address, HeadImportance] = {}
    blocks: dict[str, BlockImportance] = {}
    settings, unreached = passes.settings, list[str]()
    for mixer, count in dict(passes.mixers.values()).items():
        estimates, halves = (passes.estimates(passes.heads.get(mixer), count, part) for part in (0, 1))
        if settings.estimates and not any(estimates):
            unreached.append(mixer.site)
        why_not = "" if settings.exact or any(estimates) else UNREACHED
        for head, (fields, half) in enumerate(zip(estimates, halves, strict=True)):
            heads[mixer.at(head)] = HeadImportance(why_not=why_not, **fields)
            choosing[mixer.at(head)] = HeadImportance(why_not=why_not, **half)
    for mixer, count in passes.ungated:
        heads |= {mixer.at(head): HeadImportance(why_not=UNGATED) for head in range(count)}
    if unreached:
        notes.append(f"no estimates of {quoted(unreached)}: {UNREACHED.removesuffix(' it')} them")
    for name, (stack, layer) in placed.items():
        sums = passes.blocks.get(name)
        (fields,) = passes.estimates(sums, 1)
        why_not = UNREACHED if settings.estimates and (sums is None or sums.unreached) else ""
        blocks[name] = BlockImportance(stack=stack, layer=layer, site=name, why_not=why_not, **fields)
    return heads, choosing, blocks


def _remove_each(
    passes: GatedPasses,
    chosen: Mapping[Address, Sequence[int]] | None,
    heads: dict[Address, HeadImportance],
    choosing: dict[Address, HeadImportance],
    blocks: dict[str, BlockImportance],
) -> None:
    """Remove chosen heads and all blocks one by one. Add exact costs to the three dicts."""
    runs = [
        mixer.at(head)
        for mixer, count in dict(passes.mixers.values()).items()
        for head in (range(count) if chosen is None else chosen.get(mixer, ()))
    ]
    for head in runs:
        passes.say(f"without head {head.head} of {head.site}")
        changes = passes.without(passes.by_call([head])) - passes.losses
        for costs, part in ((heads, slice(None)), (choosing, passes.choosing)):
            exact = {"exact": passes.mean(changes, part), "standard_error": passes.standard_error(part)}
            costs[head] = costs[head].model_copy(update=exact)
    for name, block in blocks.items():
        passes.say(f"without the block {name}")
        cost = passes.mean(passes.without({}, [name]) - passes.losses)
        exact = {"exact": cost, "standard_error": passes.standard_error()}
        blocks[name] = block.model_copy(update=exact)


def _search(
    passes: GatedPasses, heads: Mapping[Address, HeadImportance], group: Group | None, notes: list[str]
) -> RemovableSet | None:
    """Return a large set of heads whose joint removal costs at most the tolerance, as measured by a run.

    Heads are sorted by single costs, exact if all are known. Bisection finds how many of the cheapest heads
    can be removed, assuming that the cost rises with their number. Then more heads are tried one by one.
    Costs of the choosing half of the sequences decide. The same runs price the set on the other half.
    Return None if no cost is known or the reference is 0.
    """
    tolerance = passes.settings.tolerance
    assert tolerance is not None
    exact = all(not math.isnan(head.exact) for head in heads.values() if not head.why_not)
    groups = sort_by_cost(heads, exact=exact, group=group)
    if not groups:
        return None
    reference, runs = passes.reference(passes.choosing), 0
    if not reference:
        name = passes.loss.reference
        notes.append(f"no removable set of heads: the tolerance is {tolerance:.2%} of {name}, which is 0")
        return None

    def fitting(units: Sequence[Sequence[Address]]) -> Floats | None:
        """Return the losses without these heads. Return None if they cost more than the tolerance."""
        nonlocal runs
        passes.say(f"without {sum(map(len, units))} heads together")
        runs += 1
        losses = passes.without(passes.by_call(chain(*units)))
        cost = passes.mean(losses - passes.losses, passes.choosing)
        return losses if cost <= tolerance * reference else None  # NaN never fits

    fits, best, fails = 0, passes.losses, len(groups) + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if (losses := fitting(groups[:middle])) is None:
            fails = middle
        else:
            fits, best = middle, losses
    removed = groups[:fits]
    for unit in groups[fits + 1 : fits + 1 + MORE_TRIES]:
        if (losses := fitting([*removed, unit])) is not None:
            removed, best = [*removed, unit], losses
    return RemovableSet(
        heads=[*chain(*removed)],
        tolerance=tolerance,
        chosen_on=len(passes.losses[passes.choosing]),
        chosen_relative=passes.mean(best - passes.losses, passes.choosing) / reference,
        **_held_out_price(passes, best),
        sorted_by="exact" if exact else "estimate",
        runs=runs,
    )


def _held_out_price(passes: GatedPasses, losses: Floats) -> dict[str, Any]:
    """Return the price of a set of heads on the sequences that did not choose it, as fields of the set.

    With d_i the increase of the summed loss of sequence i and n_i its number of tokens, the price is
    r = Σ d_i / Σ n_i. To first order r varies as the mean of its residuals e_i = d_i − r n_i, so its variance
    is m/(m − 1) · Σ e_i² / (Σ n_i)² for m sequences. The interval is r ± t · √variance, t of Student's
    distribution with m − 1 degrees of freedom, for independent sequences and a known reference.
    """
    part = slice(1, None, 2)
    number = len(passes.losses[part])
    if not passes.settings.hold_out or not number:
        return {"held_out": 0}
    cost, reference, width = passes.mean(losses - passes.losses, part), passes.reference(part), math.nan
    if number > 1:
        counts = passes.counts[part]
        squares = np.square((losses - passes.losses)[part] - cost * counts).sum() * number / (number - 1)
        width = t_quantile(number - 1) * math.sqrt(squares) / counts.sum()
    ends = {"relative": cost, "low": cost - width, "high": cost + width}
    shares = {name: end / reference if reference else math.nan for name, end in ends.items()}
    return {"held_out": number, "loss": passes.mean(losses, part), "cost": cost, **shares}
