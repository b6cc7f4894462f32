"""Run a model, and return its heads and token states by sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from rankwise._internals.batches import drop_unused_labels, to_device
from rankwise._internals.forward import device_of, eval_mode, run_model
from rankwise._internals.linalg import as_float64
from rankwise._internals.records import grouped
from rankwise.auditing.error_hints import batch_errors
from rankwise.auditing.measure_table import mixer_kind
from rankwise.operators import IndexedMixing, MixingOperator
from rankwise.tracing import CapturedMixer, capture, record_calls

MIN_TOKENS = 8
"""Least number of real tokens per sequence. In shorter sequences all ranks are low and all tokens similar."""


class NotMeasurableError(Exception):
    """Raised if a claim cannot be measured on a model or its data, with the reason and numbers to show."""

    def __init__(self, reason: str, yours: str = "") -> None:
        super().__init__(reason, yours)


@dataclass(frozen=True)
class Heads:
    """Heads of one call of an attention module on one sequence, which is a row of a batch."""

    mixer: CapturedMixer
    row: int

    def matrices(self, operator: MixingOperator | None = None) -> MixingOperator:
        """Return the matrices (1, H, T, S) of an operator, by default the mixer's, without padding."""
        whole = (self.mixer.operator if operator is None else operator)[self.row : self.row + 1]
        return IndexedMixing(whole, self.mixer.valid_tokens[self.row], self.mixer.valid_sources[self.row])

    def real(self, name: str) -> Any:
        """Return query, key or output (H, T, K) in float64 without padding. None if it is unknown."""
        tensor = getattr(self.mixer, name, getattr(self.mixer.operator, name, None))
        if tensor is None:
            return None
        kept = self.mixer.valid_tokens if name in ("query", "output") else self.mixer.valid_sources
        rows = as_float64(tensor[self.row])[:, kept[self.row].to(tensor.device)]
        return rows.repeat_interleave(self.mixer.operator.shape[1] // len(rows), 0)


@dataclass(frozen=True)
class States:
    """Token states (T, D) of one sequence after ``blocks`` blocks of a stack, without padding."""

    stack: str
    blocks: int
    sequence: tuple[int, int]
    """Index of the forward pass, and row in its batch."""
    tokens: Float64[Tensor, "T D"]


@dataclass
class Run:
    """Heads and states of the sequences that have at least `MIN_TOKENS` tokens and are finite."""

    model: nn.Module
    batches: Sequence[Any]
    kinds: set[str] = field(default_factory=set)
    heads: list[Heads] = field(default_factory=list)
    states: list[States] = field(default_factory=list)
    layer_norms: list[tuple[Any, Tensor]] = field(default_factory=list)
    """LayerNorms and their inputs, by call."""
    why_none: str = "no token states were found"

    def is_usable(self, numbers: Tensor) -> bool:
        """Return True if tokens (…, T, N) suffice. Otherwise note the reason."""
        short = numbers.shape[-2] < MIN_TOKENS
        if short or not bool(numbers.isfinite().all()):
            self.why_none = f"no sequence has {MIN_TOKENS} tokens" if short else "numbers are NaN or infinite"
            return False
        return True

    def attention(self, *, queries: bool = False) -> Sequence[Heads]:
        """Return the heads, or those with known queries. Raise `NotMeasurableError` if there are none."""
        heads = [heads for heads in self.heads if not queries or heads.real("query") is not None]
        if not heads:
            kinds = ", ".join(sorted(self.kinds))
            has_attention = any(mixer_kind(kind).rows_are_means for kind in self.kinds)
            why = "queries are unknown: the model forms attention itself" if self.heads else self.why_none
            raise NotMeasurableError(why if has_attention else f"no attention: the mixers are {kinds}")
        return heads

    def by_depth(self, measure: Callable[..., Tensor], least: int) -> list[float]:
        """Return a measure before and after each block of the longest stack, mean over sequences."""
        stacks = grouped(self.states, lambda state: state.stack).values()
        longest = max(stacks, key=lambda states: states[-1].blocks, default=[])
        depths = grouped(longest, lambda state: state.blocks).values()
        if len(depths) <= least:
            raise NotMeasurableError(f"fewer than {least} blocks" if longest else self.why_none)
        return [float(torch.cat([measure(state.tokens[None]) for state in depth]).mean()) for depth in depths]


def run_batches(model: nn.Module, batches: Sequence[Any]) -> Run:
    """Run a model on all batches in evaluation mode, and return its heads and states."""
    run = Run(model, batches)
    norms = record_calls(model, lambda name, module: isinstance(module, nn.LayerNorm), copy=True)
    with eval_mode(model), torch.no_grad(), norms as calls, capture(model, values=True) as trace:
        for number, given in enumerate(batches, 1):
            batch = drop_unused_labels(model, given)[0]
            with batch_errors(model, batch, f"`batches`, batch {number}"):
                run_model(model, to_device(batch, device_of(model)))
    run.layer_norms = [(call.module, call.args[0]) for call in calls if call.args]
    for state in trace.states:
        for row, tokens in enumerate(as_float64(state.tokens)):
            tokens = tokens if state.mask is None else tokens[state.mask[row].to(tokens.device)]
            if run.is_usable(tokens):
                run.states.append(States(state.stack, state.layer, (state.forward_pass, row), tokens))
    for mixer in trace.mixers:
        run.kinds.add(mixer.kind)
        if not mixer_kind(mixer.kind).rows_are_means or mixer.kind == "linear" or mixer.cross:
            run.why_none = f"attention is {'cross' if mixer.cross else mixer.kind} attention"
            continue
        if len(mixer.valid_tokens) != mixer.sequences:
            run.why_none = "attention mixes parts of sequences one by one"
            continue
        for heads in (Heads(mixer, row) for row in range(mixer.sequences)):
            kept = mixer.valid_sources[heads.row]
            ones = torch.ones(int(kept.sum()), 1, dtype=mixer.operator.dtype, device=mixer.operator.device)
            if run.is_usable(heads.matrices() @ ones if len(ones) else ones):
                run.heads.append(heads)
    return run
