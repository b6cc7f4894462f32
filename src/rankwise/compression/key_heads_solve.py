r"""The part ``key-heads``: fewer key heads, which more query heads share, by merging aligned heads.

Key heads i of a group become one. Their keys k_i are approximated by the new keys k times T_iᵀ, and T_i goes
into the queries, so that logits become (q T_i)·k. Among all k and T_i, the least squared error of the logits
over all pairs of calibration tokens has, by Eckart and Young, k = Σ_i k_i S_i^½ V_i and T_i = S_i^−½ V_i: S_i
is Σ qqᵀ of the queries that read head i, and the columns of V = [V_1; …; V_c] are the K largest eigenvectors
of the second moments of the k_i S_i^½, side by side. With rotary positions, T_i commutes with the rotation.
Each pair of channels is then one complex number, and its T_i are complex numbers: the largest eigenvector of
a complex c × c matrix. Values are merged like keys, with S_i from the output layer, which takes the T_i. At
last, the output layer gets the least squares of its old outputs, each layer on the inputs of the original.

Source: alignment by rotations that commute with rotary positions is from arXiv 2412.20677; there, merged
heads are the means of rotated heads.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from rankwise._internals.batches import first_sequences, real_tokens, to_device
from rankwise._internals.forward import AddedHook, Change, device_of, run_model
from rankwise._internals.linalg import as_float64
from rankwise.compression.evaluate import added_loss, measure_losses
from rankwise.compression.key_heads_find import KeyHeads, Merge, merging
from rankwise.compression.plain import check_plain
from rankwise.compression.records import MergedKeys
from rankwise.compression.trials import Job, Solution, check_tokens
from rankwise.errors import CompressionError
from rankwise.tracing import record_calls
from rankwise.tracing.projections import linear_parts

RIDGE = 1e-6
"""Added to moments whose root is inverted, relative to their mean eigenvalue."""
OUTPUT_RIDGE = 1e-2
"""Pull of the least squares toward the merged output layer, relative to the mean eigenvalue of its inputs."""


def solve(job: Job) -> Solution:
    """Return the change that merges key heads.

    The number of key heads that remain divides their number. It is the least of at least the share to keep,
    or the least whose cost on the calibration data is within the tolerance.
    """
    layers, skipped = job.found
    counts = _counts(job, layers)
    moments = _collect(job, layers)
    check_tokens(moments[layers[0].name].tokens, layers[0].query_key.width)
    before = measure_losses(job.model, _on_device(job)) if job.tolerance is not None else []
    chosen: tuple[Change, dict[KeyHeads, list[Merge]]] | None = None
    for count in counts:
        plan = {layer: moments[layer.name].merges(count) for layer in layers}
        change = merging(job.model, plan)
        _fit_outputs(job, layers, change)
        if job.tolerance is not None:
            with change:
                cost = added_loss(before, measure_losses(job.model, _on_device(job)))
            if not cost or not cost["loss_added"] <= job.tolerance * cost["loss_before"]:
                break
        chosen = change, plan
    if chosen is None:
        return Solution(Change(job.model), skipped=skipped, notes=["Key heads: none merged."])
    change, plan = chosen
    with change:
        check_plain(job.model, to_device(first_sequences(job.batches[0], 2), device_of(job.model)))
    records = [
        MergedKeys(
            stack=layer.query_key.stack,
            site=layer.name,
            layer=layer.query_key.layer,
            groups=[merge.heads for merge in merges],
            key_error=moments[layer.name].error("key", merges),
            value_error=moments[layer.name].error("value", merges),
        )
        for layer, merges in plan.items()
    ]
    count, total = len(records[0].groups), layers[0].count
    return Solution(
        change,
        merged=records,
        key_heads={record.site: [heads[0] for heads in record.groups] for record in records},
        kl={record.site: math.nan for record in records},
        skipped=skipped,
        notes=[f"Key heads: {count} of {total} remain in every layer, a share of {count / total:.3g}."],
    )


def check(job: Job) -> None:
    """Raise `CompressionError` if no number of key heads is within the share to keep."""
    _counts(job, job.found[0])


def _counts(job: Job, layers: list[KeyHeads]) -> list[int]:
    """Return numbers of key heads to try, largest first: one number if there is a share to keep."""
    divisors, total = layers[0].divisors, layers[0].count
    if job.keep is None:
        return divisors
    fitting = [count for count in divisors if count >= job.keep * total - 1e-9]
    if not fitting:
        raise CompressionError(
            "`keep`",
            expected=f"at most {divisors[0] / total:.3g}: a number of key heads must divide {total}",
            got=f"{job.keep:g}",
            fix=f"`keep` can be {' or '.join(f'{count / total:.3g}' for count in divisors)}.",
        )
    return fitting[-1:]


def _on_device(job: Job) -> list[Any]:
    return [to_device(batch, device_of(job.model)) for batch in job.batches]


# --- moments ---------------------------------------------------------------------------------------------


class HeadMoments:
    """Second moments of the keys and the values of one layer, all heads side by side, and their weights."""

    def __init__(self, layer: KeyHeads, output: Float64[Tensor, "D O"]) -> None:
        self.layer, self.tokens = layer, 0
        key, value = layer.query_key.key.channels, layer.value.channels
        self.keys = torch.zeros(key.numel(), key.numel(), dtype=torch.float64)
        self.values = torch.zeros(value.numel(), value.numel(), dtype=torch.float64)
        self.queries = torch.zeros(layer.count, key.shape[1], key.shape[1], dtype=torch.float64)
        columns = output.mT[layer.output.channels].unflatten(0, (layer.count, layer.group))
        self.outputs = torch.einsum("gmve,gmwe->gvw", columns, columns)

    def add(self, outputs: dict[str, Tensor], real: Tensor) -> None:
        """Add the outputs of the linear layers for one batch; `real` marks tokens that count."""
        layer = self.layer

        def heads(side: Any) -> Tensor:
            rows = outputs[side.module].reshape(real.numel(), -1)[real.flatten()]
            return as_float64(rows[:, side.channels.to(rows.device)])

        key, value = (heads(side).flatten(1) for side in (layer.query_key.key, layer.value))
        query = heads(layer.query_key.query).unflatten(1, (layer.count, layer.group))
        self.keys += (key.mT @ key).cpu()
        self.values += (value.mT @ value).cpu()
        moments = torch.einsum("ngmi,ngmj->gij", query, query).cpu()
        x, y = layer.query_key.pairs.mT  # over all positions, both channels of a pair have the same share
        energy = moments.diagonal(dim1=1, dim2=2).clone()
        energy[:, x] = energy[:, y] = (energy[:, x] + energy[:, y]) / 2
        rotated = layer.query_key.pairs.flatten()
        moments[:, rotated] = moments[:, :, rotated] = 0
        self.queries += moments.diagonal_scatter(energy, dim1=1, dim2=2)
        self.tokens += len(key)

    def merges(self, count: int) -> list[Merge]:
        """Return merges to `count` heads. Groups of heads are sorted by their first head."""
        return [self.merge(heads) for heads in self.groups(count)]

    def merge(self, heads: list[int]) -> Merge:
        """Return the merge of some heads of least squared error."""
        query_key = self.layer.query_key
        width, size = query_key.width, len(heads)
        key, query = (torch.zeros(size, width, width, dtype=torch.float64) for _ in range(2))
        free = torch.tensor(query_key.unrotated, dtype=torch.long)
        if len(free):
            at = free[:, None], free
            blocks = self._blocks(self.keys, heads)[:, free][:, :, :, free]
            key[:, *at], query[:, *at] = _factors(blocks, self.queries[heads][:, *at])
        if len(query_key.pairs):
            x, y = query_key.pairs.mT
            blocks = self._blocks(self.keys, heads).permute(1, 3, 0, 2)  # (K, K, c, c)
            moments = torch.complex(blocks[x, x] + blocks[y, y], blocks[y, x] - blocks[x, y])
            energy = self.queries[heads].diagonal(dim1=1, dim2=2)
            weights = (energy[:, x] + energy[:, y]).mT  # (P, c)
            roots = weights.clamp(min=RIDGE * weights.mean().clamp(min=1e-300)).sqrt()
            largest = torch.linalg.eigh(roots[:, :, None] * moments * roots[:, None]).eigenvectors[..., -1]
            for factor, numbers in ((key, largest.conj() * roots), (query, largest.conj() / roots)):
                _set_pairs(factor, x, y, numbers.mT)
        value, output = _factors(self._blocks(self.values, heads), self.outputs[heads])
        return Merge(heads, key, query, value, output.mT)

    def groups(self, count: int) -> list[list[int]]:
        """Return groups of as many heads each, by swaps that lower the errors of merging their pairs."""
        total = self.layer.count
        size = total // count
        pairs = torch.zeros(total, total, dtype=torch.float64)
        for pair in combinations(range(total), 2) if count > 1 else ():
            merged = [self.merge([*pair])]
            errors = [self.error(what, merged) for what in ("key", "value")]
            pairs[pair] = pairs[pair[::-1]] = sum(error**2 for error in errors)
        groups = [[*range(first, first + size)] for first in range(0, total, size)]

        def cost(groups: Sequence[list[int]]) -> float:
            return sum(float(pairs[group][:, group].sum()) for group in groups)

        better = True
        while better:
            better = False
            for a, b in combinations(groups, 2):
                for i in range(size):
                    for j in range(size):
                        now = cost((a, b))
                        a[i], b[j] = b[j], a[i]
                        if cost((a, b)) < now * (1 - 1e-9):
                            better = True
                        else:
                            a[i], b[j] = b[j], a[i]
        return sorted(sorted(group) for group in groups)

    def error(self, what: str, merges: list[Merge]) -> float:
        """Return the relative error of logits ("key") or of the output ("value") that merging causes."""
        lost = whole = 0.0
        for merge in merges:
            moments = self._blocks(self.keys if what == "key" else self.values, merge.heads)
            to, back = (merge.key, merge.query.mT) if what == "key" else (merge.value, merge.output)
            metric = (self.queries if what == "key" else self.outputs)[merge.heads]
            size, width = metric.shape[:2]
            flat = moments.reshape(size * width, -1)
            residual = torch.eye(size * width, dtype=torch.float64) - to.flatten(0, 1) @ torch.cat([*back], 1)
            weight = torch.block_diag(*metric)
            lost += float((residual.mT @ flat @ residual * weight).sum())
            whole += float((flat * weight).sum())
        return math.sqrt(max(lost, 0.0) / max(whole, 1e-300))

    def _blocks(self, moments: Tensor, heads: list[int]) -> Float64[Tensor, "c K c K"]:
        """Return the moments of some heads."""
        width = len(moments) // self.layer.count
        blocks = moments.reshape(self.layer.count, width, self.layer.count, width)
        return blocks[heads][:, :, heads]


def _factors(
    moments: Float64[Tensor, "c K c K"], metric: Float64[Tensor, "c K K"]
) -> tuple[Float64[Tensor, "c K K"], Float64[Tensor, "c K K"]]:
    """Return S_i^½ V_i and S_i^−½ V_i."""
    size, width = metric.shape[:2]
    ridge = RIDGE * metric.diagonal(dim1=1, dim2=2).mean().clamp(min=1e-300)
    values, vectors = torch.linalg.eigh(metric + ridge * torch.eye(width, dtype=torch.float64))
    root = values.clamp(min=ridge).sqrt()[:, None]
    roots, inverses = ((vectors * scale) @ vectors.mT for scale in (root, 1 / root))
    whitened = torch.einsum("iab,ibjc,jcd->iajd", roots, moments, roots).reshape(size * width, -1)
    largest = torch.linalg.eigh(whitened).eigenvectors[:, -width:].unflatten(0, (size, width))
    return roots @ largest, inverses @ largest


def _set_pairs(factor: Tensor, x: Tensor, y: Tensor, numbers: Complex128[Tensor, "c P"]) -> None:
    """Set the factors that multiply the pairs x + iy of rows by complex numbers."""
    factor[:, x, x] = factor[:, y, y] = numbers.real
    factor[:, x, y], factor[:, y, x] = numbers.imag, -numbers.imag


def _collect(job: Job, layers: list[KeyHeads]) -> dict[str, HeadMoments]:
    """Return the moments of each layer, from one pass over the calibration data."""
    moments = {}
    names: set[str] = set()
    for layer in layers:
        weight, _ = linear_parts(job.model.get_submodule(layer.output.module))  # type: ignore[misc]
        moments[layer.name] = HeadMoments(layer, as_float64(weight.detach()).cpu())
        names |= {side.module for side in (layer.query_key.query, layer.query_key.key, layer.value)}
    for count, batch in enumerate(_on_device(job)):
        step = f"keys and values of batch {count + 1} of {len(job.batches)}"
        job.on_progress(step, count / len(job.batches))
        with record_calls(job.model, names) as calls, torch.no_grad():
            run_model(job.model, batch)
        outputs = {call.name: call.output for call in calls}
        for moment in moments.values():
            real = real_tokens(batch, outputs[moment.layer.value.module].shape[:2])
            moment.add(outputs, real)
    return moments


# --- least squares of the outputs ------------------------------------------------------------------------


def _fit_outputs(job: Job, layers: list[KeyHeads], change: Change) -> None:
    """Change the output layers to the least squares of the original's outputs.

    Each batch runs twice. In the second run, each output layer returns the original's output, so that each
    layer gets the inputs of the original.
    """
    names = [layer.output.module for layer in layers]
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for count, batch in enumerate(_on_device(job)):
        job.on_progress(f"outputs of batch {count + 1} of {len(job.batches)}", count / len(job.batches))
        with record_calls(job.model, names) as calls, torch.no_grad():
            run_model(job.model, batch)
        wanted = {call.name: call.output for call in calls}
        hooks = [AddedHook(name, "after", lambda *_, x=x: x) for name, x in wanted.items()]
        with change, Change(job.model, hooks=hooks), torch.no_grad(), record_calls(job.model, names) as calls:
            run_model(job.model, batch)
        for call in calls:
            module: Any = change.modules[call.name]
            real = real_tokens(batch, wanted[call.name].shape[:2]).flatten()
            heads, target = (
                as_float64(x.reshape(len(real), -1)[real]) for x in (call.args[0], wanted[call.name])
            )
            left = target - heads @ as_float64(module.weight.detach()).mT
            left -= 0 if module.bias is None else as_float64(module.bias.detach())
            square, cross = sums.get(call.name, (0, 0))
            sums[call.name] = square + heads.mT @ heads, cross + heads.mT @ left
    for name, (square, cross) in sums.items():
        ridge = OUTPUT_RIDGE * square.diagonal().mean()
        step = torch.linalg.solve(square + ridge * torch.eye(len(square)).to(square), cross)
        weight: Any = change.modules[name].weight
        with torch.no_grad():
            weight.copy_(as_float64(weight) + step.mT)
