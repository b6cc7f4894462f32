"""Repair a model without some blocks, without gradients: least squares of the linear layer before a gap."""

import copy
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.batches import map_tensors, to_device
from rankwise._internals.forward import HALF, AddedHook, Change, device_of, in_float32, run_model
from rankwise._internals.linalg import as_float64
from rankwise.compression.blocks_find import Plan, Stack
from rankwise.compression.trials import Job, relative_error
from rankwise.importance.gated_passes import Removal
from rankwise.tracing import CapturedState, capture
from rankwise.tracing.projections import linear_parts

RIDGE = 0.01
"""Share of the mean squared input of the layer that is added to the squares of each input."""


def repair(job: Job, stacks: list[Stack], plan: Plan) -> dict[str, nn.Module]:
    """Return new linear layers for the blocks before gaps, by the names of the layers that they replace.

    A layer is the last one of the block before a gap, if its output is only added to the states. With h its
    input and d the state after the gap minus the state before the gap, it gets W + T, where T minimizes
    Σ w‖T h − d‖² over the calibration tokens, with a ridge. As the norms of the next block divide states by
    their lengths, w is 1/‖state after the gap‖². Cost: two passes over the calibration data per gap.
    Source: ReplaceMe (arXiv 2505.02819) fits a map of the output of this layer.
    """
    model, layers = job.model, dict[str, nn.Module]()
    gone = frozenset(stack.block(number) for stack in stacks for number in plan.get(stack.name, ()))
    for stack in stacks:
        removed = plan.get(stack.name, set())
        for number in (number for number in range(stack.size - 1) if number not in removed):
            after = next((end for end in range(number + 1, stack.size) if end not in removed), stack.size)
            if after == number + 1:
                continue
            block, last = stack.block(number), stack.block(after - 1)
            with Change(model, modules=layers), in_float32(model):
                batches = [
                    map_tensors(batch, lambda tensor: tensor.float() if tensor.dtype in HALF else tensor)
                    for batch in (to_device(batch, device_of(model)) for batch in job.batches)
                ]
                layer = _last_linear(model, block, batches[0], gone)
                if not layer:
                    continue
                bias, squares, products = model.get_submodule(layer).bias is not None, [], []
                for batch in batches:
                    target, _ = _states(model, batch, last, frozenset())
                    state, inputs = _states(model, batch, block, gone, layer)
                    rows = as_float64(F.pad(inputs, (0, 1), value=1.0) if bias else inputs)
                    weighted = rows / as_float64(target).square().sum(1, keepdim=True).clamp_min(1e-300)
                    squares.append(weighted.mT @ rows)
                    products.append(weighted.mT @ as_float64(target - state))
                total = torch.stack(squares).sum(0)
                total.diagonal().add_(RIDGE * total.diagonal().mean())
                added = torch.linalg.solve(total, torch.stack(products).sum(0)).mT
            layers[layer] = copy.deepcopy(model.get_submodule(layer))
            parts = linear_parts(layers[layer])
            assert parts is not None
            parts[0].data.add_(added[:, : parts[0].shape[1]])
            if parts[1] is not None:
                parts[1].data.add_(added[:, -1])
    return layers


def _last_linear(model: nn.Module, block: str, batch: Any, gone: Set[str]) -> str:
    """Return the name of a block's last linear layer. Return "" if its output is not just added to states."""
    called: list[str] = []
    names = [
        f"{block}.{name}"
        for name, module in model.get_submodule(block).named_modules()
        if linear_parts(module) is not None
    ]
    hooks = [AddedHook(name, "after", lambda *_, name=name: called.append(name)) for name in names]
    with torch.no_grad(), Change(model, hooks=hooks):
        run_model(model, batch)
    if not called:
        return ""
    layer = copy.deepcopy(model.get_submodule(called[-1]))
    parts = linear_parts(layer)
    assert parts is not None
    state, inputs = _states(model, batch, block, gone, called[-1])
    before = inputs @ parts[0].detach().mT
    parts[0].data.mul_(1.5)
    with Change(model, modules={called[-1]: layer}):
        after, _ = _states(model, batch, block, gone)
    exact = before.shape == state.shape and relative_error(2 * (after - state), before) <= 1e-3
    return called[-1] if exact else ""


def _states(
    model: nn.Module, batch: Any, block: str, gone: Set[str], layer: str = ""
) -> tuple[Tensor, Tensor]:
    """Return the states after a block, and the inputs of a layer, of the real tokens, without some blocks."""
    states, inputs = list[CapturedState](), list[Tensor]()

    def note(state: CapturedState) -> None:
        if state.layer > 0 and state.name == block:
            states.append(state)

    hooks = [AddedHook(layer, "before", lambda module, args, kwargs: inputs.append(args[0]))] if layer else []
    removal = Removal({}, gone)
    with torch.no_grad(), Change(model, hooks=hooks), capture(model, on_state=note, intervention=removal):
        run_model(model, batch)
    mask = states[0].mask

    def real(tokens: Tensor) -> Tensor:
        fits = mask is not None and tokens.shape[:2] == mask.shape
        return tokens[mask] if fits else tokens.flatten(0, -2)

    return real(states[0].tokens), real(inputs[0] if inputs else states[0].tokens)
