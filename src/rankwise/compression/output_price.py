"""What a change of a model costs its outputs, in one unit for all parts."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.forward import batch_size, device_of, first_sequences, run_model, to_device

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


def compared_batches(model: nn.Module, batches: list[Any]) -> Iterator[Any]:
    """Yield the first sequences of batches on the device of the model, up to `SEQUENCES`."""
    count = 0
    for batch in batches:
        if count < SEQUENCES:
            short = first_sequences(batch, SEQUENCES - count)
            count += batch_size(short)
            yield to_device(short, device_of(model))


def log_probabilities(model: nn.Module, batch: Any) -> Float64[Tensor, "N V"] | None:
    """Return log p of the outputs at real tokens, on the CPU; None if the model returns no logits."""
    with torch.no_grad():
        logits = getattr(run_model(model, batch), "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        return None
    real = logits[real_tokens(batch, logits)] if logits.dim() == 3 else logits.flatten(0, -2)
    return real.double().log_softmax(-1).cpu()


def output_kl(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> float:
    """Return KL(p‖p′) in nats, mean over tokens, from pairs (log p, log p′); NaN if logits are missing."""
    total, tokens = 0.0, 0
    for before, after in pairs:
        if before is None or after is None:
            return math.nan
        total += float(F.kl_div(after, before, reduction="sum", log_target=True))
        tokens += before.shape[0]
    return total / max(tokens, 1e-300)
