"""Measure costs and savings: compare the original and the compressed model on the same data."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from rankwise._internals.batches import batch_size, first_sequences, tensors_in, to_device
from rankwise._internals.forward import Change, Progress, config_value, device_of, run_model
from rankwise._internals.torch_private import preserve_state
from rankwise.compression.trials import output_and_mask, relative_error
from rankwise.errors import InputError
from rankwise.importance.loss_choice import choose_loss, model_loss
from rankwise.importance.losses import DivergenceLoss
from rankwise.importance.settings import ImportanceSettings

SEQUENCES = 16
"""Maximum number of sequences on which outputs are compared."""
CACHE_TOKENS = 8
"""Number of tokens for which the size of the cache is measured."""
ROUNDS = 16
"""Number of rounds in which both models are timed in turns; the first round warms up."""


@dataclass
class Snapshot:
    """Measurements of one model."""

    output: Tensor
    """Output for the first batch."""
    fields: dict[str, Any]
    """Measured fields of a `Compression`."""


def evaluate(
    model: nn.Module,
    batches: list[Any],
    changes: list[Change],
    old: Snapshot,
    timed: bool,
    on_progress: Progress,
) -> dict[str, Any]:
    """Return the measured fields of a `Compression`, for the original and the changed model.

    The changes must be applied before the call, and they stay applied. `old` is the snapshot of the original,
    made before the work, so that no work is lost if a measurement fails.
    """
    on_progress("comparing outputs", math.nan)
    batches = [to_device(batch, device_of(model)) for batch in batches]
    new = snapshot(model, batches, "after")

    fields = old.fields | new.fields
    fields["output_kl"] = output_kl(model, batches, changes)
    fields["output_error"] = relative_error(new.output, old.output)
    if timed:
        on_progress("measuring time", math.nan)
        fields |= measure_seconds(model, batches[0], changes)
    return fields


@contextmanager
def original(changes: list[Change]) -> Iterator[None]:
    """Context manager that undoes changes for one block of code."""
    for change in reversed(changes):
        change.undo()
    try:
        yield
    finally:
        for change in changes:
            change.apply()


def snapshot(model: nn.Module, batches: list[Any], when: str) -> Snapshot:
    """Return the output, the loss, the number of parameters and the cache size of a model.

    `when`, "before" or "after", is the last word of field names such as ``loss_before``.
    """
    batches = [to_device(batch, device_of(model)) for batch in batches]
    output, real = output_and_mask(model, batches[0])
    fields = {
        f"loss_{when}": measure_loss(model, batches),
        f"parameters_{when}": sum(parameter.numel() for parameter in model.parameters()),
        f"cache_bytes_{when}": cache_bytes(model, batches[0]),
    }
    return Snapshot(output[real].float().cpu(), fields)


# --- outputs ---------------------------------------------------------------------------------------------


def output_kl(model: nn.Module, batches: list[Any], changes: list[Change]) -> float:
    """Return mean KL(p‖p′) in nats over the real tokens of at most `SEQUENCES` sequences.

    The original model predicts p, the changed model p′. Return NaN if the output is no prediction of classes.
    """
    total, tokens, count = 0.0, 0.0, 0
    for batch in batches:
        if count == SEQUENCES:
            break
        batch = first_sequences(batch, SEQUENCES - count)
        count += batch_size(batch)
        with torch.no_grad():
            after = run_model(model, batch)
            with original(changes):
                before = run_model(model, batch)
            loss, [compared] = choose_loss(model, [batch], before, ImportanceSettings(loss="output"))
            if not isinstance(loss, DivergenceLoss):
                return math.nan
            losses = loss.read(after, replace(compared, reference_output=loss.keep(before, compared)))
        total, tokens = total + float(losses.total.sum()), tokens + float(losses.count.sum())
    return max(total, 0.0) / max(tokens, 1e-300)  # KL ≥ 0, so a sum below 0 is a rounding error


def is_decoder(model: nn.Module) -> bool:
    """Return True if a model generates text and is not an encoder-decoder."""
    can = getattr(model, "can_generate", None)
    return callable(can) and bool(can()) and not config_value(model, "is_encoder_decoder")


def cache_bytes(model: nn.Module, batch: Any) -> int:
    """Return the bytes that a decoder caches per token. Return 0 for other models or without token ids."""
    if not is_decoder(model) or not isinstance(batch, dict) or "input_ids" not in batch:
        return 0
    ids = batch["input_ids"][:1, :CACHE_TOKENS]
    with torch.no_grad():
        cache = getattr(run_model(model, {"input_ids": ids, "use_cache": True}), "past_key_values", None)
    layers = getattr(cache, "layers", [])
    kept = tensors_in([getattr(layer, name, None) for layer in layers for name in ("keys", "values")])
    return sum(tensor.numel() * tensor.element_size() for tensor in kept) // ids.shape[1]


# --- loss -----------------------------------------------------------------------------------------------


def measure_loss(model: nn.Module, batches: list[Any]) -> float:
    """Return the mean loss of labels or next tokens. Return NaN if the data have nothing to predict."""
    try:
        loss = model_loss(model, batches)
    except InputError:  # an encoder-decoder without labels and decoder ids has nothing to predict
        if isinstance(batches[0], Mapping) and batches[0].get("labels") is not None:
            raise
        return math.nan
    return math.nan if loss.compares_outputs else loss.mean(model, batches)


# --- time ------------------------------------------------------------------------------------------------


def measure_seconds(model: nn.Module, batch: Any, changes: list[Change]) -> dict[str, Any]:
    """Return what was timed, and the median seconds of the original and of the compressed model.

    A decoder reads all tokens of the first sequence but the last, and the step for the last token is timed.
    For other models, one forward pass is timed.
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if ids is not None and ids.shape[1] > 1 and is_decoder(model):

        def prepare() -> dict[str, Any]:
            cache = run_model(model, {"input_ids": ids[:1, :-1], "use_cache": True}).past_key_values
            return {"input_ids": ids[:1, -1:], "past_key_values": cache, "use_cache": True}

        timed = f"decoding step after {ids.shape[1] - 1} tokens"
    else:
        prepare, timed = lambda: batch, "pass"
    device, seconds = device_of(model), {"before": list[float](), "after": list[float]()}

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def run(when: str) -> None:
        inputs = prepare()
        started = now()
        # `run_model` would copy the cache within the measured time
        model(**inputs) if isinstance(inputs, Mapping) else run_model(model, inputs)
        seconds[when].append(now() - started)

    with torch.inference_mode(), preserve_state(model):
        for _ in range(ROUNDS):
            run("after")
            with original(changes):
                run("before")
    medians = {f"seconds_{when}": median(times[1:]) for when, times in seconds.items()}
    return {"timed": timed, **medians}
