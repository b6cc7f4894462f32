"""The part ``blocks``: remove the blocks whose joint removal costs least, one after another."""

import math

from rankwise._internals.forward import Change
from rankwise.compression.blocks_find import Plan, Stack, difference, generation_error, removal
from rankwise.compression.blocks_repair import repair
from rankwise.compression.records import BlockRemoval
from rankwise.compression.trials import Job, Solution
from rankwise.errors import CompressionError
from rankwise.importance.ablation import passes_without_blocks
from rankwise.importance.gated_passes import GatedPasses
from rankwise.tracing import CallId

TRIES = 4
"""Number of blocks whose joint cost is measured per step: the cheapest by their last measured costs."""


def solve(job: Job) -> Solution:
    """Return the change that removes blocks.

    The cost of each single block is measured first. Each step removes the block that has the smallest joint
    cost with the blocks of earlier steps, among the `TRIES` cheapest. The steps end at the share to keep or
    the number to remove, or before the joint cost exceeds the tolerance.
    """
    stacks, skipped = job.found
    total, count = sum(stack.size for stack in stacks), check(job)
    if "blocks" not in job.reused:
        first = passes_without_blocks(job.model, job.batches, job.seed, job.on_progress)
        job.reused["blocks"] = first, dict[frozenset[str], float]()
    passes, measured = job.reused["blocks"]
    places = {stack.block(number): (stack, number) for stack in stacks for number in stack.removable}
    done, planned = 0, len(places) + (0 if count is None else (count - 1) * TRIES)

    def joint(*blocks: str) -> float:
        """Return the increase of the loss without some blocks."""
        nonlocal done
        done += 1
        every = max(done, planned)
        if frozenset(blocks) not in measured:
            job.on_progress(f"pass {done} of about {every}: without {', '.join(blocks)}", done / every)
            cost = passes.mean(passes.without({}, blocks) - passes.losses)
            measured[frozenset(blocks)] = math.inf if math.isnan(cost) else cost
        return measured[frozenset(blocks)]

    alone = {name: joint(name) for name in places}
    added, removed = dict(alone), dict[str, float]()  # last measured increases, and joint costs
    plan: Plan = {}
    waiting: dict[str, float] = {}  # encoder blocks that can be removed after further decoder blocks
    limit, before, reason = math.inf, 0.0, ""
    if job.tolerance is not None:
        limit = job.tolerance * passes.reference()
    while added and (count is None or len(removed) < count):
        tried = sorted(added, key=added.__getitem__)[:TRIES]
        costs = {name: joint(*removed, name) if removed else alone[name] for name in tried}
        added |= {name: cost - before for name, cost in costs.items()}
        name = min(costs, key=costs.__getitem__)
        if costs[name] > limit:
            break
        del added[name]
        stack, number = places[name]
        larger = plan | {stack.name: plan.get(stack.name, set()) | {number}}
        if len(larger[stack.name]) == stack.size:
            reason = f"{name} is the last block of its stack"
        elif reason := difference(job.model, stacks, larger, job.short):
            pass
        elif reason := generation_error(job.model, stacks, larger, job.short):
            waiting[name] = costs[name] - before
        else:
            plan, before = larger, costs[name]
            removed[name] = before
            added |= waiting
            waiting.clear()
    if count is not None and len(removed) < count:
        raise CompressionError(
            f"model {type(job.model).__name__}",
            expected=f"{count} blocks that can be removed together",
            got=f"{len(removed)}; {reason}",
            fix=f"Remove at most {len(removed)}. The model is unchanged.",
        )
    notes = [
        f"Blocks: {len(removed)} of {total} removed, after {done} passes over the calibration data. There "
        f"the loss ({passes.loss.name}, {passes.loss.unit}) rises by {before:.4g}."
    ]
    change, cost = Change(job.model), math.nan
    if removed:
        change, cost, repaired = _repaired(job, passes, stacks, plan)
        notes += repaired
    steps = {name: step for step, name in enumerate(removed, start=1)}
    return Solution(
        change,
        blocks=[
            BlockRemoval(
                stack=stack.name,
                site=name,
                layer=number,
                cost=alone.get(name, math.nan),
                step=steps.get(name, 0),
                joint_cost=removed.get(name, math.nan),
            )
            for stack in stacks
            for number in range(stack.size)
            for name in [stack.block(number)]
        ],
        skipped=skipped,
        notes=notes,
        cost=cost,
    )


def _repaired(
    job: Job, calibration: GatedPasses, stacks: list[Stack], plan: Plan
) -> tuple[Change, float, list[str]]:
    """Return the removal of blocks with a repair if it lowers the loss, its held-out cost, and notes on it.

    The cost is a share of the loss. It is NaN if no data are held out.
    """
    change, passes, notes = removal(job.model, stacks, plan), calibration, list[str]()
    held_out = job.eval_batches is not job.batches
    if held_out:
        passes = passes_without_blocks(job.model, job.eval_batches, job.seed, job.on_progress)
    gone = [stack.block(number) for stack in stacks for number in plan.get(stack.name, ())]
    cost = passes.mean(passes.without({}, gone) - passes.losses)
    job.on_progress("repair", math.nan)
    if layers := repair(calibration, stacks, plan):
        with Change(job.model, modules=layers):
            losses = passes.without({CallId(name, 0): () for name in layers}, gone)
        repaired = passes.mean(losses - passes.losses)
        notes.append(
            f"Repair by least squares of {', '.join(layers)} ({'kept' if repaired < cost else 'left out'}): "
            f"the loss rises by {repaired:.4g} instead of {cost:.4g} on the "
            f"{'held-out' if held_out else 'calibration'} data."
        )
        if repaired < cost:
            change.modules, cost = layers, repaired
    return change, cost / (passes.reference() or math.nan) if held_out else math.nan, notes


def check(job: Job) -> int | None:
    """Return the number of blocks to remove; None for a tolerance.

    Raise `CompressionError` if the model has too few blocks.
    """
    stacks = job.found[0]
    if job.tolerance is not None:
        return None
    total = sum(stack.size for stack in stacks)
    most = sum(min(len(stack.removable), stack.size - 1) for stack in stacks)
    subject, got, count = "`remove`", f"{job.remove}", job.remove
    if count is None:
        assert job.keep is not None
        count = math.floor(total - job.keep * total + 1e-9)
        subject, got = "`keep`", f"{job.keep:g}, which removes {count}"
    if count > most:
        raise CompressionError(
            subject,
            expected=f"at most {most} of {total} blocks removed",
            got=got,
            fix="Each stack keeps a block, and blocks with another role stay.",
        )
    return count
