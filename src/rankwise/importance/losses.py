"""What a model loses: nats of labels, given or read off its inputs, else how far its output moves."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from rankwise.errors import InputError
from rankwise.importance.outputs import ANOTHER, first_floating, logits_of, of_decoder, real_tokens

LEFT_OUT = -100
"""The label of what is not to be predicted, as PyTorch and transformers have it."""
LossFunction = Callable[[Any, Any], Tensor]
"""From a model's output and the batch to one number for each sequence (B,), or one in all."""


@dataclass
class Case:
    """A batch, and what its loss is taken against."""

    batch: Any
    """As the model takes it."""
    given: Any = None
    """As it was given, with labels that the model has no place for."""
    number: int = 0
    """Of the batch, from 0."""
    target: Tensor | None = None
    whole: Any = None
    """What the whole model gave, where the loss is how far its output moves."""


@dataclass(frozen=True)
class Read:
    """The loss of each sequence: a sum over what counts, and how much that is."""

    total: Float[Tensor, " B"]
    count: Float[Tensor, " B"]
    reference: Float[Tensor, " B"] | None = None
    """What costs are shares of, summed as the loss is; None where that is the loss itself."""
    cosine: Float[Tensor, " B"] | None = None
    """Mean cosine between token states and those of the whole model."""


class Loss(ABC):
    """What a model loses."""

    name: str
    unit: str
    reference = "the loss"
    """What costs are shares of."""
    moves = False
    """Whether it is how far the output moves: then its gradient is 0 where nothing is removed."""

    def case(self, batch: Any, given: Any, number: int) -> Case:
        """Make of a batch what the loss is to be taken of.

        Args:
            batch: the batch, as the model takes it.
            given: as it was given.
            number: its number.
        """
        return Case(batch, given, number)

    def check(self, cases: Sequence[Case], output: Any) -> None:  # noqa: B027 - most have nothing to check
        """Refuse batches that the loss cannot be taken of, before any of them is run.

        Args:
            cases: all batches.
            output: what the model gave for the first.
        """

    def keep(self, output: Any, case: Case) -> Any:
        """What is to be known of the whole model's output; None where labels say it all."""
        return None

    @abstractmethod
    def read(self, output: Any, case: Case) -> Read:
        """The loss of each sequence, in the graph of the output."""


class ProbedLoss(Loss):
    """A loss whose second derivative is estimated by random projections of the output."""

    half = 0.5
    """What the square of a probe's gradient is multiplied with to give the change of the total."""

    @abstractmethod
    def probe(self, output: Any, case: Case, generator: torch.Generator) -> Tensor:
        """A random projection of the output for each sequence, (B,).

        The expectation of the square of its gradient, times `half`, is what the Gauss–Newton matrix gives for
        the change of the sequence's total.
        """


class LabelLoss(ProbedLoss):
    """Negative log-likelihood of labels: ``−Σ_t log p_t(y_t)``, labels of −100 left out.

    Args:
        name: of the loss.
        unit: nats per what.
        labels: from a case and the logits to labels (B, T) in the places of the logits (B, T, V) they
            belong to; of classifiers T is 1.
        make: from a batch, as taken and as given, and its number to a case.
        given: from a case to the labels that came with its batch, if any; all batches have some, or none.
    """

    def __init__(
        self,
        name: str,
        unit: str,
        labels: Callable[[Case], Tensor],
        make: Callable[[Any, Any, int], Case] | None = None,
        given: Callable[[Case], Tensor | None] | None = None,
    ) -> None:
        self.name, self.unit, self._labels, self._make = name, unit, labels, make
        self._given = given

    def case(self, batch: Any, given: Any, number: int) -> Case:
        """With masked inputs, where that is the loss."""
        return Case(batch, given, number) if self._make is None else self._make(batch, given, number)

    def check(self, cases: Sequence[Case], output: Any) -> None:
        """Refuse labels that are missing in some batches, no whole numbers or no classes of the logits.

        Raises:
            InputError: naming the batch.
        """
        if self._given is None:
            return
        first, classes = self._given(cases[0]), logits_of(output).shape[-1]
        for case in cases:
            labels = self._given(case)
            if (labels is None) != (first is None):
                some, none = ("1", case.number + 1) if labels is None else (case.number + 1, "1")
                raise InputError(
                    f"batch {case.number + 1}",
                    expected="labels in all batches, or in none",
                    got=f"some in batch {some}, none in batch {none}",
                    fix="Give every batch its labels as a tensor, or leave them out everywhere.",
                )
            wrong = "" if labels is None else strange(labels, classes)
            if wrong:
                raise InputError(
                    f"labels of batch {case.number + 1}",
                    expected=f"whole numbers from 0 to {classes - 1}, as the model has {classes} classes, or "
                    f"{LEFT_OUT} for what is left out",
                    got=wrong,
                    fix=f"Correct the labels, or set what is not to be predicted to {LEFT_OUT}. {ANOTHER}",
                )

    def read(self, output: Any, case: Case) -> Read:
        """The sum over a sequence's labels."""
        logits, labels = self._both(output, case)
        lost = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=LEFT_OUT, reduction="none"
        )
        return Read(lost.view(labels.shape).double().sum(1), (labels != LEFT_OUT).sum(1).double())

    def probe(self, output: Any, case: Case, generator: torch.Generator) -> Tensor:
        """``uᵀ logits`` with ``u = (diag √p − p √pᵀ) z``: E u uᵀ = diag p − p pᵀ, the Fisher matrix."""
        logits, labels = self._both(output, case)
        return _fisher_projection(logits, labels != LEFT_OUT, generator)

    def _both(self, output: Any, case: Case) -> tuple[Float[Tensor, "B T V"], Int[Tensor, "B T"]]:
        logits, labels = logits_of(output), self._labels(case)
        logits = logits[:, None] if logits.dim() == 2 else logits
        labels = (labels[:, None] if labels.dim() == 1 else labels).to(logits.device)
        if labels.shape[0] != logits.shape[0] or labels.shape[1] > logits.shape[1]:
            raise InputError(
                f"labels of batch {case.number + 1}",
                expected=f"one for each place of the logits, {tuple(logits.shape[:2])}",
                got=f"{tuple(labels.shape)}",
                fix=ANOTHER,
            )
        shown = logits[:, : labels.shape[1]]
        return shown.to(torch.float64 if shown.dtype == torch.float64 else torch.float32), labels.long()


class DivergenceLoss(ProbedLoss):
    """How far the predictions move: ``KL(p ‖ p')`` from the whole model's own p, 0 of the whole model.

    Costs are shares of the entropy H(p): H(p) + KL(p ‖ p') is the loss that the model would have if its
    labels were drawn from its own predictions.
    """

    name = "KL divergence of the predictions from the whole model's"
    reference = "the entropy of the predictions"
    unit = "nats per prediction"
    moves = True

    def keep(self, output: Any, case: Case) -> Any:
        """Its log-probabilities."""
        return _log_probabilities(output).detach()

    def read(self, output: Any, case: Case) -> Read:
        """The sum over a sequence's real tokens."""
        ours = _log_probabilities(output)
        whole = ours.detach() if case.whole is None else case.whole
        shares = whole.exp()
        entropy = -torch.special.xlogy(shares, shares).sum(-1)
        # where p is 0 it takes nothing, even where log p is -inf
        apart = torch.where(shares > 0, shares * (whole - ours), 0.0).sum(-1)
        real = _real(output, case, ours)
        total, reference = (torch.where(real, sums, 0.0).double().sum(1) for sums in (apart, entropy))
        return Read(total, real.sum(1).double(), reference.detach())

    def probe(self, output: Any, case: Case, generator: torch.Generator) -> Tensor:
        """That of `LabelLoss`: the divergence is ½ δᵀ F δ for small moves δ of the logits."""
        logits = logits_of(output)
        logits = (logits[:, None] if logits.dim() == 2 else logits).float()
        return _fisher_projection(logits, _real(output, case, logits), generator)


class StateLoss(ProbedLoss):
    """How far the output moves: ``‖Y' − Y‖_F² / ‖Y‖_F²`` over a sequence's real tokens."""

    name = "relative squared change of the output"
    unit = "of its squared norm"
    reference = "the squared norm of the output"
    moves = True
    half = 1.0

    def keep(self, output: Any, case: Case) -> Any:
        """The output itself."""
        return first_floating(output).detach()

    def read(self, output: Any, case: Case) -> Read:
        """One number for each sequence, and the mean cosine of its tokens."""
        ours, whole, real = self._three(output, case)
        norm = _scale(whole, real)
        moved = ((ours - whole).square() * real).flatten(1).sum(1)
        cosine = F.cosine_similarity(ours, whole, dim=-1)
        tokens = real.flatten(1).sum(1)
        mean = torch.where(real > 0, cosine[..., None], 0.0).flatten(1).sum(1) / tokens
        ones = torch.ones_like(norm)
        return Read(moved / norm, ones, ones, mean.detach())

    def probe(self, output: Any, case: Case, generator: torch.Generator) -> Tensor:
        """``zᵀ Y / ‖Y‖_F`` with signs z: E (zᵀ J δ)² = ‖J δ‖²."""
        ours, whole, real = self._three(output, case)
        signs = torch.randint(0, 2, ours.shape, generator=generator).to(ours) * 2 - 1
        return (signs * ours * real).flatten(1).sum(1) / _scale(whole, real).sqrt()

    @staticmethod
    def _three(output: Any, case: Case) -> tuple[Tensor, Tensor, Tensor]:
        """Ours, the whole model's, and 1 where a token is real."""
        ours = first_floating(output).double()
        whole = ours.detach() if case.whole is None else case.whole.double()
        real = torch.ones_like(whole[..., :1])
        if ours.dim() == 3:
            real = _real(output, case, ours).to(ours)[..., None]
        return ours, whole, real


class FunctionLoss(Loss):
    """A loss of the user's own, or the model's own: one number for each sequence, or one in all.

    Args:
        function: of the output and the batch.
        name: of it.
    """

    unit = "as the function has it"

    def __init__(self, function: LossFunction, name: str) -> None:
        self._function, self.name = function, name

    def read(self, output: Any, case: Case) -> Read:
        """What the function says."""
        lost = self._function(output, case.given)
        if not isinstance(lost, Tensor) or lost.dim() > 1 or not lost.is_floating_point():
            raise InputError(
                f"loss {self.name}",
                expected="a floating-point tensor (B,), or one number",
                got=f"{tuple(lost.shape)} {lost.dtype}" if isinstance(lost, Tensor) else type(lost).__name__,
                fix="Let it return the loss of each sequence.",
            )
        total = lost.reshape(-1).double()
        return Read(total, torch.ones_like(total))


def strange(labels: Tensor, classes: int) -> str:
    """What makes labels no classes; empty where they are.

    Args:
        labels: of any shape.
        classes: how many there are.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return str(labels.dtype)
    out = labels[((labels < 0) | (labels >= classes)) & (labels != LEFT_OUT)]
    return f"{int(out[0])}" if out.numel() else ""


def _fisher_projection(
    logits: Float[Tensor, "B T V"], counts: Tensor, generator: torch.Generator
) -> Float[Tensor, " B"]:
    with torch.no_grad():
        shares = logits.softmax(-1)
        root = shares.sqrt()
        z = torch.randn(logits.shape, generator=generator).to(logits)
        u = root * z - shares * (root * z).sum(-1, keepdim=True)
        u = u.masked_fill(~counts[..., None], 0)
    return (u * logits.masked_fill(~counts[..., None], 0)).flatten(1).sum(1)


def _log_probabilities(output: Any) -> Tensor:
    logits = logits_of(output)
    return (logits[:, None] if logits.dim() == 2 else logits).float().log_softmax(-1)


def _real(output: Any, case: Case, values: Tensor) -> Bool[Tensor, "B T"]:
    real = real_tokens(case.batch, values.shape[:2], of_decoder(output, case.batch))
    return real.to(values.device)


def _scale(whole: Tensor, real: Tensor) -> Tensor:
    return (whole.square() * real).flatten(1).sum(1).clamp_min(math.ulp(0.0))
