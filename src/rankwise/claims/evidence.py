"""Run a model once as it is and once at initialization, and cut heads and token states into sequences."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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

Place = tuple[int, int]
"""Address of a sequence: index of its forward pass, and row in the batch."""
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
    sequence: Place
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
    sequence: Place
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
    with ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        stack.enter_context(torch.no_grad())
        norms = stack.enter_context(record_calls(model, _is_layer_norm, copy=True))
        trace = stack.enter_context(capture(model, values=True))
        for number, given in enumerate(batches):
            batch = drop_unused_labels(model, given)[0]
            with batch_errors(model, batch, f"`batches`, batch {number + 1}"):
                run_model(model, to_device(batch, device_of(model)))
    lengths: dict[Place, int] = {}
    states, heads, why = [], [], Counter[str]()
    for state in trace.states:
        for row, tokens in enumerate(as_float64(state.tokens)):
            real = tokens if state.mask is None else tokens[state.mask[row].to(tokens.device)]
            sequence = state.forward_pass, row
            lengths[sequence] = len(real)
            if reason := _unusable(real):
                why[reason] += 1
            else:
                states.append(States(state.stack, state.layer, sequence, real))
    for mixer in trace.mixers:
        if not mixer_kind(mixer.kind).rows_are_means or mixer.kind == "linear" or mixer.cross:
            continue
        if mixer.operator.shape[0] != mixer.sequences:
            why["attention mixes windows of a sequence one by one"] += 1
            continue
        for row in range(mixer.sequences):
            lengths.setdefault((mixer.forward_pass, row), int(mixer.valid_tokens[row].sum()))
            one = _of_sequence(mixer, row)
            if isinstance(one, str):
                why[one] += 1
            else:
                heads.append(one)
    return Run(
        heads, states, frozenset(mixer.kind for mixer in trace.mixers),
        [(call.module, call.args[0]) for call in norms if call.args],
        len(lengths), sum(lengths.values()), why.most_common(1)[0][0] if why else "nothing was captured",
    )  # fmt: skip


def _is_layer_norm(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm)


def _unusable(tokens: Tensor) -> str:
    """Return why a sequence is left out; an empty string if it is used."""
    if len(tokens) < MIN_TOKENS:
        return f"no sequence has {MIN_TOKENS} tokens or more"
    return "" if bool(tokens.isfinite().all()) else "numbers are NaN or infinite"


def _of_sequence(mixer: CapturedMixer, row: int) -> Heads | str:
    """Return the heads of one sequence, or the reason why they are left out."""
    rows, columns = mixer.valid_tokens[row], mixer.valid_sources[row]
    whole, softmax = mixer.operator[row : row + 1], isinstance(mixer.operator, SoftmaxMixing)

    def cut(operator: MixingOperator) -> MixingOperator:
        full = bool(rows.all()) and bool(columns.all())
        return operator if full else IndexedMixing(operator, rows, columns)

    def real(tensor: Tensor | None, kept: Tensor) -> Tensor | None:
        return None if tensor is None else as_float64(tensor[row])[..., kept.to(tensor.device), :]

    query = real(mixer.operator.query, rows) if softmax else None
    key = real(mixer.operator.key, columns) if softmax else None
    if int(rows.sum()) < MIN_TOKENS:
        return _unusable(torch.empty(0))
    formed = [tensor for tensor in (query, key) if tensor is not None] or [cut(whole).dense()]
    if reason := next(filter(None, (_unusable(tensor.flatten(0, -2)) for tensor in formed)), ""):
        return reason
    return Heads(
        mixer.address(), (mixer.forward_pass, row), whole, cut, query, key,
        real(mixer.values, columns), real(mixer.output, rows),
    )  # fmt: skip
