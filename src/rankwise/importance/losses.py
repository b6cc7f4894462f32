"""Losses for the importance of heads: cross-entropy of labels, change of the output, or a user's function."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.batches import Batch, drop_unused_labels, real_tokens, tensors_in, to_device
from rankwise._internals.forward import device_of, eval_mode, run_model
from rankwise._internals.linalg import as_float64
from rankwise.errors import InputError
from rankwise.importance.output_head import OutputHead, TokenLogits

IGNORE_INDEX = -100
"""Label of positions that are not predicted, as in PyTorch and transformers."""
AUXILIARY = re.compile(
    r"hidden_state|attentions|past_key|cache|router|^(encoder_|pooler|sentence_|extract_|mems$|loc$|scale$)"
)
"""Pattern of output fields that are not the model's result, such as inner states and scales of the input."""
LOSS_HINT = (
    "Name another loss, or pass a function of (output, batch) that returns the loss of each sequence: "
    "rw.audit(model, batches, importance=ImportanceSettings(loss=…))."
)
"""Advice in errors about a loss that does not fit the model."""
LossFunction = Callable[[Any, Any], Tensor]
"""Function of (output, batch) that returns the loss of each sequence, (B,), or one number."""


def logits_of(output: Any) -> Tensor:
    """Return ``logits`` of a model's output. If there is no such field, return the first floating tensor."""
    named = named_tensor(output, "logits")
    return first_floating(output) if named is None else named


def loss_of(output: Any) -> Tensor | None:
    """Return ``loss`` of a model's output. If there is no such field, return the only floating-point scalar.

    Return None if there are no scalars, or several.
    """
    fields = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    values = output if isinstance(output, tuple | list) else (output, *fields.values())
    floating = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    numbers = [value for value in floating if value.numel() == 1 and value.dim() < 2]
    only = numbers[0] if len(numbers) == 1 else None
    return only if (named := named_tensor(output, "loss")) is None else named


def named_tensor(output: Any, name: str) -> Tensor | None:
    """Return the floating-point tensor ``name`` of a model's output. Return None if there is none."""
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, Tensor) and value.is_floating_point() else None


def first_floating(output: Any) -> Tensor:
    """Return the first floating-point tensor (B, …) of an output. Raise `InputError` if there is none."""
    for tensors in results_of(output).values():
        return tensors[0]
    shape = f" {tuple(output.shape)} {output.dtype}" if isinstance(output, Tensor) else ""
    raise InputError(
        "output of the model",
        expected="a floating-point tensor (B, …), or an object or dict with one",
        got=type(output).__name__ + shape, fix=LOSS_HINT,
    )  # fmt: skip


def results_of(output: Any) -> dict[str, list[Tensor]]:
    """Return the floating-point tensors (B, …) that are the result of a model, by the name of their field.

    The result is the fields with "logits" in their names. Without such fields, it is ``last_hidden_state``
    and all fields that do not match `AUXILIARY`, or the first field if there are none. A tuple counts as one
    field: its first item with such tensors. A field may hold a tuple of tensors.
    """
    fields = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    if isinstance(output, Tensor | tuple | list) or not fields:
        items = output if isinstance(output, tuple | list) else (output,)
        fields = {"": next((item for item in items if _batched(item)), None)}
    named = {str(name): tensors for name, value in fields.items() if (tensors := _batched(value))}
    results = {
        name: tensors
        for name, tensors in named.items()
        if name == "last_hidden_state" or not AUXILIARY.search(name)
    }
    logits = {name: tensors for name, tensors in results.items() if "logits" in name}
    return logits or results or dict(list(named.items())[:1])


def _batched(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point() and tensor.dim() > 1]


def real_outputs(output: Any, batch: Batch, values: Tensor) -> Bool[Tensor, "B *T"]:
    """Return the mask of real tokens in values (B, T, …) of an output. All values (B, C) count as real."""
    named = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    decoded = isinstance(batch, Mapping) and any(str(name).startswith("decoder_") for name in batch)
    decoder = decoded or named.get("encoder_last_hidden_state") is not None
    return real_tokens(batch, values.shape[: min(values.dim() - 1, 2)], decoder).to(values.device)


@dataclass
class LossBatch:
    """A batch, with the labels or the earlier output with which a loss compares the output of the model."""

    batch: Any
    """Arguments with which the model is called."""
    original: Any = None
    """Batch as the user passed it, including labels that the model does not accept."""
    number: int = 0
    """Index of the batch, from 0."""
    target: Tensor | None = None
    reference_output: Any = None
    """Output of the whole model, if the loss measures the change of the output."""


@dataclass(frozen=True)
class SequenceLosses:
    """Losses per sequence: `total` is a sum over tokens or labels, `count` is the number of these."""

    total: Float[Tensor, " B"]
    count: Float[Tensor, " B"]
    reference: Float[Tensor, " B"] | None = None
    """Sum by which costs are divided, such as an entropy. None if costs are divided by the loss itself."""
    tokens: Float[Tensor, " N"] | None = None
    """Losses of the tokens that were read, sequence by sequence. None if the loss has no tokens."""
    read: Int[Tensor, " B"] | None = None
    """Number of tokens that were read of each sequence."""

    @classmethod
    def of(
        cls, lost: Float[Tensor, " N"], chosen: Bool[Tensor, "B T"], counts: Bool[Tensor, "B T"]
    ) -> "SequenceLosses":
        """Sum the losses of chosen tokens. If n of N tokens that count are chosen, multiply by N/n."""
        wide = as_float64(lost)
        chosen, counts = chosen.to(wide.device), counts.to(wide.device)
        read, count = chosen.sum(1), counts.sum(1).double()
        sums = wide.new_zeros(len(chosen)).index_add(0, chosen.nonzero()[:, 0], wide)
        return cls(sums * (count / read.clamp_min(1)), count, tokens=wide.detach(), read=read)

    def variance(self, whole: "SequenceLosses | None" = None) -> Float[Tensor, " B"]:
        """Return the sampling variance of each total, or of its change from the total of the whole model.

        Formula: ``N² (1 − n/N) s² / n`` if n of N tokens are read without replacement, with s² the variance
        of their losses, or of their changes. 0 if all are read, NaN if one of several is.
        """
        if self.tokens is None or self.read is None:
            return torch.zeros_like(self.total.detach())
        before = 0.0 if whole is None or whole.tokens is None else whole.tokens
        parts = (self.tokens - before).split(self.read.tolist())
        unknown = self.total.new_tensor(math.nan)
        spread = torch.stack([part.var() if len(part) > 1 else unknown for part in parts])
        left_out = self.count - self.read
        return torch.where(left_out == 0, 0.0, self.count * left_out / self.read * spread)

    @property
    def finite(self) -> Bool[Tensor, " B"]:
        """True for sequences with a finite loss and at least one label."""
        return self.total.detach().isfinite() & (self.count > 0)


class Loss(ABC):
    """Base class of losses. A head's importance is the increase of the loss if the head is removed."""

    name: str
    unit: str
    reference = "the loss"
    """Name of the number by which costs are divided."""
    chance = math.nan
    """Loss if all classes are equally likely. NaN if the loss is not a cross-entropy of classes."""
    compares_outputs = False
    """True if the loss measures the change of the output, so that its gradient is 0 for the whole model."""
    prepare: Callable[[Any, Any, int], LossBatch] = LossBatch
    """Function that builds a `LossBatch` from input, original batch and number. It may mask tokens."""
    note = ""
    """Reason why the loss does not use labels of the batches. Empty if there is none."""
    half = 0.5
    """Factor: the second-order change of the loss is `half` times the expected squared gradient of a
    projection. 0 if the loss has no projections."""
    head: OutputHead | None = None
    """Output head of the model, from which logits are computed in chunks of tokens. None if it is unknown."""
    positions: int | None = None
    """Largest number of tokens of each sequence at which logits are read, at random. None reads all."""
    seed = 0
    """Random seed of these tokens."""

    def run(self, model: nn.Module, batch: LossBatch, seed: int | None = 0) -> Any:
        """Return the output of a model. If the head is known, return `TokenLogits`, which are not formed."""
        inputs = to_device(batch.batch, device_of(model))
        run = run_model if self.head is None else self.head.run
        return run(model, inputs, seed=seed)

    def check(self, batches: Sequence[LossBatch], output: Any) -> None:  # noqa: B027 - most check nothing
        """Raise `InputError` if the loss does not fit a batch. ``output`` belongs to the first batch."""

    def keep(self, output: Any, batch: LossBatch) -> Any:
        """Return the part of the whole model's output that later passes need for comparison, if any."""
        return None

    @abstractmethod
    def read(self, output: Any, batch: LossBatch) -> SequenceLosses:
        """Return the loss of each sequence, differentiable by the output."""

    def __call__(self, model: nn.Module, batch: Batch, number: int = 0) -> Tensor:
        """Return the differentiable mean loss per label of a batch. The model stays in its present mode.

        ``number`` is the index of the batch: masked tokens are drawn with the seed plus this number. Losses
        that compare outputs cannot be called.
        """
        losses = self.read(*self._run(model, batch, number, seed=None))
        return losses.total.sum() / losses.count.sum()

    def mean(self, model: nn.Module, batches: Iterable[Batch]) -> float:
        """Return the mean loss per label, in evaluation mode without gradients. NaN if no label counts."""
        sums = [(float(x.total.sum()), float(x.count.sum())) for x in self.by_batch(model, batches)]
        total, count = map(sum, zip(*sums, strict=True)) if sums else (0.0, 0.0)
        return total / count if count else math.nan

    def by_batch(self, model: nn.Module, batches: Iterable[Batch]) -> "list[SequenceLosses]":
        """Return the losses of each batch, in evaluation mode without gradients."""
        with eval_mode(model), torch.no_grad():
            return [self.read(*self._run(model, batch, number)) for number, batch in enumerate(batches)]

    def _run(
        self, model: nn.Module, batch: Batch, number: int, seed: int | None = 0
    ) -> tuple[Any, LossBatch]:
        prepared = self.prepare(drop_unused_labels(model, batch)[0], batch, number)
        return self.run(model, prepared, seed), prepared

    def chosen(self, counts: Bool[Tensor, "B T"], batch: LossBatch) -> Bool[Tensor, "B T"]:
        """Return the tokens that are read: per sequence, at most `positions` random ones that count."""
        if self.positions is None:
            return counts
        generator = torch.Generator().manual_seed(self.seed + batch.number)
        drawn = torch.rand(counts.shape, generator=generator, dtype=torch.float32).to(counts.device)
        return counts & (
            drawn.masked_fill(~counts, 1.0).argsort(1).argsort(1) < min(self.positions, counts.shape[1])
        )

    def probe(self, output: Any, batch: LossBatch, generator: torch.Generator) -> Float[Tensor, " B"]:
        """Return a random projection of the output per sequence. Losses with `half` 0 do not need this.

        The expected squared gradient of the projection, times `half`, is the Gauss–Newton estimate of the
        change of the sequence's loss.
        """
        raise NotImplementedError


@dataclass(eq=False)
class LabelLoss(Loss):
    """Negative log-likelihood of labels: ``−Σ_t log p_t(y_t)``, without labels of −100.

    `labels` returns the labels of a batch: (B, T) for logits (B, T, V), (B,) for classifiers. `given` returns
    the labels that the user passed, or None. Either all batches must have such labels, or no batch.
    """

    name: str
    unit: str
    labels: Callable[[LossBatch], Tensor | None]
    prepare: Callable[[Any, Any, int], LossBatch] = LossBatch
    given: Callable[[LossBatch], Tensor | None] | None = None
    note: str = ""

    def check(self, batches: Sequence[LossBatch], output: Any) -> None:
        """Raise `InputError` if only some batches have labels, or a label is not a class of the logits."""
        first, classes = self.given and self.given(batches[0]), logits_of(output).shape[-1]
        for batch in batches:
            given = self.given and self.given(batch)
            if (given is None) != (first is None):
                some, none = ("1", batch.number + 1) if given is None else (batch.number + 1, "1")
                raise InputError(
                    f"batch {batch.number + 1}", expected="labels in all batches, or in none",
                    got=f"some in batch {some}, none in batch {none}",
                    fix="Give every batch its labels as a tensor, or leave them out everywhere.",
                )  # fmt: skip
            labels = self.labels(batch) if given is None else given  # token ids may be labels
            wrong = "" if labels is None else invalid_label(labels, classes)
            if wrong:
                raise InputError(
                    f"labels of batch {batch.number + 1}",
                    expected=f"whole numbers from 0 to {classes - 1}, as the model has {classes} classes, or "
                    f"{IGNORE_INDEX} for positions that are left out",
                    got=wrong,
                    fix=f"Correct the labels, or set positions that are not predicted to {IGNORE_INDEX}. "
                    + LOSS_HINT,
                )

    def read(self, output: Any, batch: LossBatch) -> SequenceLosses:
        """Return the sum of cross-entropies over the labels of each sequence, and the number of labels."""
        logits, labels = self.logits_and_labels(output, batch)
        counts = labels != IGNORE_INDEX
        chosen = self.chosen(counts, batch)
        return SequenceLosses.of(logits.by_rows(_cross_entropy, chosen, labels[chosen]), chosen, counts)

    def probe(self, output: Any, batch: LossBatch, generator: torch.Generator) -> Tensor:
        """Return the cross-entropy of labels drawn from the predictions p, per sequence.

        Its gradient by the logits of a token is u = p − e_y for the label y. The expected u uᵀ is the Fisher
        matrix F = diag p − p pᵀ.
        """
        logits, labels = self.logits_and_labels(output, batch)
        counts = labels != IGNORE_INDEX
        return _fisher_projection(logits, self.chosen(counts, batch), counts, generator)

    def logits_and_labels(self, output: Any, batch: LossBatch) -> tuple[TokenLogits, Int[Tensor, "B T"]]:
        """Return the logits and the labels of a batch, with one label per row for classifiers."""
        logits, labels = token_logits(output), self.labels(batch)
        assert labels is not None
        (sequences, tokens), device = logits.states.shape[:2], logits.states.device
        labels = (labels[:, None] if labels.dim() == 1 else labels).to(device).long()
        if labels.shape[0] != sequences or labels.shape[1] > tokens:
            raise InputError(
                f"labels of batch {batch.number + 1}",
                expected=f"one per position of the logits, {(sequences, tokens)}",
                got=f"{tuple(labels.shape)}", fix=LOSS_HINT,
            )  # fmt: skip
        return logits, F.pad(labels, (0, tokens - labels.shape[1]), value=IGNORE_INDEX)


class DivergenceLoss(Loss):
    """Change of the predictions: ``KL(p ‖ p')``, from p of the whole model to p' of the changed model.

    Costs are divided by the entropy H(p). With labels drawn from p the loss of the whole model is H(p), and
    the loss of the changed model is H(p) + KL(p ‖ p').
    """

    name = "KL divergence of the predictions from the whole model's"
    reference = "the entropy of the predictions"
    unit = "nats per prediction"
    compares_outputs = True

    def keep(self, output: Any, batch: LossBatch) -> Any:
        """Return the logits of the whole model, not formed if its head is known."""
        return token_logits(output).detach()

    def read(self, output: Any, batch: LossBatch) -> SequenceLosses:
        """Return sums of divergences and entropies over the real tokens of each sequence."""
        logits, whole = token_logits(output), batch.reference_output
        counts = real_outputs(logits.output, batch.batch, logits.states)
        chosen = self.chosen(counts, batch)

        def divergence(logits: Tensor, states: Tensor) -> Tensor:
            with torch.no_grad():
                before = whole.of_rows(states)
            return _divergence(logits, before)

        both = logits.by_rows(divergence, chosen, whole.rows(chosen))
        entropy = SequenceLosses.of(both[:, 1].detach(), chosen, counts).total
        return replace(SequenceLosses.of(both[:, 0], chosen, counts), reference=entropy)

    def probe(self, output: Any, batch: LossBatch, generator: torch.Generator) -> Tensor:
        """Return the projection of `LabelLoss`: KL ≈ ½ δᵀ F δ for a small change δ of logits."""
        logits = token_logits(output)
        counts = real_outputs(logits.output, batch.batch, logits.states)
        return _fisher_projection(logits, self.chosen(counts, batch), counts, generator)


class StateLoss(Loss):
    """Change of the output: ``‖Y' − Y‖_F² / ‖Y‖_F²`` over real tokens, Y the output of the whole model.

    If the result has several tensors, this is the mean of their changes.
    """

    unit = "of its squared norm"
    reference = "the squared norm of the output"
    compares_outputs = True
    half = 1.0

    def __init__(self, output: Any) -> None:
        named = [*results_of(output)]
        named = [] if named in ([""], ["logits"], ["last_hidden_state"]) else named
        fields = f" ({', '.join(named)})" if named else ""
        self.name = f"relative squared change of the output{fields}"

    def keep(self, output: Any, batch: LossBatch) -> Any:
        """Return the result of the whole model, and the norms by which each of its tensors is divided."""
        every = self._real(output, batch)
        squares = [x.square().sum(1, keepdim=True).clamp_min(math.ulp(0.0)) * len(every) for x in every]
        norms = [square.sqrt() for square in squares]
        return [x / norm for x, norm in zip(every, norms, strict=True)], norms

    def read(self, output: Any, batch: LossBatch) -> SequenceLosses:
        """Return the relative squared change per sequence."""
        whole, _ = batch.reference_output
        pairs = zip(self._scaled(output, batch), whole, strict=True)
        moved = torch.stack([(x - y).square().sum(1) for x, y in pairs]).sum(0)
        ones = torch.ones_like(moved).detach()
        return SequenceLosses(moved, ones, ones)

    def probe(self, output: Any, batch: LossBatch, generator: torch.Generator) -> Tensor:
        """Return ``zᵀ Y / ‖Y‖_F`` with random signs z, because E (zᵀ x)² = ‖x‖² for each change x of Y."""
        scaled = self._scaled(output, batch)
        signs = [torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1 for x in scaled]
        return torch.stack([(z * x).sum(1) for z, x in zip(signs, scaled, strict=True)]).sum(0)

    def _scaled(self, output: Any, batch: LossBatch) -> list[Tensor]:
        _, norms = batch.reference_output
        return [x / norm for x, norm in zip(self._real(output, batch), norms, strict=True)]

    @staticmethod
    def _real(output: Any, batch: LossBatch) -> list[Tensor]:
        """Return the tensors of the result as rows (B, N), in float64 and with zeros at padding."""
        first, rows = first_floating(output), []
        for tensor in (tensor for tensors in results_of(output).values() for tensor in tensors):
            if len(tensor) == len(first):
                wide = as_float64(tensor)
                if tensor.dim() == 3:
                    real = real_outputs(output, batch.batch, tensor)[..., None].to(wide.device)
                    wide = torch.where(real, wide, 0.0)
                rows.append(wide.flatten(1))
        return rows


class FunctionLoss(Loss):
    """Loss from a user's function or from the model: one number per sequence, or one for the batch."""

    unit = "unit of the function"
    half = 0.0

    def __init__(self, function: Callable[[Any, Any], Any], name: str) -> None:
        self._function, self.name = function, name

    def read(self, output: Any, batch: LossBatch) -> SequenceLosses:
        """Return the losses from the function, each with the count 1."""
        lost = self._function(output, batch.original)
        if not isinstance(lost, Tensor) or lost.dim() > 1 or not lost.is_floating_point():
            raise InputError(
                f"loss {self.name!r}", expected="a floating-point tensor (B,), or one number",
                got=f"{tuple(lost.shape)} {lost.dtype}" if isinstance(lost, Tensor) else type(lost).__name__,
                fix="Let the function return the loss of each sequence, or put `labels` into the batches.",
            )  # fmt: skip
        total = as_float64(lost.reshape(-1))
        return SequenceLosses(total, torch.ones_like(total))


def invalid_label(labels: Tensor, classes: int) -> str:
    """Return the wrong dtype or the first label that is not a class. Return "" if all labels are classes."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return str(labels.dtype)
    out = labels[((labels < 0) | (labels >= classes)) & (labels != IGNORE_INDEX)]
    return f"{int(out[0])}" if out.numel() else ""


def _cross_entropy(logits: Float[Tensor, "N V"], labels: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    return F.cross_entropy(_wide(logits), labels, reduction="none")


def _divergence(logits: Float[Tensor, "N V"], whole: Float[Tensor, "N V"]) -> Float[Tensor, "N 2"]:
    """Return KL(p ‖ p') and the entropy H(p), with p of the whole model's logits.

    Both are computed in float64, because the KL is a small difference of large logarithms.
    """
    ours, whole = (as_float64(values).log_softmax(-1) for values in (logits, whole))
    shares = whole.exp()
    entropy = -torch.special.xlogy(shares, shares).sum(-1)
    # a class with p = 0 adds nothing, although log p is −∞
    apart = torch.where(shares > 0, shares * (whole - ours), 0.0).sum(-1)
    return torch.stack((apart, entropy), -1)


def _fisher_projection(
    logits: TokenLogits, chosen: Bool[Tensor, "B T"], counts: Bool[Tensor, "B T"], generator: torch.Generator
) -> Float[Tensor, " B"]:
    """Return the cross-entropy of labels drawn from the predictions, per sequence.

    If n of the N tokens that count are chosen, it is multiplied by √(N/n), and its squared gradient by N/n.
    """
    uniform = torch.rand(int(chosen.sum()), generator=generator, dtype=torch.float32).to(chosen.device)

    def drawn(logits: Tensor, uniform: Tensor) -> Tensor:
        sums = _wide(logits.detach()).softmax(-1).cumsum(-1)
        labels = torch.searchsorted(sums, uniform[:, None].to(sums) * sums[:, -1:], right=True)
        return _cross_entropy(logits, labels[:, 0].clamp_max(logits.shape[1] - 1))

    losses = SequenceLosses.of(logits.by_rows(drawn, chosen, uniform), chosen, counts)
    assert losses.read is not None
    return losses.total * (losses.read / losses.count.clamp_min(1)).sqrt()


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def token_logits(output: Any) -> TokenLogits:
    """Return the logits (B, T, V) of an output. Logits (B, V) of classifiers get T = 1."""
    if isinstance(output, TokenLogits):
        return output
    logits = logits_of(output)
    logits = logits[:, None] if logits.dim() == 2 else logits
    return TokenLogits(logits, lambda rows: rows, logits.shape[-1], output)
