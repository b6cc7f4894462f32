"""Interventions: replace outputs of heads and blocks before the model uses them."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from rankwise._internals.batches import map_leaves
from rankwise.tracing.module_calls import CallCounter, CallId, ModuleCall, ModuleCalls, first_tokens


@dataclass(frozen=True)
class HeadOutputs:
    """Outputs of all heads of one mixer call, in the field ``values``: mixing matrix M times its input V.

    For a state-space mixer, ``values`` is the input of the output projection: M V after the skip D·x, the
    gate and the norm, split into heads or channels.
    """

    call_id: CallId
    """Address of the mixer call, equal to ``call_id`` of its `CapturedMixer`."""
    values: Float[Tensor, "B H T V"]


@dataclass(frozen=True)
class BlockOutput:
    """Input and output of a residual block, in the model's own order of axes, such as (B, T, D)."""

    call_id: CallId
    input: Tensor
    output: Tensor


class Intervention:
    """Base class of objects that replace outputs of heads and blocks; this class replaces nothing."""

    blocks: frozenset[str] = frozenset()
    """Names of the blocks for which `on_block` is called."""

    def on_heads(self, heads: HeadOutputs) -> Float[Tensor, "B H T V"] | None:
        """Return new outputs of all heads of a mixer. Return None to keep the outputs."""
        return None

    def on_block(self, block: BlockOutput) -> Tensor | None:
        """Return a new output of a block, of the same shape. Return None to keep the output."""
        return None


class Substitution:
    """Applies an `Intervention` to a running model; ``counter`` numbers the calls of each mixer."""

    def __init__(self, intervention: Intervention | None, calls: ModuleCalls, counter: CallCounter) -> None:
        self.on = intervention is not None
        """True if there is an intervention, so that outputs may be replaced."""
        self._intervention = Intervention() if intervention is None else intervention
        self._calls, self._counter, self._block_counter = calls, counter, CallCounter()

    def heads(self, outputs: HeadOutputs) -> Tensor | None:
        """Return the intervention's new outputs of a mixer's heads. Return None if it keeps the outputs."""
        return self._intervention.on_heads(outputs)

    def new_pass(self) -> None:
        """Restart the numbering of calls at 0 for a new forward pass."""
        self._counter.clear()
        self._block_counter.clear()

    def entered(self, call: ModuleCall) -> None:
        """When a call begins, replace heads that an output projection reads, or copy the input of a block."""
        if not self.on:
            return
        if call.name in self._intervention.blocks:
            call.input_copy = None if call.stream is None else call.stream.clone()
        # Heads are replaced in the input of the mixer's output projection, which holds all heads.
        mixer = next((other for other in reversed(self._calls.running[:-1]) if other.reader), None)
        joined = None if mixer is None else mixer.reader.joined_heads(mixer.module)
        if mixer is not None and joined is not None and call.name == f"{mixer.name}.{joined[0]}".lstrip("."):
            given = call.tokens
            changed = None if given is None else self._changed_heads(mixer, given, joined[1])
            call.args = in_place_of(call.args, given, changed)
            call.kwargs = in_place_of(call.kwargs, given, changed)

    def left(self, call: ModuleCall) -> None:
        """When a call ends, replace the output of a block, or of a mixer that returns concatenated heads."""
        if not self.on:
            return
        heads = None if call.reader is None else call.reader.joined_heads(call.module)
        joined = first_tokens(call.output)
        if heads is not None and not heads[0] and joined is not None:
            call.output = in_place_of(call.output, joined, self._changed_heads(call, joined, heads[1]))
        if call.name not in self._intervention.blocks:
            return
        given = call.stream if call.input_copy is None else call.input_copy
        output = None if given is None else first_tokens(call.output, axes=given.dim())
        if given is not None and output is not None and output.shape == given.shape:
            block = BlockOutput(self._block_counter.count(call.name), given, output)
            call.output = in_place_of(call.output, output, self._intervention.on_block(block))

    def _changed_heads(self, mixer: ModuleCall, joined: Tensor, heads: int) -> Tensor | None:
        if mixer.call_id is None:
            mixer.call_id = self._counter.count(mixer.name)
        values = joined.unflatten(-1, (heads or joined.shape[-1], -1)).transpose(1, 2)
        changed = self._intervention.on_heads(HeadOutputs(mixer.call_id, values))
        return None if changed is None else changed.transpose(1, 2).reshape(joined.shape)


def in_place_of(values: Any, old: Tensor | None, new: Tensor | None) -> Any:
    """Return dicts, tuples and lists with the tensor ``old`` replaced by ``new``, unless ``new`` is None."""
    return values if new is None else map_leaves(values, lambda leaf: new if leaf is old else leaf)
