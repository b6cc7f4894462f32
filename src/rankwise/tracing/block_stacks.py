"""Stacks (chains of blocks): number the layers, and report the mixers and the token states between blocks."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from rankwise.tracing.module_calls import same, snapshot
from rankwise.tracing.trace import CapturedMixer, CapturedState

BY_HAND = -1
"""Owner of blocks that no module of the model runs, because the user calls them one by one."""
OUTSIDE = (
    "{stack}: the output of a block is not the input of the next block, so the residual is added outside, or "
    "another module changes it; token states are the inputs of the blocks, and the last state is missing"
)
UNREAD = (
    "{stack}: nothing read the output of its only block, so the residual may be added outside; the token "
    "state after it is left out"
)


@dataclass
class Block:
    """Call of a module that may be a block. `BlockFinder` decides this when the call has ended."""

    name: str
    stack: str
    alike: bool
    """Value of `block_items`. A call with False is not a block inside a possible block with True."""
    owner: int
    """Serial number of the call that runs the blocks in sequence; `BY_HAND` if the user calls them."""
    input: Tensor
    input_copy: Tensor
    """Copy of the input, taken before the block can change the input in place."""
    linked: bool
    """True if the input is the output of the previous block of the stack."""
    likely: bool
    """True if a module in the call looks like a mixer, so that a mixer may run even if capture misses it."""
    output: Tensor | None = None
    to_batch_first: Callable[[Tensor], Tensor] | None = None
    """Function that converts states from the model's order of axes to (B, T, D)."""
    mask: Tensor | None = None
    mixers: list[CapturedMixer] = field(default_factory=list)
    """Mixers in this call, except mixers in blocks inside this call."""
    open: list["Block"] = field(default_factory=list)
    """Calls inside this call that may turn out to be the blocks, in place of this call."""
    settled: bool = False
    """True once calls inside this call are known to be blocks, so that this call is not a block."""

    @property
    def inside(self) -> list["Block"]:
        """Possible blocks inside this call, of stacks that contain a mixer or a module like a mixer."""
        mixing = {inner.stack for inner in self.open if inner.mixers or inner.likely}
        return [inner for inner in self.open if inner.stack in mixing]

    def yields_to_inner(self) -> bool:
        """Return True if the possible blocks inside this call are the blocks, in place of this call.

        A single inner call is the block if its input and output are the input and output of this call.
        Several inner calls are blocks if each reads the output of the previous one, as in a stage of blocks.
        """
        inside = self.inside
        if len(inside) == 1:
            return same(self.output, inside[0].output) and same(self.input, inside[0].input)
        return bool(inside) and all(inner.linked for inner in inside[1:])

    def states(self, tokens: Tensor) -> Tensor:
        """Return states in the model's order of axes as (B, T, D)."""
        assert self.to_batch_first is not None
        return self.to_batch_first(tokens)


def alike(states: Tensor, others: Tensor | None) -> bool:
    """Return True if two states have equal shapes, or if one is a nested tensor, which has no shape."""
    return others is not None and (states.is_nested or others.is_nested or states.shape == others.shape)


@dataclass
class BlockStack:
    """One stack in one forward pass: the number of blocks that ran, and the end of the residual stream."""

    stack: str
    owner: int
    forward_pass: int
    layers: int = 0
    last: Block | None = None
    output: Tensor | None = None
    """End of the residual stream; a block that reads this tensor is the next block of the stack."""
    snapshot: Tensor | None = None
    """Copy of `output`, which later changes in place do not affect."""
    linked: int = 0
    read: bool = False
    """True if a module read the output of the last block."""


class BlockStacks:
    """Numbers blocks as they run, and reports their mixers and the token states between them.

    Layer i is the block that reads state i, so each state is the input of a block. The output of the last
    block is the last state, unless the model adds residuals outside of its blocks. If a stack runs again on
    other tokens, a new forward pass begins at layer 0.
    """

    def __init__(
        self, report: Callable[[CapturedMixer | CapturedState], None], note: Callable[[str], None]
    ) -> None:
        self.forward_pass = -1
        """Index of the current forward pass, from 0; −1 before the first."""
        self._report, self._note = report, note
        self._open: dict[str, BlockStack] = {}
        self._seen: dict[str, dict[str, int]] = {}
        """Index of the last forward pass of each block that has run, by stack and name of the block."""
        self._calls: Counter[tuple[int, str, int, str]] = Counter()
        """Number of calls so far by (forward pass, stack, layer, module); kept when a stack is closed."""
        self._loops: dict[tuple[int, str, int, str], tuple[int | None, int]] = {}
        """Module call and number of heads of the last mixer with the same key as in ``_calls``."""

    def of(self, stack: str, owner: int) -> BlockStack | None:
        """Return the open stack of this name that the call ``owner`` runs. Return None if none is open."""
        blocks = self._open.get(stack)
        return blocks if blocks is not None and blocks.owner == owner else None

    def reads(self, tensors: list[Tensor]) -> None:
        """Mark the stacks whose last output is among the arguments of a module call."""
        for blocks in self._open.values():
            blocks.read = blocks.read or any(same(blocks.output, tensor) for tensor in tensors)

    def add(self, block: Block) -> None:
        """Report a block that has run: the states that it read, and its mixers."""
        blocks = self.of(block.stack, block.owner)
        if blocks is None:
            self._last_state(self._open.get(block.stack))
            blocks = BlockStack(block.stack, block.owner, self.forward_pass)
            self._open[block.stack] = blocks
        seen = self._seen.setdefault(block.stack, {})
        if not blocks.layers:
            if self.forward_pass in seen.values():
                self.forward_pass += 1  # the same blocks run again on other tokens
            blocks.forward_pass = self.forward_pass
        if not block.mixers and blocks.last is not None:
            # A block without a mixer has the axes and the mask of the block before it.
            block.to_batch_first = blocks.last.to_batch_first
            block.mask = blocks.last.mask if alike(blocks.last.input_copy, block.input_copy) else None
        blocks.linked += block.linked
        self._state(blocks, blocks.last or block, block.states(block.input_copy), block)
        for mixer in block.mixers:
            self._place(mixer, blocks)
        seen[block.name] = blocks.forward_pass
        blocks.layers += 1
        assert block.output is not None
        blocks.last, blocks.output, blocks.snapshot = block, block.output, snapshot(block.output)
        blocks.read, block.mixers = False, []
        block.input = block.output = block.input_copy  # so that the model's tensors can be freed

    def add_bare(self, mixers: list[CapturedMixer], stack: str, owner: int) -> None:
        """Report mixers that are in no block as one layer of a stack; this layer has no token states."""
        blocks = self._open.setdefault(stack, BlockStack(stack, owner, self.forward_pass))
        self._last_state(blocks)
        blocks.last = blocks.output = None
        for mixer in mixers:
            self._place(mixer, blocks)
        blocks.layers += 1

    def close(self, owner: int | None = None, given: list[Tensor] | None = None) -> None:
        """Close the stacks that a call ran, by default all stacks, and report their last states."""
        for stack, blocks in list(self._open.items()):
            if owner is None or blocks.owner == owner:
                blocks.read = blocks.read or any(same(blocks.output, tensor) for tensor in given or ())
                self._last_state(blocks)
                del self._open[stack]

    def drop(self, owner: int) -> None:
        """Drop the stacks that a call ran before it raised, because their last states are unknown."""
        self._open = {stack: blocks for stack, blocks in self._open.items() if blocks.owner != owner}

    def finish(self) -> None:
        """Close all stacks at the end of a forward pass, and forget which blocks have run."""
        self.close()
        self._seen.clear()
        self._calls.clear()
        self._loops.clear()

    def _place(self, mixer: CapturedMixer, blocks: BlockStack) -> None:
        """Report a mixer as part of the current layer of a stack."""
        key = run, stack, layer, _ = blocks.forward_pass, blocks.stack, blocks.layers, mixer.name
        loop = mixer.window_of, mixer.operator.shape[1]
        if mixer.window_of is None or self._loops.get(key) != loop:
            self._calls[key] += 1
        self._loops[key] = loop
        self._report(replace(mixer, forward_pass=run, stack=stack, layer=layer, call=self._calls[key] - 1))

    def _last_state(self, blocks: BlockStack | None) -> None:
        """Report the output of a stack's last block as the last state, or add a note that it is missing."""
        if blocks is None or blocks.last is None or blocks.snapshot is None:
            return
        broken = blocks.linked < blocks.layers - 1
        if blocks.linked or (not broken and (blocks.read or blocks.owner == BY_HAND)):
            self._state(blocks, blocks.last, blocks.last.states(blocks.snapshot), blocks.last)
        else:
            self._note((OUTSIDE if broken else UNREAD).format(stack=blocks.stack))

    def _state(self, blocks: BlockStack, writer: Block, tokens: Tensor, block: Block) -> None:
        place = blocks.stack, blocks.forward_pass
        self._report(CapturedState(writer.name, blocks.layers, tokens, block.mask, *place))
