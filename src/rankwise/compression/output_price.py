"""What a change of a model costs its outputs, in one unit for all parts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.forward import batch_size, device_of, first_sequences, run_model, to_device
from rankwise.compression.outputs import main_output

SEQUENCES = 16
"""On which outputs are compared, at most."""


def real_tokens(batch: Any, logits: Tensor) -> Tensor:
    """Which tokens are no padding, (B, T).

    Args:
        batch: what the model takes.
        logits: what it gave, (B, T, V).
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == logits.shape[:2]:
        return mask.bool()
    return torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)


class OutputPrice:
    """How far the outputs of a model are from what they were when this was made.

    Where the model gives logits: KL(p‖p') in nats, mean over real tokens, p what it gave then; else
    ‖y' − y‖²/‖y‖². Both are of second order in small changes, so that those of independent changes add up.

    Args:
        model: in evaluation mode.
        batches: what it takes; sequences of the first ones are run.
    """

    def __init__(self, model: nn.Module, batches: list[Any]) -> None:
        self.model = model
        self.batches, count = [], 0
        for batch in batches:
            if count < SEQUENCES:
                short = first_sequences(batch, SEQUENCES - count)
                self.batches.append(to_device(short, device_of(model)))
                count += batch_size(short)
        self.has_logits = _logits(model, self.batches[0]) is not None
        self.before = [self._given(batch) for batch in self.batches]

    @property
    def unit(self) -> str:
        """What the price is in."""
        return "KL of the outputs, nats" if self.has_logits else "squared relative error of the output"

    def now(self) -> float:
        """The price of the model as it is."""
        off, whole = 0.0, 0.0
        for batch, before in zip(self.batches, self.before, strict=True):
            after = self._given(batch)
            if self.has_logits:
                off += float(F.kl_div(after, before, reduction="sum", log_target=True))
                whole += before.shape[0]
            else:
                off += float((after - before).square().sum())
                whole += float(before.square().sum())
        return off / max(whole, 1e-300)

    def _given(self, batch: Any) -> Tensor:
        logits = _logits(self.model, batch) if self.has_logits else None
        if logits is not None:
            real = logits[real_tokens(batch, logits)] if logits.dim() == 3 else logits.flatten(0, -2)
            return real.double().log_softmax(-1).cpu()
        output = main_output(self.model, batch)
        real = output[real_tokens(batch, output)] if output.dim() == 3 else output
        return real.double().cpu()


def _logits(model: nn.Module, batch: Any) -> Tensor | None:
    with torch.no_grad():
        logits = getattr(run_model(model, batch), "logits", None)
    return logits if isinstance(logits, Tensor) and logits.dim() >= 2 else None
