"""`BlockFinder`: find the repeated residual blocks of a model while the model runs."""

import re
from collections import Counter
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from rankwise.tracing.axes import find_batch_first
from rankwise.tracing.block_stacks import BY_HAND, Block, BlockStacks
from rankwise.tracing.mixing_calls import OWN_MASK, find_token_mask
from rankwise.tracing.module_calls import (
    ModuleCall,
    ModuleCalls,
    first_tokens,
    same,
    snapshot,
    tensors_of,
)
from rankwise.tracing.trace import MixerSite


class BlockFinder:
    """Finds the residual blocks of a running model, and the mixers in each block.

    A block is an item of a list of modules of one class, such as ``encoder.layer.3``. It contains a mixer,
    and its output states have the shape of its input states. If such items are nested, the inner items are
    the blocks if each reads the output of the previous item, as in stages of blocks. The outer module is the
    block if it contains one item, or items that run in parallel, as heads do. An item with a module that
    looks like a mixer is a block even if the operator of the mixer is not captured. An item without a mixer
    is a block if other items of its class in the list are blocks, as the feed-forward blocks of a hybrid; an
    item of another class if it is the first, or reads the output of the item before it.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: ModuleCalls,
        stacks: BlockStacks,
        mixer_like: set[str],
        pattern: str | None,
    ) -> None:
        self._rank = block_ranks(model, pattern)
        self._expected = set(self._rank) & (mixer_like | _around(mixer_like)) - {""}
        self._around = _around(self._expected)
        """Names of modules around possible blocks: they are no blocks if they read feature maps."""
        listed = [name for name, rank in self._rank.items() if name and rank != 1]
        kinds = {name: (name.rpartition(".")[0], type(model.get_submodule(name))) for name in listed}
        mixing = {kinds[name] for name in self._expected.intersection(kinds) - self._around}
        lists = {place for place, _ in mixing}
        self._beside = {name: kind in mixing for name, kind in kinds.items() if kind[0] in lists}
        """Items of lists that also hold items with a mixer, as in hybrids; True if they have its class."""
        self._calls, self._stacks = calls, stacks
        self._inner: dict[str, bool] = {}
        """By stack of inner modules: True if they are the blocks, False if the outer module is the block."""
        self._barren: set[str] = set()
        """Names of modules that contained no mixer in an earlier call, so their inputs need no copy."""
        self._gave: dict[str, Tensor] = {}
        """For each stack, the output of the last module that contains blocks, such as a vision stage."""

    def add(self, mixer: MixerSite) -> None:
        """Keep a mixer until the block around it is known; report the mixer at once if there is no block."""
        self._hand_up([mixer], stack_of(mixer.name), BY_HAND)

    def finish(self) -> None:
        """End the forward pass: report the last state of each stack, and forget all of them."""
        self._gave.clear()
        self._stacks.finish()

    # --- beginning and end of calls -----------------------------------------------------------------------

    @property
    def _running(self) -> list[Block]:
        """Running calls that may be blocks, from the outermost to the innermost."""
        return [call.block for call in self._calls.running if call.block is not None]

    def entered(self, call: ModuleCall) -> None:
        """When a call begins, register it as a possible block if its module may be one."""
        self._stacks.reads(call.tensors)
        if call.name in self._rank and call.name not in self._barren:
            given = call.stream
            if given is not None and (given.dim() < 4 or call.name not in self._around):
                call.block = self._possible_block(call, given)

    def _possible_block(self, call: ModuleCall, given: Tensor) -> Block:
        # The innermost enclosing call that is not a possible block itself runs the blocks.
        around = reversed(self._calls.running[:-1])
        owning = next((outer for outer in around if outer.block is None), None)
        owner = BY_HAND if owning is None else owning.serial
        stack = stack_of(call.name, "" if owning is None else owning.name)
        blocks = self._stacks.continues(stack, owner, given)
        known = blocks.snapshot if blocks is not None and same(blocks.output, given) else None
        inner = [inner for outer in self._running[-1:] for inner in outer.offered(stack)]
        other = self._gave.get(stack)
        return Block(
            call.name,
            type(call.module),
            stack,
            self._rank[call.name],
            owner,
            given,
            snapshot(given) if known is None else known,
            linked=blocks is not None or any(same(before.output, given) for before in inner),
            separate_tower=other is not None and not same(other, given),
        )

    def left(self, call: ModuleCall) -> None:
        """When a call ends, decide if it is a block; all mixers inside the call are known now."""
        block: Block | None = call.block
        call.block = None
        if call.raised:
            self._stacks.drop(call.serial)
            return
        if block is not None:
            block.output = first_tokens(call.output, axes=block.input.dim())
            # A call that returns nothing may have changed its input in place.
            if call.output is None and not torch.equal(block.input_copy, block.input):
                block.output = block.input
            self._ended(block, call.module)
        self._stacks.close(call.serial, tensors_of(call.output))

    def _ended(self, block: Block, module: nn.Module) -> None:
        around = self._running
        # Inside an item of a list of equal modules, items with and without a mixer are sublayers.
        outermost = all(outer.rank for outer in around) or self._inner.get(block.stack)
        # An item of another class is a block if it is no mere norm and no part of a block beside it.
        beside = bool(outermost) and block.name in self._beside and any(module.children())
        follows = block.linked or not self._stacks.has_blocks(block.stack)
        alike = self._beside.get(block.name, False) and bool(outermost)
        expected = block.name in self._expected or alike or (beside and follows)
        if not block.mixers and not block.settled and not expected:
            self._carry_on(block)
            return
        if not self._keeps_states(block, module) or block.yields_to_inner():
            self._yield(block)
            return
        for inner in block.open:
            self._inner[inner.stack] = False
        if not around or self._inner.get(block.stack):
            self._settle(block)
            return
        self._hand_up(block.mixers, block.stack, block.owner)
        if around[-1].rank >= block.rank and block.stack not in self._inner:
            self._offer(around[-1], block)

    def _carry_on(self, block: Block) -> None:
        """Register a module without a mixer, such as a norm, which may carry the stream between blocks."""
        for outer in self._running[-1:]:
            outer.plain.add((block.stack, block.kind))
        blocks = self._stacks.continues(block.stack, block.owner, block.input)
        if blocks is None or block.output is None or block.output.shape != block.input.shape:
            self._barren.add(block.name)
        else:
            blocks.carry(block.input, block.output, block.kind)

    def _keeps_states(self, block: Block, module: nn.Module) -> bool:
        """Set what is known of a block once it has run; False if it does not map states to equal shapes."""
        gave = block.output
        if block.settled or gave is None:
            return False
        if not (block.input.is_nested or gave.is_nested) and block.input.shape != gave.shape:
            return False
        block.to_batch_first = find_batch_first(block.input_copy, module, block.mixers)
        if block.to_batch_first is None:
            return False
        shape = block.states(block.input_copy).shape[:2]
        own = (site.valid_tokens for site in block.mixers if not site.cross)
        block.mask = next((tokens for tokens in own if tokens.shape == shape), None)
        if block.mask is None:
            block.mask = find_token_mask(self._calls.running, OWN_MASK, *shape)
        block.forward_pass = self._stacks.forward_pass
        block.separate_tower = not block.linked and any(outer.separate_tower for outer in self._running)
        return True

    # --- which of the nested calls is the block -----------------------------------------------------------

    def _offer(self, outer: Block, block: Block) -> None:
        """Keep a possible inner block; decide when a second one runs or the outer call ends."""
        others = outer.offered(block.stack)
        outer.open.append(block)
        if any(same(other.input, block.input) for other in others):
            # Inner calls with the same input run in parallel, as heads do, so the outer call is the block.
            self._inner[block.stack] = False
            outer.open = [inner for inner in outer.open if inner.stack != block.stack]
        elif others and outer.rank > 0:
            # Inner calls form a chain, and the outer call is not an item of a list of equal modules.
            self._settle_inside(outer)

    def _yield(self, block: Block) -> None:
        """Make the calls inside blocks; pass mixers outside of them to the module around this call."""
        self._settle_inside(block)
        if block.settled and block.output is not None:
            self._gave[block.stack] = block.output
        self._hand_up(block.mixers, block.stack, block.owner)

    def _settle_inside(self, outer: Block) -> None:
        if len(outer.open) > 1:
            self._inner.update({inner.stack: True for inner in outer.open})
        for inner in outer.open:
            self._settle(inner, outer)
        outer.open.clear()

    def _settle(self, block: Block, *outer: Block) -> None:
        mine = {id(mixer) for mixer in block.mixers}
        for around in (*self._running, *outer):
            around.settled = True
            around.mixers = [mixer for mixer in around.mixers if id(mixer) not in mine]
        self._stacks.add(block)

    def _hand_up(self, mixers: list[MixerSite], stack: str, owner: int) -> None:
        """Pass mixers to the enclosing possible block; report them without a block if there is none."""
        around = self._running
        if around:
            around[-1].mixers.extend(mixers)
        elif mixers:
            self._stacks.add_bare(mixers, stack, owner)


def _around(names: set[str]) -> set[str]:
    """Return the names of the modules around modules: ``encoder`` and ``encoder.0`` for ``encoder.0.mlp``."""
    parts = [name.split(".") for name in names]
    return {".".join(outer[:at]) for outer in parts for at in range(1, len(outer))}


def block_ranks(model: nn.Module, pattern: str | None) -> dict[str, int]:
    """Return a rank for each module name that may be a block; lower ranks take precedence.

    Rank 0: items of a list with another item of the same class, or of a list with one item; also names that
    match the user's pattern. Rank 1: numbered attributes of one class (``block1``, ``block2``). Rank 2: other
    items of a list, such as one layer of another class in a hybrid model.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if pattern is not None:
        return {name: 0 for name in modules if matches(name, pattern)}
    ranks: dict[str, int] = {}
    for parent_name, parent in modules.items():
        children = {name: child for name, child in parent.named_children() if re.search(r"\d", name)}
        classes = Counter(type(child) for child in children.values())
        for child_name, child in children.items():
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            alike = classes[type(child)] > 1
            if child_name.isdigit():
                ranks[name] = 0 if alike or len(children) == 1 else 2
            elif alike:
                ranks[name] = 1
    return ranks


def matches(name: str, pattern: str) -> bool:
    """Return True if a module name matches a pattern; a ``*`` matches within one part between dots."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def stack_of(name: str, owner: str = "") -> str:
    """Return the stack name of a block: ``encoder.layer.3`` → ``encoder.layer``, ``block2`` → ``block*``.

    Numbers of outer lists become ``*``: ``stages.1.blocks.0`` → ``stages.*.blocks``. Numbers that are part of
    ``owner``, the name of the module that runs the blocks, are kept.
    """
    *outer, last = name.split(".")
    known = len(owner.split(".")) if owner else 0
    outer = ["*" if part.isdigit() and at >= known else part for at, part in enumerate(outer)]
    if not last.isdigit():
        outer.append(re.sub(r"\d+$", "*", last))
    return ".".join(outer) or "*"
