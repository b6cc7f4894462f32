"""Stacks of blocks that run one after the other: their layers, and the token states between them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from rankwise.tracing.module_calls import same, snapshot
from rankwise.tracing.trace import MixerSite, StateSite

BY_HAND = -1
"""Owner of blocks that the user calls one by one."""
OUTSIDE = (
    "{stack}: the output of a block is not the input of the next block, so the residual is added outside; "
    "token states are the inputs of the blocks, and the last state is missing"
)
UNREAD = (
    "{stack}: nothing read the output of its only block, so the residual may be added outside; the token "
    "state after it is left out"
)


@dataclass
class BlockCall:
    """A call of a block, with the mixers inside it."""

    name: str
    kind: type
    """Class of the module."""
    stack: str
    owner: int
    """Serial of the call that runs the blocks one after the other."""
    input_copy: Tensor
    """Input, safe from changes in place."""
    output: Tensor
    to_batch_first: Callable[[Tensor], Tensor]
    """Function from tokens in the axes of the model to (B, T, D)."""
    mask: Tensor | None
    mixers: list[MixerSite]
    forward_pass: int
    linked: bool
    """True if its input is the output of the block before it."""
    separate_tower: bool
    """True if it belongs to another tower than the block before it."""


@dataclass
class BlockStack:
    """Blocks of a stack, in the order in which they ran."""

    stack: str
    owner: int
    layers: int = 0
    last: BlockCall | None = None
    output: Tensor | None = None
    """Output of the last block, to be compared with the next input."""
    snapshot: Tensor | None = None
    """Copy of the output, safe from changes in place."""
    linked: int = 0
    broken: int = 0
    read: bool = False
    """True if a module read the output of the last block."""

    carriers: set[type] = field(default_factory=set)
    """Classes of modules that pass the residual stream from block to block."""
    passed_on: Tensor | None = None
    """Output of a module after the last block that may pass the stream on, such as a final norm."""
    passing: set[type] = field(default_factory=set)

    def keep(self, output: Tensor) -> None:
        """Keep the output of the last block, or of a module that passes the stream on."""
        self.output, self.snapshot, self.read = output, snapshot(output), False
        self.passed_on, self.passing = None, set()

    def carry(self, input: Tensor, output: Tensor, kind: type) -> None:
        """Note a module without a mixer that read the stream; its output has the same shape."""
        if kind in self.carriers and same(self.output, input):
            self.keep(output)
        else:
            self.passed_on = output
            self.passing.add(kind)

    def follows(self, tokens: Tensor) -> bool:
        """Return True if these tokens are the last output."""
        return same(self.output, tokens) or same(self.passed_on, tokens)


class BlockStacks:
    """Numbers blocks as they run, and reports their mixers and the token states between them.

    Layer i reads state i, so states 0, 1, … are the inputs of the blocks. The last state is the output of the
    last block, if blocks read the outputs of the blocks before them. A stack that runs again, on other
    tokens, is a new forward pass and starts at layer 0.
    """

    def __init__(
        self,
        on_mixer: Callable[[MixerSite], None],
        on_state: Callable[[StateSite], None],
        notes: list[str],
    ) -> None:
        self.forward_pass = -1
        """Number of the forward pass under way."""
        self._on_mixer, self._on_state, self._notes = on_mixer, on_state, notes
        self._open: dict[str, BlockStack] = {}
        self._carriers: dict[str, set[type]] = {}
        self._seen: dict[str, tuple[set[str], int]] = {}
        """Names of the blocks of each stack in this run of the model, and their last forward pass."""
        self._calls: Counter[tuple[int, str, int, str]] = Counter()
        """Calls so far, by forward pass, stack, layer and module: a stack may be closed and opened again."""

    def continues(self, stack: str, owner: int, tokens: Tensor) -> BlockStack | None:
        """Return the stack whose last output is these tokens."""
        blocks = self._open.get(stack)
        return blocks if blocks is not None and blocks.owner == owner and blocks.follows(tokens) else None

    def reads(self, tensors: list[Tensor]) -> None:
        """Note that a module was called with these tensors."""
        for blocks in self._open.values():
            if not blocks.read and any(same(blocks.output, tensor) for tensor in tensors):
                blocks.read = True

    def add(self, block: BlockCall) -> None:
        """Add a block that ran."""
        blocks = self._blocks_of(block)
        if blocks.layers:
            blocks.linked += block.linked
            blocks.broken += not block.linked
        self._state(blocks, blocks.last or block, block.to_batch_first(block.input_copy), block)
        for mixer in block.mixers:
            self._place(mixer, blocks)
        names, _ = self._seen.get(block.stack, (set(), 0))
        self._seen[block.stack] = names | {block.name}, block.forward_pass
        blocks.layers += 1
        blocks.carriers |= {block.kind} | (blocks.passing if block.linked else set())
        blocks.keep(block.output)
        blocks.last = replace(block, mixers=[], input_copy=block.output)

    def add_bare(self, mixers: list[MixerSite], stack: str, owner: int) -> None:
        """Add mixers outside of blocks, as a layer without states."""
        blocks = self._open.setdefault(stack, BlockStack(stack, owner))
        for mixer in mixers:
            self._place(mixer, blocks)
        blocks.layers += 1

    def close(self, owner: int | None = None, given: list[Tensor] | None = None) -> None:
        """Report the last states of the stacks that a call ran, or of all stacks."""
        for stack, blocks in list(self._open.items()):
            if owner is None or blocks.owner == owner:
                blocks.read = blocks.read or any(same(blocks.output, tensor) for tensor in given or ())
                self._last_state(blocks)
                del self._open[stack]

    def drop(self, owner: int) -> None:
        """Drop the stacks of a call that raised: their last states are unknown."""
        self._open = {stack: blocks for stack, blocks in self._open.items() if blocks.owner != owner}

    def forget(self) -> None:
        """End the forward pass."""
        self._open.clear()
        self._seen.clear()
        self._calls.clear()

    def _place(self, mixer: MixerSite, blocks: BlockStack) -> None:
        """Report a mixer in the next layer of a stack."""
        key = (mixer.forward_pass, blocks.stack, blocks.layers, mixer.name)
        self._on_mixer(replace(mixer, stack=blocks.stack, layer=blocks.layers, call=self._calls[key]))
        self._calls[key] += 1

    def _blocks_of(self, block: BlockCall) -> BlockStack:
        blocks = self._open.get(block.stack)
        if blocks is not None and blocks.owner == block.owner and not block.separate_tower:
            return blocks
        stack, seen = block.stack, self._seen.get(block.stack)
        if seen is not None and block.name not in seen[0]:  # a second tower
            stack = block.name.rpartition(".")[0]
        elif seen is not None and block.forward_pass == seen[1]:  # the same blocks again, on other tokens
            self.forward_pass += 1
            block.forward_pass = self.forward_pass
            block.mixers = [replace(mixer, forward_pass=block.forward_pass) for mixer in block.mixers]
        if blocks is not None:
            self._last_state(blocks)
        carriers = self._carriers.setdefault(stack, set())
        blocks = self._open[block.stack] = BlockStack(stack, block.owner, carriers=carriers)
        return blocks

    def _last_state(self, blocks: BlockStack) -> None:
        """Report the output of the last block if it is a state, or note why it is left out."""
        if blocks.last is None or blocks.snapshot is None:
            return
        read = blocks.read or blocks.owner == BY_HAND
        if blocks.linked or (read and not blocks.broken):
            self._state(blocks, blocks.last, blocks.last.to_batch_first(blocks.snapshot), blocks.last)
            return
        note = (OUTSIDE if blocks.broken else UNREAD).format(stack=blocks.stack)
        if note not in self._notes:
            self._notes.append(note)

    def _state(self, blocks: BlockStack, writer: BlockCall, tokens: Tensor, block: BlockCall) -> None:
        state = StateSite(writer.name, blocks.layers, tokens, block.mask, blocks.stack, block.forward_pass)
        self._on_state(state)
