"""`BlockFinder`: find the repeated residual blocks of a model while the model runs."""

import re
from collections import Counter
from fnmatch import fnmatchcase

from torch import nn

from rankwise.tracing.axes import find_batch_first
from rankwise.tracing.block_stacks import BY_HAND, Block, BlockStacks, alike
from rankwise.tracing.module_calls import (
    ModuleCall,
    ModuleCalls,
    first_tokens,
    same,
    snapshot,
    tensors_of,
)
from rankwise.tracing.read_operators import OWN_MASK, find_token_mask
from rankwise.tracing.trace import CapturedMixer


class BlockFinder:
    """Finds the residual blocks of a running model, and the mixers in each block.

    A candidate is an item of a list of modules (``encoder.layer.3``) or a numbered attribute (``block1``). If
    the user gives a pattern, only modules whose names match it are candidates. The class does not matter.

    - A candidate is a block if it returns states of the shape of its input, and contains a mixer or a module
      that looks like a mixer.
    - A candidate without a mixer is a block if it reads the output of the block before it.
    - If the inner candidates of a candidate run in sequence, as in a stage, the inner candidates are blocks.
    - If the inner candidates run in parallel, as heads do, the outer candidate is the block.
    - A single inner candidate is the block only if it has the input and the output of the outer candidate.
    - If the outer candidate reads feature maps, the inner candidates are the blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: ModuleCalls,
        stacks: BlockStacks,
        mixer_like: set[str],
        pattern: str | None,
    ) -> None:
        self._items = block_items(model, pattern)
        names = [name.split(".") for name in mixer_like]
        self._likely = {".".join(outer[:depth]) for outer in names for depth in range(1, len(outer) + 1)}
        """Names of modules that look like mixers, and names of enclosing modules."""
        self._calls, self._stacks = calls, stacks

    def add(self, mixer: CapturedMixer) -> None:
        """Keep a mixer until the block around it is known; report the mixer at once if there is no block."""
        self._hand_up([mixer], stack_of(mixer.name), BY_HAND)

    # --- beginning and end of calls -----------------------------------------------------------------------

    @property
    def _running(self) -> list[Block]:
        """Running calls that may be blocks, from the outermost to the innermost."""
        return [call.block for call in self._calls.running if call.block is not None]

    def entered(self, call: ModuleCall) -> None:
        """When a call begins, register it as a possible block if its module may be one."""
        self._stacks.reads(call.tensors)
        given = call.stream if call.name in self._items else None
        if given is None:
            return
        # The innermost enclosing call that is not a possible block, or reads feature maps, runs the blocks.
        around = reversed(self._calls.running[:-1])
        owning = next(
            (outer for outer in around if outer.block is None or outer.block.input.dim() == 4), None
        )
        owner = BY_HAND if owning is None else owning.serial
        stack = stack_of(call.name, "" if owning is None else owning.name)
        blocks = self._stacks.of(stack, owner)
        follows = blocks is not None and same(blocks.output, given)
        copy = blocks.snapshot if blocks is not None and follows else None
        offered = [inner for outer in self._running[-1:] for inner in outer.open if inner.stack == stack]
        call.block = Block(
            call.name,
            stack,
            self._items[call.name],
            owner,
            given,
            snapshot(given) if copy is None else copy,
            linked=follows or any(same(inner.output, given) for inner in offered),
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
            self._ended(block, call.module)
        self._stacks.close(call.serial, tensors_of(call.output))

    def _ended(self, block: Block, module: nn.Module) -> None:
        around = self._running
        mixes = block.mixers or block.likely or block.settled
        if not mixes and not self._may_join(block, module):
            return
        if not self._keeps_states(block, module) or block.yields_to_inner():
            # This call is not a block, but calls inside it are. Its other mixers pass to the enclosing call.
            inside, block.open = block.inside, []
            for inner in inside:
                self._settle(inner, block)
            self._hand_up(block.mixers, block.stack, block.owner)
        elif not around or around[-1].input.dim() == 4:
            self._settle(block)
        else:
            self._hand_up(block.mixers, block.stack, block.owner)
            if block.alike or not around[-1].alike:
                around[-1].open.append(block)

    def _may_join(self, block: Block, module: nn.Module) -> bool:
        """Return True if a call without a mixer continues a stack of blocks, so that the call is a block."""
        sublayer = any(outer.alike and outer.input.dim() < 4 for outer in self._running)
        blocks = self._stacks.of(block.stack, block.owner)
        joins = blocks is not None and block.linked and any(module.children())  # norms have no children
        return joins and not sublayer and alike(block.input, block.output)

    def _keeps_states(self, block: Block, module: nn.Module) -> bool:
        """Set the order of axes and the mask of a finished call. Return False if it cannot be a block."""
        if block.settled or not alike(block.input, block.output):
            return False
        block.to_batch_first = find_batch_first(block.input_copy, module, block.mixers)
        if block.to_batch_first is None:
            return False
        shape = block.states(block.input_copy).shape[:2]
        masks = (mixer.valid_tokens for mixer in block.mixers if not mixer.cross)
        block.mask = next((tokens for tokens in masks if tokens.shape == shape), None)
        if block.mask is None:
            block.mask = find_token_mask(self._calls.running, OWN_MASK, *shape)
        return True

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


def block_items(model: nn.Module, pattern: str | None) -> dict[str, bool]:
    """Return the names of modules that may be blocks, each with the value of `Block.alike`.

    If a pattern is given, return the modules that match the pattern, with the value True. Otherwise return
    all items of lists. The value is True if an item is the only item, or another item has the same class. It
    is False for other items, such as a single layer of another class in a hybrid model. Also return numbered
    attributes of one class (``block1``, ``block2``), with the value False.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if pattern is not None:
        return {name: True for name in modules if matches(name, pattern)}
    items: dict[str, bool] = {}
    for parent_name, parent in modules.items():
        children = {name: child for name, child in parent.named_children() if re.search(r"\d", name)}
        classes = Counter(type(child) for child in children.values())
        for child_name, child in children.items():
            name, several = f"{parent_name}.{child_name}".lstrip("."), classes[type(child)] > 1
            if child_name.isdigit():
                items[name] = several or len(children) == 1
            elif several:
                items[name] = False
    return items


def matches(name: str, pattern: str) -> bool:
    """Return True if a module name matches a pattern, in which ``*`` matches any characters except dots."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def stack_of(name: str, owner: str = "") -> str:
    """Return the stack name of a block: ``encoder.layer.3`` → ``encoder.layer``, ``block2`` → ``block*``.

    Numbers of outer lists become ``*``: ``stages.1.blocks.0`` → ``stages.*.blocks``. Numbers that are part of
    ``owner``, the name of the module that runs the blocks, are kept.
    """
    *outer, last = name.split(".")
    kept = len(owner.split(".")) if owner else 0
    outer = ["*" if word.isdigit() and depth >= kept else word for depth, word in enumerate(outer)]
    if not last.isdigit():
        outer.append(re.sub(r"\d+$", "*", last))
    return ".".join(outer) or "*"
