"""`BlockFinder`: find the repeated residual blocks of a model while the model runs."""

import re
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from rankwise.tracing.axes import find_batch_first
from rankwise.tracing.block_stacks import BY_HAND, BlockCall, BlockStacks
from rankwise.tracing.mixing_calls import OWN_MASK, find_token_mask
from rankwise.tracing.module_calls import (
    ModuleCall,
    ModuleCalls,
    first_tokens,
    same,
    snapshot,
    tensors_of,
)
from rankwise.tracing.torch_layers import is_torch_layer
from rankwise.tracing.trace import MixerSite


@dataclass
class BlockCandidate:
    """A call of a module that may be a block."""

    call: ModuleCall
    stack: str
    rank: int
    input: Tensor
    input_copy: Tensor
    """Copy of the input, taken before the block can change the input in place."""
    linked: bool
    """True if the input is the output of the previous block of the stack."""
    separate_tower: bool
    """True if the call starts another chain of blocks, such as the second encoder of a two-tower model."""
    output: Tensor | None = None
    block: BlockCall | None = None
    """Record of the call as a block; None if its input and output are not states of equal shape."""
    open: list["BlockCandidate"] = field(default_factory=list)
    """Calls inside this call that may turn out to be the blocks, in place of this call."""
    plain: set[tuple[str, type]] = field(default_factory=set)
    """Pairs (stack, class) of the calls inside this call that contain no mixer."""
    settled: bool = False
    """True once calls inside this call are known to be blocks, so that this call is not a block."""

    @property
    def kind(self) -> type:
        """Class of the module."""
        return type(self.call.module)

    def offered(self, stack: str) -> list["BlockCandidate"]:
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
            ends = self.output is not None and inner.output is not None and same(self.output, inner.output)
            return ends and same(self.input, inner.input)
        chained = all(inner.linked for inner in self.open[1:])
        return bool(self.open) and chained and not any((v.stack, v.kind) in self.plain for v in self.open)


class BlockFinder:
    """Finds the residual blocks of a running model, and the mixers in each block.

    A block is an item of a list of modules of one class, such as ``encoder.layer.3``. It contains a mixer,
    and its output states have the shape of its input states. If such items are nested, the inner items are
    the blocks if each reads the output of the previous item, as in stages of blocks. The outer module is the
    block if it contains one item, or items that run in parallel, as heads do. An item with a module that
    looks like a mixer is a block even if the operator of the mixer is not captured. An item without a mixer
    is a block if other items of its class in the list are blocks, as the feed-forward blocks of a hybrid.
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
        listed = [name for name, rank in self._rank.items() if name and rank == 0]
        kinds = {name: (name.rpartition(".")[0], type(model.get_submodule(name))) for name in listed}
        mixing = {kinds[name] for name in self._expected.intersection(kinds) - self._around}
        self._alike = {name for name, kind in kinds.items() if kind in mixing}
        """Items of a list that also holds items of the same class with a mixer, such as blocks of hybrids."""
        self._calls, self._stacks = calls, stacks
        self._candidates: list[BlockCandidate] = []
        self._inner: dict[str, bool] = {}
        """By stack of inner modules: True if they are the blocks, False if the outer module is the block."""
        self._barren: set[str] = set()
        """Names of modules that contained no mixer in an earlier call, so their inputs need no copy."""
        self._gave: dict[str, Tensor] = {}
        """For each stack, the output of the last module that contains blocks, such as a vision stage."""

    def may_be(self, name: str) -> bool:
        """Return True if a module of this name may be a block."""
        return name in self._rank

    def add(self, mixer: MixerSite) -> None:
        """Keep a mixer until the block around it is known; report the mixer at once if there is no block."""
        self._hand_up([mixer], stack_of(mixer.name), BY_HAND)

    def finish(self) -> None:
        """End the forward pass: report the last state of each stack, and forget all candidates."""
        self._candidates.clear()
        self._gave.clear()
        self._stacks.close()
        self._stacks.forget()

    # --- beginning and end of calls -----------------------------------------------------------------------

    def arguments_known(self, call: ModuleCall) -> None:
        """Register a finished call of PyTorch's own layer: keyword arguments are known only at its end."""
        if is_torch_layer(call.module) and not any(candidate.call is call for candidate in self._candidates):
            self.entered(call)

    def entered(self, call: ModuleCall) -> None:
        """When a call begins, register it as a candidate if its module may be a block."""
        self._drop_stale()
        self._stacks.reads(call.tensors)
        if call.name in self._rank and call.name not in self._barren:
            given = call.stream
            if given is not None and (given.dim() < 4 or call.name not in self._around):
                self._candidates.append(self._candidate(call, given))

    def _candidate(self, call: ModuleCall, given: Tensor) -> BlockCandidate:
        owning = self._owning()
        stack = stack_of(call.name, "" if owning is None else owning.name)
        blocks = self._stacks.continues(stack, self._owner(), given)
        known = blocks.snapshot if blocks is not None and same(blocks.output, given) else None
        inner = [inner for outer in self._candidates[-1:] for inner in outer.offered(stack)]
        other = self._gave.get(stack)
        return BlockCandidate(
            call,
            stack,
            self._rank[call.name],
            given,
            snapshot(given) if known is None else known,
            linked=blocks is not None or any(same(before.output, given) for before in inner),
            separate_tower=other is not None and not same(other, given),
        )

    def left(self, call: ModuleCall) -> None:
        """When a call ends, decide if it is a block; all mixers inside the call are known now."""
        self._drop_stale()
        candidate = self._candidates.pop() if self._candidates and self._candidates[-1].call is call else None
        if call.raised:
            self._stacks.drop(call.serial)
            return
        if candidate is not None:
            candidate.output = first_tokens(call.output, axes=candidate.input.dim())
            # A call that returns nothing may have changed its input in place.
            if call.output is None and not torch.equal(candidate.input_copy, candidate.input):
                candidate.output = candidate.input
            self._ended(candidate)
        self._stacks.close(call.serial, tensors_of(call.output))

    def _ended(self, candidate: BlockCandidate) -> None:
        call, outer = candidate.call, self._candidates[-1] if self._candidates else None
        # Inside an item of a list of equal modules, items with and without a mixer are sublayers.
        outermost = all(around.rank for around in self._candidates) or self._inner.get(candidate.stack)
        expected = call.name in self._expected or (outermost and call.name in self._alike)
        if not call.unplaced_mixers and not candidate.settled and not expected:
            self._carry_on(candidate, outer)
            return
        candidate.block = self._block(candidate)
        if candidate.block is None or candidate.yields_to_inner():
            self._yield(candidate)
            return
        for inner in candidate.open:
            self._inner[inner.stack] = False
        if outer is None or self._inner.get(candidate.stack):
            self._settle(candidate.block)
            return
        self._hand_up(call.unplaced_mixers, candidate.stack, candidate.block.owner)
        if outer.rank >= candidate.rank and candidate.stack not in self._inner:
            self._offer(outer, candidate)

    def _carry_on(self, candidate: BlockCandidate, outer: BlockCandidate | None) -> None:
        """Register a module without a mixer, such as a norm, which may carry the stream between blocks."""
        gave = candidate.output
        if outer is not None:
            outer.plain.add((candidate.stack, candidate.kind))
        blocks = self._stacks.continues(candidate.stack, self._owner(), candidate.input)
        if blocks is None or gave is None or gave.shape != candidate.input.shape:
            self._barren.add(candidate.call.name)
        else:
            blocks.carry(candidate.input, gave, candidate.kind)

    def _block(self, candidate: BlockCandidate) -> BlockCall | None:
        """Return a candidate as a `BlockCall`; None if its input and output are not states of equal shape."""
        call, gave = candidate.call, candidate.output
        if candidate.settled or gave is None:
            return None
        if not (candidate.input.is_nested or gave.is_nested) and candidate.input.shape != gave.shape:
            return None
        to_batch_first = find_batch_first(candidate.input_copy, call.module, call.unplaced_mixers)
        if to_batch_first is None:
            return None
        shape = to_batch_first(candidate.input_copy).shape[:2]
        own = (site.valid_tokens for site in call.unplaced_mixers if not site.cross)
        mask = next((tokens for tokens in own if tokens.shape == shape), None)
        if mask is None:
            mask = find_token_mask(self._calls.running, OWN_MASK, *shape)
        return BlockCall(
            call.name,
            candidate.kind,
            candidate.stack,
            self._owner(),
            candidate.input_copy,
            gave,
            to_batch_first,
            mask,
            list(call.unplaced_mixers),
            self._stacks.forward_pass,
            candidate.linked,
            separate_tower=not candidate.linked and any(outer.separate_tower for outer in self._candidates),
        )

    # --- which of the nested calls is the block -----------------------------------------------------------

    def _offer(self, outer: BlockCandidate, candidate: BlockCandidate) -> None:
        """Keep a possible inner block; decide when a second one runs or the outer call ends."""
        others = outer.offered(candidate.stack)
        outer.open.append(candidate)
        if any(same(other.input, candidate.input) for other in others):
            # Inner calls with the same input run in parallel, as heads do, so the outer call is the block.
            self._inner[candidate.stack] = False
            outer.open = [inner for inner in outer.open if inner.stack != candidate.stack]
        elif others and outer.rank > 0:
            # Inner calls form a chain, and the outer call is not an item of a list of equal modules.
            self._settle_inside(outer)

    def _yield(self, candidate: BlockCandidate) -> None:
        """Make the inner candidates blocks; pass mixers outside of them to the module around this call."""
        self._candidates.append(candidate)
        self._settle_inside(candidate)
        self._candidates.pop()
        if candidate.settled and candidate.output is not None:
            self._gave[candidate.stack] = candidate.output
        self._hand_up(candidate.call.unplaced_mixers, candidate.stack, self._owner())

    def _settle_inside(self, outer: BlockCandidate) -> None:
        if len(outer.open) > 1:
            self._inner.update({inner.stack: True for inner in outer.open})
        for inner in outer.open:
            if inner.block is not None:
                self._settle(inner.block)
        outer.open.clear()

    def _settle(self, block: BlockCall) -> None:
        mine = {id(mixer) for mixer in block.mixers}
        for around in self._candidates:
            around.settled = True
            mixers = around.call.unplaced_mixers
            around.call.unplaced_mixers = [mixer for mixer in mixers if id(mixer) not in mine]
        self._stacks.add(block)

    def _hand_up(self, mixers: list[MixerSite], stack: str, owner: int) -> None:
        """Pass mixers to the enclosing candidate; report them without a block if there is none."""
        if self._candidates:
            self._candidates[-1].call.unplaced_mixers.extend(mixers)
        elif mixers:
            self._stacks.add_bare(mixers, stack, owner)

    # --- calls around the current call --------------------------------------------------------------------

    def _drop_stale(self) -> None:
        """Drop candidates that are no longer running, because their calls raised."""
        running = {call.serial for call in self._calls.running}
        self._candidates = [candidate for candidate in self._candidates if candidate.call.serial in running]

    def _owning(self) -> ModuleCall | None:
        """Return the innermost enclosing call that is not a candidate: the module that runs the blocks."""
        visited = {candidate.call.serial for candidate in self._candidates}
        around = self._calls.running[:-1]
        return next((call for call in reversed(around) if call.serial not in visited), None)

    def _owner(self) -> int:
        owning = self._owning()
        return BY_HAND if owning is None else owning.serial


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
