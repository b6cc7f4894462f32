"""`BlockFinder`: find the repeated residual blocks of a model while the model runs."""

import re
from collections import Counter
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from rankwise.tracing.axes import find_batch_first
from rankwise.tracing.block_stacks import BY_HAND, Block, BlockStacks, alike
from rankwise.tracing.mixing_calls import OWN_MASK, find_token_mask
from rankwise.tracing.module_calls import (
    ModuleCall,
    ModuleCalls,
    first_tokens,
    same,
    snapshot,
    tensors_of,
)
from rankwise.tracing.trace import CapturedMixer


class BlockFinder:
    """Finds the residual blocks of a running model, and the mixers in each block.

    A block is an item of a list of modules, such as ``encoder.layer.3``, that returns states of the shape of
    its input. What runs decides, not names of classes: a list has blocks if a mixer is captured in one of its
    items, or listed as not captured. The items before the first mixer wait for it. An item without a mixer
    reads the output of the item before it, or states of its shape if the stack is one list; norms and other
    single layers carry the stream on. If items of lists are nested, the inner items are the blocks if each
    reads the output of the one before it, as in stages of blocks, or if the outer module reads feature maps.
    The outer module is the block if it contains one item, items that run in parallel, as heads do, or, in a
    list of modules of one class, items with and without a mixer.
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
        parts = [name.split(".") for name in mixer_like]
        self._likely = {".".join(outer[:at]) for outer in parts for at in range(1, len(outer) + 1)}
        """Names of modules that look like mixers, and of the modules around them."""
        self._parts = {type(part) for name, part in model.named_modules() if not name[-1:].isdigit()}
        self._parts |= {kind for kind in vars(nn).values() if isinstance(kind, type)}
        """Classes of PyTorch, and of modules that are no items of lists."""
        self._calls, self._stacks = calls, stacks
        self._inner: dict[str, bool] = {}
        """By stack of inner modules: True if they are the blocks, False if the outer module is the block."""
        self._gave: dict[str, Tensor] = {}
        """For each stack, the output of the last module that contains blocks, such as a vision stage."""

    def add(self, mixer: CapturedMixer) -> None:
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
        given = call.stream if call.name in self._rank else None
        if given is not None:
            call.block = self._possible_block(call, given)

    def _possible_block(self, call: ModuleCall, given: Tensor) -> Block:
        # The innermost enclosing call that is not a possible block itself, or reads maps, runs the blocks.
        around = reversed(self._calls.running[:-1])
        owning = next((one for one in around if one.block is None or one.block.input.dim() == 4), None)
        owner = BY_HAND if owning is None else owning.serial
        stack = stack_of(call.name, "" if owning is None else owning.name)
        blocks = self._stacks.of(stack, owner)
        known = blocks.snapshot if blocks is not None and same(blocks.output, given) else None
        offered = [inner for outer in self._running[-1:] for inner in outer.open if inner.stack == stack]
        other = self._gave.get(stack)
        return Block(
            call.name,
            type(call.module),
            stack,
            self._rank[call.name],
            owner,
            given,
            snapshot(given) if known is None else known,
            linked=bool(blocks and blocks.follows(given)) or any(same(one.output, given) for one in offered),
            separate_tower=other is not None and not same(other, given),
            likely=call.name in self._likely,
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
        mixes = block.mixers or block.likely or block.settled
        if not mixes and not self._may_join(block, module):
            for outer in around[-1:]:
                outer.plain.add((block.stack, block.kind))
            blocks, output = self._stacks.of(block.stack, block.owner), block.output
            if output is not None and blocks and blocks.follows(block.input) and alike(block.input, output):
                blocks.carry(block.input, output, block.kind)  # such as a norm between blocks
            return
        if not self._keeps_states(block, module) or block.yields_to_inner():
            # Calls inside are blocks; mixers outside of them belong to the module around this call.
            self._settle_inside(block)
            if block.settled and block.output is not None:
                self._gave[block.stack] = block.output
            self._hand_up(block.mixers, block.stack, block.owner)
            return
        for inner in block.inside:
            self._inner[inner.stack] = False
        if not around or around[-1].input.dim() == 4 or self._inner.get(block.stack):
            self._settle(block)
            return
        self._hand_up(block.mixers, block.stack, block.owner)
        outer = around[-1]
        if outer.rank < block.rank or block.stack in self._inner:
            return
        # Inner calls with the same input run in parallel, as heads do, so the outer call is the block.
        parallel = any(other.stack == block.stack and same(other.input, block.input) for other in outer.open)
        outer.open.append(block)
        if len(outer.inside) > 1 and outer.rank > 0 and not parallel:
            # Inner calls form a chain, and the outer call is not an item of a list of equal modules.
            self._settle_inside(outer)

    def _may_join(self, block: Block, module: nn.Module) -> bool:
        """Return True if a module without a mixer may be a block among blocks with mixers."""
        sublayer = any(not outer.rank and outer.input.dim() < 4 for outer in self._running)
        if not alike(block.input, block.output) or (sublayer and not self._inner.get(block.stack)):
            return False
        blocks, single = self._stacks.of(block.stack, block.owner), not any(module.children())
        if blocks is None or not blocks.layers:
            return not single
        # PyTorch's layers, norms (weights of one axis), and layers that blocks contain too carry the stream.
        norm = max((weight.dim() for weight in module.parameters()), default=2) < 2
        return blocks.takes(block) and not (single and (norm or type(module) in self._parts))

    def _keeps_states(self, block: Block, module: nn.Module) -> bool:
        """Set what is known of a block once it has run; False if it does not map states to equal shapes."""
        if block.settled or not alike(block.input, block.output):
            return False
        block.separate_tower = not block.linked and any(outer.separate_tower for outer in self._running)
        block.to_batch_first = find_batch_first(block.input_copy, module, block.mixers)
        if block.to_batch_first is None:
            return not block.mixers
        shape = block.states(block.input_copy).shape[:2]
        own = (site.valid_tokens for site in block.mixers if not site.cross)
        block.mask = next((tokens for tokens in own if tokens.shape == shape), None)
        if block.mask is None:
            block.mask = find_token_mask(self._calls.running, OWN_MASK, *shape)
        return True

    # --- which of the nested calls is the block -----------------------------------------------------------

    def _settle_inside(self, outer: Block) -> None:
        inside, outer.open = outer.inside, []
        if len(inside) > 1:
            self._inner.update({inner.stack: True for inner in inside})
        for inner in inside:
            self._settle(inner, outer)

    def _settle(self, block: Block, *outer: Block) -> None:
        mine = {id(mixer) for mixer in block.mixers}
        for around in (*self._running, *outer):
            around.settled |= bool(mine) or block.likely
            around.mixers = [mixer for mixer in around.mixers if id(mixer) not in mine]
        self._stacks.add(block)

    def _hand_up(self, mixers: list[CapturedMixer], stack: str, owner: int) -> None:
        """Pass mixers to the enclosing possible block; report them without a block if there is none."""
        around = self._running
        if around:
            around[-1].mixers.extend(mixers)
        elif mixers:
            self._stacks.add_bare(mixers, stack, owner)


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
