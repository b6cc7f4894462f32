"""The repeated blocks of a model, found as it runs."""

import torch
from torch import Tensor, nn

from rankwise.capture.chains import BY_HAND, Chains, Claim, same, snapshot
from rankwise.capture.frames import Frame, Frames, first_tokens, tensors_of
from rankwise.capture.names import block_ranks, enclosing, stack_of
from rankwise.capture.padding import OWN_MASK, told_mask
from rankwise.capture.states import shown_as
from rankwise.capture.stock import is_stock
from rankwise.capture.trace import MixerSite
from rankwise.capture.visits import Visit


class Blocks:
    """Finds the blocks of a running model, and hands on what belongs to each.

    A block is an item of a list of like modules (``encoder.layer.3``, ``transformer.h.0``) that has a mixer
    inside and gives back states of the shape it was given. Where such items lie inside one another, the inner
    ones are blocks if each reads what the one before it gave, as in stages of blocks; if they run side by
    side, as heads do, or there is only one, the outer one is.

    Args:
        model: the model.
        frames: its running calls.
        chains: what numbers the blocks.
        mixer_like: names of modules that look like mixers: their block counts even if they stay unseen.
        pattern: names of the blocks, with shell wildcards, where the user gives them.
    """

    def __init__(
        self, model: nn.Module, frames: Frames, chains: Chains, mixer_like: set[str], pattern: str | None
    ) -> None:
        self._rank = block_ranks(model, pattern)
        self._expected = enclosing(mixer_like, self._rank)
        self._frames, self._chains = frames, chains
        self._visits: list[Visit] = []
        self._inner: dict[str, bool] = {}
        """Of stacks inside what may be a block: whether they are the blocks."""
        self._barren: set[str] = set()
        """Names that had no mixer when they were called: what they read need not be kept."""
        self._gave: dict[str, Tensor] = {}
        """What the last module that had blocks inside gave, by its stack."""
        frames.on_enter.append(self._entered)
        frames.on_leave.insert(0, self._learned)
        frames.on_leave.append(self._left)

    def may_be(self, name: str) -> bool:
        """Whether a module of this name may be a block."""
        return name in self._rank

    def add(self, mixer: MixerSite) -> None:
        """A mixer ran: keep it until its block is known, or hand it on where there can be none."""
        self._hand_up([mixer], stack_of(mixer.name), BY_HAND)

    def finish(self) -> None:
        """The forward pass is over."""
        self._visits.clear()
        self._gave.clear()
        self._chains.close()
        self._chains.forget()

    # --- calls --------------------------------------------------------------------------------------------

    def _learned(self, frame: Frame) -> None:
        """What a stock layer was given by name is known when it is left; it changes nothing in place."""
        if is_stock(frame.module) and not any(visit.frame is frame for visit in self._visits):
            self._entered(frame)

    def _entered(self, frame: Frame) -> None:
        self._drop_stale()
        self._chains.reads(frame.tensors)
        if frame.name in self._rank and frame.name not in self._barren:
            given = first_tokens(frame.tensors)
            given = first_tokens(frame.tensors, axes=2) if given is None else given
            if given is not None:
                self._visits.append(self._visit(frame, given))

    def _visit(self, frame: Frame, given: Tensor) -> Visit:
        stack, outer = self._stack(frame.name), self._innermost()
        chain = self._chains.continues(stack, self._owner(), given)
        known = chain.snapshot if chain is not None and same(chain.gave, given) else None
        follows = outer is not None and any(same(inner.gave, given) for inner in outer.offered(stack))
        other = self._gave.get(stack)
        return Visit(
            frame,
            stack,
            self._rank[frame.name],
            given,
            snapshot(given) if known is None else known,
            linked=chain is not None or follows,
            apart=other is not None and not same(other, given),
        )

    def _left(self, frame: Frame) -> None:
        self._drop_stale()
        visit = self._visits.pop() if self._visits and self._visits[-1].frame is frame else None
        if frame.raised:
            self._chains.drop(frame.serial)
            return
        if visit is not None:
            visit.gave = _given_back(frame, visit)
            self._ended(visit)
        self._chains.close(frame.serial, tensors_of(frame.output))

    def _ended(self, visit: Visit) -> None:
        frame, outer = visit.frame, self._innermost()
        if not frame.pending and not visit.settled and frame.name not in self._expected:
            self._carry_on(visit, outer)
            return
        visit.claim = self._claim(visit)
        if visit.claim is None or visit.yields_to_inner():
            self._yield(visit)
            return
        for inner in visit.open:
            self._inner[inner.stack] = False
        if outer is None or self._inner.get(visit.stack):
            self._settle(visit.claim)
            return
        self._hand_up(frame.pending, visit.stack, visit.claim.owner)
        if outer.rank >= visit.rank and visit.stack not in self._inner:
            self._offer(outer, visit)

    def _carry_on(self, visit: Visit, outer: Visit | None) -> None:
        """An item without a mixer: it may carry the stream on between two that have one."""
        gave = visit.gave
        if outer is not None:
            outer.plain.add((visit.stack, visit.kind))
        chain = self._chains.continues(visit.stack, self._owner(), visit.given)
        if chain is None or gave is None or gave.shape != visit.given.shape:
            self._barren.add(visit.frame.name)
        else:
            chain.carry(visit.given, gave, visit.kind)

    def _claim(self, visit: Visit) -> Claim | None:
        """The call as a block, if it has the shape of one."""
        frame, gave = visit.frame, visit.gave
        if visit.settled or gave is None:
            return None
        if not (visit.given.is_nested or gave.is_nested) and visit.given.shape != gave.shape:
            return None
        shown = shown_as(visit.before, frame.module, frame.pending)
        if shown is None:
            return None
        return Claim(
            frame.name,
            visit.kind,
            visit.stack,
            self._owner(),
            visit.before,
            gave,
            shown,
            self._mask(frame, shown(visit.before)),
            list(frame.pending),
            self._chains.run,
            visit.linked,
            apart=not visit.linked and any(outer.apart for outer in self._visits),
        )

    # --- which of the nested calls is the block -----------------------------------------------------------

    def _offer(self, outer: Visit, visit: Visit) -> None:
        """What may be a block inside what may be one: wait until a second one, or the end, tells."""
        others = outer.offered(visit.stack)
        outer.open.append(visit)
        if any(same(other.given, visit.given) for other in others):  # side by side
            self._inner[visit.stack] = False
            outer.open = [inner for inner in outer.open if inner.stack != visit.stack]
        elif others and outer.rank > 0:  # one after the other, in no list of blocks
            self._settle_inside(outer)

    def _yield(self, visit: Visit) -> None:
        """No block itself: what may be one inside it is, and what else mixed there belongs around it."""
        self._visits.append(visit)
        self._settle_inside(visit)
        self._visits.pop()
        if visit.settled and visit.gave is not None:
            self._gave[visit.stack] = visit.gave
        self._hand_up(visit.frame.pending, visit.stack, self._owner())

    def _settle_inside(self, outer: Visit) -> None:
        if len(outer.open) > 1:
            self._inner.update({inner.stack: True for inner in outer.open})
        for inner in outer.open:
            if inner.claim is not None:
                self._settle(inner.claim)
        outer.open.clear()

    def _settle(self, claim: Claim) -> None:
        mine = {id(mixer) for mixer in claim.mixers}
        for around in self._visits:
            around.settled = True
            around.frame.pending = [mixer for mixer in around.frame.pending if id(mixer) not in mine]
        self._chains.add(claim)

    def _hand_up(self, mixers: list[MixerSite], stack: str, owner: int) -> None:
        """No block, or none for now: its mixers belong to whatever is around it."""
        if self._visits:
            self._visits[-1].frame.pending.extend(mixers)
        elif mixers:
            self._chains.add_bare(mixers, stack, owner)

    # --- what is around -----------------------------------------------------------------------------------

    def _drop_stale(self) -> None:
        """Forget calls that ended without telling."""
        running = {frame.serial for frame in self._frames.running}
        self._visits = [visit for visit in self._visits if visit.frame.serial in running]

    def _innermost(self) -> Visit | None:
        return self._visits[-1] if self._visits else None

    def _owning(self) -> Frame | None:
        """The innermost call around that is no candidate: it runs the blocks one after the other."""
        visited = {visit.frame.serial for visit in self._visits}
        around = self._frames.running[:-1]
        return next((frame for frame in reversed(around) if frame.serial not in visited), None)

    def _owner(self) -> int:
        owning = self._owning()
        return BY_HAND if owning is None else owning.serial

    def _stack(self, name: str) -> str:
        owning = self._owning()
        return stack_of(name, "" if owning is None else owning.name)

    def _mask(self, frame: Frame, tokens: Tensor) -> Tensor | None:
        for site in frame.pending:
            if not site.cross and site.valid_tokens.shape == tokens.shape[:2]:
                return site.valid_tokens
        return told_mask(self._frames.running, OWN_MASK, *tokens.shape[:2])


def _given_back(frame: Frame, visit: Visit) -> Tensor | None:
    """What a call gave; one that returns nothing may have changed what it was given in place."""
    if frame.output is None:
        return None if torch.equal(visit.before, visit.given) else visit.given
    return first_tokens(frame.output, axes=visit.given.dim())
