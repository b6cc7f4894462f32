"""A gate ξ = 1 on what every head and block gives, its gradient for each sequence, and what cuts it off."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.tracing import BlockOutput, Changes, HeadOutputs

NO_BACKWARD = "WarnNotImplemented"
"""What autograd records of an operation that has no backward, such as int8 products: it gives no gradient."""


class CallKey(NamedTuple):
    """One call of one module in a forward pass."""

    name: str
    occurrence: int
    """From 0, where the module is called more than once."""


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


class Gates(Changes):
    """Puts a gate on what every head gives, (B, H), and on what every block adds, (B,).

    Args:
        blocks: names of the blocks.
        sequences: how many there are in the batch.
        means: of each call what is there at ξ = 0, (H, V); zero without.
    """

    def __init__(
        self, blocks: Iterable[str], sequences: int, means: Mapping[CallKey, Tensor] | None = None
    ) -> None:
        self.blocks = frozenset(blocks)
        self._sequences, self._means = sequences, means
        self._calls: Counter[str] = Counter()
        self._block_calls: Counter[str] = Counter()
        self.of_heads: dict[CallKey, Tensor] = {}
        self.of_blocks: dict[CallKey, Tensor] = {}
        self.serials: dict[int, CallKey] = {}
        """Which call a `MixerSite` is of."""

    def heads(self, outputs: HeadOutputs) -> Tensor:
        """Gated."""
        key = CallKey(outputs.name, self._calls[outputs.name])
        self._calls[outputs.name] += 1
        self.serials[outputs.serial] = key
        values = outputs.values
        gate = _ones(values, values.shape[:2])
        self.of_heads[key] = gate
        part = values.detach()
        if self._means is not None:
            part = part - self._means[key].to(part)[:, None]
        return Ungated.apply(gate, values, part)

    def block(self, output: BlockOutput) -> Tensor | None:
        """Gated is what the block adds to what it read."""
        key = CallKey(output.name, self._block_calls[output.name])
        self._block_calls[output.name] += 1
        gave = output.gave
        # tokens may come first; where neither axis counts the sequences, the block has one gate for all
        axis = next((at for at in (0, 1) if gave.dim() > 2 and gave.shape[at] == self._sequences), None)
        gate = _ones(gave, (1 if axis is None else self._sequences,))
        self.of_blocks[key] = gate
        part = (gave - output.read).detach()
        if axis is None:
            return Ungated.apply(gate, gave[None], part[None])[0]
        turned = Ungated.apply(gate, gave.movedim(axis, 0), part.movedim(axis, 0))
        return turned.movedim(0, axis)


class MeanTaker(Changes):
    """Sums what every head gives over the real tokens, and changes nothing.

    Args:
        sums: of each call (H, V), and of how many tokens; added to.
    """

    def __init__(self, sums: dict[CallKey, tuple[Tensor, int]]) -> None:
        self._sums = sums
        self._calls: Counter[str] = Counter()

    def heads(self, outputs: HeadOutputs) -> None:
        """Added up."""
        key = CallKey(outputs.name, self._calls[outputs.name])
        self._calls[outputs.name] += 1
        summed = torch.where(outputs.valid[:, None, :, None], outputs.values, 0).double().sum((0, 2))
        before, tokens = self._sums.get(key, (torch.zeros_like(summed), 0))
        self._sums[key] = before + summed, tokens + int(outputs.valid.sum())


class Without(Changes):
    """Puts zero, or the mean over tokens, in the place of what some heads give, and takes out whole blocks.

    Args:
        heads: of each call the numbers of the heads.
        means: of each call what its heads give on average (H, V); zero without.
        blocks: names of blocks that give what they read.
    """

    def __init__(
        self,
        heads: Mapping[CallKey, Iterable[int]],
        means: Mapping[CallKey, Tensor] | None = None,
        blocks: Iterable[str] = (),
    ) -> None:
        self.blocks = frozenset(blocks)
        self._heads = {key: sorted(chosen) for key, chosen in heads.items()}
        self._means = means
        self._calls: Counter[str] = Counter()

    def heads(self, outputs: HeadOutputs) -> Tensor | None:
        """Without the chosen heads of this call, if any."""
        key = CallKey(outputs.name, self._calls[outputs.name])
        self._calls[outputs.name] += 1
        chosen = self._heads.get(key)
        if not chosen:
            return None
        values = outputs.values.clone()
        values[:, chosen] = 0
        if self._means is not None:
            values[:, chosen] += self._means[key][chosen].to(values)[:, None]
        return values

    def block(self, output: BlockOutput) -> Tensor:
        """What it read."""
        return output.read


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
