"""A gate ξ = 1 on what every head and block gives, its gradient for each sequence, and what cuts it off."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rankwise.tracing import BlockOutput, CallId, HeadOutputs, Intervention

NO_BACKWARD = "WarnNotImplemented"
"""What autograd records of an operation that has no backward, such as int8 products: it gives no gradient."""


class Ungated(torch.autograd.Function):
    """``ξ · part + rest`` at ξ = 1, in forward the very bits that were there: nothing is multiplied.

    In backward ξ gets the sum of gradient times part over all axes that it has not.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, values: Tensor, part: Tensor) -> Tensor:
        """What was there, in memory of its own."""
        ctx.save_for_backward(part)
        ctx.axes = gate.dim()
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradient of ξ and that of the values."""
        (part,), (gradient,) = ctx.saved_tensors, gradients
        wide = torch.promote_types(gradient.dtype, torch.float32)
        product = gradient.to(wide) * part.to(wide)
        return product.flatten(ctx.axes).sum(-1), gradient, None


class Gates(Intervention):
    """Puts a gate on what every head gives, (B, H), and on what every block adds, (B,).

    Args:
        blocks: names of the blocks.
        sequences: how many there are in the batch.
        means: of each call what is there at ξ = 0, (H, V); zero without.
    """

    def __init__(
        self, blocks: Iterable[str], sequences: int, means: Mapping[CallId, Tensor] | None = None
    ) -> None:
        self.blocks = frozenset(blocks)
        self._sequences, self._means = sequences, means
        self.of_heads: dict[CallId, Tensor] = {}
        self.of_blocks: dict[CallId, Tensor] = {}

    def on_heads(self, heads: HeadOutputs) -> Tensor:
        """Gated."""
        values = heads.values
        gate = _ones(values, values.shape[:2])
        self.of_heads[heads.call_id] = gate
        part = values.detach()
        if self._means is not None:
            part = part - self._means[heads.call_id].to(part)[:, None]
        return Ungated.apply(gate, values, part)

    def on_block(self, block: BlockOutput) -> Tensor | None:
        """Gated is what the block adds to what it read."""
        gave = block.output
        # tokens may come first; where neither axis counts the sequences, the block has one gate for all
        axis = next((at for at in (0, 1) if gave.dim() > 2 and gave.shape[at] == self._sequences), None)
        gate = _ones(gave, (1 if axis is None else self._sequences,))
        self.of_blocks[block.call_id] = gate
        part = (gave - block.input).detach()
        if axis is None:
            return Ungated.apply(gate, gave[None], part[None])[0]
        turned = Ungated.apply(gate, gave.movedim(axis, 0), part.movedim(axis, 0))
        return turned.movedim(0, axis)


class MeanTaker(Intervention):
    """Sums what every head gives over the real tokens, and changes nothing.

    Args:
        sums: of each call (H, V), and of how many tokens; added to.
    """

    def __init__(self, sums: dict[CallId, tuple[Tensor, int]]) -> None:
        self._sums = sums

    def on_heads(self, heads: HeadOutputs) -> None:
        """Added up."""
        summed = torch.where(heads.valid_tokens[:, None, :, None], heads.values, 0).double().sum((0, 2))
        before, tokens = self._sums.get(heads.call_id, (torch.zeros_like(summed), 0))
        self._sums[heads.call_id] = before + summed, tokens + int(heads.valid_tokens.sum())


class Without(Intervention):
    """Puts zero, or the mean over tokens, in the place of what some heads give, and takes out whole blocks.

    Args:
        heads: of each call the numbers of the heads.
        means: of each call what its heads give on average (H, V); zero without.
        blocks: names of blocks that give what they read.
    """

    def __init__(
        self,
        heads: Mapping[CallId, Iterable[int]],
        means: Mapping[CallId, Tensor] | None = None,
        blocks: Iterable[str] = (),
    ) -> None:
        self.blocks = frozenset(blocks)
        self._heads = {key: sorted(chosen) for key, chosen in heads.items()}
        self._means = means

    def on_heads(self, heads: HeadOutputs) -> Tensor | None:
        """Without the chosen heads of this call, if any."""
        chosen = self._heads.get(heads.call_id)
        if not chosen:
            return None
        values = heads.values.clone()
        values[:, chosen] = 0
        if self._means is not None:
            values[:, chosen] += self._means[heads.call_id][chosen].to(values)[:, None]
        return values

    def on_block(self, block: BlockOutput) -> Tensor:
        """What it read."""
        return block.input


def _ones(like: Tensor, shape: Iterable[int]) -> Tensor:
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.ones(tuple(shape), dtype=wide, device=like.device, requires_grad=True)


def cut_off(scalar: Tensor, gates: Iterable[Tensor]) -> set[int]:
    """Of the gates, by `id`, those with a path to a scalar through an operation that has no gradient.

    Through a residual stream some gradient comes past such an operation, and is not the whole one.

    Args:
        scalar: in the graph of the gates.
        gates: leaves of the graph.
    """
    after_cut = _nodes(node for node in _nodes([scalar.grad_fn]) if NO_BACKWARD in node.name())
    leaves = {id(getattr(node, "variable", None)) for node in after_cut}
    return {id(gate) for gate in gates if id(gate) in leaves}


def _nodes(starts: Iterable[Any]) -> set[Any]:
    """All nodes that a backward pass comes to."""
    seen: set[Any] = set()
    open_nodes = [node for node in starts if node is not None]
    while open_nodes:
        node = open_nodes.pop()
        if node not in seen:
            seen.add(node)
            open_nodes += [following for following, _ in node.next_functions if following is not None]
    return seen
