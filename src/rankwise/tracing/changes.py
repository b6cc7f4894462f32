"""What heads and blocks give, before the model goes on from it, and how something else takes its place."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from rankwise.tracing.adapters.base import Adapter
from rankwise.tracing.masks import OWN_MASK, told_mask
from rankwise.tracing.module_calls import ModuleCall, ModuleCalls, first_tokens


@dataclass(frozen=True)
class HeadOutputs:
    """What the heads of one mixer gave, before the model goes on from it: M V.

    Of a state-space mixer, what its output projection reads of each head or channel: M V after the D-term,
    the gate and the norm.
    """

    name: str
    """Module that mixed; of PyTorch's own layers the outermost."""
    serial: int
    """That of its `MixerSite`."""
    values: Float[Tensor, "B H T V"]
    valid: Bool[Tensor, "B T"]
    """False where a row belongs to padding."""


@dataclass(frozen=True)
class BlockOutput:
    """What one block read from the residual stream, and what it gave back, as the model lays them out."""

    name: str
    read: Tensor
    gave: Tensor


class Changes:
    """What a capture puts in the place of what heads and blocks give, while the model runs."""

    blocks: frozenset[str] = frozenset()
    """Names of the blocks whose outputs are to be changed."""

    def heads(self, outputs: HeadOutputs) -> Tensor | None:
        """What the model is to go on with, (B, H, T, V); None: with what it has.

        Args:
            outputs: of one mixer.
        """
        return None

    def block(self, output: BlockOutput) -> Tensor | None:
        """What the model is to go on with, of the shape of what the block gave; None: with what it has.

        Args:
            output: of one of the `blocks`.
        """
        return None


class Changer:
    """Puts changed outputs of heads and blocks in their place.

    Args:
        changes: what to put there; None changes nothing.
        calls: the calls under way.
        serials: numbers for mixers, in the order that they run.
    """

    def __init__(self, changes: Changes | None, calls: ModuleCalls, serials: Iterator[int]) -> None:
        self._changes, self._calls, self._serials = changes, calls, serials

    @property
    def on(self) -> bool:
        """Whether anything may be changed."""
        return self._changes is not None

    def heads(self, outputs: HeadOutputs) -> Tensor | None:
        """What the model is to go on with in the place of what these heads gave."""
        return None if self._changes is None else self._changes.heads(outputs)

    def entered(self, call: ModuleCall) -> None:
        """A call begins: it may be a block, or read the heads of a mixer side by side."""
        if self._changes is None:
            return
        if call.name in self._changes.blocks:
            read = _stream(call)
            call.read = None if read is None else read.clone()
        self._joined_heads(call)

    def left(self, call: ModuleCall) -> None:
        """A call has ended, and its output may be changed."""
        if self._changes is None:
            return
        mixer = _joined_at(call)
        if mixer is not None and mixer[0] == "":
            gave = first_tokens(call.output)
            changed = None if gave is None else self._changed_heads(call, gave, mixer[1])
            if changed is not None:
                call.output, call.changed = in_place_of(call.output, gave, changed), True
        if call.name in self._changes.blocks:
            self._block(call)

    def _block(self, call: ModuleCall) -> None:
        assert self._changes is not None
        read = _stream(call) if call.read is None else call.read
        gave = None if read is None else first_tokens(call.output, axes=read.dim())
        if read is None or gave is None or gave.shape != read.shape:
            return
        changed = self._changes.block(BlockOutput(call.name, read, gave))
        if changed is not None:
            call.output, call.changed = in_place_of(call.output, gave, changed), True

    def _joined_heads(self, call: ModuleCall) -> None:
        """Change what a module inside a mixer reads, if that is the heads side by side."""
        mixer = next((other for other in reversed(self._calls.running[:-1]) if other.adapter), None)
        at = None if mixer is None else _joined_at(mixer)
        if mixer is None or at is None or not at[0] or call.name != f"{mixer.name}.{at[0]}".lstrip("."):
            return
        given = first_tokens(call.tensors)
        changed = None if given is None else self._changed_heads(mixer, given, at[1])
        if changed is not None:
            call.args = in_place_of(call.args, given, changed)
            call.kwargs = in_place_of(call.kwargs, given, changed)
            call.changed_arguments = True

    def _changed_heads(self, mixer: ModuleCall, joined: Tensor, heads: int) -> Tensor | None:
        assert self._changes is not None
        if mixer.heads_serial is None:
            mixer.heads_serial = next(self._serials)
        batch, tokens, width = joined.shape
        real = told_mask(self._calls.running, OWN_MASK, batch, tokens)
        real = joined.new_ones(batch, tokens).bool() if real is None else real.to(joined.device)
        values = joined.unflatten(-1, (heads or width, -1)).transpose(1, 2)
        changed = self._changes.heads(HeadOutputs(mixer.name, mixer.heads_serial, values, real))
        return None if changed is None else changed.transpose(1, 2).reshape(joined.shape)


def _joined_at(call: ModuleCall) -> tuple[str, int] | None:
    adapter: Adapter | None = call.adapter
    return None if adapter is None else adapter.output_projection(call.module)


def _stream(call: ModuleCall) -> Tensor | None:
    """What a block read."""
    given = first_tokens(call.tensors)
    return first_tokens(call.tensors, axes=2) if given is None else given


def in_place_of(values: Any, old: Tensor | None, new: Tensor) -> Any:
    """The same values, in what holds them, with one tensor in the place of another."""
    if values is old:
        return new
    if isinstance(values, Mapping):
        changed = {name: in_place_of(value, old, new) for name, value in values.items()}
        return changed if type(values) is dict else type(values)(**changed)
    if isinstance(values, tuple | list):
        items = [new if value is old else value for value in values]
        return type(values)(*items) if hasattr(values, "_fields") else type(values)(items)
    return values
