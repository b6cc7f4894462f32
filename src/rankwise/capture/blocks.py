"""The repeated blocks of a model, found as it runs."""

from dataclasses import dataclass, field

from torch import Tensor, nn

from rankwise.capture.chains import BY_HAND, Chains, Claim, same, snapshot
from rankwise.capture.frames import Frame, Frames, first_tokens, tensors_of
from rankwise.capture.names import block_ranks, enclosing, stack_of
from rankwise.capture.padding import OWN_MASK, told_mask
from rankwise.capture.states import shown_as
from rankwise.capture.stock import is_stock
from rankwise.capture.trace import MixerSite


@dataclass
class Visit:
    """A call of a module that may be a block."""

    frame: Frame
    given: Tensor
    """What it reads."""
    before: Tensor
    """The same, safe from changes in place."""
    linked: bool
    """Whether it reads what the block before it gave."""
    apart: bool
    """Whether a like module with blocks inside ran before it, and gave something else."""
    gave: Tensor | None = None
    open: list["Visit"] = field(default_factory=list)
    """Calls inside it that may be blocks in its stead."""
    claim: Claim | None = None
    settled: bool = False
    """Whether blocks were found inside it, so that it is none."""

    def holds_one_like_it(self) -> bool:
        """Whether one call inside it reads what it reads and gives what it gives."""
        if len(self.open) != 1 or self.gave is None:
            return False
        inner = self.open[0]
        return same(self.given, inner.given) and inner.gave is not None and same(self.gave, inner.gave)


class Blocks:
    """Finds the blocks of a running model, and hands on what belongs to each.

    A block is an item of a list of like modules (``encoder.layer.3``, ``transformer.h.0``) that has a mixer
    inside and gives back states of the shape it was given. Where such items lie inside one another, the inner
    ones are blocks if they run one after the other, as in stages of blocks; if they run side by side, as
    heads do, or there is only one, the outer one is.

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

    def add(self, mixer: MixerSite) -> None:
        """A mixer ran: keep it until its block is known, or hand it on where there can be none."""
        self._hand_up([mixer], mixer.name, BY_HAND)

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
        stack = stack_of(frame.name)
        chain = self._chains.continues(stack, self._owner(), given)
        known = chain.snapshot if chain is not None and same(chain.gave, given) else None
        other = self._gave.get(stack)
        return Visit(
            frame,
            given,
            snapshot(given) if known is None else known,
            linked=chain is not None or any(same(offer.gave, given) for offer in self._offers(stack)),
            apart=other is not None and not same(other, given),
        )

    def _offers(self, stack: str) -> list[Visit]:
        """Calls before this one, inside the same candidate, that may be blocks."""
        around = self._visits[-1].open if self._visits else []
        return [visit for visit in around if stack_of(visit.frame.name) == stack]

    def _left(self, frame: Frame) -> None:
        self._drop_stale()
        visit = self._visits.pop() if self._visits and self._visits[-1].frame is frame else None
        if frame.output is None:  # it raised
            self._chains.drop(frame.serial)
            return
        if visit is not None:
            visit.gave = first_tokens(frame.output, axes=visit.given.dim())
            self._ended(visit)
        self._chains.close(frame.serial, tensors_of(frame.output))

    def _ended(self, visit: Visit) -> None:
        frame = visit.frame
        if not frame.pending and not visit.settled and frame.name not in self._expected:
            self._carry_on(visit)
            return
        claim = visit.claim = self._claim(visit)
        if claim is None or visit.holds_one_like_it():
            self._is_none(visit)
            return
        for inner in visit.open:
            self._inner[stack_of(inner.frame.name)] = False
        outer = self._visits[-1] if self._visits else None
        if outer is None or self._inner.get(claim.stack):
            self._settle(claim)
            return
        self._hand_up(frame.pending, frame.name, claim.owner)
        if self._rank[outer.frame.name] >= self._rank[frame.name] and claim.stack not in self._inner:
            self._offer(outer, visit)

    def _carry_on(self, visit: Visit) -> None:
        """An item without a mixer: it may carry the stream on between two that have one."""
        name, gave = visit.frame.name, visit.gave
        chain = self._chains.continues(stack_of(name), self._owner(), visit.given)
        if chain is None or gave is None or gave.shape != visit.given.shape:
            self._barren.add(name)
        else:
            chain.carry(visit.given, gave, type(visit.frame.module))

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
            type(frame.module),
            stack_of(frame.name),
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
        """A block inside what may be a block: wait until a second one, or the end, tells."""
        stack = stack_of(visit.frame.name)
        others = self._offers(stack)
        outer.open.append(visit)
        if others:
            self._inner[stack] = not any(same(other.given, visit.given) for other in others)
            if self._inner[stack]:  # one after the other
                self._settle_inside(outer)
            outer.open.clear()

    def _is_none(self, visit: Visit) -> None:
        """No block itself: what may be one inside it is, and what else mixed there belongs around it."""
        self._visits.append(visit)
        self._settle_inside(visit)
        self._visits.pop()
        if visit.settled and visit.gave is not None:
            self._gave[stack_of(visit.frame.name)] = visit.gave
        self._hand_up(visit.frame.pending, visit.frame.name, self._owner())

    def _settle_inside(self, outer: Visit) -> None:
        for inner in outer.open:
            if inner.claim is not None:
                self._settle(inner.claim)

    def _settle(self, claim: Claim) -> None:
        mine = {id(mixer) for mixer in claim.mixers}
        for around in self._visits:
            around.settled = True
            around.frame.pending = [mixer for mixer in around.frame.pending if id(mixer) not in mine]
        self._chains.add(claim)

    def _hand_up(self, mixers: list[MixerSite], name: str, owner: int) -> None:
        """No block, or none for now: its mixers belong to whatever is around it."""
        if self._visits:
            self._visits[-1].frame.pending.extend(mixers)
        elif mixers:
            self._chains.add_bare(mixers, stack_of(name), owner)

    # --- what is around -----------------------------------------------------------------------------------

    def _drop_stale(self) -> None:
        """Forget calls that ended without telling."""
        running = {frame.serial for frame in self._frames.running}
        self._visits = [visit for visit in self._visits if visit.frame.serial in running]

    def _owner(self) -> int:
        """The innermost call around that is no candidate: it runs the blocks one after the other."""
        visited = {visit.frame.serial for visit in self._visits}
        around = self._frames.running[:-1]
        return next((frame.serial for frame in reversed(around) if frame.serial not in visited), BY_HAND)

    def _mask(self, frame: Frame, tokens: Tensor) -> Tensor | None:
        for site in frame.pending:
            if not site.cross and site.valid_tokens.shape == tokens.shape[:2]:
                return site.valid_tokens
        return told_mask(self._frames.running, OWN_MASK, *tokens.shape[:2])
