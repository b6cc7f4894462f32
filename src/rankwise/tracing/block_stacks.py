"""Stacks (chains of blocks): number the layers, and report the mixers and the token states between blocks."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from rankwise.tracing.module_calls import same, snapshot
from rankwise.tracing.trace import MixerSite, StateSite

BY_HAND = -1
"""Owner of blocks that no module of the model runs, because the user calls them one by one."""
OUTSIDE = (
    "{stack}: the output of a block is not the input of the next block, so the residual is added outside; "
    "token states are the inputs of the blocks, and the last state is missing"
)
UNREAD = (
    "{stack}: nothing read the output of its only block, so the residual may be added outside; the token "
    "state after it is left out"
)


@dataclass
class Block:
    """A call of a module that may be a block; `BlockFinder` decides when the call has ended."""

    name: str
    kind: type
    """Class of the module."""
    stack: str
    rank: int
    owner: int
    """Serial number of the call that runs the blocks in sequence; `BY_HAND` if the user calls them."""
    input: Tensor
    input_copy: Tensor
    """Copy of the input, taken before the block can change the input in place."""
    linked: bool
    """True if the input is the output of the previous block of the stack."""
    separate_tower: bool
    """True if the call starts another chain of blocks, such as the second encoder of a two-tower model."""
    forward_pass: int = 0
    output: Tensor | None = None
    to_batch_first: Callable[[Tensor], Tensor] | None = None
    """Function that converts states from the model's order of axes to (B, T, D)."""
    mask: Tensor | None = None
    mixers: list[MixerSite] = field(default_factory=list)
    """Mixers in the call that are not in a block inside it."""
    open: list["Block"] = field(default_factory=list)
    """Calls inside this call that may turn out to be the blocks, in place of this call."""
    plain: set[tuple[str, type]] = field(default_factory=set)
    """Pairs (stack, class) of the calls inside this call that contain no mixer."""
    settled: bool = False
    """True once calls inside this call are known to be blocks, so that this call is not a block."""

    def offered(self, stack: str) -> list["Block"]:
        """Return the possible blocks inside this call that belong to one stack (chain of blocks)."""
        return [inner for inner in self.open if inner.stack == stack]

    def yields_to_inner(self) -> bool:
        """Return True if the possible blocks inside this call are the blocks, in place of this call.

        A single inner call is the block if its input and output are the input and output of this call.
        Several inner calls are blocks if each reads the output of the previous one, as in a stage of blocks.
        But if inner calls of the same class contain no mixer, they are sublayers (attention, feed-forward),
        and this call is the block.
        """
        if len(self.open) == 1:
            inner = self.open[0]
            return same(self.output, inner.output) and same(self.input, inner.input)
        chained = all(inner.linked for inner in self.open[1:])
        return bool(self.open) and chained and not any((v.stack, v.kind) in self.plain for v in self.open)

    def states(self, tokens: Tensor) -> Tensor:
        """Return states in the model's order of axes as (B, T, D)."""
        assert self.to_batch_first is not None
        return self.to_batch_first(tokens)


@dataclass
class BlockStack:
    """One stack in one forward pass: the number of blocks that ran, and the end of the residual stream."""

    stack: str
    owner: int
    layers: int = 0
    last: Block | None = None
    output: Tensor | None = None
    """End of the residual stream; a block that reads this tensor is the next block of the stack."""
    snapshot: Tensor | None = None
    """Copy of `output`, which later changes in place do not affect."""
    linked: int = 0
    broken: int = 0
    read: bool = False
    """True if a module read the output of the last block."""

    carriers: set[type] = field(default_factory=set)
    """Classes of modules that carry the residual stream from one block to the next."""
    passed_on: Tensor | None = None
    """Output of a module that may carry the stream on after the last block, such as a norm between blocks."""
    passing: set[type] = field(default_factory=set)

    def keep(self, output: Tensor) -> None:
        """Set the end of the residual stream: the output of a block, or of a module after it."""
        self.output, self.snapshot, self.read = output, snapshot(output), False
        self.passed_on, self.passing = None, set()

    def carry(self, input: Tensor, output: Tensor, kind: type) -> None:
        """Register a module without a mixer that maps the end of the stream to states of the same shape."""
        if kind in self.carriers and same(self.output, input):
            self.keep(output)
        else:
            self.passed_on = output
            self.passing.add(kind)

    def follows(self, tokens: Tensor) -> bool:
        """Return True if a tensor is the end of the residual stream: its reader continues the stack."""
        return same(self.output, tokens) or same(self.passed_on, tokens)


class BlockStacks:
    """Numbers blocks as they run, and reports their mixers and the token states between them.

    Layer i is the block that reads state i, so each state is the input of a block. The output of the last
    block is the last state, unless the model adds residuals outside of its blocks. If a stack runs again on
    other tokens, a new forward pass begins at layer 0.
    """

    def __init__(self, report: Callable[[MixerSite | StateSite], None], note: Callable[[str], None]) -> None:
        self.forward_pass = -1
        """Index of the current forward pass, from 0; −1 before the first."""
        self._report, self._note = report, note
        self._open: dict[str, BlockStack] = {}
        self._carriers: dict[str, set[type]] = {}
        self._seen: dict[str, tuple[set[str], int]] = {}
        """By stack, the names of the blocks that have run, and the index of their last forward pass."""
        self._calls: Counter[tuple[int, str, int, str]] = Counter()
        """Number of calls so far by (forward pass, stack, layer, module); kept when a stack is closed."""

    def continues(self, stack: str, owner: int, tokens: Tensor) -> BlockStack | None:
        """Return the open stack that a block with this input continues; None if there is no such stack."""
        blocks = self._open.get(stack)
        return blocks if blocks is not None and blocks.owner == owner and blocks.follows(tokens) else None

    def has_blocks(self, stack: str) -> bool:
        """Return True if blocks of an open stack have run."""
        return stack in self._open

    def reads(self, tensors: list[Tensor]) -> None:
        """Mark the stacks whose last output is among the arguments of a module call."""
        for blocks in self._open.values():
            blocks.read = blocks.read or any(same(blocks.output, tensor) for tensor in tensors)

    def add(self, block: Block) -> None:
        """Append a block that has run to its stack; report its mixers and input state."""
        blocks = self._blocks_of(block)
        if blocks.layers:
            blocks.linked += block.linked
            blocks.broken += not block.linked
        self._state(blocks, blocks.last or block, block.states(block.input_copy), block)
        for mixer in block.mixers:
            self._place(mixer, blocks)
        names, _ = self._seen.get(block.stack, (set(), 0))
        self._seen[block.stack] = names | {block.name}, block.forward_pass
        blocks.layers += 1
        blocks.carriers |= {block.kind} | (blocks.passing if block.linked else set())
        assert block.output is not None
        blocks.keep(block.output)
        block.mixers, block.input, block.input_copy = [], block.output, block.output  # free the input
        blocks.last = block

    def add_bare(self, mixers: list[MixerSite], stack: str, owner: int) -> None:
        """Report mixers that are in no block as one layer of a stack; this layer has no token states."""
        blocks = self._open.setdefault(stack, BlockStack(stack, owner))
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

    def _place(self, mixer: MixerSite, blocks: BlockStack) -> None:
        """Report a mixer as part of the current layer of a stack."""
        key = (mixer.forward_pass, blocks.stack, blocks.layers, mixer.name)
        self._report(replace(mixer, stack=blocks.stack, layer=blocks.layers, call=self._calls[key]))
        self._calls[key] += 1

    def _blocks_of(self, block: Block) -> BlockStack:
        blocks = self._open.get(block.stack)
        if blocks is not None and blocks.owner == block.owner and not block.separate_tower:
            return blocks
        stack, seen = block.stack, self._seen.get(block.stack)
        if seen is not None and block.name not in seen[0]:
            # A second tower begins, such as another encoder: name its stack after its own list of blocks.
            stack = block.name.rpartition(".")[0]
        elif seen is not None and block.forward_pass == seen[1]:
            # The same blocks run again on other tokens, so a new forward pass begins.
            self.forward_pass += 1
            block.forward_pass = self.forward_pass
            block.mixers = [replace(mixer, forward_pass=block.forward_pass) for mixer in block.mixers]
        if blocks is not None:
            self._last_state(blocks)
        carriers = self._carriers.setdefault(stack, set())
        blocks = self._open[block.stack] = BlockStack(stack, block.owner, carriers=carriers)
        return blocks

    def _last_state(self, blocks: BlockStack) -> None:
        """Report the output of a stack's last block as the last state, or add a note that it is missing."""
        if blocks.last is None or blocks.snapshot is None:
            return
        read = blocks.read or blocks.owner == BY_HAND
        if blocks.linked or (read and not blocks.broken):
            self._state(blocks, blocks.last, blocks.last.states(blocks.snapshot), blocks.last)
            return
        self._note((OUTSIDE if blocks.broken else UNREAD).format(stack=blocks.stack))

    def _state(self, blocks: BlockStack, writer: Block, tokens: Tensor, block: Block) -> None:
        place = blocks.stack, block.forward_pass
        self._report(StateSite(writer.name, blocks.layers, tokens, block.mask, *place))
