"""The repeated blocks of a model, and the token states between them, found without being told."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.capture.frames import Frame, Frames, first_tokens

Place = tuple[str, int]
"""A stack and a layer."""
EmitState = Callable[[Frame, Place, Tensor], None]
EmitMixer = Callable[[Any, Place], None]


class Blocks:
    """Finds the blocks of a running model, numbers them, and hands on what belongs to each.

    A block is an item of a list of like modules (``encoder.layer.3``, ``transformer.h.0``) that has a mixer
    inside and gives back states of the shape it was given: the innermost such item. Whether it does is known
    when it ends, so mixers wait until then. Layers are counted by calls: a module called twelve times is
    twelve layers. Lists whose names differ in numbers only are one stack.

    Args:
        model: the model.
        frames: its running calls.
        emit_mixer: called with what `add` was given and its place.
        emit_state: called with the block's frame, the place and the tokens.
        mixer_like: names of modules that look like mixers: their block counts even if they stay unseen.
        pattern: names of the blocks, with shell wildcards, where the user gives them.
    """

    def __init__(
        self,
        model: nn.Module,
        frames: Frames,
        emit_mixer: EmitMixer,
        emit_state: EmitState,
        mixer_like: set[str],
        pattern: str | None,
    ) -> None:
        self._rank = _candidates(model, pattern)
        self._frames, self._emit_mixer, self._emit_state = frames, emit_mixer, emit_state
        self._expected = _enclosing(mixer_like, self._rank)
        self._count: Counter[str] = Counter()
        self._claimed_inside: set[int] = set()
        self._inputs: dict[int, Tensor] = {}
        frames.on_enter.append(self._entered)
        frames.on_leave.append(self._left)

    def add(self, mixer: Any) -> None:
        """A mixer ran: keep it until its block is known, or hand it on where there can be none."""
        frame = self._candidate(self._frames.running)
        if frame is None:
            self._emit_mixer(mixer, self._next(_stack_of(self._frames.running[-1].name)))
        else:
            frame.pending.append(mixer)

    def reset(self) -> None:
        """A new forward pass begins."""
        self._count.clear()
        self._claimed_inside.clear()
        self._inputs.clear()

    def _candidate(self, running: list[Frame]) -> Frame | None:
        return next((frame for frame in reversed(running) if frame.name in self._rank), None)

    def _next(self, stack: str) -> Place:
        self._count[stack] += 1
        return stack, self._count[stack] - 1

    def _entered(self, frame: Frame) -> None:
        if frame.name in self._rank and frame.tokens is not None:
            self._inputs[id(frame)] = frame.tokens.detach()

    def _left(self, frame: Frame) -> None:
        before = self._inputs.pop(id(frame), None)
        if frame.name not in self._rank:
            return
        after = first_tokens(frame.output)
        outer = self._frames.running[:-1]
        if before is not None and after is not None and self._is_block(frame, before, after, outer):
            self._claim(frame, before, after)
            return
        parent = self._candidate(outer)
        if parent is not None:
            parent.pending.extend(frame.pending)
            return
        for mixer in frame.pending:
            self._emit_mixer(mixer, self._next(_stack_of(frame.name)))

    def _is_block(self, frame: Frame, before: Tensor, after: Tensor, outer: list[Frame]) -> bool:
        inside = id(frame) in self._claimed_inside
        self._claimed_inside.discard(id(frame))
        has_mixer = bool(frame.pending) or (frame.name in self._expected and not inside)
        keeps_shape = before.is_nested or after.is_nested or before.shape == after.shape
        better_outside = any(self._rank.get(above.name, 9) < self._rank[frame.name] for above in outer)
        return has_mixer and keeps_shape and not better_outside

    def _claim(self, frame: Frame, before: Tensor, after: Tensor) -> None:
        self._claimed_inside.update(id(above) for above in self._frames.running[:-1])
        stack, layer = self._next(_stack_of(frame.name))
        if layer == 0:
            self._emit_state(frame, (stack, 0), before)
        for mixer in frame.pending:
            self._emit_mixer(mixer, (stack, layer))
        self._emit_state(frame, (stack, layer + 1), after)


def _enclosing(names: set[str], candidates: Iterable[str]) -> set[str]:
    """The candidates that are, or hold, one of the names."""
    return {outer for outer in candidates if any(f"{name}.".startswith(f"{outer}.") for name in names)}


def _stack_of(name: str) -> str:
    """``encoder.layer.3`` → ``encoder.layer``; inner numbers become ``*``."""
    parts = ["*" if part.isdigit() else re.sub(r"\d+$", "*", part) for part in name.split(".")]
    while len(parts) > 1 and parts[-1] == "*":
        parts.pop()
    return ".".join(parts)


def _candidates(model: nn.Module, pattern: str | None) -> dict[str, int]:
    """Names that may be blocks, with their rank: 0 before 1 before 2.

    0: items of a list in which their class recurs (or that has one item); 1: numbered attributes of one class
    (``block1``, ``block2``); 2: items of a mixed list, such as the alternating layers of a hybrid.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if pattern is not None:
        return {name: 0 for name in modules if fnmatchcase(name, pattern)}
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


def padded(tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """A nested tensor as a padded one with its mask; anything else as it is."""
    if not tokens.is_nested:
        return tokens, None
    lengths = torch.tensor([item.shape[0] for item in tokens.unbind()], device=tokens.device)
    dense = tokens.to_padded_tensor(0.0)
    return dense, torch.arange(dense.shape[1], device=tokens.device) < lengths[:, None]
