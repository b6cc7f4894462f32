"""Run a model once as it is and once at initialization, and cut heads and token states into sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from rankwise._internals.batches import drop_unused_labels, to_device
from rankwise._internals.forward import device_of, eval_mode, run_model
from rankwise._internals.linalg import as_float64
from rankwise.auditing import InitializationError, reinitialized
from rankwise.auditing.error_hints import batch_errors
from rankwise.auditing.measure_table import mixer_kind
from rankwise.auditing.reference_ranks import masks_of
from rankwise.operators import IndexedMixing, MixingOperator, SoftmaxMixing
from rankwise.tracing import Address, CapturedMixer, capture, record_calls

MIN_TOKENS = 8
"""Least number of real tokens of a sequence. In shorter sequences every rank is low and every token near."""


class NotMeasurableError(Exception):
    """Raised by the check of a claim that a model or its data cannot show; ``ours`` is shown all the same."""

    def __init__(self, reason: str, ours: str = "") -> None:
        super().__init__(reason)
        self.reason, self.ours = reason, ours


@dataclass(frozen=True)
class Heads:
    """Heads of one call of an attention module on one sequence, without padding."""

    mixer: Address
    sequence: int
    whole: MixingOperator
    """Operator (1, H, T, S) with padding; ``cut`` removes the padding."""
    cut: Callable[[MixingOperator], MixingOperator]
    query: Float[Tensor, "H T K"] | None
    key: Float[Tensor, "Hkv S K"] | None
    value: Float[Tensor, "Hv S V"] | None
    output: Float[Tensor, "H T V"] | None
    """Output M V of the heads."""

    @cached_property
    def operator(self) -> MixingOperator:
        """Mixing matrices (1, H, T, S) of the real tokens."""
        return self.cut(self.whole)

    @cached_property
    def masks(self) -> set[str]:
        """Names of the masks of the heads."""
        return {mask.name for mask in masks_of(self.operator)[0]}


@dataclass(frozen=True)
class States:
    """Token states (T, D) of one sequence after ``blocks`` blocks of a stack, without padding."""

    stack: str
    blocks: int
    sequence: int
    tokens: Float64[Tensor, "T D"]


@dataclass(frozen=True)
class Run:
    """Heads and token states of all sequences with `MIN_TOKENS` finite tokens, in the order of the model."""

    heads: Sequence[Heads]
    states: Sequence[States]
    kinds: frozenset[str]
    """Kinds of the mixers, such as softmax."""
    layer_norms: Sequence[tuple[nn.LayerNorm, Float[Tensor, "... T D"]]]
    """Calls of LayerNorm: the module and its input."""
    sequences: int
    tokens: int
    why_empty: str

    def attention(self) -> Sequence[Heads]:
        """Return the heads of softmax attention. Raise `NotMeasurableError` if there are none."""
        if not self.heads:
            kinds = ", ".join(sorted(self.kinds))
            no_attention = not any(mixer_kind(kind).rows_are_means for kind in self.kinds)
            raise NotMeasurableError(f"mixers are {kinds}" if no_attention else self.why_empty)
        return self.heads

    def with_queries(self) -> list[Heads]:
        """Return the heads with queries and keys. Raise `NotMeasurableError` if there are none."""
        heads = [heads for heads in self.attention() if heads.query is not None]
        if not heads:
            raise NotMeasurableError("the model forms attention itself, so queries and keys are unknown")
        return heads

    def stacks(self, least: int) -> list[list[list[States]]]:
        """Return the states by stack and by blocks passed, for stacks of at least ``least`` blocks."""
        if not self.states:
            raise NotMeasurableError(self.why_empty)
        stacks: dict[str, dict[int, list[States]]] = {}
        for state in self.states:
            stacks.setdefault(state.stack, {}).setdefault(state.blocks, []).append(state)
        long = [[*stack.values()] for stack in stacks.values() if len(stack) > least]
        if not long:
            raise NotMeasurableError(f"no stack has {least} blocks")
        return long


class Evidence:
    """Runs that claims are checked on. Each run is made when the first claim reads it."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], say: Callable[[str], None]) -> None:
        self.model, self.batches, self._say = model, batches, say

    @cached_property
    def trained(self) -> Run:
        """Run of the model as it is."""
        self._say("running the model")
        return _run(self.model, self.batches)

    @cached_property
    def initial(self) -> Run:
        """Run of a copy at initialization. Raise `NotMeasurableError` if no copy can be built."""
        self._say("running the model at initialization")
        try:
            copy = reinitialized(self.model)
        except InitializationError as error:
            raise NotMeasurableError(f"no copy at initialization: {error}") from None
        return _run(copy, self.batches)


def _run(model: nn.Module, batches: Sequence[Any]) -> Run:
    sizes: list[int] = []
    with eval_mode(model), torch.no_grad(), capture(model, values=True) as trace:
        is_norm = record_calls(model, lambda name, module: isinstance(module, nn.LayerNorm))
        with is_norm as norms:
            for number, given in enumerate(batches):
                batch = drop_unused_labels(model, given)[0]
                with batch_errors(model, batch, f"`batches`, batch {number + 1}"):
                    run_model(model, to_device(batch, device_of(model)))
    first: dict[int, int] = {}
    for state in trace.states:
        if state.forward_pass not in first:
            first[state.forward_pass] = sum(sizes)
            sizes.append(len(state.tokens))
    states, short, total = [], 0, {}
    for state in trace.states:
        for row, tokens in enumerate(as_float64(state.tokens)):
            real = tokens if state.mask is None else tokens[state.mask[row].to(tokens.device)]
            sequence = first[state.forward_pass] + row
            total[sequence] = len(real)
            if len(real) >= MIN_TOKENS and bool(real.isfinite().all()):
                states.append(States(state.stack, state.layer, sequence, real))
            short += len(real) < MIN_TOKENS
    heads = [
        one
        for mixer in trace.mixers
        if mixer_kind(mixer.kind).rows_are_means and mixer.kind != "linear" and not mixer.cross
        for one in _by_sequence(mixer, first.get(mixer.forward_pass, 0))
    ]
    short_words = f"no sequence has {MIN_TOKENS} tokens"
    return Run(
        heads, states, frozenset(mixer.kind for mixer in trace.mixers),
        [(call.module, call.args[0]) for call in norms if call.args], len(total), sum(total.values()),
        short_words if short else "states or attention are not finite, or no mixer sees whole sequences",
    )  # fmt: skip
