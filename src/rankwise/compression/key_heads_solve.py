r"""The part ``key-heads``: fewer key heads, which more query heads share, by merging aligned heads.

Adjacent key heads i become one. Their keys k_i are approximated by the new keys k times T_iᵀ, and T_i goes
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

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from rankwise._internals.batches import real_tokens, to_device
from rankwise._internals.forward import AddedHook, Change, device_of, run_model
from rankwise._internals.linalg import as_float64, roots_of
from rankwise.compression.evaluate import added_loss, measure_losses
from rankwise.compression.key_heads_find import KeyHeads, Merge, merging
from rankwise.compression.plain import check_plain
from rankwise.compression.records import MergedKeys
from rankwise.compression.trials import Job, Solution, check_tokens
from rankwise.errors import CompressionError
from rankwise.tracing import RecordedCall, record_calls
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
    total = layers[0].count
    moments = collect_moments(job, layers)
    check_tokens(moments[0].tokens, layers[0].query_key.width)
    data = [to_device(batch, device_of(job.model)) for batch in job.batches]
    before = measure_losses(job.model, data) if job.tolerance is not None else []
    if job.tolerance is not None and not before:
        expected, got = "a loss of labels or of next tokens, of which it is a share", "a model without one"
        raise CompressionError("`tolerance`", expected=expected, got=got, fix="Give `keep` instead.")
    chosen, left = Change(job.model), total
    for count in check(job):
        change = merging(job.model, {moment.layer: moment.merge(count) for moment in moments})
        _fit_outputs(job, layers, change)
        if job.tolerance is not None:
            with change:
                cost = added_loss(before, measure_losses(job.model, data))
            if not cost["loss_added"] <= job.tolerance * cost["loss_before"]:
                break
        chosen, left = change, count
    if left == total:
        return Solution(chosen, skipped=skipped, notes=["Key heads: none merged."])
    with chosen:
        check_plain(job.model, job.short)
    places = [layer.query_key for layer in layers]
    return Solution(
        chosen,
        merged=[
            MergedKeys(stack=x.stack, site=x.name, layer=x.layer, before=total, after=left) for x in places
        ],
        key_heads={place.name: [*range(0, total, total // left)] for place in places},
        skipped=skipped,
        notes=[f"Key heads: {left} of {total} remain in every layer, a share of {left / total:.3g}."],
    )


def check(job: Job) -> list[int]:
    """Return numbers of key heads to try, largest first: one number if there is a share to keep.

    Raise `CompressionError` if no number of key heads is within the share to keep.
    """
    layer = job.found[0][0]
    divisors, total = layer.divisors, layer.count
    fitting = [count for count in divisors if job.keep is None or count >= job.keep * total - 1e-9]
    if not fitting:
        raise CompressionError(
            "`keep`",
            expected=f"at most {divisors[0] / total:.3g}: a number of key heads must divide {total}",
            got=f"{job.keep:g}",
            fix=f"`keep` can be {' or '.join(f'{count / total:.3g}' for count in divisors)}.",
        )
    return fitting if job.keep is None else fitting[-1:]


def _passes(job: Job, names: list[str], what: str) -> Iterator[tuple[Any, dict[str, RecordedCall]]]:
    """Run each batch, and yield it with the last call of each of some modules."""
    for count, batch in enumerate(job.batches):
        job.on_progress(f"{what} of batch {count + 1} of {len(job.batches)}", count / len(job.batches))
        batch = to_device(batch, device_of(job.model))
        with record_calls(job.model, names) as calls, torch.no_grad():
            run_model(job.model, batch)
        yield batch, {call.name: call for call in calls}


# --- moments ---------------------------------------------------------------------------------------------


class HeadMoments:
    """Second moments of the keys and the values of one layer, all heads side by side, and their weights."""

    def __init__(self, layer: KeyHeads, output: Float64[Tensor, "D O"]) -> None:
        self.layer, self.tokens = layer, 0
        (count, width), value_width = layer.query_key.key.channels.shape, layer.value.channels.shape[1]
        self.keys = torch.zeros(count, width, count, width, dtype=torch.float64)
        self.values = torch.zeros(count, value_width, count, value_width, dtype=torch.float64)
        self.queries = torch.zeros(count, width, width, dtype=torch.float64)
        columns = output.mT[layer.output.channels].unflatten(0, (count, -1))
        self.outputs = torch.einsum("gmve,gmwe->gvw", columns, columns)

    def add(self, outputs: dict[str, Tensor], real: Tensor) -> None:
        """Add the outputs of the linear layers for one batch; `real` marks tokens that count."""
        sides = self.layer.query_key.query, self.layer.query_key.key, self.layer.value
        rows = (outputs[side.module].reshape(real.numel(), -1)[real.flatten()] for side in sides)
        query, key, value = (
            as_float64(x[:, side.channels.to(x.device)]) for x, side in zip(rows, sides, strict=True)
        )
        query = query.unflatten(1, (self.layer.count, -1))
        self.keys += torch.einsum("ngi,nhj->gihj", key, key).cpu()
        self.values += torch.einsum("ngi,nhj->gihj", value, value).cpu()
        self.queries += torch.einsum("ngmi,ngmj->gij", query, query).cpu()
        self.tokens += len(key)

    def merge(self, count: int) -> Merge:
        """Return the merge to `count` heads of least squared error."""
        key, query = torch.zeros_like(self.queries), torch.zeros_like(self.queries)
        value, output = torch.zeros_like(self.outputs), torch.zeros_like(self.outputs)
        free = torch.tensor(self.layer.query_key.unrotated, dtype=torch.long)
        x, y = self.layer.query_key.pairs.mT
        size = self.layer.count // count
        for heads in (slice(first, first + size) for first in range(0, self.layer.count, size)):
            keys, queries = self.keys[heads, :, heads], self.queries[heads]
            if len(free):
                at = slice(None), free[:, None], free
                key[heads][at], query[heads][at] = _factors(keys[:, free][..., free], queries[at])
            if len(x):
                blocks = keys.permute(1, 3, 0, 2)  # (K, K, c, c)
                numbers = torch.complex(blocks[x, x] + blocks[y, y], blocks[y, x] - blocks[x, y])
                energy = queries.diagonal(dim1=1, dim2=2)
                weights = (energy[:, x] + energy[:, y]).mT  # (P, c)
                roots = weights.clamp(min=RIDGE * weights.mean().clamp(min=1e-300)).sqrt()
                vectors = torch.linalg.eigh(roots[:, :, None] * numbers * roots[:, None]).eigenvectors
                largest = vectors[..., -1]
                _set_pairs(key[heads], x, y, (largest.conj() * roots).mT)
                _set_pairs(query[heads], x, y, (largest.conj() / roots).mT)
            value[heads], back = _factors(self.values[heads, :, heads], self.outputs[heads])
            output[heads] = back.mT
        return Merge(count, query, key, value, output)


def _factors(
    moments: Float64[Tensor, "c K c K"], metric: Float64[Tensor, "c K K"]
) -> tuple[Float64[Tensor, "c K K"], Float64[Tensor, "c K K"]]:
    """Return S_i^½ V_i and S_i^−½ V_i."""
    size, width = metric.shape[:2]
    roots, inverses = roots_of(metric, RIDGE)
    whitened = torch.einsum("iab,ibjc,jcd->iajd", roots, moments, roots).reshape(size * width, -1)
    largest = torch.linalg.eigh(whitened).eigenvectors[:, -width:].unflatten(0, (size, width))
    return roots @ largest, inverses @ largest


def _set_pairs(factor: Tensor, x: Tensor, y: Tensor, numbers: Complex128[Tensor, "c P"]) -> None:
    """Set the factors that multiply the pairs x + iy of rows by complex numbers."""
    factor[:, x, x] = factor[:, y, y] = numbers.real
    factor[:, x, y], factor[:, y, x] = numbers.imag, -numbers.imag


def collect_moments(job: Job, layers: list[KeyHeads]) -> list[HeadMoments]:
    """Return the moments of each layer, from one pass over the calibration data."""
    weights = [linear_parts(job.model.get_submodule(layer.output.module)) for layer in layers]
    moments = [
        HeadMoments(layer, as_float64(parts[0].detach()).cpu())  # type: ignore[index]
        for layer, parts in zip(layers, weights, strict=True)
    ]
    sides = [side for x in layers for side in (x.query_key.query, x.query_key.key, x.value)]
    for batch, calls in _passes(job, [side.module for side in sides], "keys and values"):
        outputs = {name: call.output for name, call in calls.items()}
        for moment in moments:
            moment.add(outputs, real_tokens(batch, outputs[moment.layer.value.module].shape[:2]))
    return moments


def _fit_outputs(job: Job, layers: list[KeyHeads], change: Change) -> None:
    """Change the output layers to the least squares of the original's outputs.

    Each batch runs twice. In the second run, each output layer returns the original's output, so that each
    layer gets the inputs of the original.
    """
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    names = [layer.output.module for layer in layers]
    for batch, original in _passes(job, names, "outputs"):
        hooks = [AddedHook(name, "after", lambda *_, x=x.output: x) for name, x in original.items()]
        with change, Change(job.model, hooks=hooks), torch.no_grad(), record_calls(job.model, names) as calls:
            run_model(job.model, batch)
        for call in calls:
            module: Any = change.modules[call.name]
            real = real_tokens(batch, call.output.shape[:2]).flatten()
            heads, wanted = (
                as_float64(x.reshape(len(real), -1)[real]) for x in (call.args[0], original[call.name].output)
            )
            left = wanted - heads @ as_float64(module.weight.detach()).mT
            left -= 0 if module.bias is None else as_float64(module.bias.detach())
            square, cross = sums.get(call.name, (0, 0))
            sums[call.name] = square + heads.mT @ heads, cross + heads.mT @ left
    for name, (square, cross) in sums.items():
        square.diagonal().add_(OUTPUT_RIDGE * square.diagonal().mean())
        weight: Any = change.modules[name].weight
        with torch.no_grad():
            weight.copy_(as_float64(weight) + torch.linalg.solve(square, cross).mT)
