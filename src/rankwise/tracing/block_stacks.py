"""BlockFinder that ran one after the other: their layers, and the token states between them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from rankwise.tracing.module_calls import same, snapshot
from rankwise.tracing.trace import MixerSite, StateSite

BY_HAND = -1
"""Owner of blocks that the user calls one by one."""
OUTSIDE = (
    "{stack}: what one block gives is not what the next one reads, so the residual is added outside of them; "
    "token states are what each block read, and the last state is missing"
)
UNREAD = (
    "{stack}: nothing read what its only block gives, so the residual may be added outside of it; the token "
    "state after it is left out"
)


@dataclass
class BlockCall:
    """A block that ran: what it read and gave, and the mixers inside it."""

    name: str
    kind: type
    """Its module's class."""
    stack: str
    owner: int
    """Which call of which module ran the blocks one after the other."""
    input_copy: Tensor
    """What it read, safe from changes in place."""
    output: Tensor
    to_batch_first: Callable[[Tensor], Tensor]
    """From tokens as the model lays them out to (B, T, D)."""
    mask: Tensor | None
    mixers: list[MixerSite]
    forward_pass: int
    linked: bool
    """Whether it read what the block before it gave."""
    separate_tower: bool
    """Whether it belongs to another tower than the block before it."""


@dataclass
class BlockStack:
    """The blocks of one stack, in the order they ran."""

    stack: str
    owner: int
    layers: int = 0
    last: BlockCall | None = None
    output: Tensor | None = None
    """What the last of them gave, to be compared with what is read next."""
    snapshot: Tensor | None = None
    """The same, safe from changes in place."""
    linked: int = 0
    broken: int = 0
    read: bool = False
    """Whether any module read what the last block gave."""

    carriers: set[type] = field(default_factory=set)
    """Kinds of items that carry the stream on from block to block."""
    passed_on: Tensor | None = None
    """What items after the last block gave that may or may not carry the stream on, such as a final norm."""
    passing: set[type] = field(default_factory=set)

    def keep(self, gave: Tensor) -> None:
        """Remember what the last block, or what carries its stream on, gave."""
        self.output, self.snapshot, self.read = gave, snapshot(gave), False
        self.passed_on, self.passing = None, set()

    def carry(self, given: Tensor, gave: Tensor, kind: type) -> None:
        """An item without a mixer read this stream and gave something of its shape."""
        if kind in self.carriers and same(self.output, given):
            self.keep(gave)
        else:
            self.passed_on = gave
            self.passing.add(kind)

    def follows(self, tokens: Tensor) -> bool:
        """Whether these tokens are what came out last."""
        return same(self.output, tokens) or same(self.passed_on, tokens)


class BlockStacks:
    """Numbers blocks as they run, and hands on their mixers and the states between them.

    Layer i reads state i, so states 0, 1, … are what each block read; the last is what the last block gave,
    if blocks do read what the blocks before them gave. A stack that its module runs again, on other tokens,
    starts at layer 0 again, as a new run.

    Args:
        on_mixer: called with each mixer, its place known.
        on_state: called with each state.
        notes: where to say what a reader must know.
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
        """The blocks whose last block gave these tokens, if there is one."""
        blocks = self._open.get(stack)
        linked = blocks is not None and blocks.owner == owner and blocks.follows(tokens)
        return blocks if linked else None

    def reads(self, tensors: list[Tensor]) -> None:
        """A module was called with these tensors."""
        for blocks in self._open.values():
            if not blocks.read and any(same(blocks.output, tensor) for tensor in tensors):
                blocks.read = True

    def add(self, block: BlockCall) -> None:
        """A block ran."""
        blocks = self._blocks_of(block)
        if blocks.layers:
            blocks.linked += block.linked
            blocks.broken += not block.linked
        self._state(blocks, blocks.last or block, block.to_batch_first(block.input_copy), block)
        for mixer in block.mixers:
            self._place(mixer, blocks)
        self._note_seen(block.stack, block.name, block.forward_pass)
        blocks.layers += 1
        blocks.carriers |= {block.kind} | (blocks.passing if block.linked else set())
        blocks.keep(block.output)
        blocks.last = replace(block, mixers=[], input_copy=block.output)

    def add_bare(self, mixers: list[MixerSite], stack: str, owner: int) -> None:
        """Mixers ran where no block was found: they make a layer of their own, without states."""
        blocks = self._open.setdefault(stack, BlockStack(stack, owner))
        for mixer in mixers:
            self._place(mixer, blocks)
        blocks.layers += 1

    def close(self, owner: int | None = None, given: list[Tensor] | None = None) -> None:
        """The module that ran the blocks is done (or all are): hand on their last states."""
        for stack, blocks in list(self._open.items()):
            if owner is None or blocks.owner == owner:
                blocks.read = blocks.read or any(same(blocks.output, tensor) for tensor in given or ())
                self._last_state(blocks)
                del self._open[stack]

    def drop(self, owner: int) -> None:
        """The module that ran the blocks raised: their last states are not known."""
        self._open = {stack: blocks for stack, blocks in self._open.items() if blocks.owner != owner}

    def forget(self) -> None:
        """The forward pass is over."""
        self._open.clear()
        self._seen.clear()
        self._calls.clear()

    def _place(self, mixer: MixerSite, blocks: BlockStack) -> None:
        """Report a mixer of the layer that comes next in a stack."""
        key = (mixer.forward_pass, blocks.stack, blocks.layers, mixer.name)
        self._on_mixer(replace(mixer, stack=blocks.stack, layer=blocks.layers, call=self._calls[key]))
        self._calls[key] += 1

    def _blocks_of(self, block: BlockCall) -> BlockStack:
        blocks = self._open.get(block.stack)
        if blocks is not None and blocks.owner == block.owner and not block.separate_tower:
            return blocks
        stack, seen = block.stack, self._seen.get(block.stack)
        if seen is not None and block.name not in seen[0]:  # a tower beside the first
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

    def _note_seen(self, stack: str, name: str, forward_pass: int) -> None:
        names, _ = self._seen.get(stack, (set(), forward_pass))
        self._seen[stack] = names | {name}, forward_pass

    def _last_state(self, blocks: BlockStack) -> None:
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
