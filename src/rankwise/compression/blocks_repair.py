"""Repair a model without some blocks, without gradients: least squares of the layers before a gap."""

import copy
from collections.abc import Set
from typing import Any, NamedTuple

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


class Writer(NamedTuple):
    """Names of the last linear layer of a block, and of the norm that reads its output; "" if there is none.

    The output of the norm, or of the layer if there is no norm, is only added to the states.
    """

    linear: str
    norm: str


class Rows(NamedTuple):
    """Float64 values of the real tokens (N, channels)."""

    state: Tensor
    """States after a block."""
    inputs: Tensor
    """Inputs of the linear layer of a `Writer`."""
    middle: Tensor
    """Inputs of its norm, or outputs of the linear layer."""
    written: Tensor
    """Outputs of its norm, or of the linear layer."""


def repair(job: Job, stacks: list[Stack], plan: Plan) -> dict[str, nn.Module]:
    """Return new layers for the blocks before gaps, by the names of the layers that they replace.

    With h the input of the last linear layer of the block before a gap, and d the state after the gap minus
    the state before the gap, the layer gets W + T, where T minimizes Σ w‖T h − d‖² over the calibration
    tokens, with a ridge. Norms divide states by their lengths, so w is 1/‖state after the gap‖². If a norm
    with gains g reads the output y of the layer, d is divided by g, and h by the length of y; the gains are
    then fitted, too.
    Cost: two passes over the calibration data per gap, four with a norm.
    Source: ReplaceMe (arXiv 2505.02819) fits a map of the output of this layer.
    """
    model, layers = job.model, dict[str, nn.Module]()
    gone = frozenset(stack.block(number) for stack in stacks for number in plan.get(stack.name, ()))
    for stack in stacks:
        removed = plan.get(stack.name, set())
        for number in (number for number in range(stack.size - 1) if number not in removed):
            after = next((end for end in range(number + 1, stack.size) if end not in removed), stack.size)
            if after > number + 1:
                gap = stack.block(number), stack.block(after - 1)
                with Change(model, modules=layers), in_float32(model):
                    batches = [
                        map_tensors(batch, lambda tensor: tensor.float() if tensor.dtype in HALF else tensor)
                        for batch in (to_device(batch, device_of(model)) for batch in job.batches)
                    ]
                    fitted = _fit(model, *gap, gone, batches)
                for name, module in fitted.items():
                    layers[name] = copy.deepcopy(model.get_submodule(name))
                    layers[name].load_state_dict(module.state_dict())
    return layers


def _fit(model: nn.Module, block: str, last: str, gone: Set[str], batches: list[Any]) -> dict[str, nn.Module]:
    """Return the layers of a block that are fitted to the states after block `last`, by name."""
    writer = _writer(model, block, batches[0], gone)
    if writer is None:
        return {}
    layers = {name: copy.deepcopy(model.get_submodule(name)) for name in writer if name}
    linear, norm = layers[writer.linear], layers.get(writer.norm)
    weight, bias = _parts(linear)
    shift: Any = getattr(norm, "bias", None)
    shift = 0.0 if shift is None else as_float64(shift.detach())
    sums: Any = 0.0, 0.0, 0.0, 0.0
    for batch in batches:
        target = _rows(model, batch, last, frozenset()).state
        rows = _rows(model, batch, block, gone, writer)
        scale = 1 / target.norm(dim=1, keepdim=True)
        inputs = rows.inputs if bias is None else F.pad(rows.inputs, (0, 1), value=1.0)
        above = below = torch.ones_like(target[0])
        if norm is not None:
            inputs, normal = inputs * _inverse_length(rows, norm), rows.middle * _inverse_length(rows, norm)
            above = ((rows.written - shift) * normal * scale.square()).sum(0)
            below = (normal * scale).square().sum(0)
        inputs, wanted = inputs * scale, (target - rows.state) * scale
        terms = inputs.mT @ inputs, inputs.mT @ wanted, above, below
        sums = tuple(total + term for total, term in zip(sums, terms, strict=True))
    squares, products, above, below = sums
    gain = above / below
    squares.diagonal().add_(RIDGE * squares.diagonal().mean())
    small = gain.abs() < RIDGE * gain.abs().mean()
    added = torch.linalg.solve(squares, products / gain).masked_fill(small, 0.0).mT
    weight.data.add_(added[:, : weight.shape[1]])
    if bias is not None:
        bias.data.add_(added[:, -1])
    if norm is None:
        return layers
    above = below = torch.zeros_like(gain)
    for batch in batches:
        target, rows = _rows(model, batch, last, frozenset()).state, _rows(model, batch, block, gone, writer)
        with Change(model, modules={writer.linear: linear}):
            new = _rows(model, batch, block, gone, writer).written - shift
        scale = 1 / target.square().sum(1, keepdim=True)
        above = above + ((target - rows.state + rows.written - shift) * new * scale).sum(0)
        below = below + (new.square() * scale).sum(0)
    gains: Any = norm.weight
    offset = (gain - as_float64(gains)).mean().round()  # 1 if the norm multiplies by 1 + weight
    gains.data.copy_(above / below * (as_float64(gains) + offset) - offset)
    return layers


def _inverse_length(rows: Rows, norm: nn.Module) -> Tensor:
    """Return the factor by which a norm multiplies the numbers of each token, without its gains."""
    if isinstance(norm, nn.LayerNorm):
        return 1 / rows.middle.std(1, keepdim=True, correction=0)
    return 1 / rows.middle.square().mean(1, keepdim=True).sqrt()


def _parts(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    parts = linear_parts(module)
    assert parts is not None
    return parts


def _writer(model: nn.Module, block: str, batch: Any, gone: Set[str]) -> Writer | None:
    """Return the layers that write the last sum of a block. Return None if a trial finds no such layers."""
    called: list[str] = []
    leaves = [
        f"{block}.{name}"
        for name, module in model.get_submodule(block).named_modules()
        if name and not any(module.children()) and isinstance(getattr(module, "weight", None), Tensor)
    ]
    hooks = [AddedHook(name, "after", lambda *_, name=name: called.append(name)) for name in leaves]
    with torch.no_grad(), Change(model, hooks=hooks):
        run_model(model, batch)
    linear = [name for name in called if linear_parts(model.get_submodule(name)) is not None]
    norms = called[called.index(linear[-1]) + 1 :] if linear else []
    if not linear or called.count(linear[-1]) > 1 or len(norms) > 1:
        return None
    writer = Writer(linear[-1], *(norms or [""]))
    before = _rows(model, batch, block, gone, writer)
    layer = copy.deepcopy(model.get_submodule(writer.linear))
    weight, _ = _parts(layer)
    weight.data[::2] *= 1.5
    with Change(model, modules={writer.linear: layer}):
        after = _rows(model, batch, block, gone, writer)
    changed = after.middle - before.middle
    if before.inputs.shape[0] != changed.shape[0] or before.state.shape != changed.shape:
        return None
    added = before.inputs @ as_float64(weight.detach()).mT
    added[:, ::2] /= 3
    added[:, 1::2] = 0
    exact = relative_error(changed, added) <= 1e-3
    exact &= relative_error(after.state - before.state, after.written - before.written) <= 1e-3
    return writer if exact else None


def _rows(model: nn.Module, batch: Any, block: str, gone: Set[str], writer: Writer | None = None) -> Rows:
    """Return values of one pass without some blocks. Without a writer, all of them are the states."""
    states: list[CapturedState] = []
    seen: dict[str, Tensor] = {}

    def note(state: CapturedState) -> None:
        if state.layer > 0 and state.name == block:
            states.append(state)

    def keep(key: str, value: Tensor) -> None:
        seen[key] = value

    hooks = []
    if writer is not None:
        hooks = [
            AddedHook(writer.linear, "before", lambda _, args, kwargs: keep("inputs", args[0])),
            AddedHook(writer.linear, "after", lambda _, args, kwargs, output: keep("middle", output)),
            AddedHook(writer[-1] or writer[0], "after", lambda _, args, kwargs, out: keep("written", out)),
        ]
        if writer.norm:
            hooks.append(AddedHook(writer.norm, "before", lambda _, args, kwargs: keep("middle", args[0])))
    removal = Removal({}, gone)
    with torch.no_grad(), Change(model, hooks=hooks), capture(model, on_state=note, intervention=removal):
        run_model(model, batch)
    tokens, mask = states[0].tokens, states[0].mask

    def real(key: str) -> Tensor:
        values = seen.get(key, tokens)
        fits = mask is not None and values.shape[:2] == mask.shape
        return as_float64(values[mask] if fits else values.flatten(0, -2))

    return Rows(as_float64(real("state")), *(real(key) for key in ("inputs", "middle", "written")))
