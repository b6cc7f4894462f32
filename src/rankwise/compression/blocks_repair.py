"""Repair a model without some blocks, without gradients: least squares of the layers before a gap."""

import copy
from collections.abc import Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.batches import map_tensors
from rankwise._internals.forward import HALF, AddedHook, Change, in_float32
from rankwise._internals.linalg import as_float64
from rankwise.compression.blocks_find import Plan, Stack
from rankwise.importance.gated_passes import GatedPasses, Removal
from rankwise.importance.losses import LossBatch
from rankwise.tracing import CapturedState, capture
from rankwise.tracing.projections import linear_parts

RIDGE = 0.01
"""Share of the mean squared input of the layer that is added to the squares of each input."""
Layers = dict[str, nn.Module]
"""Modules by the name of the module that they replace."""
Writer = tuple[str, str]
"""Names of the last linear layer of a block and of the norm that reads its output; "" if there is none."""


def repair(passes: GatedPasses, stacks: list[Stack], plan: Plan) -> Layers:
    """Return new layers for the blocks before gaps.

    With h the input of the last linear layer of the block before a gap, and d the state after the gap minus
    the state before the gap, the layer gets W + T, where T minimizes Σ w‖T h − d‖² over the calibration
    tokens, with a ridge. Norms divide states by their lengths, so w is 1/‖state after the gap‖². If a norm
    with gains g reads the output y of the layer, d is divided by g and h by the length of y. No trial tests
    that states read the layer in this way: the caller keeps the layers only if the loss falls.
    Cost: two passes over the calibration data per gap.
    Source: ReplaceMe (arXiv 2505.02819) fits a map of the output of this layer.
    """
    model, layers = passes.model, Layers()
    gone = frozenset(stack.block(number) for stack in stacks for number in plan.get(stack.name, ()))
    batches = [
        replace(batch, batch=map_tensors(batch.batch, lambda x: x.float() if x.dtype in HALF else x))
        for batch in passes.batches
    ]
    for stack in stacks:
        removed = plan.get(stack.name, set())
        for number in (number for number in range(stack.size - 1) if number not in removed):
            after = next((end for end in range(number + 1, stack.size) if end not in removed), stack.size)
            if after > number + 1:
                with Change(model, modules=layers), in_float32(model):
                    fitted = _fit(passes, batches, stack.block(number), stack.block(after - 1), gone)
                for name, layer in fitted.items():
                    layers[name] = layer.to(next(model.get_submodule(name).parameters()).dtype)
    return layers


def _fit(passes: GatedPasses, batches: list[LossBatch], block: str, last: str, gone: Set[str]) -> Layers:
    """Return the last layer of a block that is fitted to the states after block `last` of the whole model."""
    writer = _writer(passes, batches[0], block)
    if writer is None:
        return {}
    linear = copy.deepcopy(passes.model.get_submodule(writer[0]))
    norm: Any = passes.model.get_submodule(writer[1]) if writer[1] else None
    parts, shift = linear_parts(linear), getattr(norm, "bias", None)
    assert parts is not None
    weight, bias = parts
    offset = 0.0 if shift is None else as_float64(shift.detach())
    sums = list[list[Tensor]]()
    for batch in batches:
        target = _rows(passes, batch, last, frozenset())["state"]
        rows = _rows(passes, batch, block, gone, writer)
        if len(rows["inputs"]) != len(target) or rows["middle"].shape != target.shape:
            return {}  # an expert or a router
        scale = 1 / target.norm(dim=1, keepdim=True)  # √w
        inputs = rows["inputs"] if bias is None else F.pad(rows["inputs"], (0, 1), value=1.0)
        above = below = torch.ones_like(rows["state"][0])
        if norm is not None:
            middle = rows["middle"]
            centered = middle - middle.mean(1, keepdim=True) if isinstance(norm, nn.LayerNorm) else middle
            length = centered.square().mean(1, keepdim=True).sqrt()
            inputs, normal = inputs / length, centered / length * scale
            above, below = ((rows["written"] - offset) * scale * normal).sum(0), normal.square().sum(0)
        inputs = inputs * scale
        sums.append([inputs.mT @ inputs, inputs.mT @ ((target - rows["state"]) * scale), above, below])
    squares, products, above, below = (torch.stack(terms).sum(0) for terms in zip(*sums, strict=True))
    gain = above / below
    squares.diagonal().add_(RIDGE * squares.diagonal().mean())
    unread = gain.abs() < RIDGE * gain.abs().mean()
    added = torch.linalg.solve(squares, products / gain).masked_fill(unread, 0.0).mT
    weight.data.add_(added[:, : weight.shape[1]])
    if bias is not None:
        bias.data.add_(added[:, -1])
    return {writer[0]: linear}


def _writer(passes: GatedPasses, batch: LossBatch, block: str) -> Writer | None:
    """Return the last linear layer that a block calls, and the norm after it. None if others follow."""
    model, called = passes.model, list[str]()
    leaves = [
        f"{block}.{name}"
        for name, module in model.get_submodule(block).named_modules()
        if not any(module.children()) and isinstance(getattr(module, "weight", None), Tensor)
    ]
    hooks = [AddedHook(name, "after", lambda *_, name=name: called.append(name)) for name in leaves]
    with torch.no_grad(), Change(model, hooks=hooks):
        passes.loss.run(model, batch)
    last = next((name for name in reversed(called) if linear_parts(model.get_submodule(name))), "")
    norms = called[called.index(last) + 1 :] if last else []
    return None if not last or called.count(last) > 1 or len(norms) > 1 else (last, "".join(norms))


def _rows(
    passes: GatedPasses, batch: LossBatch, block: str, gone: Set[str], writer: Writer = ("", "")
) -> dict[str, Tensor]:
    """Return the states after a block of a pass without some blocks, in float64, real tokens only.

    With a writer, also return the inputs and the outputs of its layers: ``middle`` is the input of the norm.
    """
    states: list[CapturedState] = []
    seen: dict[str, Tensor] = {}

    def note(state: CapturedState) -> None:
        if state.layer > 0 and state.name == block:
            states.append(state)

    def keep(key: str, value: Tensor) -> None:
        seen[key] = value

    linear, norm = writer
    hooks = [
        AddedHook(linear, "before", lambda _, args, kwargs: keep("inputs", args[0])),
        AddedHook(linear, "after", lambda _, args, kwargs, output: keep("middle", output)),
        AddedHook(norm or linear, "after", lambda _, args, kwargs, output: keep("written", output)),
        AddedHook(norm, "before", lambda _, args, kwargs: keep("middle", args[0])),
    ]
    change = Change(passes.model, hooks=[hook for hook in hooks if hook.module])
    pass_without = capture(passes.model, on_state=note, intervention=Removal({}, gone))
    with torch.no_grad(), change, pass_without:  # no logits of all tokens, if the output head is known
        passes.loss.run(passes.model, batch)
    seen["state"], mask = states[0].tokens, states[0].mask
    masked = {key for key, values in seen.items() if mask is not None and values.shape[:2] == mask.shape}
    return {
        key: as_float64(values[mask] if key in masked else values.flatten(0, -2))
        for key, values in seen.items()
    }
