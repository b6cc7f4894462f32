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
    likely: bool
    """True if a module in the call looks like a mixer: one may run even if none is captured."""
    output: Tensor | None = None
    to_batch_first: Callable[[Tensor], Tensor] | None = None
    """Function that converts states from the model's order of axes to (B, T, D)."""
    mask: Tensor | None = None
    mixers: list[CapturedMixer] = field(default_factory=list)
    """Mixers in the call that are not in a block inside it."""
    open: list["Block"] = field(default_factory=list)
    """Calls inside this call that may turn out to be the blocks, in place of this call."""
    plain: set[tuple[str, type]] = field(default_factory=set)
    """Pairs (stack, class) of the calls inside this call that contain no mixer."""
    settled: bool = False
    """True once calls inside this call are known to be blocks, so that this call is not a block."""

    @property
    def inside(self) -> list["Block"]:
        """Possible blocks inside this call, of the stacks that contain mixers."""
        mixing = {inner.stack for inner in self.open if inner.mixers or inner.likely}
        return [inner for inner in self.open if inner.stack in mixing]

    def yields_to_inner(self) -> bool:
        """Return True if the possible blocks inside this call are the blocks, in place of this call.

        A single inner call is the block if its input and output are the input and output of this call.
        Several inner calls are blocks if each reads the output of the previous one, as in a stage of blocks.
        But if inner calls of the same class contain no mixer, they are sublayers (attention, feed-forward),
        and this call is the block.
        """
        inside = self.inside
        if len(inside) == 1:
            return same(self.output, inside[0].output) and same(self.input, inside[0].input)
        chained = all(inner.linked for inner in inside[1:])
        return bool(inside) and chained and not any((v.stack, v.kind) in self.plain for v in inside)

    def states(self, tokens: Tensor) -> Tensor:
        """Return states in the model's order of axes as (B, T, D)."""
        assert self.to_batch_first is not None
        return self.to_batch_first(tokens)


def alike(states: Tensor, others: Tensor | None) -> bool:
    """Return True if states have equal shapes, or are nested, which have no shape."""
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

    carriers: set[type] = field(default_factory=set)
    """Classes of modules that carry the residual stream from one block to the next."""
    passed_on: Tensor | None = None
    """Output of a module that may carry the stream on after the last block, such as a norm between blocks."""
    passing: set[type] = field(default_factory=set)
    waiting: list[Block] = field(default_factory=list)
    """Blocks that ran before the first mixer of the stack was captured; they are not reported yet."""

    def takes(self, block: Block) -> bool:
        """Return True if a block reads the end of the stack, or states like it in its only list."""
        listed = (block.name.rpartition(".")[0] or "*") == block.stack
        return block.linked or (listed and (self.output is None or alike(self.output, block.input)))

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

    def __init__(
        self, report: Callable[[CapturedMixer | CapturedState], None], note: Callable[[str], None]
    ) -> None:
        self.forward_pass = -1
        """Index of the current forward pass, from 0; −1 before the first."""
        self._report, self._note = report, note
        self._open: dict[str, BlockStack] = {}
        self._seen: dict[str, dict[str, int]] = {}
        """By stack and name of the blocks that have run, the index of their last forward pass."""
        self._calls: Counter[tuple[int, str, int, str]] = Counter()
        """Number of calls so far by (forward pass, stack, layer, module); kept when a stack is closed."""

    def of(self, stack: str, owner: int) -> BlockStack | None:
        """Return the open stack of this name that a call runs; None if there is no such stack."""
        blocks = self._open.get(stack)
        return blocks if blocks is not None and blocks.owner == owner else None

    def reads(self, tensors: list[Tensor]) -> None:
        """Mark the stacks whose last output is among the arguments of a module call."""
        for blocks in self._open.values():
            blocks.read = blocks.read or any(same(blocks.output, tensor) for tensor in tensors)

    def add(self, block: Block) -> None:
        """Report a block that has run, or keep it until a mixer of its stack is known, if there is one."""
        blocks = self.of(block.stack, block.owner)
        if blocks is None or block.separate_tower:
            self._last_state(self._open.get(block.stack))
            blocks = BlockStack(block.stack, block.owner, self.forward_pass)
            self._open[block.stack] = blocks
        if blocks.waiting and not blocks.takes(block):
            blocks.waiting.clear()
        blocks.waiting.append(block)
        like = block if block.mixers or blocks.last is None else blocks.last
        if (block.mixers or block.likely or blocks.layers) and like.to_batch_first is not None:
            self._report_waiting(blocks, like)
        blocks.carriers |= blocks.passing if block.linked else set()
        assert block.output is not None
        blocks.keep(block.output)
        if not blocks.waiting:
            block.input_copy = block.output
        block.input = block.output = block.input_copy  # a block that waits keeps one copy

    def add_bare(self, mixers: list[CapturedMixer], stack: str, owner: int) -> None:
        """Report mixers that are in no block as one layer of a stack; this layer has no token states."""
        blocks = self._open.setdefault(stack, BlockStack(stack, owner, self.forward_pass))
        blocks.layers += len(blocks.waiting)
        blocks.waiting.clear()
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

    def _place(self, mixer: CapturedMixer, blocks: BlockStack) -> None:
        """Report a mixer as part of the current layer of a stack."""
        key = run, stack, layer, _ = blocks.forward_pass, blocks.stack, blocks.layers, mixer.name
        self._report(replace(mixer, forward_pass=run, stack=stack, layer=layer, call=self._calls[key]))
        self._calls[key] += 1

    def _report_waiting(self, blocks: BlockStack, like: Block) -> None:
        """Report blocks that wait; those without a mixer have the axes and the mask of a block ``like``."""
        if not blocks.layers:
            first, seen = blocks.waiting[0].name, self._seen.get(blocks.stack, {})
            if seen and first not in seen:
                # A second tower begins, such as another encoder: name its stack after its own list of blocks.
                blocks.stack = first.rpartition(".")[0]
            elif self.forward_pass in seen.values():
                # The same blocks run again on other tokens, so a new forward pass begins.
                self.forward_pass += 1
            blocks.forward_pass = self.forward_pass
        for block in blocks.waiting:
            if not block.mixers:
                block.to_batch_first = like.to_batch_first
                block.mask = like.mask if alike(like.input_copy, block.input_copy) else None
            blocks.linked += block.linked
            self._state(blocks, blocks.last or block, block.states(block.input_copy), block)
            for mixer in block.mixers:
                self._place(mixer, blocks)
            self._seen.setdefault(block.stack, {})[block.name] = blocks.forward_pass
            blocks.layers += 1
            blocks.last, block.mixers = block, []
        blocks.waiting.clear()

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
