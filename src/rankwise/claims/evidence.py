"""Run a model as it is and at initialization, and give claims its heads and token states by sequence."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import getdoc
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from rankwise._internals.batches import drop_unused_labels, to_device
from rankwise._internals.forward import device_of, eval_mode, run_model
from rankwise._internals.linalg import as_float64
from rankwise._internals.records import grouped
from rankwise.auditing import InitializationError, reinitialized
from rankwise.auditing.error_hints import batch_errors
from rankwise.auditing.measure_table import mixer_kind
from rankwise.claims.records import CheckedClaim
from rankwise.operators import IndexedMixing, MixingOperator
from rankwise.tracing import CapturedMixer, capture, record_calls

MIN_TOKENS = 8
"""Least number of real tokens of a sequence. In shorter ones every rank is low and all tokens are alike."""


class NotMeasurableError(Exception):
    """Raised if a claim cannot be measured on a model or its data. Arguments: reason, and numbers to show."""


@dataclass(frozen=True)
class Heads:
    """Heads of one call of an attention module on one sequence, without padding."""

    mixer: CapturedMixer
    row: int
    """Index of the sequence in its batch."""

    @property
    def sequence(self) -> tuple[int, int]:
        """Forward pass and row of the sequence."""
        return self.mixer.forward_pass, self.row

    def matrices(self, operator: MixingOperator | None = None) -> MixingOperator:
        """Return the attention matrices (1, H, T, S), or those of another operator of the mixer's shape."""
        whole = (self.mixer.operator if operator is None else operator)[self.row : self.row + 1]
        return IndexedMixing(whole, self.mixer.valid_tokens[self.row], self.mixer.valid_sources[self.row])

    def real(self, name: str) -> Float64[Tensor, "H T K"] | None:
        """Return the query, key, values or output of each head (or key head). None if it is unknown."""
        tensor = getattr(self.mixer, name, getattr(self.mixer.operator, name, None))
        kept = self.mixer.valid_tokens if name in ("query", "output") else self.mixer.valid_sources
        return None if tensor is None else as_float64(tensor[self.row])[:, kept[self.row].to(tensor.device)]


@dataclass(frozen=True)
class States:
    """Token states (T, D) of one sequence after ``blocks`` blocks of a stack, without padding."""

    stack: str
    blocks: int
    sequence: tuple[int, int]
    tokens: Float64[Tensor, "T D"]


@dataclass
class Run:
    """Heads and states of the sequences with at least `MIN_TOKENS` tokens and finite numbers."""

    kinds: set[str] = field(default_factory=set)
    """Kinds of the captured mixers."""
    layer_norms: list[tuple[nn.LayerNorm, Tensor]] = field(default_factory=list)
    """LayerNorms and their inputs, by call."""
    heads: list[Heads] = field(default_factory=list)
    states: list[States] = field(default_factory=list)
    why_none: str = "no token states were found"

    def attention(self, *, queries: bool = False) -> Sequence[Heads]:
        """Return the heads, or those with queries and keys. Raise `NotMeasurableError` if there are none."""
        heads = [heads for heads in self.heads if not queries or heads.real("query") is not None]
        if not heads:
            unlike = not any(mixer_kind(kind).rows_are_means for kind in self.kinds)
            unknown = "the model forms its attention itself, so queries are unknown"
            words = f"no attention: the mixers are {', '.join(sorted(self.kinds))}"
            raise NotMeasurableError(words if unlike else unknown if self.heads else self.why_none)
        return heads

    def depth_curve(self, measure: Callable[..., Tensor], least: int) -> list[float]:
        """Return the mean of a measure over sequences, before and after each block of the longest stack."""
        if not self.states:
            raise NotMeasurableError(self.why_none)
        curve = max(
            grouped(self.states, lambda state: state.stack).values(), key=lambda states: states[-1].blocks
        )
        values = grouped(curve, lambda state: state.blocks).values()
        if len(values) <= least:
            raise NotMeasurableError(f"the longest stack has fewer than {least} blocks")
        return [
            float(torch.stack([measure(state.tokens[None]) for state in states]).mean()) for states in values
        ]


class Evidence:
    """Runs of a model on all batches. Each is made when the first claim reads it."""

    def __init__(self, model: nn.Module, batches: Sequence[Any]) -> None:
        self.model, self.batches = model, batches

    @cached_property
    def trained(self) -> Run:
        """Run of the model as it is."""
        return _run(self.model, self.batches)

    @cached_property
    def initial(self) -> Run:
        """Run of a copy at initialization. Raise `NotMeasurableError` if no copy can be built."""
        try:
            return _run(reinitialized(self.model), self.batches)
        except InitializationError as error:
            raise NotMeasurableError(f"no copy at initialization: {error}") from None


def _run(model: nn.Module, batches: Iterable[Any]) -> Run:
    run, is_norm = Run(), lambda name, module: isinstance(module, nn.LayerNorm)
    with eval_mode(model), torch.no_grad(), record_calls(model, is_norm, copy=True) as norms:
        with capture(model, values=True) as trace:
            for number, given in enumerate(batches, 1):
                batch = drop_unused_labels(model, given)[0]
                with batch_errors(model, batch, f"`batches`, batch {number}"):
                    run_model(model, to_device(batch, device_of(model)))
    run.layer_norms = [(call.module, call.args[0]) for call in norms if call.args]
    for state in trace.states:
        for row, tokens in enumerate(as_float64(state.tokens)):
            tokens = tokens if state.mask is None else tokens[state.mask[row].to(tokens.device)]
            if run_is_usable(run, len(tokens), tokens):
                run.states.append(States(state.stack, state.layer, (state.forward_pass, row), tokens))
    for mixer in trace.mixers:
        run.kinds.add(mixer.kind)
        if not mixer_kind(mixer.kind).rows_are_means or mixer.kind == "linear" or mixer.cross:
            continue
        if len(mixer.valid_tokens) != mixer.sequences:
            run.why_none = "attention mixes parts of sequences one by one"
            continue
        for heads in (Heads(mixer, row) for row in range(mixer.sequences)):
            length = int(mixer.valid_tokens[heads.row].sum())
            if run_is_usable(run, length, length and heads.matrices().dense()):
                run.heads.append(heads)
    return run


def run_is_usable(run: Run, length: int, numbers: Any) -> bool:
    """Return True if a sequence is long enough and finite. Otherwise note the reason in the run."""
    if length < MIN_TOKENS:
        run.why_none = f"no sequence has {MIN_TOKENS} tokens or more"
    elif not bool(numbers.isfinite().all()):
        run.why_none = "numbers are NaN or infinite"
    else:
        return True
    return False


CLAIMS: dict[str, tuple[Callable[[Evidence], tuple[str, bool]], CheckedClaim]] = {}
"""Functions that check a claim, with the claim before it is checked, by code, in the order of the table."""


def claim(statement: str, source: str, theirs: str) -> Callable[..., Any]:
    """Register the decorated function as the check of a claim; its docstring is the claim's definition.

    The function returns the number of the model in words, and True if the claim holds.
    """

    def register(check: Callable[[Evidence], tuple[str, bool]]) -> Callable[..., tuple[str, bool]]:
        words = " ".join((getdoc(check) or "").split())
        about = {"code": check.__name__, "statement": statement, "source": source, "theirs": theirs}
        CLAIMS[check.__name__] = check, CheckedClaim(**about, definition=words)
        return check

    return register
