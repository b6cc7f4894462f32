"""What a compression costs and gains, measured on the model as it was and as it is."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.capture import StateSite, capture
from rankwise.compression.latency import measure_latency
from rankwise.compression.outputs import cache_bytes, is_decoder, main_output, relative_error
from rankwise.compression.parts import PartResult
from rankwise.running import device_of, moved, run_model


@dataclass
class Prices:
    """Fields of a record, and the errors of its layers."""

    fields: dict[str, Any]
    layer_errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def measure_prices(
    model: nn.Module,
    batches: list[Any],
    done: list[PartResult],
    time: bool,
    on_step: Callable[[str], None],
) -> Prices:
    """Compare the model as it was with the model as it is.

    Args:
        model: compressed.
        batches: what prices are measured on.
        done: what the parts did; they can be undone and done again.
        time: whether to measure latency.
        on_step: told what is under way.
    """

    def before() -> None:
        for result in reversed(done):
            result.undo()

    def after() -> None:
        for result in done:
            result.redo()

    on_step("comparing outputs")
    moved_batches = [moved(batch, device_of(model)) for batch in batches]
    now = _size(model, moved_batches[0])
    states, outputs, loss = _look(model, moved_batches)
    before()
    try:
        then = _size(model, moved_batches[0])
        old_states, old_outputs, old_loss = _look(model, moved_batches)
    finally:
        after()
    sites = {head.layer: head.site for result in done for head in result.heads}
    sites |= {latent.layer: latent.site for result in done for latent in result.latents}
    errors = {
        sites[layer]: relative_error(states[layer + 1], old)
        for layer, old in ((at - 1, state) for at, state in old_states.items())
        if layer in sites and layer + 1 in states
    }
    fields: dict[str, Any] = {
        "output_error": relative_error(outputs, old_outputs),
        "loss_before": old_loss,
        "loss_after": loss,
        "parameters_before": then[0],
        "parameters_after": now[0],
        "cache_bytes_before": then[1],
        "cache_bytes_after": now[1],
    }
    if time:
        on_step("measuring latency")
        fields["latency"], notes = measure_latency(model, moved_batches[0], before, after)
        return Prices(fields, errors, notes)
    return Prices(fields, errors)


def _size(model: nn.Module, batch: Any) -> tuple[int, int]:
    """Parameters, and bytes of keys and values in the cache for each token."""
    return sum(parameter.numel() for parameter in model.parameters()), cache_bytes(model, batch)


def _look(model: nn.Module, batches: list[Any]) -> tuple[dict[int, Tensor], Tensor, float]:
    """Token states of the first batch by layer, outputs of it, and the mean loss over all batches."""
    states: dict[int, Tensor] = {}

    def keep(site: StateSite) -> None:
        real = site.mask if site.mask is not None else torch.ones(site.tokens.shape[:2], dtype=torch.bool)
        states[site.layer] = site.tokens[real.to(site.tokens.device)].float().cpu()

    with torch.no_grad(), capture(model, on_state=keep, on_mixer=lambda site: None):
        run_model(model, batches[0])
    losses, tokens = 0.0, 0
    for batch in batches:
        loss, count = _loss(model, batch)
        losses, tokens = losses + loss * count, tokens + count
    mask = batches[0].get("attention_mask") if isinstance(batches[0], dict) else None
    output = main_output(model, batches[0])
    if mask is not None and mask.shape == output.shape[:2]:
        output = output[mask.bool()]
    return states, output.float().cpu(), losses / tokens if tokens else math.nan


def _loss(model: nn.Module, batch: Any) -> tuple[float, int]:
    """Mean loss of a batch and over how many targets: its own labels, or the next token of a decoder."""
    if not isinstance(batch, dict) or "input_ids" not in batch:
        return 0.0, 0
    if "labels" in batch:
        labels = batch["labels"]
        if is_decoder(model) and labels.dim() == 2:
            labels = labels[:, 1:]  # the loss of a decoder is of the next token: nothing predicts the first
        count = int((labels != -100).sum())
        with torch.no_grad():
            loss = getattr(run_model(model, batch), "loss", None)
        return (0.0, 0) if loss is None or not count else (float(loss), count)
    if not is_decoder(model):
        return 0.0, 0
    with torch.no_grad():
        logits = getattr(run_model(model, batch), "logits", None)
    if logits is None:
        return 0.0, 0
    ids = batch["input_ids"]
    real = batch.get("attention_mask", torch.ones_like(ids)).bool()
    pairs = real[:, 1:] & real[:, :-1]
    losses = F.cross_entropy(logits[:, :-1][pairs].float(), ids[:, 1:][pairs], reduction="sum")
    return float(losses) / max(int(pairs.sum()), 1), int(pairs.sum())
